"""Which nodes become ops, what they access and what orders them: by hand, in random programs and in real models."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
import torch
import torch.distributed._functional_collectives
from hypothesis import given, settings
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from autostream.analysis.capturability import NUMBER
from autostream.analysis.collectives import Terms, terms_of
from autostream.analysis.dependencies import analyze
from autostream.ir import Hazard, OpGraph, Role
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.releases import place_releases
from tests.analysis.programs import Case, Run, Tape, aten, exported, run, same, topological_order
from tests.analysis.random_programs import random_programs
from tests.runtime.programs import Inception


def edges(graph: OpGraph) -> set[tuple[str, str, str]]:
    return {(d.before, d.after, d.hazard.name) for d in graph.dependencies}


def nodes_of(graph: OpGraph) -> list[tuple[str, ...]]:
    return [op.nodes for op in graph.ops.values()]


@pytest.fixture
def tape() -> Tape:
    return Tape()


# Any program


def assert_consistent(graph: OpGraph, case: Case) -> None:
    """Each node is issued once, each intermediate is allocated once, each dependency has its reason."""
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


def assert_aliases_share_storages(graph: OpGraph, result: Run) -> None:
    """Values that share memory in a run occupy a common storage."""
    occupied, aliases = defaultdict(set), defaultdict(set)
    for storage in graph.storages.values():
        for node in storage.holders:
            occupied[node].add(storage.name)
    for name, value in result.values.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                aliases[leaf.untyped_storage().data_ptr()].add(name)
    for names in aliases.values():
        assert all(occupied[a] & occupied[b] for a in names for b in names)


@settings(max_examples=100, deadline=None)
@given(random_programs())
def test_every_order_that_the_graph_allows_computes_the_same(case: Case) -> None:
    graph = analyze(case.program)
    assert_consistent(graph, case)
    expected = run(case)
    assert_aliases_share_storages(graph, expected)
    for seed in (None, 0):
        actual = run(case, topological_order(graph, seed))
        assert same(actual.outputs, expected.outputs)
        assert same(actual.arguments, expected.arguments)
        assert same(map(actual.values.get, expected.values), expected.values.values()), "even unused values"


class Traps(nn.Module):
    """Mutated views, running statistics, dropout, LSTMs, renormalized embeddings, autocast and reshapes."""

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


def test_a_module_with_many_effects_computes_the_same_in_any_order() -> None:
    torch.manual_seed(0)
    case = exported(Traps(), torch.randn(2, 3, 8, 8), torch.arange(5))
    graph = analyze(case.program)
    assert_consistent(graph, case)
    expected = run(case)
    for seed in (None, 0, 1, 2, 3):
        actual = run(case, topological_order(graph, seed))
        assert same(actual.outputs, expected.outputs)
        assert same(actual.arguments, expected.arguments)


def test_the_branches_of_an_inception_are_independent() -> None:
    case = exported(Inception().eval(), torch.randn(2, 4, 5, 5))
    graph = analyze(case.program)
    assert_consistent(graph, case)
    assert sum(op.target == "aten.conv2d.default" for op in graph.ops.values()) == 1 + 1 + 2 + 2 + 1
    assert {d.hazard for d in graph.dependencies} == {Hazard.RAW}, "only those of the dataflow"
    assert max(len(list(ops)) for ops in nx.topological_generations(graph.digraph)) == 4
    assert len(list(graph.digraph.predecessors("cat"))) == 4


# Nodes that launch nothing


def test_a_reshape_that_may_copy_is_issued_with_the_allocation_or_is_an_op(tape: Tape) -> None:
    """If it copies, its memory must be allocated on the stream on which its base is released."""
    sin = tape.call(aten.sin.default, tape.input(4, 4))
    early = tape.call(aten.reshape.default, sin, [16])
    relu_ = tape.call(aten.relu_.default, sin)
    late, view = tape.call(aten.reshape.default, sin, [16]), tape.call(aten.view.default, sin, [16])
    graph = analyze(tape.case([early, late, view]).program)
    assert nodes_of(graph) == [(sin.name, early.name), (relu_.name, view.name), (late.name,)]


def test_a_view_of_memory_that_the_last_writer_does_not_access_is_an_op(tape: Tape) -> None:
    """The reshape may copy. If select were issued with relu__1, the copy could be released before it.

    relu_ ──▶ reshape    relu__1    select      select is a view of both
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


def test_a_dropout_that_drops_nothing_is_a_view() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(inplace=True)).eval()
    graph = analyze(exported(model, torch.randn(2, 4)).program)
    assert nodes_of(graph) == [("linear", "dropout"), ("relu_",)]
    assert graph.ops["relu_"].writes == {"linear"}


