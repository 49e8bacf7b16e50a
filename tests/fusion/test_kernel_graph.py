"""The conversion of Inductor's wrapper lines to graphs of kernels; ``tests/gpu/test_fusion.py`` runs such graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import fx
from torch._inductor.codegen import common
from torch._inductor.codegen.wrapper import WrapperLine
from torch._inductor.utils import LineContext
from torch._inductor.virtualized import V

from autostream.fusion import kernel_graph
from autostream.fusion.kernel_graph import (
    Converter,
    Definition,
    Wrapper,
    capture_kernel_graphs,
    extern_kernel,
    kernel_from_recipe,
    triton_kernel,
)
from autostream.utils.kernels import Kernel

aten = torch.ops.aten
GPU = torch.device("cuda:0")
NO_CODE = Definition("", "", "")


def converter_of(*lines: Any) -> Converter:
    return Converter(lines=[*lines], prologue="", graph_inputs={}, graph_outputs=[], subgms={}, is_subgraph=False)


def generated(converter: Converter) -> fx.GraphModule:
    with V.set_graph_handler(SimpleNamespace(constants={})):  # type: ignore[arg-type]
        return converter.generate()


def mutating(*buffers: str) -> AbstractContextManager[None]:
    """As if Inductor's graph mutated these buffers."""
    return V.set_graph_handler(SimpleNamespace(mutated_buffers=buffers))  # type: ignore[arg-type,no-any-return]


# Lines


class Calls(WrapperLine):
    """A line that becomes ``count`` nodes."""

    def __init__(self, count: int) -> None:
        self.count = count

    def codegen_fx(self, converter: Any) -> Callable[[Any], None]:
        return lambda line: [converter.gm.graph.call_function(torch.rand, (1,)) for _ in range(line.count)] and None


def origin(line: str) -> LineContext:
    node = fx.Graph().placeholder("x")
    node.stack_trace = line or None  # type: ignore[assignment]
    return LineContext(node)


def test_nodes_get_the_source_line_of_the_ops_fused_into_them() -> None:
    unknown = [each for context in (origin(""), LineContext(None), LineContext("?")) for each in (context, Calls(1))]
    lines = [Calls(1), origin("relu"), Calls(2), origin("conv"), Calls(0), Calls(1), *unknown]
    calls = generated(converter_of(*lines)).graph.find_nodes(op="call_function", target=torch.rand)
    assert [node.stack_trace for node in calls] == [None, "relu", "relu", "conv", None, None, None]


def test_a_line_of_python_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"a line of Python: assert x > 1$"):
        generated(converter_of("  assert x > 1"))


# Memory and views


def test_a_buffer_is_allocated_with_sizes_that_are_ints() -> None:
    buffer = SimpleNamespace(
        get_name=lambda: "buf7",
        get_size=lambda: [sympy.Integer(4), 6],
        get_stride=lambda: [sympy.Integer(6), 1],
        get_dtype=lambda: torch.float16,
        get_device=lambda: GPU,
    )
    converter = converter_of()
    converter._generate_allocate(SimpleNamespace(node=buffer))
    (node,) = converter.gm.graph.nodes
    assert (node.name, node.target) == ("buf7", aten.empty_strided.default)
    assert (node.args, node.kwargs) == (([4, 6], [6, 1]), {"dtype": torch.float16, "device": GPU})
    assert all(type(number) is int for numbers in node.args for number in numbers)


@pytest.mark.parametrize(("size", "stride", "offset"), [([4], [1], 0), ([2, 3], [1, 4], 5), ([0], [1], 12)])
def test_a_returned_view_of_an_argument_is_an_ordinary_tensor_in_inference_mode(
    size: list[int], stride: list[int], offset: int
) -> None:
    converter = converter_of()
    x = converter.gm.graph.placeholder("x")
    view = converter._create_as_strided(x, size, stride, offset)
    converter._generate_outputs = lambda: [view, x, view]  # type: ignore[method-assign]
    module = generated(converter)
    argument = torch.arange(20.0)[3:]
    with torch.inference_mode():
        first, whole, second = module(argument)
    assert not first.is_inference()
    assert whole is argument
    assert second is first
    assert (first.shape, first.stride()) == (torch.Size(size), tuple(stride))
    assert first.storage_offset() == 3 + offset
    assert first.untyped_storage()._cdata == argument.untyped_storage()._cdata


