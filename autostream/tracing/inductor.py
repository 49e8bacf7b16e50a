"""Program → Program below fusion: one op is one kernel of TorchInductor's.

    Program of ATen ops ──▶ functional graph ──▶ Inductor: passes, fusion, code ──▶ wrapper lines ──▶ Program of kernels

Inductor can emit its fused program as an fx graph (``config.fx_wrapper``). Its converter is used here with calls of
our own: an op allocates memory, an op looks at it, and a Triton kernel is a :class:`~autostream.kernels.Kernel` that
Inductor's own launcher launches. Inductor's reuse of memory is off, for it chains branches that are independent
otherwise: what is reused is for the schedule to say.

Private to PyTorch, seen on 2.11 and 2.13: ``wrapper_fxir``, the registry of wrappers by device, ``compile_fx_inner``.
Where a version differs, a :class:`~autostream.errors.FusionError` says so, and ops stay those of ATen.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.traceback import preserve_node_meta

from autostream.errors import FusionError, OptionError, first_line
from autostream.ir import Program
from autostream.kernels import Kernel
from autostream.storages import storage_of

SETTINGS: Mapping[str, Any] = {
    "fx_wrapper": True,
    "triton.cudagraphs": False,
    # Each would make one chain of independent branches.
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    # Lines of Python, which no fx graph can hold; the checks are made once, when the model is traced.
    "size_asserts": False,
    "nan_asserts": False,
    "alignment_asserts": False,
    "fx_graph_cache": False,  # keeps Python code; kernels are cached on disk all the same
    "fallback_random": True,  # the numbers that the model draws when it runs plainly
}
"""What every program is compiled with."""


def check_settings(options: Mapping[str, Any]) -> None:
    """See that Inductor has these settings, and that they are the user's to choose.

    Raises:
        OptionError: one is unknown, or set already.
    """
    if not options:
        return
    from torch._inductor import config

    known = config.get_config_copy()
    for name in options:
        if name in SETTINGS:
            raise OptionError(f"inductor_options: {name!r} is autostream's to choose: leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise OptionError(f"inductor_options: torch._inductor.config has no setting {name!r}{hint}")


def fuse(program: Program, options: Mapping[str, Any] | None = None) -> Program:
    """Let Inductor fuse a program's ops into kernels.

    Args:
        program: of ATen ops, on a CUDA device. It stays as it is.
        options: of ``torch._inductor.config``, e.g. ``{"max_autotune": True}``.

    Returns:
        The same function of the same placeholders, at level ``"inductor"``. Its kernels may still be compiling in
        other processes: the first launch of each waits for it.

    Raises:
        FusionError: this version of PyTorch, or Inductor, cannot.
    """
    from torch._inductor import config

    try:
        with config.patch({**(options or {}), **SETTINGS}):
            fused = _named(_compiled(_functional(program), torch.device(program.device)), program)
    except Exception as error:
        raise FusionError(f"TorchInductor cannot fuse it: {first_line(error)}") from error
    if _shared(fused) != _shared(program.module):
        raise FusionError("fused, outputs would share other memory with arguments or each other than the model's do")
    outputs = tuple(node.name for node in _outputs(fused))
    return replace(program, module=fused, outputs=outputs, level="inductor")


def _functional(program: Program) -> fx.GraphModule:
    """A program's graph in the ops that Inductor lowers; what it writes to its arguments it copies there at the end."""
    from torch._functorch.aot_autograd import aot_export_module
    from torch._inductor.decomposition import select_decomp_table

    values = [value.detach() for value in _arguments(program.module)]
    module: Any
    with _fake_mode(values), torch.no_grad():
        module, signature = aot_export_module(
            _Interpreted(program.module), values, trace_joint=False, decompositions=select_decomp_table()
        )
    written = signature.user_inputs_to_mutate
    arguments = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    results = {node.name: node for node in _outputs(module)}
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        for result, argument in written.items():
            copy = module.graph.call_function(torch.ops.aten.copy_.default, (arguments[argument], results[result]))
            copy.meta["val"] = arguments[argument].meta["val"]
    output.args = (_outputs(module)[len(written) :],)
    module.recompile()
    return module  # type: ignore[no-any-return]


