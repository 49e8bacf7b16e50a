"""Fused kernels: turns a program of ATen ops into a program of TorchInductor's kernels.

``inductor.py`` runs Inductor, ``kernel_graph.py`` turns its wrapper code into an fx graph of kernels, and ``cache.py``
keeps such graphs on disk. Inductor has no public interface for this, so private ones are used:

================= ================================================================ ========== ==================
file              interface, in ``torch``                                          seen in    if missing
================= ================================================================ ========== ==================
inductor.py       _functorch.aot_autograd.aot_export_module                        2.11, 2.13 no fusion
..                _inductor.compile_fx: compile_fx_inner, fake_tensor_prop,        2.11, 2.13 no fusion
                  record_original_output_strides
..                _inductor.fx_passes.joint_graph.joint_graph_passes               2.11, 2.13 no fusion
..                _inductor.decomposition.select_decomp_table                      2.11, 2.13 no fusion
..                _inductor.freezing: freeze,                                      2.11, 2.13 no fusion
                  convert_conv_weights_to_channels_last
..                _inductor.graph.GraphLowering.decide_layout_opt                  2.11, 2.13 no fusion
..                _inductor.async_compile.AsyncCompile.wakeup                      2.11, 2.13 no fusion
..                _inductor.config: patch, get_config_copy, each of ``SETTINGS``   2.11, 2.13 no fusion
..                _C._DisableAutocast, FakeTensorMode.allow_non_fake_inputs        2.11, 2.13 fusing fails
..                _guards: TracingContext, tracing                                 2.11, 2.13 import fails
kernel_values.py  _guards.detect_fake_mode, _subclasses.FakeTensorMode             2.11, 2.13 import fails
kernel_graph.py   _inductor.codegen.wrapper_fxir: WrapperFxCodegen, FxConverter    2.11, 2.13 no fusion
..                _inductor.codegen.wrapper.WrapperLine.codegen_fx                 2.11, 2.13 no fusion
..                _inductor.codegen.common: init_backend_registration,             2.11, 2.13 no fusion
                  device_codegens, DeviceCodegen.fx_wrapper_codegen,
                  FileBackedGraphModule
..                _inductor: ir.ExternKernelOut, select_algorithm.extern_kernels,  2.11, 2.13 no fusion
                  utils.LineContext, virtualized.V
..                _inductor.codecache.PyCodeCache.load,                            2.11, 2.13 no fusion
                  _inductor.runtime.cache_dir_utils.cache_dir
..                ops.inductor._reinterpret_tensor, V.graph.mutated_buffers        2.11, 2.13 fusing fails
..                names of a kernel's arguments: in_ptr, out_ptr, in_out_ptr,      2.11, 2.13 fusing fails
                  ws_ptr, sem_ptr, arg
..                CachingAutotuner.run, ``result`` of a future of it               2.11, 2.13 first launch fails
combo_kernels.py  _inductor.scheduler.ForeachKernelSchedulerNode:                  2.11, 2.13 no fusion
                  combinable_nodes, group_nodes_for_combo_kernels, OutputNode
..                of a Scheduler its nodes, name_to_buf, name_to_fused_node; of    2.11, 2.13 fusing fails
                  each node its group, unmet_dependencies, read_writes,
                  ancestors, operations and outputs; of these the users
concatenated_     _inductor.ir: ConcatKernel.realize_into,                         2.11, 2.13 no fusion
products.py       ConcatKernel.can_realize_into_without_copy, NonOwningLayout,
                  FixedLayout, ReinterpretView, StorageBox, TensorBox
..                of these their ``data`` and ``layout``; a buffer's origin node;  2.11, 2.13 fusing fails
                  ``V.graph``: current_node, sizevars
fingerprint.py    _functorch.config.get_config_copy, _inductor.lowering.lowerings  2.11, 2.13 no fusion
..                _inductor.codegen.common: custom_backend_passes,                 2.11, 2.13 no fusion
                  custom_backend_codegen_configs
..                utils.deterministic.fill_uninitialized_memory                    2.11, 2.13 not cached
cache.py          _inductor.config.force_disable_caches                            2.11, 2.13 no fusion
out_variants.py   _C: _select_conv_backend, _ConvBackend,                          2.11, 2.13 slower
                  _conv_determine_backend_memory_format
..                _C._get_fp32_precision_getter                                    2.11, 2.13 allow_tf32 tells
================= ================================================================ ========== ==================

If another version of PyTorch lacks an interface, the last column tells what happens:

- *no fusion*: the interface is in ``inductor.NEEDED``, which is checked before anything is fused. The program runs as
  ATen ops, and a :class:`~autostream.errors.FusionError` names what is missing. With ``kernels="inductor"`` an
  :class:`~autostream.errors.OptionError` is raised instead.
- *fusing fails*: a ``FusionError`` without that check; the program runs as ATen ops.
- *import fails*, *first launch fails*: an ``ImportError`` or ``AttributeError`` that nothing handles.
- *not cached*: each process fuses again.
- *slower*: convolutions allocate their results themselves, so a schedule cannot place them.
- *allow_tf32 tells*: the public setting is used, which may raise; then convolutions allocate as well.
"""
