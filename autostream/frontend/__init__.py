"""From a callable to programs of ATen ops, and the guards that say for which calls they may be reused.

Where to look: ``capture.py`` captures a call as one graph, ``guards.py`` says what is guarded, ``graph_breaks.py`` what
happens at a graph break, ``eager_only.py`` which calls stay eager. ``aten.py`` makes programs of captured graphs,
``autograd.py`` forward and backward graphs. ``step_capture.py`` captures a training step, of which ``steps.py`` makes
one program, in which ``gradient_sums.py`` adds products to sums; ``training_steps.py`` writes out those of
``train_step``. ``tensor_parallel.py`` takes DTensors apart. ``reasons.py`` says why Dynamo refused.

The private interfaces of PyTorch that this package uses. All of them were first seen in torch 2.11, and are there in
2.13; both versions are tested. After a ``TraceError`` the call runs eagerly.

=====================  =================================================  ==============================================
File                   Interface                                          Where it is missing
=====================  =================================================  ==============================================
``capture.py``         ``convert_frame.compile_frame`` and its output     a ``TraceError`` names it
..                     ``InstructionTranslator.current_tx``: effects      a ``TraceError`` names it
..                     ``inconsistent_side_effects`` of a trace           no run of the model more than the user's
..                     ``get_compile_id``, ``compile_context``            a ``TraceError`` names it
..                     ``fx.Node._dynamo_source``: origin of an input     a ``TraceError`` names it
``counters.py``        ``torch.compiler.config.dynamic_sources``          a counter makes a graph for each of its values
..                     ``AttrSource``: how Dynamo writes an attribute     a ``TraceError`` names it
..                     ``source`` and ``value`` of Dynamo's variables     a ``TraceError`` names it
..                     ``originating_source`` of guards                   a ``TraceError`` names it
``guards.py``          ``CheckFunctionManager``: builds guards            a ``TraceError`` names it
..                     ``add_id_match_guard``: identities of weights      a ``TraceError`` names it
..                     ``mark_tag_safe_root``: guards that are skipped    none is skipped: checks are slower
..                     ``obj_weakref``, ``TensorWeakRef`` of guards       ``swap_tensors`` refuses the tensors
..                     ``code_list``, ``user_stack`` of guards            the reason is the guard, as Dynamo writes it
..                     ``freevar_name`` of the cell of a closure          a reason has the last attribute as the name
``dynamo.py``          ``torch._dynamo.config``                           a setting that is missing is left out
..                     ``torch._disable_dynamo``                          what calls a step traces it
..                     ``convert_frame.compile_lock``                     no lock: only one thread may compile
..                     ``torch.compiler._is_compiling_flag``              no fallback
..                     ``dynamo_timed``, ``get_metrics_context``          a ``TraceError`` names it
..                     ``fx._lazy_graph_module``: code when it is run     graphs that never run are written as code
..                     names of the loggers that Dynamo writes to         errors are logged; no reason in the report
..                     ``variables.constant``: constants that it shares   there are none to replace
``graph_breaks.py``    ``callback`` of Dynamo's contexts                  the lock is held for the whole call
..                     ``eval_frame._stance``: the user's stance          the lock is held for the whole call
..                     ``TorchDynamoException``, ``ConvertFrameReturn``   no fallback
..                     ``ResumePrologueTracingError``                     no fallback
..                     ``compile_subgraph_reason``                        no reason in the report
``attention_fast_…``   ``torch._native_multi_head_attention``             no fallback
``aten.py``            ``FakeTensorMode``, ``ShapeEnv``                   no fallback
..                     ``fx.Graph._root``: order of placeholders          no fallback
..                     ``meta_converter``: references to real tensors     ``swap_tensors`` refuses the tensors
``static_tensors.py``  ``_dynamo_static_input_type``: marks buffers,      buffers are copied in each call
..                     and caches among the arguments                     caches are copied in each call
..                     ``_param_name_to_source``                          a ``TraceError``: the call runs eagerly
``autograd.py``        ``aot_module_simplified``, ``TracingContext``      no fallback
..                     ``bw_donated_idxs``                                ``retain_graph=True`` may be refused
..                     ``_register_effectful_op``                         no error where a factorization fails
..                     ``_AnalyzeCustomOpInputOutputMode``                a first call computes in that mode
``eager_only.py``      ``_len_torch_dispatch_stack`` and its like         no fallback: nothing public says the same
..                     ``_global_forward_hooks``                          no fallback
..                     ``forward_ad._current_level``                      no fallback
..                     ``peek_interpreter_stack`` of functorch            no fallback
..                     ``is_fx_symbolic_tracing``                         each call searches the Python stack
..                     ``torch._C._is_tracing``                           ``torch.jit.is_tracing``, which is slower
..                     ``is_legacy_batchedtensor``                        there are no such tensors
``settings.py``        getters in ``torch._C``                            the public properties, which are slower
..                     ``GlobalStateGuard``                               each setting is compared
..                     ``_fused_sdp_choice``: order of attention          a cached schedule may not be found
``saved_tensors.py``   ``_top_saved_tensors_default_hooks`` and its like  a ``TraceError`` names it; hooks count as set
``decompositions.py``  kernels by dispatch key: ``OpOverload._op_dk``     no fallback
``optimizers.py``      hooks of optimizers, ``_wrapped_by_lr_sched``      no fallback
``step_capture.py``    ``config.trace_autograd_ops``                      a ``TraceError``: the step runs eagerly
..                     ``SideEffects.register_hook``                      a ``TraceError`` names it
..                     ``autograd_grad_consumed_grad_fns``, ``comptime``  a ``TraceError`` names it
..                     ``builder.make_dupe_guard``                        a ``TraceError`` names it
..                     ``TensorVariable._collect_backward_inputs``        a ``TraceError`` names it
..                     ``_collect_tensors_with_sources``                  a ``TraceError`` names it
..                     ``_dynamo_static_input_type``: marks constants     Dynamo marks none
``freezing.py``        ``TensorVariable.method_requires_grad_``             Dynamo refuses to set ``requires_grad``
..                     ``SetAttrBuiltinVariable._call_setattr``           the same
``reasons.py``         Dynamo's messages                                  the reason is Dynamo's message
..                     ``node``, which ``fx.Interpreter`` runs            a reason has no line
``scalers.py``         ``GradScaler._scale`` and its like                 a ``TraceError``: the step runs eagerly
``steps.py``           ``pop_dynamic_layer_stack`` of functorch           no fallback
``tensor_parallel.py`` ``DTensor._local_tensor``: what it holds           no fallback
..                     ``_random._rng_tracker``: numbers of DTensors      no call that draws such numbers is refused
``submodules.py``      ``nn_module_stack``: ids of modules                no cut points: models cannot be split
``pipelining.py``      ``_schedule_visualizer.get_schedule_ops``          GPipe and 1F1B only, whose order is known
``fake_processes.py``  ``torch.testing._internal.distributed.fake_pg``    ``--world`` is refused
..                     ``torch.ops._c10d_functional``                     no fallback
``parameters.py``      ``Tensor._backward_hooks`` and its like            no fallback
``averages.py``        ``Module._non_persistent_buffers_set``             no fallback
=====================  =================================================  ==============================================
"""
