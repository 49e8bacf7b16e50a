"""What can be tested of the way to Inductor's kernels without a GPU; the rest is in ``tests/gpu/test_fusion.py``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from autostream.analysis.dependencies import analyze
from autostream.errors import FusionError, OptionError
from autostream.ir import Program, Role
from autostream.kernels import Kernel
from autostream.tracing import inductor
from autostream.tracing.inductor import check_settings, evaluate, fuse
from tests.execution.programs import case_of, fused_case

aten = torch.ops.aten


def program_of(model: nn.Module | Callable[..., object], *inputs: Tensor) -> Program:
    return case_of(model, *inputs).program


# The functional graph that Inductor is given


def learning(x: Tensor, mean: Tensor) -> Tensor:
    mean.mul_(0.9).add_(x.mean(0))
    return (x - mean).relu_().view(-1)


def test_a_functional_graph_writes_to_its_arguments_at_the_end_only() -> None:
    module = inductor._functional(program_of(learning, torch.randn(4, 6), torch.randn(6)))
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    written = [node.target._schema.is_mutable for node in calls]  # type: ignore[union-attr]
    assert written == [False] * (len(calls) - 1) + [True]
    assert calls[-1].target is aten.copy_.default


def test_a_functional_graph_computes_the_same() -> None:
    x, mean = torch.randn(4, 6), torch.randn(6)
    module = inductor._functional(program_of(learning, x, mean))
    ours, theirs = mean.clone(), mean.clone()
    (result,) = module(x, ours)
    torch.testing.assert_close(result, learning(x, theirs))
    torch.testing.assert_close(ours, theirs)


def test_a_functional_graph_keeps_the_users_lines() -> None:
    module = inductor._functional(program_of(learning, torch.randn(4, 6), torch.randn(6)))
    relu = next(node for node in module.graph.nodes if node.target is aten.relu.default)
    assert "return (x - mean).relu_()" in relu.stack_trace


def test_composites_become_what_inductor_lowers() -> None:
    program = program_of(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout()).eval(), torch.randn(1, 1, 5, 5)
    )
    targets = {str(node.target) for node in inductor._functional(program).graph.nodes if node.op == "call_function"}
    assert "aten.convolution.default" in targets
    assert not targets & {"aten.conv2d.default", "aten.batch_norm.default", "aten.dropout.default"}


# Kernels


def signature(*names: str) -> dict[str, Any]:
    return {"signature": dict.fromkeys(names, "*fp32")}


def test_argument_names_say_what_a_kernel_reads_and_writes() -> None:
    names = ("in_ptr0", "out_ptr0", "in_out_ptr0", "ws_ptr", "out_ptr1", "xnumel")
    kernel = inductor._kernel("triton_0", object(), signature(*names), torch.device("cuda:0"))
    assert kernel.written == {1, 2, 3, 4}
    assert kernel.overwritten == {1, 3, 4}


class Compiled:
    """A kernel as Inductor hands it out: later."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.waited = 0

    def result(self) -> SimpleNamespace:
        self.waited += 1
        return SimpleNamespace(run=lambda *args, stream: self.launched.append((*args, stream)))


def test_a_kernel_is_waited_for_once_when_it_is_first_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    kernel = inductor._kernel("triton_0", compiled, signature("in_ptr0"), torch.device("cuda:0"))
    assert compiled.waited == 0
    kernel(1)
    kernel(2)
    assert (compiled.waited, compiled.launched) == (1, [(1, 7), (2, 7)])


# Values of a graph of kernels


