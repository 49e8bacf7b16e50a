"""Which nodes become ops, what they access and what orders them: by hand, by random programs, on real models."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from autostream.analysis.capturability import NUMBER
from autostream.analysis.dependencies import analyze
from autostream.cli.zoo import build
from autostream.ir import Hazard, OpGraph, Role
from tests.analysis.programs import Case, Tape, aten, exported, run, same, topological_order
from tests.analysis.random_programs import random_programs


def edges(graph: OpGraph) -> set[tuple[str, str, str]]:
    return {(d.before, d.after, d.hazard.name) for d in graph.dependencies}


def op_of(graph: OpGraph, node: fx.Node) -> str:
    """The op that issues a node."""
    return next(op.name for op in graph.ops.values() if node.name in op.nodes)


@pytest.fixture
def tape() -> Tape:
    return Tape()


class TestRandomPrograms:
    @settings(max_examples=120, deadline=None)
    @given(random_programs())
    def test_every_order_that_the_graph_allows_computes_the_same(self, case: Case) -> None:
        graph = analyze(case.program)
        expected = run(case)
        for seed in (None, 0, 1):
            found = run(case, topological_order(graph, seed))
            assert same(found.outputs, expected.outputs)
            assert same(found.arguments, expected.arguments)
            assert same(map(found.values.get, expected.values), expected.values.values()), "also what nobody returns"

    @settings(max_examples=60, deadline=None)
    @given(random_programs())
    def test_values_that_share_memory_occupy_a_common_storage(self, case: Case) -> None:
        storages = analyze(case.program).storages.values()
        occupied = defaultdict(set)
        for storage in storages:
            for node in storage.holders:
                occupied[node].add(storage.name)
        sharing = defaultdict(set)
        for name, value in run(case).values.items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    sharing[leaf.untyped_storage().data_ptr()].add(name)
        for names in sharing.values():
            assert all(occupied[a] & occupied[b] for a in names for b in names)

    @settings(max_examples=60, deadline=None)
    @given(random_programs())
    def test_the_graph_is_consistent(self, case: Case) -> None:
        assert_consistent(analyze(case.program), case)


def assert_consistent(graph: OpGraph, case: Case) -> None:
    """Each node is issued once, each intermediate comes into being once, each dependency has its reason."""
    issued = [*graph.prelude, *(node for op in graph.ops.values() for node in op.nodes)]
    assert sorted(issued) == sorted(n for n, node in case.nodes.items() if node.op in ("call_function", "get_attr"))
    allocated = Counter(name for op in graph.ops.values() for name in op.allocates)
    intermediates = {name for name, storage in graph.storages.items() if storage.role is Role.INTERMEDIATE}
    assert allocated == dict.fromkeys(intermediates - set(graph.prelude), 1)
    position = {op: index for index, op in enumerate(graph.ops)}
    assert len(edges(graph)) == len(graph.dependencies)
    whole = {part: storage.name for storage in graph.storages.values() for part in storage.parts}
    for dependency in graph.dependencies:
        before, after, resource = graph.ops[dependency.before], graph.ops[dependency.after], dependency.resource
        assert position[before.name] < position[after.name]
        names = {resource, whole.get(resource, resource)}
        reason = {
            Hazard.RAW: names & before.writes and names & after.reads,
            Hazard.WAR: names & before.reads and names & after.writes,
            Hazard.WAW: names & before.writes and names & after.writes,
            Hazard.ORDER: resource in before.orders & after.orders,
        }
        assert reason[dependency.hazard]
    returned = set(case.program.outputs)
    for storage in graph.storages.values():
        assert storage.escapes == bool(returned.intersection(storage.holders))
    assert all(op.allocates <= op.writes and not op.allocates & op.reads for op in graph.ops.values())
    assert set().union(*(op.reads | op.writes for op in graph.ops.values())) <= graph.storages.keys() | whole.keys()


class TestFolding:
    def test_views_go_with_what_they_look_at(self, tape: Tape) -> None:
        """``x ─▶ relu ─▶ t ─▶ add_ ─▶ view``: after add_, memory is what add_ made it."""
        x = tape.input(4, 4)
        relu = tape.call(aten.relu.default, x)
        t = tape.call(aten.t.default, relu)
        add_ = tape.call(aten.add_.Tensor, t, 1)
        late = tape.call(aten.detach.default, relu)
        graph = analyze(tape.case([late]).program)
        assert graph.ops[relu.name].nodes == (relu.name, t.name)
        assert graph.ops[add_.name].nodes == (add_.name, late.name)
        assert graph.prelude == ()

    def test_views_of_placeholders_come_first(self, tape: Tape) -> None:
        weight = tape.input(4, 4, role=Role.PARAMETER)
        t = tape.call(aten.t.default, weight)
        size = tape.number(aten.sym_size.int, weight, 0, value=4)
        y = tape.call(aten.mul.Tensor, t, size)
        graph = analyze(tape.case([y]).program)
        assert graph.prelude == (t.name, size.name)
        assert list(graph.ops) == [y.name]

    def test_a_view_of_a_placeholder_that_was_written_goes_with_the_writer(self, tape: Tape) -> None:
        buffer = tape.input(4, 4, role=Role.BUFFER)
        add_ = tape.call(aten.add_.Tensor, buffer, 1)
        t = tape.call(aten.t.default, buffer)
        graph = analyze(tape.case([t]).program)
        assert graph.ops[add_.name].nodes == (add_.name, t.name)

    def test_a_look_at_two_independent_results_is_an_op_of_its_own(self, tape: Tape) -> None:
        r"""Issued with either of them, it could come before the other::

        x ─▶ sin ─╲
                   broadcast_tensors ─▶ getitem ─▶ neg
        y ─▶ cos ─╱
        """
        sin = tape.call(aten.sin.default, tape.input(4))
        cos = tape.call(aten.cos.default, tape.input(4))
        both = tape.call(aten.broadcast_tensors.default, [sin, cos])
        first = tape.call(operator.getitem, both, 0)
        neg = tape.call(aten.neg.default, first)
        graph = analyze(tape.case([neg]).program)
        assert graph.ops[both.name].nodes == (both.name, first.name)
        # What was looked at is read besides: neg may read memory of sin, of cos, or of both.
        assert edges(graph) >= {
            (sin.name, both.name, "RAW"),
            (cos.name, both.name, "RAW"),
            (both.name, neg.name, "RAW"),
        }
        assert graph.ops[both.name].allocates == {both.name, f"{both.name}.1"}, "stand for the two results"
        assert graph.storages[both.name].bytes == graph.ops[both.name].bytes_written == 0

    def test_a_look_at_dependent_results_goes_with_the_later(self, tape: Tape) -> None:
        sin = tape.call(aten.sin.default, tape.input(4))
        cos = tape.call(aten.cos.default, sin)
        both = tape.call(aten.broadcast_tensors.default, [sin, cos])
        graph = analyze(tape.case([tape.call(operator.getitem, both, 0)]).program)
        assert op_of(graph, both) == cos.name

    def test_a_reshape_that_may_copy_stays_with_the_allocating_op(self, tape: Tape) -> None:
        """If it copies where it runs, the copy's memory must be of the stream on which its base is released."""
        sin = tape.call(aten.sin.default, tape.input(4, 4))
        early = tape.call(aten.reshape.default, sin, [16])
        relu_ = tape.call(aten.relu_.default, sin)
        late, view = tape.call(aten.reshape.default, sin, [16]), tape.call(aten.view.default, sin, [16])
        graph = analyze(tape.case([early, late, view]).program)
        assert graph.ops[sin.name].nodes == (sin.name, early.name)
        assert graph.ops[relu_.name].nodes == (relu_.name, view.name)
        assert graph.ops[late.name].nodes == (late.name,)

    def test_a_look_at_memory_that_the_last_writer_does_not_use_is_an_op(self, tape: Tape) -> None:
        """The reshape, which may copy, could be released right after it: nothing that uses its memory comes later.

        relu_ ──▶ reshape    relu__1    select      select looks at both
          └────────────────────▲
        """
        x = tape.input(4)
        reshape = tape.call(aten.reshape.default, tape.call(aten.relu_.default, x), [4])
        written = tape.call(aten.relu_.default, x)
        select = tape.call(aten.select.int, reshape, 0, 0)
        graph = analyze(tape.case([]).program)
        assert graph.ops[written.name].nodes == (written.name,)
        assert graph.ops[select.name].nodes == (select.name,)
        assert graph.users[reshape.name] == (reshape.name, select.name)

    def test_an_idle_dropout_is_no_op(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(inplace=True)).eval()
        graph = analyze(exported(model, torch.randn(2, 4)).program)
        assert [op.nodes for op in graph.ops.values()] == [("linear", "dropout"), ("relu_",)]
        assert graph.ops["relu_"].writes == {"linear"}


