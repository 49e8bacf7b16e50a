"""Converts the lines of Inductor's wrapper code to an fx graph of kernels.

    line of the wrapper          node of the graph
    ─────────────────────────    ────────────────────────────────────────────────────────────────────
    allocate a buffer            aten.empty_strided
    view a buffer                inductor._reinterpret_tensor, which launches nothing
    clear scratch memory         aten.zero_
    call a Triton kernel         Kernel, launched by Inductor's launcher
    call an operator             the operator
    call a function              Kernel, for a function of Inductor's that is not an operator

This module imports private modules of PyTorch, which takes seconds. ``inductor.py`` imports it only when there is
something to fuse, after checking that this version of PyTorch has them (``inductor.NEEDED``).
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
def capture_kernel_graphs(device: torch.device) -> Iterator[list[fx.GraphModule]]:
    """Make Inductor produce graphs of kernels, and append them to the list that this yields.

    Args:
        device: kernels for devices of this type are affected.
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
    """Inductor's wrapper code generator, with :class:`Converter` in place of its own converter."""

    def _generate(self, is_inference: bool) -> tuple[FileBackedGraphModule, None]:
        self.run_wrapper_ir_passes(is_inference)
        wrapper: Any = self  # its attributes have different types in different versions
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
        """A line that the converter understands, in place of a line of Python."""
        return _ClearLine(name)


class _ClearLine(WrapperLine):
    """A line that sets scratch memory to zero."""

    def __init__(self, name: str) -> None:
        self.name = name

    def codegen_fx(self, converter: Any) -> Callable[[WrapperLine], None]:
        return converter.clear  # type: ignore[no-any-return]


class Converter(FxConverter):
    """Inductor's converter from wrapper lines to an fx graph, with :class:`Kernel` calls in place of its own calls."""

    def generate(self) -> fx.GraphModule:
        """Convert all lines. Unlike in the base class, nodes get the user's lines, and no values: kernels have none."""
        self._definitions: dict[str, Definition] = {}
        self._generate_graph_inputs()
        self._generate_graph_constants()
        self._generate_subgm_getattrs()
        origin: Any = None
        for line in self.lines:
            if isinstance(line, LineContext):
                origin = line.context  # the last of the nodes that are fused into the next kernel
            elif isinstance(line, WrapperLine):
                self._convert(line, getattr(origin, "stack_trace", None))
            else:
                raise NotImplementedError(f"a line of Python: {str(line).strip()}")
        outputs = self._generate_outputs()
        results = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
        returned = {result: _as_aten_view(result) for result in dict.fromkeys(results)}
        self.gm.graph.output(tuple(returned[result] for result in results))
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
        # The offset of _reinterpret_tensor is relative to that of the input: arguments may have storage offsets.
        args = (input_node, _numbers(size), _numbers(stride), int(offset))
        return self.gm.graph.call_function(_REINTERPRET, args)

    def _generate_reinterpret_helper(self, input_buffer: Any, result_buffer: Any, layout: Any) -> None:
        """Convert a view. Unlike in the base class, the view may have another dtype than its input."""
        super()._generate_reinterpret_helper(input_buffer, result_buffer, layout)
        if layout.dtype != input_buffer.get_dtype():
            view = self.buffer_to_node[result_buffer.get_name()]
            cast = self.gm.graph.call_function(aten.view.dtype, (view, layout.dtype))
            self._record_allocation(result_buffer, cast)

    def _generate_kernel_definition(self, line: Any) -> None:
        if "user_autotune" in line.kernel_body:
            raise NotImplementedError(f"{line.kernel_name}, which the user wrote: what it writes is not known")
        name = line.kernel_name
        self.kernels[name], self._definitions[name] = define_triton_kernel(name, self.prologue, line.kernel_body)

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
        """Convert data-dependent sizes. Inductor calls this even for operators that return nothing and have none."""
        if line.unbacked_bindings:
            super()._generate_unbacked_symbol_defs(line)

    def _generate_extern_kernel_common(self, kernel: Any, out_ir_node: Any) -> None:
        """Convert a call of an operator, or of a function by name, e.g. ``extern_kernels.bias_addmm``."""
        if kernel.op_overload is not None:
            super()._generate_extern_kernel_common(kernel, out_ir_node)
            return
        name = kernel.python_kernel_name
        if not isinstance(kernel, ExternKernelOut):
            raise NotImplementedError(f"{name}, which is no operator: what it writes is not known")
        inputs: Any = kernel.inputs
        arguments = (*map(self._generate_buffer, inputs), *kernel.constant_args)
        kernels: dict[str, Any] = self.kernels
        target = extern_kernel(name.removeprefix("extern_kernels."), len(arguments), kernel.kwargs)
        target = kernels.setdefault(repr((name, kernel.kwargs)), target)
        self.gm.graph.call_function(target, (*arguments, self.buffer_to_node[out_ir_node.codegen_reference()]))


