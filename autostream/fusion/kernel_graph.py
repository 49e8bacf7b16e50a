"""Inductor's wrapper lines → a graph of calls of our own.

    a buffer is allocated       aten.empty_strided              takes memory
    it is looked at             inductor._reinterpret_tensor    launches nothing
    scratch memory is cleared   aten.zero_
    a Triton kernel is called   Kernel                          Inductor's own launcher launches it
    an operator is called       the operator                    as Inductor writes it
    a function is called        Kernel                          one of Inductor's own, where there is no operator

Builds on what is private to PyTorch and imports it at once, which takes seconds: ``inductor.py`` imports this file when
there is something to fuse, having seen that this PyTorch has all that is used here (``inductor.NEEDED``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import common
from torch._inductor.codegen.common import FileBackedGraphModule
from torch._inductor.codegen.wrapper import WrapperLine
from torch._inductor.codegen.wrapper_fxir import FxConverter, WrapperFxCodegen
from torch._inductor.ir import ExternKernelOut
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.utils import LineContext
from torch._inductor.virtualized import V

from autostream.utils.kernels import Kernel

aten = torch.ops.aten

_REINTERPRET = torch.ops.inductor._reinterpret_tensor.default


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

    def make_zero_buffer(self, name: str) -> WrapperLine:
        """A line of ours in the place of one of Python."""
        return _Cleared(name)


class _Cleared(WrapperLine):
    """Scratch memory is set to zero."""

    def __init__(self, name: str) -> None:
        self.name = name

    def codegen_fx(self, converter: Any) -> Callable[[WrapperLine], None]:
        return converter.clear  # type: ignore[no-any-return]


class Converter(FxConverter):
    """Inductor's converter with our calls in the place of its own."""

    def generate(self) -> fx.GraphModule:
        """As in the class that this overrides, but nodes get the user's lines, and no values: kernels have none."""
        self._definitions: dict[str, Definition] = {}
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
        several = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
        returned = {output: _as_ordinary_view(output) for output in dict.fromkeys(several)}
        self.gm.graph.output(tuple(returned[output] for output in several))
        self.gm.recompile()
        return self.gm

    def _convert(self, line: WrapperLine, stack_trace: str | None) -> None:
        nodes = self.gm.graph.nodes
        before = len(nodes)
        line.codegen_fx(self)(line)
        origins = getattr(getattr(line, "node", None), "origins", None) or ()
        for node in islice(reversed(nodes), len(nodes) - before):
            node.stack_trace = stack_trace
            node.meta["origins"] = [origin.name for origin in origins]

    def _generate_allocate(self, line: Any) -> None:
        buffer = line.node
        node = self.gm.graph.call_function(
            aten.empty_strided.default,
            (_numbers(buffer.get_size()), _numbers(buffer.get_stride())),
            {"dtype": buffer.get_dtype(), "device": buffer.get_device()},
        )
        node.name = buffer.get_name()
        self._record_allocation(buffer, node)

    def clear(self, line: Any) -> None:
        """Set a buffer to zero."""
        self.gm.graph.call_function(aten.zero_.default, (self.buffer_to_node[line.name],))

    def _create_as_strided(self, input_node: fx.Node, size: Any, stride: Any, offset: Any) -> fx.Node:
        # Relative to where the tensor begins, wherever that is in its storage: arguments may begin anywhere.
        args = (input_node, _numbers(size), _numbers(stride), int(offset))
        return self.gm.graph.call_function(_REINTERPRET, args)

    def _generate_reinterpret_helper(self, input_buffer: Any, result_buffer: Any, layout: Any) -> None:
        """As in the class that this overrides, which forgets that a view may read the same bits as another type."""
        super()._generate_reinterpret_helper(input_buffer, result_buffer, layout)
        if layout.dtype != input_buffer.get_dtype():
            view = self.buffer_to_node[result_buffer.get_name()]
            cast = self.gm.graph.call_function(aten.view.dtype, (view, layout.dtype))
            self._record_allocation(result_buffer, cast)

    def _generate_kernel_definition(self, line: Any) -> None:
        if "user_autotune" in line.kernel_body:
            raise NotImplementedError(f"{line.kernel_name}, which the user wrote: what it writes is not known")
        name = line.kernel_name
        self.kernels[name], self._definitions[name] = defined(name, self.prologue, line.kernel_body)

    def _generate_triton_call(self, line: Any) -> None:
        kernels: dict[str, Any] = self.kernels
        name = line.kernel_name
        if not isinstance(kernels[name], Kernel):
            mutated = [at for at, argument in enumerate(line.call_args) if argument in V.graph.mutated_buffers]
            signature, definition = line.triton_meta["signature"], self._definitions[name]
            kernels[name] = triton_kernel(name, kernels[name], signature, line.device, definition, mutated)
        arguments = self._lookup_args(line.call_args)
        self.gm.graph.call_function(kernels[name], tuple(map(_number, arguments)))

    def _generate_unbacked_symbol_defs(self, line: Any) -> None:
        """Sizes that only a result tells. Inductor says that there are none of operators that return nothing, too."""
        if line.unbacked_bindings:
            super()._generate_unbacked_symbol_defs(line)

    def _generate_extern_kernel_common(self, kernel: Any, out_ir_node: Any) -> None:
        """Where Inductor says no operator, it calls a function by name, e.g. ``extern_kernels.bias_addmm``."""
        if kernel.op_overload is not None:
            super()._generate_extern_kernel_common(kernel, out_ir_node)
            return
        name = kernel.python_kernel_name
        if not isinstance(kernel, ExternKernelOut):
            raise NotImplementedError(f"{name}, which is no operator: what it writes is not known")
        inputs: Any = kernel.inputs
        arguments = (*map(self._generate_buffer, inputs), *kernel.constant_args)
        kernels: dict[str, Any] = self.kernels
        called = extern_kernel(name.removeprefix("extern_kernels."), len(arguments), kernel.kwargs)
        called = kernels.setdefault(repr((name, kernel.kwargs)), called)
        self.gm.graph.call_function(called, (*arguments, self.buffer_to_node[out_ir_node.codegen_reference()]))