class TestMemoryThatIsTaken:
    """Memory that holds nothing yet comes into being with the op that uses it first."""

    @staticmethod
    def taken(tape: Tape) -> fx.Node:
        return tape.call(aten.empty.memory_format, [4, 4], device=torch.device(tape.device))

    def test_it_is_issued_right_before_its_first_user_on_its_stream(self, tape: Tape) -> None:
        """``empty ─▶ view ─▶ fill_ ─▶ exp``, and an op in between that has nothing to do with it."""
        x, empty = tape.input(4), self.taken(tape)
        view = tape.call(aten.view.default, empty, [16])
        other = tape.call(aten.relu.default, x)
        fill = tape.call(aten.fill_.Scalar, view, 1.0)
        exp = tape.call(aten.exp.default, empty)
        graph = analyze(tape.case([other, exp]).program)
        assert graph.ops[fill.name].nodes == (empty.name, view.name, fill.name)
        assert graph.ops[fill.name].allocates == {empty.name}
        assert edges(graph) == {(fill.name, exp.name, "RAW")}
        assert list(graph.ops) == [other.name, fill.name, exp.name]

    def test_the_first_user_takes_all_the_memory_that_it_is_given(self, tape: Tape) -> None:
        x, out, indices = (
            tape.input(4, 4),
            self.taken(tape),
            tape.call(aten.empty.memory_format, [4], dtype=torch.int64),
        )
        best = tape.call(aten.max.dim_max, x, 1, max=tape.call(aten.select.int, out, 0, 0), max_values=indices)
        graph = analyze(tape.case([out]).program)
        assert graph.ops[best.name].allocates >= {out.name, indices.name}
        assert graph.ops[best.name].nodes[-1] == best.name

    def test_later_users_come_after_the_first(self, tape: Tape) -> None:
        empty = self.taken(tape)
        overlapping = [tape.call(aten.slice.Tensor, empty, 0, row, row + 2) for row in (0, 1)]
        first, second = (tape.call(aten.fill_.Scalar, rows, 1.0) for rows in overlapping)
        graph = analyze(tape.case([empty]).program)
        assert graph.ops[first.name].nodes == (empty.name, *(rows.name for rows in overlapping), first.name)
        assert edges(graph) == {(first.name, second.name, "WAW")}

    def test_what_nobody_uses_is_an_op_of_its_own(self, tape: Tape) -> None:
        empty = self.taken(tape)
        view = tape.call(aten.view.default, empty, [16])
        graph = analyze(tape.case([view]).program)
        assert [op.nodes for op in graph.ops.values()] == [(empty.name, view.name)]
        assert graph.storages[empty.name].escapes

    def test_what_is_sized_by_a_tensor_is_taken_where_the_program_says(self, tape: Tape) -> None:
        """Later, that tensor might be gone."""
        like = tape.call(aten.empty_like.default, tape.input(4))
        fill = tape.call(aten.fill_.Scalar, like, 1.0)
        graph = analyze(tape.case([fill]).program)
        assert [op.nodes for op in graph.ops.values()] == [(like.name,), (fill.name,)]

    def test_a_number_that_is_asked_of_it_is_there_for_whoever_uses_it(self, tape: Tape) -> None:
        """``empty ─▶ size ─▶ mul``, before anything is written."""
        x, empty = tape.input(4), self.taken(tape)
        size = tape.number(aten.sym_size.int, empty, 0, value=4)
        mul = tape.call(aten.mul.Tensor, x, size)
        fill = tape.call(aten.fill_.Scalar, empty, 1.0)
        graph = analyze(tape.case([mul, fill]).program)
        assert [op.nodes for op in graph.ops.values()] == [(empty.name, size.name), (mul.name,), (fill.name,)]
        assert (empty.name, mul.name, "RAW") in edges(graph)

    def test_a_look_at_two_comes_after_both(self, tape: Tape) -> None:
        one, other = self.taken(tape), self.taken(tape)
        both = tape.call(aten.broadcast_tensors.default, [one, other])
        fill = tape.call(aten.fill_.Scalar, tape.call(operator.getitem, both, 0), 1.0)
        graph = analyze(tape.case([fill]).program)
        assert list(graph.ops)[:2] == [one.name, other.name]
        assert {before for before, after, _ in edges(graph) if after in (both.name, fill.name)} >= {
            one.name,
            other.name,
        }

    def test_memory_of_another_device_is_not_the_streams(self) -> None:
        tape = Tape("cuda:0")
        empty = tape.call(aten.empty.memory_format, [4])
        fill = tape.call(aten.fill_.Scalar, empty, 1.0)
        graph = analyze(tape.case([fill]).program)
        assert [op.nodes for op in graph.ops.values()] == [(empty.name,), (fill.name,)]


