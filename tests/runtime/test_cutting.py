"""Programs in parts: what is written where, by hand; and that it computes the same, however it is cut."""

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

from autostream.analysis.argument_views import argument_views
from autostream.analysis.dependencies import analyze
from autostream.analysis.source import user_line
from autostream.analysis.values import tensors_in, value_of
from autostream.frontend.trace import trace
from autostream.ir import Op, OpGraph, Role
from autostream.runtime import host_copies as crossing
from autostream.runtime.cutting import SplitProgram, split_program
from autostream.scheduling.cut import LONG_BYTES, Part
from tests.cuts import REFUSED, cut_everything, graph_with, placed
from tests.runtime.programs import MODELS, Case, case_of, same, sample
from tests.semantics import Model


def taken_apart(case: Case, refused: Callable[[Op], bool]) -> SplitProgram:
    """A program, cut at these ops and those that depend on numbers of the device."""
    graph = graph_with(case.program, refused)
    return in_parts(case, graph, cut_everything(graph))


def in_parts(case: Case, graph: OpGraph, parts: Sequence[Part]) -> SplitProgram:
    """These parts of a program; one that runs as it is, where there are none."""
    bound = [p.role is not Role.INPUT for p in case.program.placeholders]
    looks = argument_views(case.program.module.graph)
    return split_program(case.program, graph, parts or (Part(tuple(graph.ops), ""),), bound, looks)


def named(*names: str) -> Callable[[Op], bool]:
    return lambda op: op.name in names


def graph_of(whole: SplitProgram, place: int) -> fx.Graph:
    return whole.sections[place].program.module.graph


def nodes(whole: SplitProgram, place: int) -> list[str]:
    return [node.name for node in graph_of(whole, place).nodes]


def check_same(case: Case, whole: SplitProgram) -> None:
    args = case.args()
    with torch.no_grad():
        outputs = whole.module(*args)
    expected, expected_args = case.expected()
    assert same(outputs, expected)
    assert same(args, expected_args)


def test_values_go_from_part_to_part() -> None:
    """X ─▶ sin ─▶ COS ─▶ add, which takes sin as well; the weight comes first, for it stays."""
    model = Model(lambda s, x: (top := x.sin()).cos() + top * s.w, w=nn.Parameter(torch.randn(4)))
    case = case_of(model, torch.randn(4))
    whole = taken_apart(case, named("cos"))
    assert [section.captured for section in whole.sections] == [True, False, True]
    assert nodes(whole, 0) == ["parameter_w", "input_0", "sin", "mul", "output"]
    assert nodes(whole, 1) == ["sin", "cos", "output"]
    assert nodes(whole, 2) == ["cos", "mul", "add", "output"]
    assert [section.bound for section in whole.sections] == [{0}, set(), set()]
    assert [[p.role for p in section.program.placeholders] for section in whole.sections] == [
        [Role.PARAMETER, Role.INPUT], [Role.INPUT], [Role.INPUT] * 2
    ]  # fmt: skip
    assert [section.program.outputs for section in whole.sections] == [("sin", "mul"), ("cos",), ("add",)]
    check_same(case, whole)


def test_what_looks_at_the_same_memory_is_known_to() -> None:
    case = case_of(lambda x: (top := x.sin())[1:].cos() + top[1:].exp() + top[0], torch.randn(4))
    whole = taken_apart(case, named("cos", "exp", "add", "add_1"))
    storages = {placeholder.storage for placeholder in whole.sections[1].program.placeholders}
    assert len(whole.sections[1].program.placeholders) == 3
    assert storages == {whole.sections[1].program.placeholders[0].storage}
    check_same(case, whole)


def test_each_part_has_its_own_views_of_arguments() -> None:
    """Of the transposed weight, both parts are given the weight."""
    model = Model(lambda s, x: (x @ s.w.t()).sin() @ s.w.t(), w=nn.Parameter(torch.randn(4, 4)))
    case = case_of(model, torch.randn(4, 4))
    whole = taken_apart(case, named("sin"))
    assert [nodes(whole, at) for at in (0, 2)] == [
        ["parameter_w", "input_1", "t", "matmul", "output"],
        ["parameter_w", "sin", "t_1", "matmul_1", "output"],
    ]
    assert [section.bound for section in whole.sections] == [{0}, set(), {0}]
    check_same(case, whole)