def extern_kernel(name: str, inputs: int, kwargs: Mapping[str, Any]) -> Kernel:
    """A function that Inductor calls where there is no operator, as a kernel that writes its last argument.

    Args:
        name: what Inductor calls it, e.g. ``"bias_addmm"``.
        inputs: how many arguments come before ``out=``.
        kwargs: what else it is called with.
    """
    function = vars(extern_kernels)[name]

    def launch(*args: Any) -> None:
        function(*args[:inputs], **kwargs, out=args[inputs])

    recipe = {"function": name, "inputs": inputs, "kwargs": dict(kwargs)}
    return Kernel(name, launch, frozenset({inputs}), frozenset({inputs}), repr((name, kwargs)), recipe)


class Definition(NamedTuple):
    """What Inductor writes to define a Triton kernel.

    Attributes:
        prologue: imports.
        body: an expression, the kernel with its source code.
        file: where Inductor keeps both.
    """

    prologue: str
    body: str
    file: str


def defined(name: str, prologue: str, body: str) -> tuple[Any, Definition]:
    """A Triton kernel as Inductor launches it, or a future of that. What Triton has on disk is not compiled again.

    Args:
        name: what it is called.
        prologue: as in :class:`Definition`.
        body: likewise.
    """
    module = PyCodeCache.load(_code(name, prologue, body))
    return getattr(module, name), Definition(prologue, body, str(module.__file__))


def _code(name: str, prologue: str, body: str) -> str:
    return f"{prologue}\n\n{name} = {body}\n"


def _check_kept(name: str, file: str, code: str) -> None:
    """See that Inductor itself keeps some code: whoever can write nothing but recipes has no code run.

    Raises:
        FileNotFoundError: the file is gone.
        ValueError: it is none of Inductor's, or holds something else.
    """
    if not Path(file).resolve().is_relative_to(Path(cache_dir()).resolve()):
        raise ValueError(f"{name}: {file} is not in Inductor's folder, {cache_dir()}")
    try:
        kept = Path(file).read_text()
    except FileNotFoundError:
        raise FileNotFoundError(f"{name}: {file} is gone") from None
    if kept.strip() != code.strip():
        raise ValueError(f"{name}: {file} holds other code")


