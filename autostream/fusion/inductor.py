"""Program → Program below fusion: one op is one kernel of TorchInductor's.

    Program of ATen ops ──▶ functional graph ──▶ Inductor: passes, fusion, code ──▶ wrapper lines ──▶ Program of kernels

Inductor can emit its fused program as an fx graph (``config.fx_wrapper``), here one of calls of our own
(``kernel_graph.py``). Its reuse of memory is off, for it chains branches that are independent otherwise: what is
reused is for the schedule to say.

Where freezing is asked for, weights become constants, and what depends on constants alone is computed now. Whoever
runs the program has to look whether these weights are still what they were (:attr:`autostream.ir.Program.frozen`).

All that is private to PyTorch is listed in :data:`NEEDED`, and looked for before anything is done. Where a version
lacks some of it, a :class:`~autostream.errors.FusionError` names it, and ops stay those of ATen.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch.fx.traceback import preserve_node_meta

from autostream.errors import FusionError, OptionError, first_line
from autostream.frontend.capture import compile_lock
from autostream.fusion.channels_last import (
    Relaid,
    in_channels_last,
    is_channels_last,
    trains_convolutions,
)
from autostream.fusion.kernel_values import (
    arguments_of,
    fake_mode_of,
    kinds,
    named_as,
    outputs_of,
    shared,
)
from autostream.fusion.matvec import with_rows
from autostream.fusion.out_variants import write_into_given_memory
from autostream.fusion.random_ops import draw_in_order, drawing_as_eager, draws_of
from autostream.fusion.scalars import compute_once
from autostream.ir import Program, Role
from autostream.utils.storages import storage_of

log = logging.getLogger(__name__)

aten = torch.ops.aten

SETTINGS: Mapping[str, Any] = {
    "fx_wrapper": True,
    "cpp_wrapper": False,
    "triton.cudagraphs": False,
    # Each would make one chain of independent branches.
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "memory_planning": False,
    # Lines of Python, which no fx graph can hold; what asserts check is checked once, when the model is traced.
    "size_asserts": False,
    "nan_asserts": False,
    "alignment_asserts": False,
    "triton.num_decompose_k_splits": 0,
    "triton.multi_kernel": 0,
    "freezing_discard_parameters": False,  # the weights are the user's
    "fx_graph_cache": False,  # keeps Python code; kernels are cached on disk all the same
    "fallback_random": True,  # the numbers that the model draws when it runs plainly
}
"""What every program is compiled with."""

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
    "torch._inductor.ir": ["ExternKernelOut"],
    "torch._inductor.select_algorithm": ["extern_kernels"],
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
"""What is used and overridden of PyTorch's private parts, by module, as torch 2.11 and 2.13 have it."""


def check_settings(options: Mapping[str, Any]) -> None:
    """See that Inductor has these settings, that they are the user's to choose, and that switches are on or off.

    Raises:
        OptionError: one is unknown, or set already; or a switch is something else, such as ``"False"``, which would
            turn it on.
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
    """See that fused kernels can be had on this machine, and where a model is, if no others will do.

    Args:
        kernels: the option of that name.
        tensors: the model's, where they will stay.

    Raises:
        OptionError: there is no GPU, the tensors are all on the CPU, there is no Triton, or this version of PyTorch
            lacks what fusing builds on.

    Example:
        >>> check_level("auto", [torch.ones(1)])
    """
    if kernels != "inductor":
        return
    on_cpu = not torch.cuda.is_available() or {tensor.device.type for tensor in tensors} == {"cpu"}
    if reason := obstacle("cpu" if on_cpu else "cuda"):
        raise OptionError(f'kernels="inductor" is not to be had: {reason}')


def obstacle(device: str) -> str:
    """Why nothing can be fused here, whatever the program, and what to do instead; ``""`` where it can.

    Args:
        device: where the program runs.

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
    """Let Inductor fuse a program's ops into kernels.

    Args:
        program: of ATen ops, on a CUDA device. It stays as it is.
        options: of ``torch._inductor.config``, e.g. ``{"max_autotune": True}``.
        tensors: its arguments, which are looked at only where the options ask for freezing.

    Returns:
        The same function of the same placeholders, at level ``"inductor"``. Its kernels may still be compiling in
        other processes: the first launch of each waits for it. With ``{"freezing": True}`` it holds on to weights as
        they are now; ``frozen`` says which.

    Raises:
        FusionError: the program is one of the CPU, Triton is not installed, this version of PyTorch lacks what fusing
            builds on, or Inductor fails.
    """
    reason = obstacle(program.device)
    if reason:
        raise FusionError(f"{reason}; ops stay those of ATen")
    from torch._inductor.async_compile import AsyncCompile

    options = options or {}
    try:
        AsyncCompile.wakeup()  # until its processes are there, which takes seconds, this one compiles, one by one
        with with_settings(options), _drawing_nothing(program.device):
            functional = _functional(program)  # under the user's autocast; what comes out has casts of its own
            drawn = draws_of(functional.graph)
            constants = _freezable(program, functional, tensors) if options.get("freezing") else {}
            with torch._C._DisableAutocast():
                fused = named_as(_compiled(functional, torch.device(program.device), constants), program)
                draw_in_order(fused.graph, drawn)
                write_into_given_memory(fused)
        return _checked(program, fused, frozenset(constants))
    except FusionError:
        raise
    except Exception as error:
        raise FusionError(f"TorchInductor cannot fuse it: {first_line(error)}") from error