class _Interpreted(nn.Module):
    """A graph run node by node, so that what is traced keeps the user's lines."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self._interpreter = fx.Interpreter(module)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        with preserve_node_meta():
            return tuple(self._interpreter.run(*args))


def _compiled(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Inductor's kernels as a graph. Takes Inductor's own steps for inference, but for those of autograd."""
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    values = _arguments(module)
    mode = _fake_mode(values)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(tracing(TracingContext(mode)))
        modules = stack.enter_context(_wrapped_by_converter(device))
        record_original_output_strides(module)
        joint_graph_passes(module, device)
        module.graph.output_node().meta["user_visible_output_idxs"] = range(len(_outputs(module)))
        compile_fx_inner(module, values, fx_wrapper=True, is_inference=True)
    (compiled,) = modules
    return compiled


@contextmanager
def _wrapped_by_converter(device: torch.device) -> Iterator[list[fx.GraphModule]]:
    """Let Inductor write graphs of our calls, into the list that this yields."""
    from torch._inductor.codegen import common

    modules: list[fx.GraphModule] = []
    common.init_backend_registration()
    before = common.device_codegens[device.type]
    common.device_codegens[device.type] = replace(before, fx_wrapper_codegen=_wrapper_class(modules, device))
    try:
        yield modules
    finally:
        common.device_codegens[device.type] = before


def _wrapper_class(modules: list[fx.GraphModule], device: torch.device) -> type:
    from torch._inductor.codegen.common import FileBackedGraphModule
    from torch._inductor.codegen.wrapper import WrapperLine
    from torch._inductor.codegen.wrapper_fxir import FxConverter, WrapperFxCodegen
    from torch._inductor.utils import LineContext

    class Converter(FxConverter):
        """Writes our calls in the place of its own."""

        def generate(self) -> fx.GraphModule:
            """As in the class that this overrides, but without evaluating each node: kernels have no fake values."""
            self._generate_graph_inputs()
            self._generate_graph_constants()
            self._generate_subgm_getattrs()
            for line in self.lines:
                if isinstance(line, WrapperLine):
                    line.codegen_fx(self)(line)
                elif not isinstance(line, LineContext):
                    raise NotImplementedError(f"a line of Python: {str(line).strip()}")
            outputs = self._generate_outputs()
            self.gm.graph.output(tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,))
            self.gm.recompile()
            return self.gm

        def _generate_allocate(self, line: Any) -> None:
            buffer = line.node
            node = self.gm.graph.call_function(
                torch.ops.aten.empty_strided.default,
                (_numbers(buffer.get_size()), _numbers(buffer.get_stride())),
                {"dtype": buffer.get_dtype(), "device": buffer.get_device()},
            )
            node.name = buffer.get_name()
            self._record_allocation(buffer, node)

        def _create_as_strided(self, input_node: fx.Node, size: Any, stride: Any, offset: Any) -> fx.Node:
            # Relative to where the tensor begins, wherever that is in its storage: arguments may begin anywhere.
            args = (input_node, _numbers(size), _numbers(stride), int(offset))
            return self.gm.graph.call_function(torch.ops.inductor._reinterpret_tensor.default, args)

        def _generate_kernel_definition(self, line: Any) -> None:
            from torch._inductor.codecache import PyCodeCache
            from torch._inductor.codegen.wrapper import PythonWrapperCodegen

            code = PythonWrapperCodegen._format_kernel_definition(
                line.kernel_name, line.kernel_body, metadata=line.metadata
            )
            module = PyCodeCache.load(f"{self.prologue}\n{code}")
            self.kernels[line.kernel_name] = getattr(module, line.kernel_name)

        def _generate_triton_call(self, line: Any) -> None:
            kernels: dict[str, Any] = self.kernels
            name = line.kernel_name
            if not isinstance(kernels[name], Kernel):
                kernels[name] = _kernel(name, kernels[name], line.triton_meta, device)
            arguments = self._lookup_args(line.call_args)
            self.gm.graph.call_function(kernels[name], tuple(map(_number, arguments)))

    class Wrapper(WrapperFxCodegen):
        """Hands its lines to the converter."""

        def _generate(self, is_inference: bool) -> tuple[FileBackedGraphModule, None]:
            self.run_wrapper_ir_passes(is_inference)
            wrapper: Any = self  # of types that differ from version to version
            converter = Converter(
                lines=wrapper.lines,
                prologue=f"{wrapper.imports.getvalue()}\n{wrapper.header.getvalue()}",
                graph_inputs=wrapper.get_fx_graph_inputs(),
                graph_outputs=wrapper.get_graph_outputs(),
                subgms=wrapper.subgms,
                is_subgraph=wrapper.is_subgraph,
            )
            module = converter.generate()
            modules.append(module)
            return FileBackedGraphModule(module, module.forward), None

    return Wrapper