def extern_kernel(name: str, inputs: int, kwargs: Mapping[str, Any]) -> Kernel:
    """A function of Inductor's ``extern_kernels``, as a kernel that writes its last argument.

    Args:
        name: its name there, e.g. ``"bias_addmm"``.
        inputs: how many arguments come before ``out=``.
        kwargs: its other arguments.
    """
    function = vars(extern_kernels)[name]

    def launch(*args: Any) -> None:
        function(*args[:inputs], **kwargs, out=args[inputs])

    recipe = {"function": name, "inputs": inputs, "kwargs": dict(kwargs)}
    return Kernel(name, launch, frozenset({inputs}), frozenset({inputs}), repr((name, kwargs)), recipe)


class Definition(NamedTuple):
    """The code by which Inductor defines a Triton kernel.

    Attributes:
        prologue: the imports.
        body: an expression: the kernel with its source code.
        file: the file in Inductor's cache that contains both.
    """

    prologue: str
    body: str
    file: str


def define_triton_kernel(name: str, prologue: str, body: str) -> tuple[Any, Definition]:
    """Load a Triton kernel's definition. Kernels in Triton's cache on disk are not compiled again.

    Args:
        name: the name of the kernel.
        prologue: as in :class:`Definition`.
        body: as in :class:`Definition`.

    Returns:
        Inductor's launcher of the kernel, or a future of it; and the definition.
    """
    module = PyCodeCache.load(_code(name, prologue, body))
    return getattr(module, name), Definition(prologue, body, str(module.__file__))


def _code(name: str, prologue: str, body: str) -> str:
    return f"{prologue}\n\n{name} = {body}\n"


def _check_file(name: str, file: str, code: str) -> None:
    """Check that code is in Inductor's own cache: a recipe alone must not be able to run code.

    Raises:
        FileNotFoundError: the file is gone.
        ValueError: the file is not in Inductor's cache, or has other content.
    """
    if not Path(file).resolve().is_relative_to(Path(cache_dir()).resolve()):
        raise ValueError(f"{name}: {file} is not in Inductor's folder, {cache_dir()}")
    try:
        content = Path(file).read_text()
    except FileNotFoundError:
        raise FileNotFoundError(f"{name}: {file} is gone") from None
    if content.strip() != code.strip():
        raise ValueError(f"{name}: {file} holds other code")