def test_a_view_that_may_be_a_copy_is_made_before_what_is_written_afterwards() -> None:
    """Made in the last part, where only it is used, a copy would have what was written meanwhile."""

    def model(x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        y = x.sin().cos()
        x.add_(1)
        return y.reshape(-1) + flat

    whole = taken_apart(case_of(model, torch.randn(3, 3)), named("sin"))
    assert "reshape" in nodes(whole, 0)
    for x in (torch.randn(3, 3), torch.randn(3, 3).t()):
        assert same(whole.module(x.clone()), [model(x)])


def test_a_view_that_may_be_a_copy_is_in_a_part_of_its_device() -> None:
    """Nothing before that writes there; in the first part, a graph would be given tensors of two devices."""
    model = Model(
        lambda s, x: (x.reshape(-1).sin(), (flat := s.far.reshape(-1)).cos(), s.far.add_(1), flat.exp()),
        far=nn.Buffer(torch.randn(3, 3)),
    )
    case = case_of(model, torch.randn(3, 3))
    program = placed(case.program)
    graph = analyze(program)
    whole = split_program(program, graph, cut_everything(graph), [True, False], argument_views(program.module.graph))
    values = [
        [tensor.device for node in graph_of(whole, at).nodes for tensor in tensors_in(value_of(node))] for at in (0, 1)
    ]
    assert [set(map(str, each)) for each in values] == [{"cuda:0"}, {"cuda:1"}]
    assert [name for at in (0, 1) for name in nodes(whole, at) if "reshape" in name] == ["reshape", "reshape_1"]
    check_same(case, whole)


def test_outputs_may_be_arguments_and_views_of_them() -> None:
    case = case_of(lambda x, y: (x.neg_(), y[1:], x.sin().cos(), x.t()), torch.randn(3, 3), torch.randn(3))
    whole = taken_apart(case, named("sin"))
    args = case.args()
    x, part, _, view = whole.module(*args)
    assert x is args[0]
    assert (part.data_ptr(), view.data_ptr()) == (args[1][1:].data_ptr(), x.data_ptr())
    check_same(case, whole)


def test_numbers_go_between_parts_that_are_not_captured() -> None:
    def model(x: Tensor) -> Tensor:
        number = x.sin().max().item()
        return (x * number + x * (number + 1)).cos().exp()

    case = case_of(model, torch.randn(4))
    whole = taken_apart(case, lambda op: False)
    assert [list(section.program.outputs) for section in whole.sections] == [["max_1"], ["mul", "mul_1"], ["exp"]]
    for seed in range(3):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(whole.module(x)[0], model(x))


def test_shapes_that_depend_on_data_stay_outside_of_graphs() -> None:
    def model(x: Tensor) -> Tensor:
        return x[x.cos().nonzero()[:, 0]].sin().sum(0) + x.exp()

    case = case_of(model, torch.randn(4))
    whole = taken_apart(case, lambda op: False)
    inner = [node for section in whole.sections if section.captured for node in section.program.module.graph.nodes]
    values = [node.meta.get("val") for node in inner]
    assert all(isinstance(size, int) for value in values if isinstance(value, Tensor) for size in value.shape)
    for x in (torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, 2.0])):
        assert torch.equal(whole.module(x)[0], model(x))


def test_the_users_lines_stay() -> None:
    whole = taken_apart(case_of(lambda x: x.sin().cos(), torch.randn(4)), named("cos"))
    found = {node.name: user_line(node.stack_trace) for at in (1, 0) for node in graph_of(whole, at).nodes}
    assert "test_cutting.py" in found["sin"]
    assert found["cos"] == found["sin"]


def test_literals_on_the_cpu_are_made_in_each_part_that_uses_them() -> None:
    """A graph can be given nothing on the CPU, and keeps what is made there from literals."""
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


def test_copies_beside_begin_behind_what_they_need() -> None:
    """The upload of x begins before all else, the download of what part_0 makes behind that::

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
    given = (names["getitem"], torch.float32)
    assert names["copy_beside"].args == (names["mark"], "cuda:0", "download", torch.ops.aten.to.dtype, *given)
    assert [list(section.program.outputs) for section in whole.sections] == [["sin_4"], ["to"], ["add"], ["to_1"]]


def flattened(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Given another layout, the flat tensor is a copy, which no op makes."""
    flat = y.reshape(-1)
    for _ in range(5):
        x = x.sin()
    return x, flat.to(torch.float64)