# Allocations


def allocation(tape: Tape) -> fx.Node:
    return tape.call(aten.empty.memory_format, [4, 4], device=torch.device(tape.device))


def test_an_allocation_is_issued_right_before_its_first_user(tape: Tape) -> None:
    """``empty ─▶ view ─▶ fill_ ─▶ exp``, and an independent op in between."""
    x, empty = tape.input(4), allocation(tape)
    view = tape.call(aten.view.default, empty, [16])
    other = tape.call(aten.relu.default, x)
    fill = tape.call(aten.fill_.Scalar, view, 1.0)
    exp = tape.call(aten.exp.default, empty)
    graph = analyze(tape.case([other, exp]).program)
    assert nodes_of(graph) == [(other.name,), (empty.name, view.name, fill.name), (exp.name,)]
    assert graph.ops[fill.name].allocates == {empty.name}
    assert edges(graph) == {(fill.name, exp.name, "RAW")}


# Storages of which ops use parts


def columns(tape: Tape, whole: fx.Node) -> list[fx.Node]:
    return [tape.call(aten.slice.Tensor, whole, 1, at, at + 2) for at in (0, 2)]


def test_divided_memory_is_allocated_with_the_latest_op_on_which_all_users_depend(tape: Tape) -> None:
    r"""That op is ``mul``::

                ╭▶ sin ─▶ copy_ ─╮
    exp ─▶ mul ─┤                ├▶ neg
                ╰▶ cos ─▶ copy_ ─╯
    """
    empty = allocation(tape)
    left, right = columns(tape, empty)
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
    assert {(before, after) for before, after, _ in edges(graph) if before != mul.name and after != mul.name} == {
        (sin.name, first.name), (cos.name, second.name), (first.name, neg.name), (second.name, neg.name),
    }  # fmt: skip


def test_divided_memory_is_allocated_before_the_fork_or_by_its_first_user(tape: Tape) -> None:
    empty, zeroed = allocation(tape), allocation(tape)
    halves = columns(tape, empty)
    fills = [tape.call(aten.fill_.Scalar, half, 1.0) for half in halves]
    zeroed_halves = columns(tape, zeroed)
    zero_ = tape.call(aten.zero_.default, zeroed)
    adds = [tape.call(aten.add_.Tensor, half, 1.0) for half in zeroed_halves]
    graph = analyze(tape.case([empty, zeroed]).program)
    assert graph.prelude == (empty.name, *(half.name for half in halves))
    assert [graph.ops[fill.name].allocates for fill in fills] == [frozenset()] * 2
    assert graph.pinned == {zero_.name}
    assert graph.ops[zero_.name].nodes == (zeroed.name, *(half.name for half in zeroed_halves), zero_.name)
    assert graph.ops[zero_.name].allocates == {zeroed.name}
    assert edges(graph) == {(zero_.name, add.name, "RAW") for add in adds}


def test_a_reader_of_a_part_comes_before_writers_of_that_part_only(tape: Tape) -> None:
    zeros = tape.call(aten.zeros.default, [4, 4])
    left, right = columns(tape, zeros)
    exp = tape.call(aten.exp.default, left)
    adds = [tape.call(aten.add_.Tensor, half, 1.0) for half in (left, right)]
    graph = analyze(tape.case([exp, zeros]).program)
    assert (exp.name, adds[0].name, "WAR") in edges(graph)
    assert list(graph.digraph.predecessors(adds[1].name)) == [zeros.name]


def test_memory_of_another_device_is_allocated_by_an_op() -> None:
    tape = Tape("cuda:0")
    empty, divided = tape.call(aten.empty.memory_format, [4]), tape.call(aten.empty.memory_format, [4, 4])
    fill = tape.call(aten.fill_.Scalar, empty, 1.0)
    fills = [tape.call(aten.fill_.Scalar, half, 1.0) for half in columns(tape, divided)]
    graph = analyze(tape.case([fill, *fills]).program)
    assert graph.ops[empty.name].nodes == (empty.name,)
    assert edges(graph) == {
        (empty.name, fill.name, "WAW"), *((divided.name, each.name, "WAW") for each in fills),
    }  # fmt: skip


# Hazards


def test_reads_of_parameters_order_nothing(tape: Tape) -> None:
    x, w = tape.input(4, 4), tape.input(4, 4, role=Role.PARAMETER)
    left, right = tape.call(aten.mm.default, x, w), tape.call(aten.mm.default, w, x)
    assert analyze(tape.case([left, right]).program).dependencies == ()