class TestMemoryInParts:
    """Ops that write different parts of one storage are ordered by it only against those that use the same parts."""

    @staticmethod
    def columns(tape: Tape, whole: fx.Node, count: int = 2) -> list[fx.Node]:
        width = 4 // count
        return [tape.call(aten.slice.Tensor, whole, 1, at, at + width) for at in range(0, 4, width)]

    @pytest.fixture
    def empty(self, tape: Tape) -> fx.Node:
        return tape.call(aten.empty.memory_format, [4, 4])

    def test_it_is_taken_with_the_latest_op_that_all_users_come_after(self, tape: Tape, empty: fx.Node) -> None:
        r"""After ``mul`` nothing is before both writers::

                    ╭▶ sin ─▶ copy_ ─╮
        exp ─▶ mul ─┤                ├▶ neg
                    ╰▶ cos ─▶ copy_ ─╯
        """
        left, right = self.columns(tape, empty)
        mul = tape.call(aten.mul.Tensor, tape.call(aten.exp.default, tape.input(4, 2)), 2.0)
        sin, cos = tape.call(aten.sin.default, mul), tape.call(aten.cos.default, mul)
        first, second = tape.call(aten.copy_.default, left, sin), tape.call(aten.copy_.default, right, cos)
        neg = tape.call(aten.neg.default, empty)
        graph = analyze(tape.case([neg]).program)
        assert graph.ops[mul.name].nodes == (empty.name, left.name, right.name, mul.name)
        assert graph.ops[mul.name].allocates == graph.ops[mul.name].writes == {mul.name, empty.name}
        one, other = graph.storages[empty.name].parts
        assert (graph.ops[first.name].writes, graph.ops[second.name].writes) == ({one}, {other})
        assert graph.ops[neg.name].reads == {empty.name}
        assert {
            (before, after) for before, after, _ in edges(graph) if after in (first.name, second.name, neg.name)
        } == {
            (sin.name, first.name),
            (cos.name, second.name),
            (first.name, neg.name),
            (second.name, neg.name),
        }

    def test_it_is_taken_before_the_fork_where_no_op_comes_before_all_users(self, tape: Tape, empty: fx.Node) -> None:
        left, right = self.columns(tape, empty)
        fills = [tape.call(aten.fill_.Scalar, half, 1.0) for half in (left, right)]
        graph = analyze(tape.case([empty]).program)
        assert graph.prelude == (empty.name, left.name, right.name)
        assert graph.dependencies == ()
        assert [op.allocates for op in graph.ops.values()] == [frozenset()] * 2
        assert graph.pinned == frozenset()
        assert list(graph.ops) == [fill.name for fill in fills]

    def test_it_is_taken_by_the_first_user_where_all_others_come_after_that(self, tape: Tape, empty: fx.Node) -> None:
        left, right = self.columns(tape, empty)
        zero_ = tape.call(aten.zero_.default, empty)
        adds = [tape.call(aten.add_.Tensor, half, 1.0) for half in (left, right)]
        graph = analyze(tape.case([empty]).program)
        assert graph.ops[zero_.name].nodes == (empty.name, left.name, right.name, zero_.name)
        assert graph.ops[zero_.name].allocates == {empty.name}
        assert edges(graph) == {(zero_.name, add.name, "RAW") for add in adds}

    def test_looks_that_come_late_are_issued_with_it(self, tape: Tape) -> None:
        """Each slice is looked at right before it is written, as Inductor does; and one is read alone."""
        zeros = tape.call(aten.zeros.default, [4, 4])
        looks = []
        for at in (0, 2):
            looks.append(tape.call(aten.slice.Tensor, zeros, 1, at, at + 2))
            tape.call(aten.add_.Tensor, looks[-1], 1.0)
        parts = tape.call(aten.split.Tensor, zeros, 2, 1)
        looks += [parts, tape.call(operator.getitem, parts, 1)]
        neg = tape.call(aten.neg.default, looks[-1])
        graph = analyze(tape.case([neg]).program)
        assert graph.ops[zeros.name].nodes == (zeros.name, *(look.name for look in looks))
        assert graph.ops[zeros.name].writes == graph.ops[zeros.name].allocates == {zeros.name}
        assert list(graph.digraph.predecessors(neg.name)) == ["add__tensor_1"]

    def test_a_reader_of_a_part_is_in_the_way_of_those_who_write_it(self, tape: Tape) -> None:
        zeros = tape.call(aten.zeros.default, [4, 4])
        left, right = self.columns(tape, zeros)
        exp = tape.call(aten.exp.default, left)
        adds = [tape.call(aten.add_.Tensor, half, 1.0) for half in (left, right)]
        graph = analyze(tape.case([exp, zeros]).program)
        assert (exp.name, adds[0].name, "WAR") in edges(graph)
        assert list(graph.digraph.predecessors(adds[1].name)) == [zeros.name]

    def test_memory_of_another_device_is_divided_where_it_is_taken(self) -> None:
        tape = Tape("cuda:0")
        empty = tape.call(aten.empty.memory_format, [4, 4])
        fills = [tape.call(aten.fill_.Scalar, half, 1.0) for half in self.columns(tape, empty)]
        graph = analyze(tape.case(fills).program)
        assert edges(graph) == {(empty.name, fill.name, "WAW") for fill in fills}


