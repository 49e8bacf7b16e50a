"""Fuses the ops of a program into kernels by TorchInductor: each op of the result is one kernel.

    Program of ATen ops ──▶ functional graph ──▶ Inductor: passes, fusion, code ──▶ wrapper lines ──▶ Program of kernels

Inductor can emit its fused program as an fx graph (``config.fx_wrapper``); ``kernel_graph.py`` turns it into calls of
:class:`~autostream.utils.kernels.Kernel`. Inductor's reuse of buffers is off, because it makes independent branches
depend on each other; the schedule decides which memory is reused.

With freezing, weights become constants, and ops that depend on constants alone are computed at compile time. The caller
must check that these weights have not changed before each run (:attr:`autostream.ir.Program.frozen`).

The private interfaces of PyTorch that this needs are in :data:`NEEDED`, and are checked first. If a version lacks one,
a :class:`~autostream.errors.FusionError` names it, and the ops stay those of ATen.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch.fx.traceback import preserve_node_meta

from autostream.errors import FusionError, OptionError, first_line
from autostream.frontend.dynamo import compile_lock, compile_session
from autostream.fusion.channels_last import (
    LayoutInterpreter,
    channels_last_decompositions,
    is_channels_last,
    trains_convolutions,
)
from autostream.fusion.collectives import functional_collectives
from autostream.fusion.in_place_products import keep_in_place, restore_in_place
from autostream.fusion.kernel_values import (
    arguments_of,
    fake_mode_of,
    match_program,
    output_layouts,
    outputs_of,
    shared_storages,
)
from autostream.fusion.matvec import matvec_decompositions
from autostream.fusion.out_variants import use_out_variants
from autostream.fusion.random_ops import random_decompositions, random_ops_of, restore_random_order
from autostream.fusion.scalars import compute_once
from autostream.ir import Program, Role
from autostream.utils.logs import Log
from autostream.utils.storages import storage_of

log = Log(__name__)

aten = torch.ops.aten

SETTINGS: Mapping[str, Any] = {
    "fx_wrapper": True,
    "cpp_wrapper": False,
    "triton.cudagraphs": False,
    # Each reuses memory, which makes independent branches depend on each other.
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "memory_planning": False,
    # These emit lines of Python, which an fx graph cannot hold. Sizes are checked once, when the model is traced.
    "size_asserts": False,
    "nan_asserts": False,
    "alignment_asserts": False,
    "triton.num_decompose_k_splits": 0,
    "triton.multi_kernel": 0,
    "freezing_discard_parameters": False,  # the weights are the user's
    "fx_graph_cache": False,  # caches Python code; kernels are cached on disk all the same
    "fallback_random": True,  # the same random numbers as in eager mode
}
"""The settings of ``torch._inductor.config`` with which every program is compiled."""

PREFERRED: Mapping[str, Any] = {
    # All updates of a step read its learning rate. With 64 of them to try for each, as is Inductor's default, that was
    # up to half of the time of fusing, and what was fused was the same.
    "max_fusion_buffer_group_pairwise_attempts": 8,
    "combo_kernels": True,  # for small kernels alone, unless the user asks for all; these need no check of memory
    "combo_kernel_peak_memory_pct_threshold": None,
}
"""Settings that the user may change, where this version of Inductor has them."""

NEEDED: Mapping[str, Sequence[str]] = {
    "torch._functorch.aot_autograd": ["aot_export_module"],
    "torch._inductor.async_compile": ["AsyncCompile.wakeup"],
    "torch._inductor.config": [*SETTINGS, "patch", "get_config_copy", "force_disable_caches"],
    "torch._functorch.config": ["get_config_copy"],
    "torch._inductor.decomposition": ["select_decomp_table"],
    "torch._inductor.lowering": ["lowerings"],
    "torch._inductor.fx_passes.joint_graph": ["joint_graph_passes"],
    "torch._inductor.compile_fx": ["compile_fx_inner", "fake_tensor_prop", "record_original_output_strides"],
    "torch._inductor.freezing": ["convert_conv_weights_to_channels_last", "freeze"],
    "torch._inductor.graph": ["GraphLowering.decide_layout_opt"],
    "torch._inductor.codecache": ["PyCodeCache.load"],
    "torch._inductor.runtime.cache_dir_utils": ["cache_dir"],
    "torch._inductor.ir": [
        "ConcatKernel.can_realize_into_without_copy",
        "ConcatKernel.realize_into",
        "ExternKernelOut",
        "FixedLayout",
        "NonOwningLayout",
        "ReinterpretView",
        "StorageBox",
        "TensorBox",
    ],
    "torch._inductor.select_algorithm": ["extern_kernels"],
    "torch._inductor.scheduler": [
        "ForeachKernelSchedulerNode.combinable_nodes",
        "ForeachKernelSchedulerNode.group_nodes_for_combo_kernels",
        "OutputNode",
    ],
    "torch._inductor.utils": ["LineContext"],
    "torch._inductor.virtualized": ["V"],
    "torch._inductor.codegen.common": [
        "init_backend_registration",
        "custom_backend_codegen_configs",
        "custom_backend_passes",
        "device_codegens",
        "DeviceCodegen.fx_wrapper_codegen",
        "FileBackedGraphModule",
    ],
    "torch._inductor.codegen.wrapper": ["WrapperLine.codegen_fx"],
    "torch._inductor.codegen.wrapper_fxir": [
        "WrapperFxCodegen._generate",
        "WrapperFxCodegen.compile_graph",
        "WrapperFxCodegen.get_fx_graph_inputs",
        "WrapperFxCodegen.get_graph_outputs",
        "WrapperFxCodegen.is_subgraph",
        "WrapperFxCodegen.make_zero_buffer",
        "WrapperFxCodegen.run_wrapper_ir_passes",
        "FxConverter.generate",
        "FxConverter._create_as_strided",
        "FxConverter._generate_buffer",
        "FxConverter._generate_extern_kernel_common",
        "FxConverter._generate_allocate",
        "FxConverter._generate_graph_constants",
        "FxConverter._generate_graph_inputs",
        "FxConverter._generate_kernel_definition",
        "FxConverter._generate_outputs",
        "FxConverter._generate_reinterpret_helper",
        "FxConverter._generate_subgm_getattrs",
        "FxConverter._generate_triton_call",
        "FxConverter._generate_unbacked_symbol_defs",
        "FxConverter._lookup_args",
        "FxConverter._record_allocation",
    ],
}
"""The private interfaces of PyTorch that fusion uses or overrides, by module; torch 2.11 and 2.13 have all of them."""


def check_settings(options: Mapping[str, Any]) -> None:
    """Check the user's settings of Inductor.

    Raises:
        OptionError: a setting is unknown, or one of :data:`SETTINGS`; or a boolean is not a bool. The string
            ``"False"`` would turn it on.
    """
    if not options:
        return
    from torch._inductor import config

    known = config.get_config_copy()
    for name, value in options.items():
        if name in SETTINGS:
            raise OptionError(f"inductor_options: {name!r} is autostream's to choose: leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise OptionError(f"inductor_options: torch._inductor.config has no setting {name!r}{hint}")
        if isinstance(known[name], bool) and not isinstance(value, bool):
            raise OptionError(f"inductor_options: {name!r} is a switch: use True or False, not {value!r}")


def check_level(kernels: str, tensors: Iterable[Tensor] = ()) -> None:
    """Check that a model's ops can be fused, if the option ``kernels`` requires it.

    Args:
        kernels: the option of that name.
        tensors: the model's tensors, on the devices on which it runs.

    Raises:
        OptionError: there is no GPU, the tensors are all on the CPU, Triton is not installed, or this version of
            PyTorch lacks an interface that fusion needs.

    Example:
        >>> check_level("auto", [torch.ones(1)])
    """
    if kernels != "inductor":
        return
    if reason := obstacle("cpu" if runs_on_cpu(tensors) else "cuda"):
        raise OptionError(f'kernels="inductor" is not to be had: {reason}')


def runs_on_cpu(tensors: Iterable[Tensor]) -> bool:
    """Whether a model of these tensors runs on the CPU: there is no GPU, or there are tensors, all of them there.

    Example:
        >>> runs_on_cpu([torch.ones(1)])
        True
    """
    return not torch.cuda.is_available() or {tensor.device.type for tensor in tensors} == {"cpu"}


def obstacle(device: str) -> str:
    """Why no program can be fused on this machine, and what to do instead; ``""`` if fusion is available.

    Args:
        device: the device on which the program runs.

    Example:
        >>> obstacle("cpu")
        'TorchInductor fuses ops into kernels of a GPU, and this program runs on the CPU: use kernels="eager"'
    """
    if device == "cpu":
        return 'TorchInductor fuses ops into kernels of a GPU, and this program runs on the CPU: use kernels="eager"'
    if not _installed("triton"):
        return 'TorchInductor writes its kernels in Triton, which is not installed: install it, or use kernels="eager"'
    missing = next(_missing(), "")
    if missing:
        return f'torch {torch.__version__} has no {missing}, as 2.11 and 2.13 have for fusing: use kernels="eager"'
    return ""


def fuse(program: Program, options: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()) -> Program:
    """Fuse a program's ops into kernels of Inductor.

    Args:
        program: a program of ATen ops, on a CUDA device; it is not changed.
        options: settings of ``torch._inductor.config``, e.g. ``{"max_autotune": True}``.
        tensors: its arguments; used only for freezing.

    Returns:
        The same function of the same placeholders, at level ``"inductor"``. Its kernels may still be compiling in
        other processes; the first launch of each waits for that. With ``{"freezing": True}`` the values of weights are
        baked in; ``frozen`` has their positions.

    Raises:
        FusionError: the program runs on the CPU, Triton is not installed, this version of PyTorch lacks an interface
            that fusion needs, or Inductor fails.
    """
    reason = obstacle(program.device)
    if reason:
        raise FusionError(f"{reason}; ops stay those of ATen")
    from torch._inductor.async_compile import AsyncCompile

    from autostream.fusion.combo_kernels import small_together
    from autostream.fusion.concatenated_products import products_in_place

    options = options or {}
    try:
        AsyncCompile.wakeup()  # starting its worker processes takes seconds; until then this process would compile
        combined = nullcontext() if "combo_kernels" in options else small_together()
        with with_settings(options), _preserve_rng(program.device), combined, products_in_place():
            functional = _functional(program)  # under the user's autocast; the result contains the casts
            random_ops = random_ops_of(functional.graph)
            constants = _freezable(program, functional, tensors) if options.get("freezing") else {}
            with torch._C._DisableAutocast():
                compiled = restore_in_place(_compiled(functional, torch.device(program.device), constants))
                fused = match_program(compiled, program)
                restore_random_order(fused.graph, random_ops)
                use_out_variants(fused)
        return _checked(program, fused, frozenset(constants))
    except FusionError:
        raise
    except Exception as error:
        raise FusionError(f"TorchInductor cannot fuse it: {first_line(error)}") from error


def _preserve_rng(device: str) -> AbstractContextManager[None]:
    """Restores the states of random generators: to decide on padding, Inductor times products of random matrices."""
    return torch.random.fork_rng([device] if torch.cuda.is_initialized() else [])  # type: ignore[no-untyped-call]


@contextmanager
def with_settings(options: Mapping[str, Any]) -> Iterator[None]:
    """Apply these settings of Inductor, :data:`PREFERRED` and :data:`SETTINGS`, under the lock of all compilations."""
    from torch._inductor import config

    preferred = {name: value for name, value in PREFERRED.items() if hasattr(config, name)}
    with compile_lock(), config.patch({**preferred, **options, **SETTINGS}):
        yield


def restore_fused(program: Program, module: fx.GraphModule) -> Program:
    """Restore a fused program from the graph that was fused in another process.

    Args:
        program: the program of ATen ops, on a CUDA device; it is not changed.
        module: the graph of kernels that :func:`fuse` returned for it, without values.

    Raises:
        FusionError: the graph is not one of this program's kernels.
    """
    with torch._C._DisableAutocast():
        return _checked(program, match_program(module, program), frozenset())


def _checked(program: Program, fused: fx.GraphModule, frozen: frozenset[int]) -> Program:
    if shared_storages(fused) != shared_storages(program.module):
        raise FusionError("fused, outputs would share other memory with arguments or each other than the model's do")
    if output_layouts(fused) != output_layouts(program.module):
        raise FusionError("fused, outputs would have other types, shapes or strides than the model's do")
    if _returns_constants(fused):
        raise FusionError(
            "frozen, an output would be a constant, and a write to it would change it for the next call: "
            "leave 'freezing' out of inductor_options"
        )
    outputs = tuple(node.name for node in outputs_of(fused))
    return replace(program, module=fused, outputs=outputs, level="inductor", frozen=frozen)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module of this name without a spec was put into sys.modules
        return False


def _missing() -> Iterator[str]:
    """The interfaces in :data:`NEEDED` that this version of PyTorch lacks."""
    for module, names in NEEDED.items():
        try:
            imported = importlib.import_module(module)
        except ImportError:
            yield module
            continue
        except Exception as error:  # any error of the import only means that ops are not fused
            yield f"{module} that could be imported ({first_line(error)})"
            continue
        for name in names:
            try:
                attrgetter(name)(imported)
            except AttributeError:
                yield f"{module}.{name}"


def _functional(program: Program) -> fx.GraphModule:
    """A program's graph in the ops that Inductor lowers; mutated arguments are written by copies at the end."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering

    module = functional_collectives(program.module)
    if not (config.max_autotune or config.max_autotune_gemm):  # which may have a kernel that is faster still
        module = keep_in_place(module)
    table = matvec_decompositions(random_decompositions(select_decomp_table()))
    if trains_convolutions(module.graph) and GraphLowering.decide_layout_opt(module, is_inference=False):
        try:
            return _traced(module, LayoutInterpreter(module), channels_last_decompositions(table))
        except Exception as error:  # an op may fail on tensors of another layout; the traced layout always works
            log.debug("convolutions stay as they were traced, not channels-last: %s", first_line(error))
    return _traced(module, _FoldingInterpreter(module), table)


