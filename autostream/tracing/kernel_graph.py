"""Inductor's wrapper lines → a graph of calls of our own.

    a buffer is allocated       aten.empty_strided              takes memory
    it is looked at             inductor._reinterpret_tensor    launches nothing
    a Triton kernel is called   Kernel                          Inductor's own launcher launches it
    any other kernel is called  the ATen operator, as Inductor writes it

Builds on what is private to PyTorch and imports it at once, which takes seconds: ``inductor.py`` imports this file when
there is something to fuse, having seen that this PyTorch has all that is used here (``inductor.NEEDED``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import common
from torch._inductor.codegen.common import FileBackedGraphModule
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, WrapperLine
from torch._inductor.codegen.wrapper_fxir import FxConverter, WrapperFxCodegen
from torch._inductor.utils import LineContext

from autostream.kernels import Footprint, Kernel


@contextmanager
def graphs_of_kernels(device: torch.device) -> Iterator[list[fx.GraphModule]]:
    """Let Inductor write graphs of our calls, into the list that this yields.

    Args:
        device: the kind of device whose kernels are called in them.
    """
    graphs: list[fx.GraphModule] = []

    class Registered(Wrapper):
        def compile_graph(self, gm: fx.GraphModule) -> Callable[..., Any]:
            graphs.append(gm)
            return gm.forward

    common.init_backend_registration()
    before = common.device_codegens[device.type]
    common.device_codegens[device.type] = replace(before, fx_wrapper_codegen=Registered)
    try:
        yield graphs
    finally:
        common.device_codegens[device.type] = before


class Wrapper(WrapperFxCodegen):
    """Inductor's wrapper with our converter."""

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
        return FileBackedGraphModule(module, self.compile_graph(module)), None


class Converter(FxConverter):
    """Inductor's converter with our calls in the place of its own."""

    def generate(self) -> fx.GraphModule:
        """As in the class that this overrides, but nodes get the user's lines, and no values: kernels have none."""
        self._generate_graph_inputs()
        self._generate_graph_constants()
        self._generate_subgm_getattrs()
        origin: Any = None
        for line in self.lines:
            if isinstance(line, LineContext):
                origin = line.context  # of what is fused into the next kernel, the node that comes last
            elif isinstance(line, WrapperLine):
                self._convert(line, getattr(origin, "stack_trace", None))
            else:
                raise NotImplementedError(f"a line of Python: {str(line).strip()}")
        outputs = self._generate_outputs()
        self.gm.graph.output(tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,))
        self.gm.recompile()
        return self.gm

    def _convert(self, line: WrapperLine, stack_trace: str | None) -> None:
        nodes = self.gm.graph.nodes
        before = len(nodes)
        line.codegen_fx(self)(line)
        for node in islice(reversed(nodes), len(nodes) - before):
            node.stack_trace = stack_trace

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
        if "user_autotune" in line.kernel_body:
            raise NotImplementedError(f"{line.kernel_name}, which the user wrote: what it writes is not known")
        code = PythonWrapperCodegen._format_kernel_definition(
            line.kernel_name, line.kernel_body, metadata=line.metadata
        )
        module = PyCodeCache.load(f"{self.prologue}\n{code}")
        self.kernels[line.kernel_name] = getattr(module, line.kernel_name)

    def _generate_triton_call(self, line: Any) -> None:
        kernels: dict[str, Any] = self.kernels
        name = line.kernel_name
        if not isinstance(kernels[name], Kernel):
            kernels[name] = triton_kernel(name, kernels[name], line.triton_meta["signature"], line.device)
        arguments = self._lookup_args(line.call_args)
        self.gm.graph.call_function(kernels[name], tuple(map(_number, arguments)))


_POINTERS = ("in_ptr", "out_ptr", "in_out_ptr", "ws_ptr", "arg_")
"""How Inductor's own kernels call what they are given; ``arg_`` in those that it makes of templates."""


def triton_kernel(name: str, compiled: Any, signature: Mapping[str, str], device: torch.device) -> Kernel:
    """A Triton kernel, which may still be compiling, as one that says what it writes.

    Args:
        name: what it is called.
        compiled: Inductor's launcher of it (a ``CachingAutotuner``), or a future of that.
        signature: the type of each argument by name; Inductor's names say which are written.
        device: where to launch it.
    """
    names = list(signature)
    foreign = [name for name in names if signature[name].startswith("*") and not name.startswith(_POINTERS)]
    if foreign:
        raise NotImplementedError(f"{name}, which is not Inductor's: nobody knows whether it writes {foreign[0]}")
    written = [at for at, argument in enumerate(names) if argument.startswith(("out_ptr", "in_out_ptr", "ws_ptr"))]
    overwritten = [at for at in written if not names[at].startswith("in_out_ptr")]
    triton = _Triton(compiled, device)
    return Kernel(name, triton.launch, frozenset(written), frozenset(overwritten), triton.footprint)


class _Triton:
    """A Triton kernel of Inductor's, which may still be compiling: the first launch waits for it."""

    def __init__(self, compiled: Any, device: torch.device) -> None:
        self._compiled = compiled
        self._device = device

    def launch(self, *args: Any) -> None:
        if hasattr(self._compiled, "result"):
            self._compiled = self._compiled.result()
        with torch.cuda.device(self._device):
            self._compiled.run(*args, stream=torch.cuda.current_stream(self._device).cuda_stream)

    def footprint(self, *args: Any) -> Footprint | None:
        """Of a launch with these arguments: known once it is compiled, loaded and tuned, that is, has been launched."""
        launchers: Sequence[Any] = getattr(self._compiled, "launchers", ())
        if len(launchers) != 1:
            return None
        (launcher,) = launchers
        try:
            _, (x, y, z) = self._compiled._interpret_args_grid(args, launcher.config)
            return Footprint(x * y * z, launcher.config.num_warps, int(launcher.n_regs), int(launcher.shared))
        except Exception:
            # All this is Inductor's own affair; where it is otherwise, sizes say how much of the device an op fills.
            return None


def _numbers(sizes: Sequence[Any]) -> list[Any]:
    return [int(size) for size in sizes]


def _number(argument: Any) -> Any:
    """An argument as fx can hold it: Inductor counts with sympy's numbers."""
    return argument if isinstance(argument, (fx.Node, int, float, bool, str, type(None))) else int(argument)