class TestHazards:
    def test_parameters_that_are_only_read_order_nothing(self, tape: Tape) -> None:
        x, w = tape.input(4, 4), tape.input(4, 4, role=Role.PARAMETER)
        left, right = tape.call(aten.mm.default, x, w), tape.call(aten.mm.default, w, x)
        assert analyze(tape.case([left, right]).program).dependencies == ()

    def test_a_write_to_a_slice(self) -> None:
        """The reader of the whole and the writer of a part meet in the storage."""

        def model(x: Tensor) -> tuple[Tensor, Tensor]:
            base = x * 2
            before = base.sum()
            base[0].add_(1)
            return before, base.t()

        graph = analyze(exported(model, torch.ones(3, 3)).program)
        assert edges(graph) == {("mul", "sum_1", "RAW"), ("sum_1", "add_", "WAR"), ("mul", "add_", "RAW")}
        assert graph.ops["add_"].nodes == ("add_", "t")

    def test_overwriting_waits_for_the_writer(self, tape: Tape) -> None:
        x = tape.call(aten.sin.default, tape.input(4))
        zero_ = tape.call(aten.zero_.default, x)
        graph = analyze(tape.case([zero_]).program)
        assert edges(graph) == {(x.name, zero_.name, "WAW")}

    def test_arguments_that_share_memory(self, tape: Tape) -> None:
        x = tape.input(4)
        y = tape.input_like(x)
        neg = tape.call(aten.neg.default, y)
        add_ = tape.call(aten.add_.Tensor, x, 1)
        graph = analyze(tape.case([neg, add_]).program)
        assert edges(graph) == {(neg.name, add_.name, "WAR")}
        assert graph.storages["in0"].holders == ("in0", "in1", add_.name)

    def test_running_statistics(self) -> None:
        """Two calls of one batch norm: the second updates what the first updated."""

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(4)

            def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                return self.norm(x), self.norm(y)

        case = exported(Twice(), torch.randn(3, 4), torch.randn(3, 4))
        graph = analyze(case.program)
        assert ("batch_norm", "batch_norm_1", "RAW") in edges(graph)
        assert graph.ops["batch_norm"].writes >= {"b_norm_running_mean", "b_norm_running_var"}
        assert analyze(exported(Twice().eval(), torch.randn(3, 4), torch.randn(3, 4)).program).dependencies == ()

    def test_random_numbers_keep_their_order(self) -> None:
        def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return nn.functional.dropout(x), nn.functional.dropout(y)

        graph = analyze(exported(model, torch.ones(3), torch.ones(3)).program)
        assert edges(graph) == {("dropout", "dropout_1", "ORDER")}

    def test_renormalized_embeddings(self) -> None:
        """``embedding_renorm_`` writes the table, through a detached look at it, before ``embedding`` reads it."""
        graph = analyze(exported(nn.Embedding(5, 4, max_norm=1.0), torch.arange(3)).program)
        assert edges(graph) == {("embedding_renorm_", "embedding", "RAW")}

    def test_numbers_carry_dependencies(self, tape: Tape) -> None:
        x = tape.input(1)
        item = tape.number(aten.item.default, x)
        doubled = tape.number(operator.mul, item, 2)
        scaled = tape.call(aten.mul.Tensor, tape.input(4), doubled)
        graph = analyze(tape.case([scaled]).program)
        assert graph.ops[item.name].nodes == (item.name, doubled.name)
        assert edges(graph) == {(item.name, scaled.name, "RAW")}
        assert graph.storages[item.name].bytes == 0

    def test_a_result_that_is_an_untouched_argument(self, tape: Tape) -> None:
        """Users of it must come after the call that hands it out, though that call wrote nothing of it."""
        x = tape.call(aten.sin.default, tape.input(4))
        node = tape.graph.call_function(torch.ops.profiler._record_function_enter.default, ("name",))
        node.meta["val"] = x.meta["val"]
        neg = tape.graph.call_function(aten.neg.default, (node,))
        neg.meta["val"] = torch.empty(4)
        graph = analyze(tape.case([neg]).program)
        assert (node.name, neg.name, "RAW") in edges(graph)