def test_users_of_a_returned_argument_depend_on_the_call_that_returns_it(tape: Tape) -> None:
    x = tape.call(aten.sin.default, tape.input(4))
    node = tape.graph.call_function(torch.ops.profiler._record_function_enter.default, ("name",))
    node.meta["val"] = x.meta["val"]
    neg = tape.graph.call_function(aten.neg.default, (node,))
    neg.meta["val"] = torch.empty(4)
    assert (node.name, neg.name, "RAW") in edges(analyze(tape.case([neg]).program))


# Values of the CPU in a CUDA graph


def reasons(case: Case) -> dict[str, str]:
    return {op.name: op.uncapturable for op in analyze(case.program).ops.values()}


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(3) + self.constant.sin()


def test_only_what_the_cpu_computes_from_literals_can_be_baked_in() -> None:
    found = reasons(exported(lambda x: x * (torch.tensor(2.0) + torch.arange(3).add_(1)), torch.ones(3)))
    assert found.pop("mul") == "runs on the CPU"
    assert set(found.values()) == {""}
    assert {"lift_fresh_copy", "arange", "add_", "add"} <= found.keys()
    found = reasons(exported(WithConstant(), torch.ones(3)))
    assert found["rand"] == found["sin"] == "runs on the CPU"


@pytest.mark.parametrize("role", [Role.INPUT, Role.BUFFER, Role.CONSTANT])
def test_a_number_on_the_cpu_must_be_a_literal(role: Role) -> None:
    """On the GPU: x ─▶ mul ◀─ number on the CPU; the kernel takes it by value, so a graph would bake it in."""
    tape = Tape("cuda:0")
    x, number = tape.input(3), tape.input(role=role, device="cpu")
    muls = [tape.call(aten.mul.Tensor, x, number)]
    if role is Role.CONSTANT:
        muls.append(tape.call(aten.mul.Tensor, x, tape.call(aten.lift_fresh_copy.default, number)))
    found = reasons(tape.case(muls))
    assert found["mul_tensor"] == NUMBER
    assert role is not Role.CONSTANT or found["lift_fresh_copy_default"] == found["mul_tensor_1"] == ""


# Descriptions and devices


def test_ops_are_described() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin().t()

    (op,) = analyze(exported(Model(), torch.ones(2, 3)).program).ops.values()
    assert (op.target, op.device, op.dtype, op.elements) == ("aten.sin.default", "cpu", "float32", 6)
    path, line, code = op.source.split(":", 2)
    assert Path(path).samefile(__file__)
    assert "return x.sin().t()" in Path(path).read_text().splitlines()[int(line) - 1]
    assert code.strip() == "return x.sin().t()"
    branches = exported(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), torch.ones(3))
    graph = analyze(branches.program)
    assert graph.ops["cond"].target == "cond"
    assert len(graph.prelude) == 2, "the two branches"


def test_ops_of_a_program_over_two_devices_are_on_those_of_their_results() -> None:
    tape = Tape("cuda:0")
    x, weight = tape.input(2), tape.input(2, device="cuda:1")
    moved = tape.call(aten.to.device, tape.call(aten.relu.default, x), torch.device("cuda:1"), torch.float32)
    empty = tape.call(aten.empty.memory_format, [2], device=torch.device("cuda:1"))
    filled = tape.call(aten.copy_.default, empty, tape.call(aten.mul.Tensor, moved, weight))
    ops = analyze(replace(tape.case([filled]).program, peers=("cuda:1",))).ops
    assert {op.name: (op.device, op.crosses, op.uncapturable) for op in ops.values()} == {
        "relu_default": ("cuda:0", "", ""),
        "to_device": ("cuda:1", "peer", "copies from cuda:0 to cuda:1"),
        "mul_tensor": ("cuda:1", "", ""),
        "copy__default": ("cuda:1", "", ""),
    }
    assert ops["copy__default"].nodes == ("empty_memory_format", "copy__default")


def test_copies_between_host_and_device_run_on_the_device() -> None:
    """Upload and download are independent of each other::

    x (host) ──▶ copied ─╮
    y ──▶ relu ──────────┴▶ add
            └──▶ host ──▶ neg (host)
    """
    tape = Tape("cuda:0")
    x, y = tape.input(2, device="cpu"), tape.input(2)
    relu = tape.call(aten.relu.default, y)
    back = tape.call(aten.copy_.default, tape.input(2, device="cpu"), relu)
    there = tape.call(aten.copy_.default, tape.input(2), x, True)
    neg = tape.call(aten.neg.default, back)
    graph = analyze(tape.case([neg, tape.call(aten.add.Tensor, there, relu)]).program)
    assert {op.name: (op.crosses, op.device) for op in graph.ops.values()} == {
        "relu_default": ("", "cuda:0"),
        "copy__default": ("download", "cuda:0"),
        "copy__default_1": ("upload", "cuda:0"),
        "neg_default": ("", "cpu"),
        "add_tensor": ("", "cuda:0"),
    }
    assert {(d.before, d.after) for d in graph.dependencies} == {
        ("relu_default", "copy__default"), ("copy__default", "neg_default"), ("relu_default", "add_tensor"),
        ("copy__default_1", "add_tensor"),
    }  # fmt: skip