def test_a_view_may_have_another_dtype() -> None:
    converter = converter_of()
    buffer = SimpleNamespace(get_name=lambda: "buf0", get_dtype=lambda: torch.float32, get_offset=lambda: 0)
    converter._record_allocation(buffer, converter.gm.graph.placeholder("x"))
    layout = SimpleNamespace(size=[2], stride=[1], offset=1, dtype=torch.int32)
    converter._generate_reinterpret_helper(buffer, SimpleNamespace(get_name=lambda: "buf1"), layout)
    converter._generate_outputs = lambda: converter.buffer_to_node["buf1"]  # type: ignore[method-assign, return-value]
    argument = torch.tensor([1.0, 0.5, 0.25])
    (result,) = generated(converter)(argument)
    assert torch.equal(result, argument[1:].view(torch.int32))


def test_a_view_that_is_mutated_or_of_a_buffer_stays_as_it_is() -> None:
    converter = converter_of()
    x = converter.gm.graph.placeholder("x")
    buffer = converter.gm.graph.call_function(aten.empty_strided.default, ([4], [1]))
    views = [converter._create_as_strided(node, [2], [1], 1) for node in (x, buffer)]
    converter.gm.graph.call_function(aten.zero_.default, (views[0],))
    converter._generate_outputs = lambda: [*views, None]  # type: ignore[method-assign]
    module = generated(converter)
    argument = torch.ones(4)
    result, _, nothing = module(argument)
    assert argument.tolist() == [1, 0, 0, 1]
    assert result.tolist() == [0, 0]
    assert module.graph.output_node().args[0][1] is views[1]  # type: ignore[index]
    assert nothing is None


# Calls of Triton kernels


def triton_calls(types: dict[str, str], arguments: tuple[Any, ...], mutated: tuple[str, ...] = ()) -> list[fx.Node]:
    """Two calls of one kernel."""
    converter, name = converter_of(), "triton_0"
    for buffer in arguments:
        if isinstance(buffer, str):
            converter.buffer_to_node[buffer] = converter.gm.graph.placeholder(buffer)
    converter.kernels[name] = object()  # type: ignore[assignment]
    converter._definitions = {name: Definition("", f"triton('{name}', 'out = x')", "")}
    line = SimpleNamespace(kernel_name=name, call_args=arguments, triton_meta={"signature": types}, device=GPU)
    with mutating(*mutated):
        converter._generate_triton_call(line)
        converter._generate_triton_call(line)
    return converter.gm.graph.find_nodes(op="call_function", target=converter.kernels[name])