def _drawing_nothing(device: str) -> AbstractContextManager[None]:
    """Puts back the states of the generators: to see whether padding a product pays, Inductor times random ones."""
    return torch.random.fork_rng([device] if torch.cuda.is_initialized() else [])  # type: ignore[no-untyped-call]


@contextmanager
def with_settings(options: Mapping[str, Any]) -> Iterator[None]:
    """Let Inductor have these settings and those that every program is compiled with; other threads' compilers wait."""
    from torch._inductor import config

    with compile_lock(), config.patch({**options, **SETTINGS}):
        yield


def fused_before(program: Program, module: fx.GraphModule) -> Program:
    """A program that was fused before, in another process.

    Args:
        program: of ATen ops, on a CUDA device. It stays as it is.
        module: its kernels, without values: what :func:`fuse` has returned, read back.

    Raises:
        FusionError: they are not the kernels of such a program.
    """
    with torch._C._DisableAutocast():
        return _checked(program, named_as(module, program), frozenset())


def _checked(program: Program, fused: fx.GraphModule, frozen: frozenset[int]) -> Program:
    if shared(fused) != shared(program.module):
        raise FusionError("fused, outputs would share other memory with arguments or each other than the model's do")
    if kinds(fused) != kinds(program.module):
        raise FusionError("fused, outputs would have other types, shapes or strides than the model's do")
    if _hands_out_constants(fused):
        raise FusionError(
            "frozen, an output would be a constant, and whoever writes to it would change it for the next call: "
            "leave 'freezing' out of inductor_options"
        )
    outputs = tuple(node.name for node in outputs_of(fused))
    return replace(program, module=fused, outputs=outputs, level="inductor", frozen=frozen)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # something else under its name, which says not where it is from
        return False


def _missing() -> Iterator[str]:
    """What this version of PyTorch lacks of what is needed."""
    for module, names in NEEDED.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            yield module
            continue
        except Exception as error:  # whatever is wrong with it, ops as they are still run
            yield f"{module} that could be imported ({first_line(error)})"
            continue
        for name in names:
            try:
                attrgetter(name)(found)
            except AttributeError:
                yield f"{module}.{name}"


