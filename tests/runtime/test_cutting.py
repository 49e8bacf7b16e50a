"""Programs split into parts: what is in which part, and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from autostream.analysis.dependencies import analyze
from autostream.analysis.effects import argument_views
from autostream.analysis.source import user_line
from autostream.analysis.values import tensors_in, value_of
from autostream.frontend.trace import trace
from autostream.ir import OpGraph, Role
from autostream.runtime import host_copies
from autostream.runtime.cutting import SplitProgram, split_program
from autostream.scheduling.cut import LONG_BYTES, Part
from tests.cuts import REFUSED, cut_everything, graph_with, moved, over_devices, placed
from tests.runtime.programs import MODELS, Case, case_of, same, sample
from tests.semantics import Model


def split(case: Case, *refused: str) -> SplitProgram:
    """A program, split at ops of these names and at those that depend on numbers of the device."""
    return split_at(case, graph_with(case.program, lambda op: op.name in refused))


def split_at(case: Case, graph: OpGraph, parts: Sequence[Part] | None = None) -> SplitProgram:
    bound = [p.role is not Role.INPUT for p in case.program.placeholders]
    views = argument_views(case.program.module.graph, {op.name for op in graph.ops.values() if op.crosses == "peer"})
    parts = cut_everything(graph) if parts is None else parts
    return split_program(case.program, graph, parts or (Part(tuple(graph.ops), ""),), bound, views)


def nodes(whole: SplitProgram, part: int) -> list[str]:
    return [node.name for node in whole.sections[part].program.module.graph.nodes]


def check_same(case: Case, whole: SplitProgram) -> None:
    args = case.args()
    with torch.no_grad():
        outputs = whole.module(*args)
    expected, expected_args = case.expected()
    assert same(outputs, expected)
    assert same(args, expected_args)


def test_parts_take_values_of_earlier_parts_and_keep_source_lines() -> None:
    """X ─▶ sin ─▶ COS ─▶ add, which takes sin as well. Bound arguments come first."""
    model = Model(lambda s, x: (top := x.sin()).cos() + top * s.w, w=nn.Parameter(torch.randn(4)))
    case = case_of(model, torch.randn(4))
    whole = split(case, "cos")
    assert [section.captured for section in whole.sections] == [True, False, True]
    assert [nodes(whole, at) for at in range(3)] == [
        ["parameter_w", "input_0", "sin", "mul", "output"],
        ["sin", "cos", "output"],
        ["cos", "mul", "add", "output"],
    ]
    assert [section.bound for section in whole.sections] == [{0}, set(), set()]
    assert [[p.role for p in section.program.placeholders] for section in whole.sections] == [
        [Role.PARAMETER, Role.INPUT], [Role.INPUT], [Role.INPUT] * 2
    ]  # fmt: skip
    assert [section.program.outputs for section in whole.sections] == [("sin", "mul"), ("cos",), ("add",)]
    found = {node.name: node for at in (0, 1) for node in whole.sections[at].program.module.graph.nodes}
    assert "test_cutting.py" in user_line(found["mul"].stack_trace) == user_line(found["cos"].stack_trace)
    check_same(case, whole)


def test_a_possible_view_is_made_before_later_writes() -> None:
    """In the last part, which alone uses it, a copy would have what was written meanwhile."""

    def model(x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        y = x.sin().cos()
        x.add_(1)
        return y.reshape(-1) + flat

    whole = split(case_of(model, torch.randn(3, 3)), "sin")
    assert "reshape" in nodes(whole, 0)
    for x in (torch.randn(3, 3), torch.randn(3, 3).t()):
        assert same(whole.module(x.clone()), [model(x)])


def test_a_possible_view_is_in_a_part_of_its_device() -> None:
    """In the first part, a graph would have tensors of two devices."""
    model = Model(
        lambda s, x: (x.reshape(-1).sin(), (flat := s.far.reshape(-1)).cos(), s.far.add_(1), flat.exp()),
        far=nn.Buffer(torch.randn(3, 3)),
    )
    case = case_of(model, torch.randn(3, 3))
    program = placed(case.program)
    graph = analyze(program)
    whole = split_program(program, graph, cut_everything(graph), [True, False], argument_views(program.module.graph))
    graphs = [section.program.module.graph for section in whole.sections[:2]]
    devices = [{str(t.device) for node in graph.nodes for t in tensors_in(value_of(node))} for graph in graphs]
    assert devices == [{"cuda:0"}, {"cuda:1"}]
    assert [name for at in (0, 1) for name in nodes(whole, at) if "reshape" in name] == ["reshape", "reshape_1"]
    check_same(case, whole)


def test_a_view_of_a_copy_between_devices_is_made_where_it_is_used() -> None:
    """X ─▶ COPY ─▶ t ─▶ sin, in two parts or in one, which has both the copy and its view."""
    case = case_of(lambda x: moved(x).t().sin(), torch.randn(3, 2))
    graph = over_devices(analyze(case.program), lambda op: "cuda:1", lambda op: op.name != "sin")
    apart = split_at(case, graph, [Part(("to",), ""), Part(("sin",), "cuda:1")])
    together = split_at(case, graph, [Part(("to", "sin"), "")])
    assert [nodes(apart, at) for at in (0, 1)] == [["input_0", "to", "output"], ["to", "t", "sin", "output"]]
    for whole in (apart, together):
        check_same(case, whole)


def test_outputs_may_be_arguments_and_views_of_them() -> None:
    case = case_of(lambda x, y: (x.neg_(), y[1:], x.sin().cos(), x.t()), torch.randn(3, 3), torch.randn(3))
    whole = split(case, "sin")
    args = case.args()
    x, part, _, view = whole.module(*args)
    assert x is args[0]
    assert (part.data_ptr(), view.data_ptr()) == (args[1][1:].data_ptr(), x.data_ptr())
    check_same(case, whole)


def scaled(x: Tensor) -> Tensor:
    number = x.sin().max().item()
    return (x * number + x * (number + 1)).cos().exp()


def selected(x: Tensor) -> Tensor:
    return x[x.cos().nonzero()[:, 0]].sin().sum(0) + x.exp()


@pytest.mark.parametrize("model", [scaled, selected])
def test_numbers_and_shapes_that_depend_on_data_stay_outside_of_captured_parts(
    model: Callable[[Tensor], Tensor],
) -> None:
    whole = split(case_of(model, torch.randn(4)))
    captured = [section for section in whole.sections if section.captured]
    for section in captured:
        values = [node.meta.get("val") for node in section.program.module.graph.nodes if node.op != "output"]
        assert all(isinstance(value, Tensor) for value in values)
        assert all(isinstance(size, int) for value in values for size in value.shape)
    for x in (torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, 2.0]), torch.randn(4)):
        assert torch.equal(whole.module(x)[0], model(x))


def test_literals_on_the_cpu_are_made_in_each_part_that_uses_them() -> None:
    """A captured graph has no inputs on the CPU, but may contain literals."""
    model = Model(lambda s, x: ((x * (k := torch.tensor(2.0))).sin() * k).exp())
    x = torch.randn(4)
    program = trace(model, [x], device="cuda:0").program
    literal = "constant__tensor_constant0"
    for node in program.module.graph.nodes:
        if node.name in (literal, "lift_fresh_copy", "detach_"):
            node.meta["val"].fake_device = torch.device("cpu")
    graph = analyze(program)
    graph = replace(graph, ops={**graph.ops, "sin": replace(graph.ops["sin"], uncapturable=REFUSED)})
    whole = split_program(program, graph, cut_everything(graph), [True, False], ())
    made = ["lift_fresh_copy", "detach_"]
    assert nodes(whole, 0) == [literal, "input_0", *made, "mul", "output"]
    assert nodes(whole, 1) == ["mul", "sin", "output"]
    assert nodes(whole, 2) == [literal, "sin", *made, "mul_1", "exp", "output"]
    assert torch.equal(whole.module(torch.tensor(2.0), x)[0], model(x))


def test_copies_beside_other_parts_start_as_soon_as_their_source_is_there() -> None:
    """The upload of x starts first, the download of part_0's result after that part::

    x (host) ──▶ upload ───────╮
    y ──▶ part_0 ──┬───────────┴▶ part_2
                   ╰──▶ download
    """

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        for _ in range(5):
            y = y.sin()
        uploaded = x.to(torch.float64)
        for _ in range(5):
            uploaded = uploaded.cos()
        return uploaded + y, y.to(torch.float32)

    x, y = torch.randn(512, 512, dtype=torch.float16), torch.randn(1024, 1024, dtype=torch.float64)[::2, ::2]
    case = case_of(function, x, y)
    program = replace(case.program, device="cuda:0")
    inputs = program.module.graph.find_nodes(op="placeholder")  # by version of torch, x or y comes first
    x_name = next(node.name for node in inputs if value_of(node).dtype is torch.float16)
    for node in program.module.graph.nodes:
        on_host = node.name in (x_name, "to_1")
        for value in tensors_in(value_of(node)):
            value.fake_device = torch.device("cpu" if on_host else "cuda:0")  # type: ignore[attr-defined]
    graph = analyze(program)
    whole = split_program(program, graph, cut_everything(graph), [False, False], ())
    assert [section.beside for section in whole.sections] == [False, True, False, True]
    assert [name for name, _ in whole.module.named_children()] == ["part_0", "part_2"]
    names = {node.name: node for node in whole.module.graph.nodes}
    assert list(names) == [
        *(*(node.name for node in inputs), "reserve", "part_0", "getitem", "mark", "upload", "part_2", "getitem_1"),
        *("copy_beside", "output"),
    ]
    assert names["reserve"].args == ("cuda:0", (512, 512), (512, 1), torch.float64)
    assert names["upload"].args == (names["reserve"], names[x_name], False)
    assert names["part_2"].args == (names["upload"], names["getitem"])
    arguments = (names["getitem"], torch.float32)
    assert names["copy_beside"].args == (names["mark"], "cuda:0", "download", torch.ops.aten.to.dtype, *arguments)
    assert [list(section.program.outputs) for section in whole.sections] == [["sin_4"], ["to"], ["add"], ["to_1"]]


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_results_are_the_same_for_any_parts_and_copies_beside_them(model: str, data: Any) -> None:
    """Any op may count as a copy. It starts after the parts that it depends on, and before all later parts."""
    case = sample(model)
    refused = data.draw(st.sets(st.sampled_from(list(case.graph.ops))))
    copies = data.draw(st.sets(st.sampled_from(sorted(refused)))) if refused else set()
    graph = graph_with(case.program, lambda op: op.name in refused)
    check_same(case, split_at(case, graph))
    as_copies = {name: replace(graph.ops[name], crosses="download", bytes_written=LONG_BYTES) for name in copies}
    graph = replace(graph, ops={**graph.ops, **as_copies})
    parts = cut_everything(graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "mark", mark := lambda device: "event")
        patch.setattr(host_copies, "_beside", lambda since, device, copies: nullcontext())
        whole = split_at(case, graph, parts)
        check_same(case, whole)
    order, views = list(whole.module.graph.nodes), argument_views(case.program.module.graph)
    calls = {node.target: order.index(node) for node in order if node.op == "call_module"}
    copied = [node for node in order if node.target is host_copies.copy_beside]
    names = [op for part in parts if part.beside for op in part.ops]
    for node, op in zip(copied, names, strict=True):
        start = node.args[0]
        assert isinstance(start, fx.Node)
        assert start.target is mark
        sources = [source for source in node.all_input_nodes if source.name not in views]
        assert all(order.index(source) <= order.index(start) for source in sources)
        before = {d.before for d in graph.dependencies if d.after == op}
        needed = [calls[f"part_{at}"] for at, part in enumerate(parts) if before & {*part.ops} and not part.beside]
        assert all(call < order.index(start) for call in needed)
        assert order.index(start) < min(call for call in calls.values() if call > max(needed, default=-1))