def test_calls_of_one_triton_kernel_have_the_same_target() -> None:
    types = {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32"}
    first, second = triton_calls(types, ("x", "out", sympy.Integer(24)))
    assert first.args == second.args
    assert type(first.args[2]) is int
    assert isinstance(first.target, Kernel)
    assert first.target.written == {1}
    assert first.target.content == "triton('kernel', 'out = x')", "the number in a name depends on other kernels"


def test_a_template_is_assumed_to_write_the_arguments_that_the_graph_mutates() -> None:
    """Their names do not tell. Flex attention writes the logarithms of its sums to one."""
    types = {"arg_Q": "*fp32", "arg_LSE": "*fp32", "out_ptr0": "*fp32"}
    kernel: Any = triton_calls(types, ("query", "sums", "out", 4, 1, 1), mutated=("sums", "another"))[0].target
    assert (kernel.written, kernel.overwritten) == ({1, 2}, {2})


def signature(*names: str) -> dict[str, str]:
    return {name: "*fp32" if "ptr" in name else "i32" for name in names}


def test_argument_names_tell_what_a_kernel_reads_and_writes() -> None:
    names = ("in_ptr0", "out_ptr0", "in_out_ptr0", "ws_ptr", "sem_ptr", "out_ptr1", "arg_A", "xnumel")
    kernel = triton_kernel("triton_0", object(), signature(*names), GPU, NO_CODE, mutated=[0, 7])
    assert kernel.written == {1, 2, 3, 4, 5}
    assert kernel.overwritten == {1, 5}
    with pytest.raises(NotImplementedError, match="it is not known whether it writes x_ptr"):
        triton_kernel("theirs", object(), signature("in_ptr0", "x_ptr"), GPU, NO_CODE)


def test_a_kernel_that_the_user_wrote_is_refused_whatever_its_arguments_are_called() -> None:
    body = "@triton_heuristics.user_autotune(configs=[])\ndef theirs(in_ptr0, out_ptr0):\n    ..."
    with pytest.raises(NotImplementedError, match="theirs, which the user wrote"):
        converter_of()._generate_kernel_definition(SimpleNamespace(kernel_name="theirs", kernel_body=body))


def test_a_kernel_that_is_still_compiling_is_waited_for_at_its_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    events: list[Any] = []
    tuner = SimpleNamespace(run=lambda *args, stream: events.append((*args, stream)))
    future = SimpleNamespace(result=lambda: events.append("compiled") or tuner)
    kernel = triton_kernel("triton_0", future, signature("in_ptr0"), GPU, NO_CODE)
    assert events == []
    kernel(1)
    kernel(2)
    assert events == ["compiled", (1, 7), (2, 7)]


# Calls of functions and operators


class Extern(SimpleNamespace):
    """The attributes of Inductor's ``ExternKernelOut`` that are used."""

    def __init__(self, name: str, *inputs: str, **kwargs: Any) -> None:
        name = f"extern_kernels.{name}"
        super().__init__(op_overload=None, python_kernel_name=name, inputs=inputs, constant_args=(), kwargs=kwargs)

    def codegen_reference(self) -> str:
        return "out"


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    """A converter that knows some buffers by name."""
    converter = converter_of()
    buffers = ("bias", "one", "other", "out")
    converter.buffer_to_node |= {name: converter.gm.graph.placeholder(name) for name in buffers}
    monkeypatch.setattr(kernel_graph, "ExternKernelOut", Extern)
    monkeypatch.setattr(converter, "_generate_buffer", converter.buffer_to_node.__getitem__)
    return converter


def calls(converter: Converter) -> list[fx.Node]:
    return [node for node in converter.gm.graph.nodes if node.op == "call_function"]


def test_a_function_becomes_a_kernel_that_writes_its_last_argument(converter: Converter) -> None:
    for alpha in (2, 2, 1):
        line = Extern("bias_addmm", "bias", "one", "other", alpha=alpha, beta=1)
        converter._generate_extern_kernel_common(line, line)
    call, second, third = calls(converter)
    assert call.target is second.target is not third.target
    assert isinstance(call.target, Kernel)
    assert [node.name for node in call.args] == ["bias", "one", "other", "out"]
    assert (repr(call.target), call.target.written, call.target.overwritten) == ("bias_addmm", {3}, {3})
    bias, one, other, out = torch.randn(1, 4).expand(3, 4), torch.randn(3, 5), torch.randn(5, 4), torch.empty(3, 4)
    call.target(bias, one, other, out)
    torch.testing.assert_close(out, bias + 2 * one @ other)


def test_an_unknown_function_is_refused(converter: Converter) -> None:
    line = SimpleNamespace(**vars(Extern("theirs", "one")))
    match = r"extern_kernels\.theirs, which is no operator: what it writes is not"
    with pytest.raises(NotImplementedError, match=match):
        converter._generate_extern_kernel_common(line, line)


def test_inductor_produces_graphs_of_kernels_only_inside_the_context() -> None:
    common.init_backend_registration()
    before = common.device_codegens["cuda"]
    with pytest.raises(KeyError), capture_kernel_graphs(GPU) as graphs:
        wrapper = common.device_codegens["cuda"].fx_wrapper_codegen
        assert isinstance(wrapper, type)
        assert issubclass(wrapper, Wrapper)
        module = fx.GraphModule({}, fx.Graph())
        assert wrapper.compile_graph(None, module) == module.forward  # type: ignore[attr-defined]
        assert graphs == [module]
        raise KeyError
    assert common.device_codegens["cuda"] is before


# Recipes


def described(kernel: Kernel) -> tuple[object, ...]:
    return kernel.__name__, kernel.written, kernel.overwritten, kernel.content, kernel.recipe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which Inductor keeps the code that it runs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "inductor"


def kernel_and_recipe() -> tuple[Kernel, dict[str, Any]]:
    """A kernel whose code is in Inductor's folder, and its recipe as another process reads it."""
    name, prologue, body = "triton_tem_0", "def triton(source): return source", "triton('x')"
    launcher, definition = kernel_graph.define_triton_kernel(name, prologue, body)
    assert (launcher, definition[:2]) == ("x", (prologue, body))
    types = signature("arg_A", "out_ptr0", "in_out_ptr0", "xnumel")
    kernel = triton_kernel(name, launcher, types, GPU, definition, [0])
    return kernel, json.loads(json.dumps(kernel.recipe))


def test_a_triton_kernel_is_made_from_its_recipe_as_long_as_inductors_file_is_there(folder: Path) -> None:
    kernel, recipe = kernel_and_recipe()
    assert Path(recipe["file"]).is_relative_to(folder)
    assert described(kernel_from_recipe("triton_tem_0", recipe, GPU)) == described(kernel)
    assert kernel.written == {0, 1, 2}
    Path(recipe["file"]).unlink()
    with pytest.raises(FileNotFoundError, match=r"triton_tem_0: .*\.py is gone"):
        kernel_from_recipe("triton_tem_0", recipe, GPU)


def test_a_function_is_made_from_its_recipe() -> None:
    kernel = extern_kernel("bias_addmm", 3, {"alpha": 2, "beta": 1})
    again = kernel_from_recipe("bias_addmm", json.loads(json.dumps(kernel.recipe)), GPU)
    assert described(again) == described(kernel)
    bias, one, other, out = torch.randn(3, 4), torch.randn(3, 5), torch.randn(5, 4), torch.empty(3, 4)
    again(bias, one, other, out)
    torch.testing.assert_close(out, bias + 2 * one @ other)


@pytest.mark.parametrize("where", ["inductor's file", "a file of the same code", "a file elsewhere", "no file"])
def test_code_that_is_not_in_inductors_folder_is_not_run(where: str, folder: Path, tmp_path: Path) -> None:
    """A recipe comes from a file that is not code, so writing such a file must not be enough to run code."""
    _, recipe = kernel_and_recipe()
    evidence, elsewhere = tmp_path / "it ran", tmp_path / "elsewhere.py"
    recipe["body"] = f"open({str(evidence)!r}, 'w').close()"
    elsewhere.write_text(f"{recipe['prologue']}\n\ntriton_tem_0 = {recipe['body']}\n")
    original = Path(recipe["file"])
    recipe["file"] = {
        "inductor's file": str(original),
        "a file of the same code": str(original.parent / ".." / ".." / ".." / elsewhere.name),
        "a file elsewhere": str(elsewhere),
        "no file": "/",
    }[where]
    with pytest.raises(ValueError, match=r"triton_tem_0: .* (holds other code|is not in Inductor's folder)"):
        kernel_from_recipe("triton_tem_0", recipe, GPU)
    assert not evidence.exists()


@pytest.mark.parametrize("recipe", [{}, {"function": "mm"}, {"function": "mm", "inputs": "2", "kwargs": {}}])
def test_an_invalid_recipe_is_refused(recipe: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="triton_0: there is no such recipe"):
        kernel_from_recipe("triton_0", recipe, GPU)
    with pytest.raises(KeyError):  # only functions of extern_kernels
        kernel_from_recipe("kernel", {"function": "__class__", "inputs": 1, "kwargs": {}}, GPU)