def _functional(program: Program) -> fx.GraphModule:
    """A program's graph in the ops that Inductor lowers; what it writes to its arguments it copies there at the end."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering

    module, table = program.module, with_rows(drawing_as_eager(select_decomp_table()))
    if trains_convolutions(module.graph) and GraphLowering.decide_layout_opt(module, is_inference=False):
        try:
            return _traced(module, Relaid(module), in_channels_last(table))
        except Exception as seen:  # whatever an op makes of tensors that lie otherwise, the graph can be had as it is
            log.debug("convolutions stay as they were traced, not channels-last: %s", first_line(seen))
    return _traced(module, fx.Interpreter(module), table)


def _traced(module: fx.GraphModule, run: fx.Interpreter, table: Mapping[Any, Any]) -> fx.GraphModule:
    from torch._functorch.aot_autograd import aot_export_module

    values = [value.detach() for value in arguments_of(module)]
    traced: Any
    with fake_mode_of(values), torch.no_grad():
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
    """A graph run node by node, so that what is traced keeps the user's lines."""

    def __init__(self, interpreter: fx.Interpreter) -> None:
        super().__init__()
        self._interpreter = interpreter

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        with preserve_node_meta():
            return tuple(self._interpreter.run(*args))


def _compiled(module: fx.GraphModule, device: torch.device, constants: Mapping[int, Tensor]) -> fx.GraphModule:
    """Inductor's kernels as a graph. Takes Inductor's own steps for inference, but for those of autograd."""
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    from autostream.fusion.kernel_graph import graphs_of_kernels

    values = arguments_of(module)
    mode = fake_mode_of(values)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        for told in _OF_INDUCTORS_OWN:
            warnings.filterwarnings("ignore", told)
        with tracing(TracingContext(mode)):
            record_original_output_strides(module)
            joint_graph_passes(module, device)
        if constants:
            module = _frozen(module, constants)
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(mock.patch.object(mode, "allow_non_fake_inputs", True))  # constants, as Inductor does
        graphs = stack.enter_context(graphs_of_kernels(device))
        module.graph.output_node().meta["user_visible_output_idxs"] = range(len(outputs_of(module)))
        compile_fx_inner(module, values, fx_wrapper=True, is_inference=True, layout_opt=_layouts(module))
    (compiled,) = graphs
    return compiled


def _layouts(module: fx.GraphModule) -> bool | None:
    """Whether Inductor is to lay out convolutions; ``None`` where it may choose.

    Forward and backward alike, or gradients would copy what convolutions have written.
    """
    from torch._inductor.graph import GraphLowering

    if not trains_convolutions(module.graph):
        return None
    if is_channels_last(module.graph):
        return True
    return None if GraphLowering.decide_layout_opt(module, is_inference=False) else False


_OF_INDUCTORS_OWN = ("TypedStorage is deprecated", "Attempted to insert a get_attr Node")
"""How what it warns of at every autotuning and every constant begins: as errors, they would keep it from fusing."""


def _freezable(program: Program, functional: fx.GraphModule, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """What a program may hold on to, by position: the model's tensors that it neither writes nor returns.

    Of tensors that were made in inference mode nobody can tell whether they have been changed.
    """
    placeholders = functional.graph.find_nodes(op="placeholder")
    written = {node.args[0] for node in functional.graph.find_nodes(op="call_function", target=aten.copy_.default)}
    values = arguments_of(program.module)
    kept = {storage_of(value) for node, value in zip(placeholders, values, strict=True) if node in written}
    kept |= {storage_of(node.meta["val"]) for node in outputs_of(program.module)}
    return {
        at: tensor
        for at, (item, value, tensor) in enumerate(zip(program.placeholders, values, tensors, strict=True))
        if item.role is not Role.INPUT and storage_of(value) not in kept and not tensor.is_inference()
    }


def _frozen(module: fx.GraphModule, constants: Mapping[int, Tensor]) -> fx.GraphModule:
    """A graph with constants in the place of some placeholders, which stay, and what follows from them computed.

    A copy, for PyTorch keeps a graph that was exported until the next is, and would keep the constants with it. Takes
    Inductor's own steps, outside of a ``TracingContext``: in one, Inductor would look there for the parameters.
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
    # What is computed now is an ordinary tensor, whatever the mode of the call that comes first.
    with torch.inference_mode(False), torch.no_grad():
        frozen, _ = freeze(module, module, values)
    return frozen


def _hands_out_constants(module: fx.GraphModule) -> bool:
    constants = {storage_of(node.meta["val"]) for node in module.graph.find_nodes(op="get_attr")}
    return any(storage_of(node.meta["val"]) in constants for node in outputs_of(module))