def test_values_are_found_without_launching_a_kernel() -> None:
    def fail(*args: object) -> None:
        raise AssertionError("launched")

    graph = fx.Graph()
    x = graph.placeholder("x")
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    buffer = graph.call_function(aten.empty_strided.default, ([4, 6], [6, 1]), options)
    view = graph.call_function(torch.ops.inductor._reinterpret_tensor.default, (buffer, [2, 3], [6, 1], 13))
    kernel = graph.call_function(Kernel("k", fail, frozenset({1}), frozenset({1})), (x, view))
    product = graph.call_function(aten.mm.out, (x, x), {"out": view})
    graph.output((buffer,))
    with FakeTensorMode() as mode:
        evaluate(fx.GraphModule(nn.Module(), graph), [mode.from_tensor(torch.ones(2, 2))])
    value = view.meta["val"]
    assert (value.shape, value.stride(), value.storage_offset()) == ((2, 3), (6, 1), 13)
    assert value.untyped_storage()._cdata == buffer.meta["val"].untyped_storage()._cdata
    assert product.meta["val"] is value
    assert kernel.meta["val"] is None


def test_a_view_begins_where_its_argument_does() -> None:
    """An argument may lie anywhere in its storage."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(torch.ops.inductor._reinterpret_tensor.default, (x, [2], [1], 1))
    graph.output((view,))
    module = fx.GraphModule(nn.Module(), graph)
    given = torch.arange(8.0)[3:]
    with FakeTensorMode() as mode:
        evaluate(module, [mode.from_tensor(given)])
    assert view.meta["val"].storage_offset() == 4
    assert module(given)[0].tolist() == [4.0, 5.0]


def test_who_shares_memory_is_told_by_value() -> None:
    case = fused_case()
    assert inductor._shared(case.program.module) == [0, 1, 2, 3]
    program = program_of(lambda x: (x[1:], y := x + 1, y.t()), torch.ones(3, 3))
    assert inductor._shared(program.module) == [0, 0, 2, 2]


# What cannot be fused


def test_a_program_that_cannot_be_fused_is_refused_in_one_line_and_stays_as_it_is() -> None:
    """Here because there is no GPU, or no Triton."""
    program = program_of(lambda x: x.relu() + 1, torch.ones(3))
    before = program.module.code
    with pytest.raises(FusionError, match="TorchInductor cannot fuse it: ") as failure:
        fuse(program)
    assert "\n" not in str(failure.value)
    assert program.module.code == before


def test_a_program_whose_outputs_would_lie_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
        graph = fx.Graph()
        result = graph.call_function(aten.clone.default, (graph.placeholder("a"),))
        graph.output((result,))
        return fx.GraphModule(nn.Module(), graph)

    monkeypatch.setattr(inductor, "_compiled", copies)
    assert fuse(program_of(lambda x: x + 1, torch.ones(3))).level == "inductor"
    with pytest.raises(FusionError, match="outputs would share other memory"):
        fuse(program_of(lambda x: x[1:], torch.ones(3)))


def test_a_fused_program_has_the_names_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    case = fused_case()
    monkeypatch.setattr(inductor, "_compiled", lambda *args: renamed(case.program.module))
    fused = fuse(case.program)
    assert fused.placeholders == case.program.placeholders
    assert [node.name for node in fused.module.graph.find_nodes(op="placeholder")] == ["x", "w", "mean"]
    assert analyze(fused).ops.keys() == case.graph.ops.keys()
    assert [p.role for p in fused.placeholders] == [Role.INPUT, Role.PARAMETER, Role.BUFFER]


def renamed(module: fx.GraphModule) -> fx.GraphModule:
    """As Inductor calls placeholders."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for at, node in enumerate(module.graph.nodes):
        values[node] = graph.node_copy(node, values.__getitem__)
        if node.op == "placeholder":
            values[node].name = values[node].target = f"arg{at}_1"
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_autotun": True}, r"has no setting 'max_autotun' \(did you mean 'max_autotune'\?\)"),
        ({"inplace_buffers": True}, "'inplace_buffers' is autostream's to choose: leave it out"),
    ],
)
def test_settings_that_inductor_does_not_have_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=f"inductor_options: .*{message}"):
        check_settings(settings)


def test_settings_that_inductor_has_pass() -> None:
    check_settings({})
    check_settings({"max_autotune": True, "triton.unique_kernel_names": True})