def _kernel(name: str, compiled: Any, triton_meta: Mapping[str, Any], device: torch.device) -> Kernel:
    """A Triton kernel, which may still be compiling, as one that names what it writes."""
    names = list(triton_meta["signature"])
    written = [at for at, argument in enumerate(names) if argument.startswith(("out_ptr", "in_out_ptr", "ws_ptr"))]
    overwritten = [at for at in written if not names[at].startswith("in_out_ptr")]

    def launch(*args: Any) -> None:
        nonlocal compiled
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        with torch.cuda.device(device):
            compiled.run(*args, stream=torch.cuda.current_stream(device).cuda_stream)

    return Kernel(name, launch, frozenset(written), frozenset(overwritten))


def _named(module: fx.GraphModule, program: Program) -> fx.GraphModule:
    """Call placeholders as the program does, and give each node its value."""
    values = _arguments(program.module)
    for node, placeholder in zip(module.graph.find_nodes(op="placeholder"), program.placeholders, strict=True):
        node.name = node.target = placeholder.name
    with _fake_mode(values), torch.no_grad():
        evaluate(module, values)
    module.recompile()
    return module


def evaluate(module: fx.GraphModule, values: Sequence[Tensor]) -> None:
    """Give each node of a graph of kernels its fake value, without running any.

    Args:
        module: the graph.
        values: fake tensors for its placeholders; their mode is the current one.
    """
    for node, value in zip(module.graph.find_nodes(op="placeholder"), values, strict=True):
        node.meta["val"] = value
    mode = _fake_mode(values)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = mode.from_tensor(getattr(module, node.target))
        elif node.op == "call_function":
            node.meta["val"] = _value(node)


def _value(node: fx.Node) -> Any:
    if isinstance(node.target, Kernel):
        return None
    args: Any
    kwargs: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    if node.target is torch.ops.inductor._reinterpret_tensor.default:
        tensor, size, stride, offset = args
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
    return kwargs["out"] if "out" in kwargs else node.target(*args, **kwargs)  # type: ignore[operator]


def _shared(module: fx.GraphModule) -> list[int]:
    """For each argument and output, the first of them that lies in the same memory."""
    values = [*_arguments(module), *(node.meta["val"] for node in _outputs(module))]
    storages = list(map(storage_of, values))
    return [storages.index(storage) for storage in storages]


def _outputs(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    return tuple(module.graph.output_node().args[0])  # type: ignore[arg-type]


def _arguments(module: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]


def _fake_mode(values: Sequence[Any]) -> FakeTensorMode:
    return detect_fake_mode(values) or FakeTensorMode(allow_non_fake_inputs=True)


def _numbers(sizes: Sequence[Any]) -> list[Any]:
    return [int(size) for size in sizes]


def _number(argument: Any) -> Any:
    """An argument as fx can hold it: Inductor counts with sympy's numbers."""
    return argument if isinstance(argument, (fx.Node, int, float, bool, str, type(None))) else int(argument)
