"""Inductor's lines as calls of our own, without a GPU; the rest is in ``tests/gpu/test_fusion.py``."""

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
from torch._inductor.codegen.wrapper_fxir import FxConverter
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
NOWHERE = Definition("", "", "")


# Graphs


def converter(*lines: Any) -> Converter:
    return Converter(lines=[*lines], prologue="", graph_inputs={}, graph_outputs=[], subgms={}, is_subgraph=False)


def finished(made: Converter) -> fx.GraphModule:
    with V.set_graph_handler(SimpleNamespace(constants={})):  # type: ignore[arg-type]
        return made.generate()


def generated(*lines: Any) -> fx.GraphModule:
    return finished(converter(*lines))


def writing_to(*buffers: str) -> AbstractContextManager[None]:
    """As if Inductor's graph wrote to these buffers once they have been made."""
    return V.set_graph_handler(SimpleNamespace(mutated_buffers=buffers))  # type: ignore[arg-type,no-any-return]


class Calls(WrapperLine):
    """A line that becomes so many nodes."""

    def __init__(self, count: int) -> None:
        self.count = count

    def codegen_fx(self, converter: Any) -> Callable[[Any], None]:
        return lambda line: [converter.gm.graph.call_function(torch.rand, (1,)) for _ in range(line.count)] and None


def came_from(line: str) -> LineContext:
    node = fx.Graph().placeholder("x")
    node.stack_trace = line or None  # type: ignore[assignment]
    return LineContext(node)


def test_nodes_get_the_line_of_what_was_fused_into_them() -> None:
    module = generated(Calls(1), came_from("relu"), Calls(2), came_from("conv"), Calls(0), Calls(1))
    calls = module.graph.find_nodes(op="call_function", target=torch.rand)
    assert [node.stack_trace for node in calls] == [None, "relu", "relu", "conv"]


@pytest.mark.parametrize("context", [came_from(""), LineContext(None), LineContext("?")])
def test_a_line_that_is_not_known_is_left_out(context: LineContext) -> None:
    module = generated(came_from("relu"), context, Calls(1))
    (call,) = module.graph.find_nodes(op="call_function", target=torch.rand)
    assert call.stack_trace is None


def test_a_line_of_python_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"a line of Python: assert x > 1$"):
        generated("  assert x > 1")


def test_a_buffer_is_taken_with_whole_numbers() -> None:
    buffer = SimpleNamespace(
        get_name=lambda: "buf7",
        get_size=lambda: [sympy.Integer(4), 6],
        get_stride=lambda: [sympy.Integer(6), 1],
        get_dtype=lambda: torch.float16,
        get_device=lambda: GPU,
    )
    made = converter()
    made._generate_allocate(SimpleNamespace(node=buffer))
    (node,) = made.gm.graph.nodes
    assert (node.name, node.target) == ("buf7", aten.empty_strided.default)
    assert (node.args, node.kwargs) == (([4, 6], [6, 1]), {"dtype": torch.float16, "device": GPU})
    assert all(type(number) is int for numbers in node.args for number in numbers)


@pytest.mark.parametrize(("size", "stride", "offset"), [([4], [1], 0), ([2, 3], [1, 4], 5), ([0], [1], 12)])
def test_a_view_of_an_argument_that_is_returned_is_an_ordinary_tensor_in_inference_mode(
    size: list[int], stride: list[int], offset: int
) -> None:
    """As in the model, where it is a view of what the caller made outside of that mode."""
    made = converter()
    x = made.gm.graph.placeholder("x")
    view = made._create_as_strided(x, size, stride, offset)
    made._generate_outputs = lambda: [view, x, view]  # type: ignore[method-assign]
    module = finished(made)
    given = torch.arange(20.0)[3:]
    with torch.inference_mode():
        first, whole, second = module(given)
    assert not first.is_inference()
    assert whole is given
    assert second is first
    assert (first.shape, first.stride()) == (torch.Size(size), tuple(stride))
    assert first.storage_offset() == 3 + offset
    assert first.untyped_storage()._cdata == given.untyped_storage()._cdata


def test_a_view_may_read_the_same_bits_as_another_type() -> None:
    """Which Inductor's own converter forgets."""
    made = converter()
    buffer = SimpleNamespace(get_name=lambda: "buf0", get_dtype=lambda: torch.float32, get_offset=lambda: 0)
    made._record_allocation(buffer, made.gm.graph.placeholder("x"))
    layout = SimpleNamespace(size=[2], stride=[1], offset=1, dtype=torch.int32)
    made._generate_reinterpret_helper(buffer, SimpleNamespace(get_name=lambda: "buf1"), layout)
    made._generate_outputs = lambda: made.buffer_to_node["buf1"]  # type: ignore[method-assign, return-value]
    given = torch.tensor([1.0, 0.5, 0.25])
    (found,) = finished(made)(given)
    assert torch.equal(found, given[1:].view(torch.int32))