class _FoldingInterpreter(fx.Interpreter):
    """Runs a graph with one product for all rows of a batch that is multiplied by a matrix.

    So do ATen's own ops for weights that require gradients, which those of a program do not. For others, and rows that
    are not contiguous, they repeat the matrix for each of the batch: on an H100, a projection of ViT-B/16 took 70 us
    instead of 11.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a ``call_function`` node."""
        if target in (aten.linear.default, aten.matmul.default):
            rows, matrix, *bias = args
            if rows.dim() > 2 and matrix.dim() == 2:
                product = super().call_function(target, (rows.flatten(0, -2), matrix, *bias), kwargs)
                return product.unflatten(0, rows.shape[:-1])
        return super().call_function(target, args, kwargs)


def _traced(module: fx.GraphModule, run: fx.Interpreter, table: Mapping[Any, Any]) -> fx.GraphModule:
    from torch._functorch.aot_autograd import aot_export_module

    values = [value.detach() for value in arguments_of(module)]
    traced: Any
    with fake_mode_of(values), torch.no_grad(), compile_session():
        traced, signature = aot_export_module(_Interpreted(run), values, trace_joint=False, decompositions=dict(table))
    written = signature.user_inputs_to_mutate
    arguments = {node.name: node for node in traced.graph.find_nodes(op="placeholder")}
    results = {node.name: node for node in outputs_of(traced)}
    output = traced.graph.output_node()
    with traced.graph.inserting_before(output):
        for result, argument in written.items():
            copy = traced.graph.call_function(aten.copy_.default, (arguments[argument], results[result]))
            copy.meta["val"] = arguments[argument].meta["val"]
    output.args = (outputs_of(traced)[len(written) :],)
    compute_once(traced.graph)
    traced.recompile()
    return traced  # type: ignore[no-any-return]