# Collectives

c10d = torch.ops._c10d_functional


def test_collectives_keep_the_order_of_their_group_and_waits_that_of_their_data(tape: Tape) -> None:
    """Two groups, and a call that may use any.

    x ─┬▶ all_reduce (a) ─────────────────────▶ wait_tensor ──▶ relu
       ├▶ all_reduce_1 (a): after all_reduce, not after its wait
       ├▶ all_reduce_2 (b): after neither
       └▶ print: after all of them
    """
    x = tape.input(4)
    first, second, other = (tape.call(c10d.all_reduce.default, x, "sum", group) for group in "aab")
    waited = tape.call(c10d.wait_tensor.default, first)
    tape.call(aten.relu.default, waited)
    anything = tape.graph.call_function(print, (x,))
    anything.meta["val"] = torch.ones(4)
    graph = analyze(tape.case([waited]).program)
    ordered = {(d.before, d.after, d.resource) for d in graph.dependencies if d.hazard is Hazard.ORDER}
    assert ordered == {
        (first.name, second.name, "collective:a"),
        (second.name, anything.name, "collective:a"),
        (other.name, anything.name, "collective:b"),
    }
    assert {before for before, after, _ in edges(graph) if after == waited.name} == {first.name}
    assert [graph.ops[node.name].group for node in (first, other, waited)] == ["a", "b", ""]
    assert graph.collectives == {first.name, second.name, other.name}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_over_gloo_an_all_gather_has_no_collective_beside_it_that_the_program_has_not(tape: Tape, device: str) -> None:
    """Gloo may end the process: ``gather ─▶ wait ─▶ all_reduce ─▶ wait_1``; NCCL's order is that of launches alone."""
    x = tape.input(4)
    gathered = tape.call(c10d.all_gather_into_tensor.default, x, 2, "a")
    waits = [tape.call(c10d.wait_tensor.default, gathered)]
    reduced = tape.call(c10d.all_reduce.default, x, "sum", "a")
    waits.append(tape.call(c10d.wait_tensor.default, reduced))
    graph = analyze(replace(tape.case(waits).program, device=device))
    ordered = {(d.before, d.after) for d in graph.dependencies if d.hazard is Hazard.ORDER}
    one_by_one = {(gathered.name, waits[0].name), (waits[0].name, reduced.name), (reduced.name, waits[1].name)}
    assert ordered == (one_by_one if device == "cpu" else {(gathered.name, reduced.name)})


def test_what_a_collective_takes_is_written_and_released_after_the_wait_for_it(tape: Tape) -> None:
    """The collective reads its input until then: ``x ─▶ relu ─▶ gather ─▶ wait``, then ``relu`` is overwritten."""
    taken = tape.call(aten.relu.default, tape.input(4))
    gathered = tape.call(c10d.all_gather_into_tensor.default, taken, 2, "a")
    waited = tape.call(c10d.wait_tensor.default, gathered)
    overwritten = tape.call(aten.fill_.Scalar, taken, 0.0)
    program = tape.case([waited]).program
    graph = analyze(program)
    assert (waited.name, overwritten.name, "WAR") in edges(graph)
    tape.graph.erase_node(overwritten)
    graph = analyze(program)
    assert graph.users[taken.name][-1] == waited.name
    (released,) = [one.op for one in place_releases(graph, one_stream(graph)).launches if taken.name in one.releases]
    assert released == waited.name


def test_what_a_process_sends_to_each_is_known_unless_it_depends_on_data(tape: Tape) -> None:
    """Rows of four numbers, by sizes, and by a number that a tensor holds."""
    graph = tape.graph
    x, number = tape.input(6, 4), graph.call_function(aten._local_scalar_dense.default, (tape.input(1),))
    number.meta["val"] = ShapeEnv().create_unbacked_symint()
    for sent, expected in {(5, 1): Terms(sends=(80, 16), receives=(32, 64)), (number, 1): Terms()}.items():
        node = graph.call_function(c10d.all_to_all_single.default, (x, [2, 4], [*sent], "a"))
        node.meta["val"] = torch.ones(6, 4)
        assert terms_of(node) == expected
