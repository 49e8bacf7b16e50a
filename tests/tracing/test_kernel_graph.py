"""Inductor's lines as calls of our own, without a GPU; the rest is in ``tests/gpu/test_fusion.py``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import fx
from torch._inductor.codegen import common
from torch._inductor.codegen.wrapper import WrapperLine
from torch._inductor.runtime import triton_compat
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import LineContext
from torch._inductor.virtualized import V

from autostream.kernels import Footprint, Kernel
from autostream.tracing.kernel_graph import Converter, Wrapper, graphs_of_kernels, triton_kernel

aten = torch.ops.aten
GPU = torch.device("cuda:0")


# Graphs


def converter(*lines: Any) -> Converter:
    return Converter(lines=[*lines], prologue="", graph_inputs={}, graph_outputs=[], subgms={}, is_subgraph=False)


def generated(*lines: Any) -> fx.GraphModule:
    with V.set_graph_handler(SimpleNamespace(constants={})):  # type: ignore[arg-type]
        return converter(*lines).generate()


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


def test_two_calls_of_one_kernel_are_of_the_same_kernel() -> None:
    made = converter()
    x, out = made.gm.graph.placeholder("x"), made.gm.graph.placeholder("out")
    made.buffer_to_node |= {"x": x, "out": out}
    made.kernels["triton_0"] = object()  # type: ignore[assignment]
    line = SimpleNamespace(
        kernel_name="triton_0",
        call_args=("x", "out", sympy.Integer(24)),
        triton_meta={"signature": {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32"}},
        device=GPU,
    )
    made._generate_triton_call(line)
    made._generate_triton_call(line)
    first, second = made.gm.graph.find_nodes(op="call_function", target=made.kernels["triton_0"])
    assert first.args == second.args == (x, out, 24)
    assert type(first.args[2]) is int
    assert isinstance(first.target, Kernel)
    assert first.target.written == {1}


def test_inductor_writes_our_graphs_only_meanwhile() -> None:
    common.init_backend_registration()
    before = common.device_codegens["cuda"]
    with pytest.raises(KeyError), graphs_of_kernels(GPU) as graphs:
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
    names = ("in_ptr0", "out_ptr0", "in_out_ptr0", "ws_ptr", "out_ptr1", "xnumel")
    kernel = triton_kernel("triton_0", object(), signature(*names), GPU)
    assert kernel.written == {1, 2, 3, 4}
    assert kernel.overwritten == {1, 3, 4}


def test_a_kernel_that_is_not_inductors_is_refused() -> None:
    """A user's own names do not say what it writes."""
    with pytest.raises(NotImplementedError, match="nobody knows whether it writes x_ptr"):
        triton_kernel("theirs", object(), signature("in_ptr0", "x_ptr"), GPU)


class Compiling:
    """A kernel as Inductor hands it out: later."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.waited = 0

    def result(self) -> Any:
        self.waited += 1
        return self.compiled


def launcher(registers: int | None = 40, **kwargs: int) -> SimpleNamespace:
    """As the classes of ``torch._inductor.runtime.triton_heuristics`` make them."""
    config: Any = SimpleNamespace if triton_compat.Config is object else triton_compat.Config
    return SimpleNamespace(config=config(kwargs=kwargs, num_warps=4, num_stages=1), n_regs=registers, shared=512)


class Tuner:
    """As much of a ``CachingAutotuner`` as a GPU is not needed for; its grids are the real one's."""

    grid_mode = "python"

    def __init__(self, *candidates: SimpleNamespace, grid: str = "Grid1D") -> None:
        self.candidates = candidates
        self.inductor_meta = {"grid_type": grid}
        self.triton_meta = {"signature": {"in_ptr0": "*fp32", "xnumel": "i32", "ynumel": "i32", "XBLOCK": "constexpr"}}
        self.fn = SimpleNamespace(params=[SimpleNamespace(num=3, is_constexpr=True)])
        self.launchers: list[SimpleNamespace] = []
        self.launched: list[tuple[Any, ...]] = []
        self._interpret_args_grid = partial(CachingAutotuner._interpret_args_grid, self)  # type: ignore[arg-type]

    def run(self, *args: Any, stream: int) -> None:
        self.launchers = [*self.candidates]
        self.launched.append((*args, stream))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)


@pytest.mark.usefixtures("stream")
def test_a_kernel_is_waited_for_once_when_it_is_first_launched() -> None:
    tuner = Tuner()
    compiling = Compiling(tuner)
    kernel = triton_kernel("triton_0", compiling, signature("in_ptr0"), GPU)
    assert compiling.waited == 0
    kernel(1)
    kernel(2)
    assert (compiling.waited, tuner.launched) == (1, [(1, 7), (2, 7)])


@pytest.mark.usefixtures("stream")
def test_a_footprint_is_known_once_launched_and_waits_for_nothing() -> None:
    compiling = Compiling(Tuner(launcher(XBLOCK=128)))
    kernel = triton_kernel("triton_0", compiling, signature("in_ptr0"), GPU)
    assert kernel.footprint(None, 1000, 3) is None
    assert compiling.waited == 0
    kernel(None, 1000, 3)
    assert kernel.footprint(None, 1000, 3) == Footprint(blocks=8, warps=4, registers=40, shared_bytes=512)
    assert kernel.footprint(None, 100, 3) == Footprint(blocks=1, warps=4, registers=40, shared_bytes=512)


@pytest.mark.usefixtures("stream")
def test_a_grid_may_have_several_dimensions() -> None:
    kernel = triton_kernel("triton_0", Tuner(launcher(XBLOCK=128, YBLOCK=2), grid="Grid2D"), signature("in_ptr0"), GPU)
    kernel(None, 1000, 3)
    footprint = kernel.footprint(None, 1000, 3)
    assert footprint is not None
    assert footprint.blocks == 8 * 2


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    "tuner",
    [
        Tuner(launcher(XBLOCK=128), launcher(XBLOCK=256)),
        Tuner(launcher(XBLOCK=128, registers=None)),
        Tuner(launcher(XBLOCK=128), grid="A grid of tomorrow"),
        SimpleNamespace(run=lambda *args, stream: None),
    ],
    ids=["not tuned", "registers not told", "another grid", "another class"],
)
def test_a_footprint_that_inductor_does_not_tell_is_not_known(tuner: Any) -> None:
    kernel = triton_kernel("triton_0", tuner, signature("in_ptr0"), GPU)
    kernel(None, 1000, 3)
    assert kernel.footprint(None, 1000, 3) is None