class _Interpreted(nn.Module):
    """Runs a graph by an interpreter, node by node, so that the nodes of a new trace keep the user's lines."""

    def __init__(self, interpreter: fx.Interpreter) -> None:
        super().__init__()
        self._interpreter = interpreter

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        with preserve_node_meta():
            return tuple(self._interpreter.run(*args))


def _compiled(module: fx.GraphModule, device: torch.device, constants: Mapping[int, Tensor]) -> fx.GraphModule:
    """Compile a graph to a graph of kernels, by the steps of Inductor's inference path without AOTAutograd."""
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    from autostream.fusion.kernel_graph import capture_kernel_graphs

    values = arguments_of(module)
    mode = fake_mode_of(values)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        for message in _IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        with tracing(TracingContext(mode)):
            record_original_output_strides(module)
            joint_graph_passes(module, device)
        if constants:
            module = _frozen(module, constants)
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(mock.patch.object(mode, "allow_non_fake_inputs", True))  # for constants, like Inductor
        graphs = stack.enter_context(capture_kernel_graphs(device))
        module.graph.output_node().meta["user_visible_output_idxs"] = range(len(outputs_of(module)))
        compile_fx_inner(module, values, fx_wrapper=True, is_inference=True, layout_opt=_layout_opt(module))
    (compiled,) = graphs
    return compiled