def made_again(name: str, recipe: Mapping[str, Any], device: torch.device) -> Kernel:
    """A kernel that another process had.

    Args:
        name: what it is called.
        recipe: its :attr:`~autostream.utils.kernels.Kernel.recipe`.
        device: where to launch it.

    Raises:
        FileNotFoundError: Inductor's file of it is gone, and with it most likely what Triton has compiled of all: many
            processes compile them sooner than this one, to which it would be left here.
        ValueError: it is no recipe, or its code is not what Inductor's file holds.
    """
    match recipe:
        case {"function": str(function), "inputs": int(inputs), "kwargs": dict(kwargs)}:
            return extern_kernel(function, inputs, kwargs)
        case {
            "prologue": str(prologue),
            "body": str(body),
            "file": str(file),
            "signature": dict(signature),
            "mutated": list(mutated),
        }:
            _check_kept(name, file, _code(name, prologue, body))
            launched, definition = defined(name, prologue, body)
            return triton_kernel(name, launched, signature, device, definition, mutated)
    raise ValueError(f"{name}: there is no such recipe")


_OUTPUTS, _SCRATCH, _UPDATED = "out_ptr", ("ws_ptr", "sem_ptr"), "in_out_ptr"
_TEMPLATE = "arg_"
_POINTERS = ("in_ptr", _OUTPUTS, _UPDATED, *_SCRATCH, _TEMPLATE)
"""How Inductor's own kernels call what they are given."""


def triton_kernel(
    name: str,
    compiled: Any,
    signature: Mapping[str, str],
    device: torch.device,
    definition: Definition,
    mutated: Collection[int] = (),
) -> Kernel:
    """A Triton kernel, which may still be compiling, as one that says what it writes.

    Args:
        name: what it is called.
        compiled: Inductor's launcher of it (a ``CachingAutotuner``), or a future of that.
        signature: the type of each argument by name; Inductor's names say which are written.
        device: where to launch it.
        definition: its source code.
        mutated: positions of buffers that are written somewhere after they have been made. The names of a template's
            arguments do not say whether it is there.
    """
    names = list(signature)
    foreign = [name for name in names if signature[name].startswith("*") and not name.startswith(_POINTERS)]
    if foreign:
        raise NotImplementedError(f"{name}, which is not Inductor's: nobody knows whether it writes {foreign[0]}")
    overwritten = [at for at, argument in enumerate(names) if argument.startswith(_OUTPUTS)]
    updated = [at for at, argument in enumerate(names) if argument.startswith((_UPDATED, *_SCRATCH))]
    updated += [at for at in mutated if names[at].startswith(_TEMPLATE)]
    return Kernel(
        name,
        _Triton(compiled, device).launch,
        frozenset([*overwritten, *updated]),
        frozenset(overwritten),
        # Without its name: that has a number, which depends on the kernels before it.
        content=definition.body.replace(name, "kernel"),
        recipe={**definition._asdict(), "signature": dict(signature), "mutated": list(mutated)},
    )


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


def _as_ordinary_view(output: Any) -> Any:
    """A view of an argument by ops of ATen: made in inference mode, it is an ordinary tensor if the argument is one.

    What ``_reinterpret_tensor`` makes there is not. Arguments may begin anywhere in their storage, and so may views.
    """
    if output is None or output.target is not _REINTERPRET or output.args[0].op != "placeholder":
        return output
    begin, size, stride, offset = output.args
    call = output.graph.call_function
    if offset:
        begin = call(aten.slice.Tensor, (call(aten.as_strided.default, (begin, [offset], [1])), 0, offset))
    if not output.users:
        output.graph.erase_node(output)
    return call(aten.as_strided.default, (begin, size, stride))


def _numbers(sizes: Sequence[Any]) -> list[Any]:
    return [int(size) for size in sizes]


def _number(argument: Any) -> Any:
    """An argument as fx can hold it: Inductor counts with sympy's numbers."""
    return argument if isinstance(argument, (fx.Node, int, float, bool, str, type(None))) else int(argument)