def kernel_from_recipe(name: str, recipe: Mapping[str, Any], device: torch.device) -> Kernel:
    """Make a kernel from the recipe of a kernel in another process.

    Args:
        name: the name of the kernel.
        recipe: its :attr:`~autostream.utils.kernels.Kernel.recipe`.
        device: the device to launch it on.

    Raises:
        FileNotFoundError: Inductor's file of it is gone. Most likely the compiled kernels are gone, too. To fuse again
            is faster then, since Inductor compiles them in many processes; here this process would compile them all.
        ValueError: the recipe is invalid, or its code differs from that in Inductor's file.
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
            _check_file(name, file, _code(name, prologue, body))
            compiled, definition = define_triton_kernel(name, prologue, body)
            return triton_kernel(name, compiled, signature, device, definition, mutated)
    raise ValueError(f"{name}: there is no such recipe")


_OUTPUTS, _SCRATCH, _UPDATED = "out_ptr", ("ws_ptr", "sem_ptr"), "in_out_ptr"
_TEMPLATE = "arg_"
_POINTERS = ("in_ptr", _OUTPUTS, _UPDATED, *_SCRATCH, _TEMPLATE)
"""Prefixes of the names of pointer arguments in kernels that Inductor generates."""


def triton_kernel(
    name: str,
    compiled: Any,
    signature: Mapping[str, str],
    device: torch.device,
    definition: Definition,
    mutated: Collection[int] = (),
) -> Kernel:
    """A Triton kernel of Inductor's, which may still be compiling, with the positions of the arguments that it writes.

    Args:
        name: the name of the kernel.
        compiled: Inductor's launcher of it (a ``CachingAutotuner``), or a future of that.
        signature: the type of each argument by name; Inductor's names tell which are written.
        device: the device to launch it on.
        definition: its source code.
        mutated: positions of buffers that the program mutates somewhere. A template's argument names do not tell
            whether the template does it, so this is assumed.
    """
    names = list(signature)
    foreign = [name for name in names if signature[name].startswith("*") and not name.startswith(_POINTERS)]
    if foreign:
        raise NotImplementedError(f"{name}, which is not Inductor's: it is not known whether it writes {foreign[0]}")
    overwritten = [at for at, argument in enumerate(names) if argument.startswith(_OUTPUTS)]
    updated = [at for at, argument in enumerate(names) if argument.startswith((_UPDATED, *_SCRATCH))]
    updated += [at for at in mutated if names[at].startswith(_TEMPLATE)]
    return Kernel(
        name,
        _Triton(compiled, device).launch,
        frozenset([*overwritten, *updated]),
        frozenset(overwritten),
        # Without its name, which has a number that depends on the kernels before it.
        content=definition.body.replace(name, "kernel"),
        recipe={**definition._asdict(), "signature": dict(signature), "mutated": list(mutated)},
    )


class _Triton:
    """A Triton kernel of Inductor's, which may still be compiling; the first launch waits for that."""

    def __init__(self, compiled: Any, device: torch.device) -> None:
        self._compiled = compiled
        self._device = device

    def launch(self, *args: Any) -> None:
        if hasattr(self._compiled, "result"):
            self._compiled = self._compiled.result()
        with torch.cuda.device(self._device):
            self._compiled.run(*args, stream=torch.cuda.current_stream(self._device).cuda_stream)


def _as_aten_view(output: Any) -> Any:
    """An output by ATen ops, if it is a view of an argument by ``_reinterpret_tensor``.

    In inference mode, views of an ordinary tensor by ATen ops are ordinary tensors; those by ``_reinterpret_tensor``
    are inference tensors. Both argument and view may have storage offsets.
    """
    if output is None or output.target is not _REINTERPRET or output.args[0].op != "placeholder":
        return output
    base, size, stride, offset = output.args
    call = output.graph.call_function
    if offset:
        base = call(aten.slice.Tensor, (call(aten.as_strided.default, (base, [offset], [1])), 0, offset))
    if not output.users:
        output.graph.erase_node(output)
    return call(aten.as_strided.default, (base, size, stride))


def _numbers(sizes: Sequence[Any]) -> list[Any]:
    return [int(size) for size in sizes]


def _number(argument: Any) -> Any:
    """An argument as fx accepts it: Inductor's numbers are those of sympy."""
    return argument if isinstance(argument, (fx.Node, int, float, bool, str, type(None))) else int(argument)