def test_a_view_that_is_written_stays_and_one_of_a_buffer_too() -> None:
    made = converter()
    x = made.gm.graph.placeholder("x")
    buffer = made.gm.graph.call_function(aten.empty_strided.default, ([4], [1]))
    views = [made._create_as_strided(node, [2], [1], 1) for node in (x, buffer)]
    made.gm.graph.call_function(aten.zero_.default, (views[0],))
    made._generate_outputs = lambda: [*views, None]  # type: ignore[method-assign]
    module = finished(made)
    given = torch.ones(4)
    ours, _, nothing = module(given)
    assert given.tolist() == [1, 0, 0, 1]
    assert ours.tolist() == [0, 0]
    assert module.graph.output_node().args[0][1] is views[1]  # type: ignore[index]
    assert nothing is None


def test_two_calls_of_one_kernel_are_of_the_same_kernel() -> None:
    made = converter()
    x, out = made.gm.graph.placeholder("x"), made.gm.graph.placeholder("out")
    made.buffer_to_node |= {"x": x, "out": out}
    made.kernels["triton_0"] = object()  # type: ignore[assignment]
    made._definitions = {"triton_0": Definition("", "triton('triton_0', 'out = x')", "")}
    line = SimpleNamespace(
        kernel_name="triton_0",
        call_args=("x", "out", sympy.Integer(24)),
        triton_meta={"signature": {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32"}},
        device=GPU,
    )
    with writing_to():
        made._generate_triton_call(line)
        made._generate_triton_call(line)
    first, second = made.gm.graph.find_nodes(op="call_function", target=made.kernels["triton_0"])
    assert first.args == second.args == (x, out, 24)
    assert type(first.args[2]) is int
    assert isinstance(first.target, Kernel)
    assert first.target.written == {1}
    assert first.target.content == "triton('kernel', 'out = x')", "its number depends on the kernels before it"


def test_a_template_writes_those_of_its_arguments_that_are_written_anywhere() -> None:
    """Their names do not say it. A flexible attention writes the logarithms of its sums to one."""
    made = converter()
    names = ("query", "sums", "out")
    made.buffer_to_node |= {name: made.gm.graph.placeholder(name) for name in names}
    made.kernels["triton_tem_0"] = object()  # type: ignore[assignment]
    made._definitions = {"triton_tem_0": Definition("", "out = attention", "")}
    types = {"arg_Q": "*fp32", "arg_LSE": "*fp32", "out_ptr0": "*fp32"}
    line = SimpleNamespace(
        kernel_name="triton_tem_0", call_args=(*names, 4, 1, 1), triton_meta={"signature": types}, device=GPU
    )
    with writing_to("sums", "another"):
        made._generate_triton_call(line)
    kernel: Any = made.kernels["triton_tem_0"]
    assert (kernel.written, kernel.overwritten) == ({1, 2}, {2})


def test_scratch_memory_is_cleared_by_an_operator() -> None:
    made = converter()
    scratch = made.buffer_to_node["workspace_0"] = made.gm.graph.placeholder("workspace_0")
    line: Any = Wrapper.make_zero_buffer(None, "workspace_0")  # type: ignore[arg-type]
    made._convert(line, "cumsum")
    (call,) = made.gm.graph.find_nodes(op="call_function", target=aten.zero_.default)
    assert call.args == (scratch,)
    assert call.stack_trace == "cumsum"


class Extern(SimpleNamespace):
    """As much of Inductor's ``ExternKernelOut`` as is looked at."""

    def __init__(self, name: str, *inputs: str, **kwargs: Any) -> None:
        name = f"extern_kernels.{name}"
        super().__init__(op_overload=None, python_kernel_name=name, inputs=inputs, constant_args=(), kwargs=kwargs)

    def codegen_reference(self) -> str:
        return "out"


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> Converter:
    """A converter that knows some buffers by name."""
    made = converter()
    made.buffer_to_node |= {name: made.gm.graph.placeholder(name) for name in ("bias", "one", "other", "out")}
    monkeypatch.setattr(kernel_graph, "ExternKernelOut", Extern)
    monkeypatch.setattr(made, "_generate_buffer", made.buffer_to_node.__getitem__)
    return made


def calls(made: Converter) -> list[fx.Node]:
    return [node for node in made.gm.graph.nodes if node.op == "call_function"]


def test_a_function_that_is_no_operator_becomes_a_kernel_that_writes_its_last_argument(calling: Converter) -> None:
    line = Extern("bias_addmm", "bias", "one", "other", alpha=2, beta=1)
    calling._generate_extern_kernel_common(line, line)
    (call,) = calls(calling)
    assert isinstance(call.target, Kernel)
    assert [node.name for node in call.args] == ["bias", "one", "other", "out"]
    assert (repr(call.target), call.target.written, call.target.overwritten) == ("bias_addmm", {3}, {3})
    bias, one, other, out = torch.randn(1, 4).expand(3, 4), torch.randn(3, 5), torch.randn(5, 4), torch.empty(3, 4)
    call.target(bias, one, other, out)
    torch.testing.assert_close(out, bias + 2 * one @ other)


def test_calls_of_one_function_are_of_one_kernel_if_they_say_the_same(calling: Converter) -> None:
    for alpha in (1, 1, 2):
        line = Extern("bias_addmm", "bias", "one", "other", alpha=alpha)
        calling._generate_extern_kernel_common(line, line)
    first, second, third = (call.target for call in calls(calling))
    assert first is second
    assert first is not third


def test_a_function_of_which_nobody_knows_what_it_writes_is_refused(calling: Converter) -> None:
    line = SimpleNamespace(**vars(Extern("theirs", "one")))
    with pytest.raises(
        NotImplementedError, match=r"extern_kernels\.theirs, which is no operator: what it writes is not"
    ):
        calling._generate_extern_kernel_common(line, line)


def test_an_operator_is_left_to_inductor(calling: Converter, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[object] = []
    monkeypatch.setattr(FxConverter, "_generate_extern_kernel_common", lambda self, *args: left.append(args))
    line = Extern("mm", "one", "other")
    line.op_overload = aten.mm.out
    calling._generate_extern_kernel_common(line, line)
    assert left == [(line, line)]
    assert not calls(calling)


def test_an_operator_that_returns_nothing_has_no_sizes_that_only_it_tells(
    calling: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor has a line for them all the same, of a result that there is not."""
    left: list[object] = []
    monkeypatch.setattr(FxConverter, "_generate_unbacked_symbol_defs", lambda self, line: left.append(line))
    nothing, never, some = (SimpleNamespace(unbacked_bindings=bindings) for bindings in ({}, None, {"u0": ()}))
    for line in (nothing, never, some):
        calling._generate_unbacked_symbol_defs(line)
    assert left == [some]


def test_inductor_writes_our_graphs_only_meanwhile() -> None:
    common.init_backend_registration()
    before = common.device_codegens["cuda"]
    with pytest.raises(KeyError), capture_kernel_graphs(GPU) as graphs:
        ours = common.device_codegens["cuda"].fx_wrapper_codegen
        assert isinstance(ours, type)
        assert issubclass(ours, Wrapper)
        module = fx.GraphModule({}, fx.Graph())
        assert ours.compile_graph(None, module) == module.forward  # type: ignore[attr-defined]
        assert graphs == [module]
        raise KeyError
    assert common.device_codegens["cuda"] is before


# Kernels


def signature(*names: str) -> dict[str, str]:
    return {name: "*fp32" if "ptr" in name else "i32" for name in names}


def test_argument_names_say_what_a_kernel_reads_and_writes() -> None:
    names = ("in_ptr0", "out_ptr0", "in_out_ptr0", "ws_ptr", "sem_ptr", "out_ptr1", "arg_A", "xnumel")
    kernel = triton_kernel("triton_0", object(), signature(*names), GPU, NOWHERE, mutated=[0, 7])
    assert kernel.written == {1, 2, 3, 4, 5}
    assert kernel.overwritten == {1, 5}


def test_a_kernel_that_is_not_inductors_is_refused() -> None:
    """A user's own names do not say what it writes."""
    with pytest.raises(NotImplementedError, match="nobody knows whether it writes x_ptr"):
        triton_kernel("theirs", object(), signature("in_ptr0", "x_ptr"), GPU, NOWHERE)


def test_a_kernel_that_the_user_wrote_is_refused_whatever_its_arguments_are_called() -> None:
    """They may be called as Inductor's are, and mean something else."""
    body = "@triton_heuristics.user_autotune(configs=[])\ndef theirs(in_ptr0, out_ptr0):\n    ..."
    with pytest.raises(NotImplementedError, match="theirs, which the user wrote"):
        converter()._generate_kernel_definition(SimpleNamespace(kernel_name="theirs", kernel_body=body))


class Compiling:
    """A kernel as Inductor hands it out: later."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.waited = 0

    def result(self) -> Any:
        self.waited += 1
        return self.compiled


class Tuner:
    """As much of a ``CachingAutotuner`` as is called."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *args: Any, stream: int) -> None:
        self.launched.append((*args, stream))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)


@pytest.mark.usefixtures("stream")
def test_a_kernel_is_waited_for_once_when_it_is_first_launched() -> None:
    tuner = Tuner()
    compiling = Compiling(tuner)
    kernel = triton_kernel("triton_0", compiling, signature("in_ptr0"), GPU, NOWHERE)
    assert compiling.waited == 0
    kernel(1)
    kernel(2)
    assert (compiling.waited, tuner.launched) == (1, [(1, 7), (2, 7)])


# Kernels of another process


def told(kernel: Kernel) -> tuple[object, ...]:
    return kernel.__name__, kernel.written, kernel.overwritten, kernel.content, kernel.recipe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inductor's own, in which it keeps the code that it runs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "inductor"


def kept_kernel() -> tuple[Kernel, dict[str, Any]]:
    """A kernel whose code Inductor keeps, and its recipe as another process reads it."""
    launched, definition = kernel_graph.define_triton_kernel(
        "triton_tem_0", "def triton(source): return source", "triton('x')"
    )
    assert launched == "x"
    assert definition[:2] == ("def triton(source): return source", "triton('x')")
    types = signature("arg_A", "out_ptr0", "in_out_ptr0", "xnumel")
    kernel = triton_kernel("triton_tem_0", launched, types, GPU, definition, [0])
    return kernel, json.loads(json.dumps(kernel.recipe))


def test_a_kernel_is_made_again_by_its_recipe(folder: Path) -> None:
    kernel, recipe = kept_kernel()
    assert Path(recipe["file"]).is_relative_to(folder)
    assert told(kernel_from_recipe("triton_tem_0", recipe, GPU)) == told(kernel)
    assert kernel.written == {0, 1, 2}


EVIL = "open({!r}, 'w').close()"


@pytest.mark.parametrize("where", ["inductor's file", "a file of the same code", "a file elsewhere", "no file"])
def test_code_that_inductor_does_not_keep_is_not_run(where: str, folder: Path, tmp_path: Path) -> None:
    """A recipe comes from a file that is no code; who can write that can have run what Inductor keeps, and no more."""
    _, recipe = kept_kernel()
    trace, elsewhere = tmp_path / "it ran", tmp_path / "elsewhere.py"
    recipe["body"] = EVIL.format(str(trace))
    elsewhere.write_text(f"{recipe['prologue']}\n\ntriton_tem_0 = {recipe['body']}\n")
    own = Path(recipe["file"])
    recipe["file"] = {
        "inductor's file": str(own),
        "a file of the same code": str(own.parent / ".." / ".." / ".." / elsewhere.name),
        "a file elsewhere": str(elsewhere),
        "no file": "/",
    }[where]
    with pytest.raises(ValueError, match=r"triton_tem_0: .* (holds other code|is not in Inductor's folder)"):
        kernel_from_recipe("triton_tem_0", recipe, GPU)
    assert not trace.exists()


def test_a_function_is_made_again_by_its_recipe() -> None:
    kernel = extern_kernel("bias_addmm", 3, {"alpha": 2, "beta": 1})
    assert kernel.recipe
    again = kernel_from_recipe("bias_addmm", json.loads(json.dumps(kernel.recipe)), GPU)
    assert told(again) == told(kernel)
    bias, one, other, out = torch.randn(3, 4), torch.randn(3, 5), torch.randn(5, 4), torch.empty(3, 4)
    again(bias, one, other, out)
    torch.testing.assert_close(out, bias + 2 * one @ other)


def test_where_inductors_file_is_gone_nothing_is_made(folder: Path) -> None:
    """What Triton has compiled is gone with it, as after a restart."""
    _, recipe = kept_kernel()
    Path(recipe["file"]).unlink()
    with pytest.raises(FileNotFoundError, match=r"triton_tem_0: .*\.py is gone"):
        kernel_from_recipe("triton_tem_0", recipe, GPU)


def test_only_what_inductor_calls_is_found_by_name() -> None:
    with pytest.raises(KeyError):
        kernel_from_recipe("kernel", {"function": "__class__", "inputs": 1, "kwargs": {}}, GPU)


@pytest.mark.parametrize("recipe", [{}, {"function": "mm"}, {"function": "mm", "inputs": "2", "kwargs": {}}])
def test_what_is_no_recipe_is_refused(recipe: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="triton_0: there is no such recipe"):
        kernel_from_recipe("triton_0", recipe, GPU)