def _layout_opt(module: fx.GraphModule) -> bool | None:
    """The argument ``layout_opt`` of Inductor: whether to convert convolutions to channels-last; ``None``: it decides.

    Forward and backward must agree, else gradients would copy the outputs of convolutions.
    """
    from torch._inductor.graph import GraphLowering

    if not trains_convolutions(module.graph):
        return None
    if is_channels_last(module.graph):
        return True
    return None if GraphLowering.decide_layout_opt(module, is_inference=False) else False


_IGNORED_WARNINGS = ("TypedStorage is deprecated", "Attempted to insert a get_attr Node")
"""The beginnings of warnings that Inductor causes itself, for autotuning and for constants. If the user has turned
warnings into errors, they would make fusion fail."""


def _freezable(program: Program, functional: fx.GraphModule, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """The tensors of the model that may become constants, by position: those that are neither mutated nor returned.

    Inference tensors are left out: they have no version counter, so changes to them cannot be detected.
    """
    placeholders = functional.graph.find_nodes(op="placeholder")
    written = {node.args[0] for node in functional.graph.find_nodes(op="call_function", target=aten.copy_.default)}
    values = arguments_of(program.module)
    excluded = {storage_of(value) for node, value in zip(placeholders, values, strict=True) if node in written}
    excluded |= {storage_of(node.meta["val"]) for node in outputs_of(program.module)}
    return {
        at: tensor
        for at, (item, value, tensor) in enumerate(zip(program.placeholders, values, tensors, strict=True))
        if item.role is not Role.INPUT and storage_of(value) not in excluded and not tensor.is_inference()
    }


def _frozen(module: fx.GraphModule, constants: Mapping[int, Tensor]) -> fx.GraphModule:
    """A copy of a graph in which constants replace some placeholders, and ops on constants alone are computed.

    The placeholders stay, without users. The graph is copied because PyTorch holds the last exported graph, and would
    hold the constants with it. The steps are those of Inductor, outside of a ``TracingContext``: in one, ``freeze``
    would take the parameters from there.
    """
    from torch._inductor.compile_fx import fake_tensor_prop
    from torch._inductor.freezing import convert_conv_weights_to_channels_last, freeze
    from torch._inductor.graph import GraphLowering

    module = copy.deepcopy(module)
    values = arguments_of(module)
    placeholders = module.graph.find_nodes(op="placeholder")
    with module.graph.inserting_after(placeholders[-1]):
        for at, tensor in constants.items():
            name = f"frozen_{placeholders[at].name}"
            module.register_buffer(name, tensor.detach())
            constant = module.graph.get_attr(name)
            placeholders[at].replace_all_uses_with(constant)
            constant.meta.update(placeholders[at].meta)
    if GraphLowering.decide_layout_opt(module, is_inference=True):
        fake_tensor_prop(module, values, force_allow_non_fake_inputs=True)
        convert_conv_weights_to_channels_last(module)
    # The constants must be ordinary tensors, even if the first call is in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        frozen, _ = freeze(module, module, values)
    return frozen


def _returns_constants(module: fx.GraphModule) -> bool:
    constants = {storage_of(node.meta["val"]) for node in module.graph.find_nodes(op="get_attr")}
    return any(storage_of(node.meta["val"]) in constants for node in outputs_of(module))