class TestLstm:
    def test_results_of_one_op(self) -> None:
        def split(result: tuple[Tensor, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            return result[0].relu(), result[1][1].sin()

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(3, 4)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                return split(self.lstm(x))

        graph = analyze(exported(Model(), torch.randn(5, 1, 3)).program)
        assert graph.ops["lstm"].allocates == {"lstm", "lstm.1", "lstm.2"}
        assert graph.ops["relu"].reads == {"lstm"}
        assert graph.ops["sin"].reads == {"lstm.2"}
        assert graph.storages["lstm"].bytes == 5 * 1 * 4 * 4


class TestLiterals:
    """A graph captured for a GPU may keep what the CPU computed from literals, and only that."""

    @staticmethod
    def reasons(case: Case) -> dict[str, str]:
        return {op.name: op.uncapturable for op in analyze(case.program).ops.values()}

    def test_literals_and_what_follows_from_them(self) -> None:
        def model(x: Tensor) -> Tensor:
            return x * (torch.tensor(2.0) + torch.arange(3).add_(1))

        reasons = self.reasons(exported(model, torch.ones(3)))
        assert reasons.pop("mul") == "runs on the CPU"
        assert set(reasons.values()) == {""}
        assert {"lift_fresh_copy", "arange", "add_", "add"} <= reasons.keys()

    def test_random_numbers_and_attributes_are_none(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.constant = torch.ones(3)

            def forward(self, x: Tensor) -> Tensor:
                return x + torch.rand(3) + self.constant.sin()

        reasons = self.reasons(exported(Model(), torch.ones(3)))
        assert reasons["rand"] == reasons["sin"] == "runs on the CPU"

    @pytest.mark.parametrize("role", [Role.INPUT, Role.BUFFER, Role.CONSTANT])
    def test_a_number_on_the_cpu_that_may_change_from_run_to_run(self, role: Role) -> None:
        """On the GPU: x ─▶ mul ◀─ number on the CPU; the kernel takes it by value, which a graph would keep."""
        tape = Tape("cuda:0")
        x, number = tape.input(3), tape.input(role=role, device="cpu")
        case = tape.case([tape.call(aten.mul.Tensor, x, number)])
        assert self.reasons(case) == {"mul_tensor": NUMBER}

    def test_a_number_on_the_cpu_that_is_a_literal(self) -> None:
        tape = Tape("cuda:0")
        x, lifted = tape.input(3), tape.input(role=Role.CONSTANT, device="cpu")
        literal = tape.call(aten.lift_fresh_copy.default, lifted)
        case = tape.case([tape.call(aten.mul.Tensor, x, literal)])
        assert self.reasons(case) == {"lift_fresh_copy_default": "", "mul_tensor": ""}


class TestDescriptions:
    def test_where_and_what(self) -> None:
        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.sin().t()

        (op,) = analyze(exported(Model(), torch.ones(2, 3)).program).ops.values()
        assert (op.target, op.device, op.dtype, op.elements) == ("aten.sin.default", "cpu", "float32", 6)
        path, line, code = op.source.split(":", 2)
        assert Path(path).samefile(__file__)
        assert "return x.sin().t()" in Path(path).read_text().splitlines()[int(line) - 1]
        assert code.strip() == "return x.sin().t()"

    def test_copies_run_on_the_scheduled_device(self) -> None:
        tape = Tape("cuda:0")
        x = tape.input(4)
        host = tape.call(aten.to.device, x, torch.device("cpu"), torch.float32)
        on_host = tape.call(aten.neg.default, host)
        graph = analyze(tape.case([on_host]).program)
        assert [op.device for op in graph.ops.values()] == ["cuda:0", "cpu"]

    def test_targets_without_a_schema_have_their_name(self) -> None:
        def model(x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

        graph = analyze(exported(model, torch.ones(3)).program)
        assert graph.ops["cond"].target == "cond"
        assert len(graph.prelude) == 2, "the two branches"


class TestExportedModules:
    """Modules full of traps, in orders that are as unlike program order as the graph allows."""

    class Traps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
            self.lstm = nn.LSTM(4, 6, num_layers=2, dropout=0.3, batch_first=True)
            self.embedding = nn.Embedding(10, 4, max_norm=1.0)
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
            y = nn.functional.dropout(self.relu(self.norm(self.conv(x))), 0.5)
            turned = y.view(y.shape[0], 4, -1).transpose(1, 2)
            turned[0].add_(1)
            sequence, (hidden, _) = self.lstm(turned)
            left, right = torch.split(sequence, [2, 4], dim=-1)
            left.mul_(2)
            self.count.add_(1)
            e = self.embedding(i) + self.count
            with torch.autocast("cpu", dtype=torch.bfloat16):
                product = e @ e.T
            idle = nn.functional.dropout(e, 0.5, training=False)
            idle.sub_(1)
            return y, right.contiguous(), hidden.sum(), product, e, idle, y.expand(2, *y.shape), x.mT.reshape(2, 3, -1)

    def test_any_order_computes_the_same(self) -> None:
        torch.manual_seed(0)
        case = exported(self.Traps(), torch.randn(2, 3, 8, 8), torch.arange(5))
        graph = analyze(case.program)
        assert_consistent(graph, case)
        expected = run(case)
        for seed in (None, 0, 1, 2, 3):
            found = run(case, topological_order(graph, seed))
            assert same(found.outputs, expected.outputs)
            assert same(found.arguments, expected.arguments)


class TestRealModels:
    @pytest.mark.parametrize(
        ("name", "products"),
        [("googlenet", {"conv2d": 57, "linear": 1}), ("resnet18", {"conv2d": 20, "linear": 1})],
    )
    def test_image_models(self, name: str, products: dict[str, int]) -> None:
        model, (image,) = build(name)
        case = exported(model, image)
        graph = analyze(case.program)
        targets = Counter(op.target.split(".")[1] for op in graph.ops.values())
        assert products.items() <= targets.items()
        assert "dropout" not in targets
        assert nx.is_directed_acyclic_graph(graph.digraph)
        assert_consistent(graph, case)
        # Each op of these nets depends on its predecessors in the dataflow and on nothing else.
        assert {d.hazard for d in graph.dependencies} == {Hazard.RAW}

    def test_the_branches_of_googlenet_are_independent(self) -> None:
        model, (image,) = build("googlenet")
        graph = analyze(exported(model, image).program)
        generations = [list(ops) for ops in nx.topological_generations(graph.digraph)]
        assert max(map(len, generations)) == 4
        assert sum(len(list(graph.digraph.predecessors(op))) == 4 for op in graph.ops if "cat" in op) == 9

    def test_bert(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50
        )
        case = exported(
            _LastHidden(transformers.BertModel(config, add_pooling_layer=False).eval()), torch.arange(8).reshape(1, 8)
        )
        graph = analyze(case.program)
        targets = Counter(op.target.split(".")[1] for op in graph.ops.values())
        assert targets["linear"] == 2 * 6, "queries, keys, values, outputs and two of the feed-forward net"
        assert targets["layer_norm"] == 1 + 2 * 2
        assert nx.is_directed_acyclic_graph(graph.digraph)
        assert_consistent(graph, case)
        first = next(op for op in graph.ops.values() if "layer_norm" in op.name)
        heads = [op for op in graph.digraph.successors(first.name) if op.startswith("linear")]
        assert len(heads) == 3, "queries, keys and values need the first layer norm and nothing of each other"


class _LastHidden(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.model(tokens).last_hidden_state
        return hidden


def test_ops_of_a_program_over_two_devices_are_where_their_results_are() -> None:
    """Memory that one takes first, on the second device too, is taken with the op that fills it."""
    tape = Tape("cuda:0")
    x, weight = tape.input(2), tape.input(2, device="cuda:1")
    moved = tape.call(aten.to.device, tape.call(aten.relu.default, x), torch.device("cuda:1"), torch.float32)
    empty = tape.call(aten.empty.memory_format, [2], device=torch.device("cuda:1"))
    filled = tape.call(aten.copy_.default, empty, tape.call(aten.mul.Tensor, moved, weight))
    program = replace(tape.case([filled]).program, peers=("cuda:1",))
    ops = analyze(program).ops
    assert {op.name: (op.device, op.crosses, op.uncapturable) for op in ops.values()} == {
        "relu_default": ("cuda:0", "", ""),
        "to_device": ("cuda:1", "peer", "copies from cuda:0 to cuda:1"),
        "mul_tensor": ("cuda:1", "", ""),
        "copy__default": ("cuda:1", "", ""),
    }
    assert ops["copy__default"].nodes == ("empty_memory_format", "copy__default")


def test_copies_between_the_host_and_the_device_are_ops_beside_what_needs_them_not() -> None:
    """One in and one out, which have nothing to do with each other::

    x (host) ──▶ copied ─╮
    y ──▶ relu ──────────┴▶ add
            └──▶ host
    """
    tape = Tape("cuda:0")
    x, y = tape.input(2, device="cpu"), tape.input(2)
    relu = tape.call(aten.relu.default, y)
    host = tape.input(2, device="cpu")
    back = tape.call(aten.copy_.default, host, relu)
    copied = tape.input(2)
    there = tape.call(aten.copy_.default, copied, x, True)
    graph = analyze(tape.case([back, tape.call(aten.add.Tensor, there, relu)]).program)
    assert {op.name: op.crosses for op in graph.ops.values()} == {
        "relu_default": "", "copy__default": "download", "copy__default_1": "upload", "add_tensor": "",
    }  # fmt: skip
    assert {(d.before, d.after) for d in graph.dependencies} == {
        ("relu_default", "copy__default"), ("relu_default", "add_tensor"), ("copy__default_1", "add_tensor"),
    }  # fmt: skip
    assert {op.device for op in graph.ops.values()} == {"cuda:0"}