def halves(x: Tensor, y: Tensor) -> Tensor:
    """Memory that two ops are the first to use is made by none."""
    both = torch.empty(2 * len(x), len(x), dtype=x.dtype, device=x.device)
    for _ in range(5):
        x = x.sin()
    both[: len(x)].copy_(y)
    both[len(x) :].copy_(x)
    for _ in range(5):
        both = both.cos()
    return both


@pytest.mark.parametrize(("function", "copy"), [(flattened, "to"), (halves, "copy_")])
def test_a_copy_beside_waits_for_what_no_op_has_made(function: Callable[..., Any], copy: str) -> None:
    """That is made in the first part, so the copy begins behind it."""
    case = case_of(function, torch.randn(512, 512), torch.randn(512, 512))
    graph = graph_with(case.program, lambda op: op.name == copy)
    one = replace(graph.ops[copy], crosses="download" if copy == "to" else "upload", bytes_written=LONG_BYTES)
    graph = replace(graph, ops={**graph.ops, copy: one})
    whole = split_program(case.program, graph, cut_everything(graph), [False, False], ())
    assert whole.sections[1].beside
    assert "copy_beside" in (names := [node.name for node in whole.module.graph.nodes])
    assert names.index("part_0") < names.index("mark") < names.index("copy_beside")


def test_memory_that_is_taken_for_a_copy_alone_is_taken_in_its_place() -> None:
    """And the copy waits for nothing that comes before."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(5):
            x = x.sin()
        return x, torch.empty(512, 512).copy_(y)

    case = case_of(function, torch.randn(512, 512), torch.randn(512, 512))
    graph = graph_with(case.program, lambda op: op.name == "copy_")
    copied = replace(graph.ops["copy_"], crosses="download", bytes_written=LONG_BYTES)
    assert len(copied.nodes) == 2
    graph = replace(graph, ops={**graph.ops, "copy_": copied})
    whole = in_parts(case, graph, cut_everything(graph))
    names = [node.name for node in whole.module.graph.nodes]
    assert names.index("mark") < names.index("part_0") < names.index("empty") < names.index("copy_beside")


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_with_copies_beside_it_computes_the_same(model: str, data: Any) -> None:
    """Any op may be said to copy: it is called in its place, and waits for what is over when it is begun."""
    case = sample(model)
    refused = data.draw(st.sets(st.sampled_from(list(case.graph.ops))))
    copies = data.draw(st.sets(st.sampled_from(sorted(refused)))) if refused else set()
    graph = graph_with(case.program, lambda op: op.name in refused)
    ops = {
        n: replace(op, crosses="download", bytes_written=LONG_BYTES) if n in copies else op
        for n, op in graph.ops.items()
    }
    graph = replace(graph, ops=ops)
    parts = cut_everything(graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossing, "mark", mark := lambda device: "moment")
        patch.setattr(crossing, "_beside", lambda since, device, copies: nullcontext())
        whole = in_parts(case, graph, parts)
        check_same(case, whole)
    nodes, looks = list(whole.module.graph.nodes), argument_views(case.program.module.graph)
    calls = {node.target: nodes.index(node) for node in nodes if node.op == "call_module"}
    copied = [node for node in nodes if node.target is crossing.copy_beside]
    assert len(copied) == sum(len(part.ops) for part in parts if part.beside)
    names = [op for part in parts if part.beside for op in part.ops]
    for node, op in zip(copied, names, strict=True):
        begun = node.args[0]
        assert isinstance(begun, fx.Node)
        assert begun.target is mark
        sources = [source for source in node.all_input_nodes if source.name not in looks]
        assert all(nodes.index(source) <= nodes.index(begun) for source in sources), "it is there by then"
        before = {d.before for d in graph.dependencies if d.after == op}
        needed = [calls[f"part_{at}"] for at, part in enumerate(parts) if before & {*part.ops} and not part.beside]
        assert all(call < nodes.index(begun) for call in needed)
        later = [call for call in calls.values() if call > max(needed, default=-1)]
        assert nodes.index(begun) < min(later)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_however_it_is_cut_it_computes_the_same(model: str, data: Any) -> None:
    case = sample(model)
    refused = data.draw(st.sets(st.sampled_from(list(case.graph.ops))))
    check_same(case, taken_apart(case, lambda op: op.name in refused))
