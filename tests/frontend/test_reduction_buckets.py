"""All-reduces are joined where that delays none, and written into a traced step as if traced in their buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autostream
from autostream.analysis.dependencies import analyze
from autostream.analysis.effects import group_of
from autostream.analysis.values import input_tensors
from autostream.frontend import all_reduces
from autostream.frontend.all_reduces import ALL_REDUCES, Sizes, buckets
from autostream.frontend.data_parallel import DataParallel
from autostream.frontend.fake_processes import fake_processes
from autostream.frontend.reduction_buckets import gathered, in_buckets, joinable, sums_of
from autostream.ir import Program
from autostream.options import Options
from tests.analysis.programs import Tape, aten

c10d = torch.ops._c10d_functional


class Net(nn.Module):
    """A convolution with channels last, a linear layer, and a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(12, 4)
        self.phases = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(self.convolution(x).flatten(1)) * self.phases).abs()


def clipped(net: nn.Module) -> tuple[Any, tuple[Tensor, ...]]:
    """A step that its user has written: averages are read, clipped in place, and seen as real numbers."""
    adam = torch.optim.Adam(net.parameters(), lr=0.1)

    @autostream.step(optimizers=[adam])
    def step(x: Tensor) -> Tensor:
        adam.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        adam.step()
        return loss

    return step, (torch.ones(5, 2, 4, 4),)


def accumulated(net: nn.Module) -> tuple[Any, tuple[Tensor, ...]]:
    """Two backwards, whose averages add up."""
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    @autostream.step(optimizers=[sgd])
    def step(x: Tensor) -> Tensor:
        sgd.zero_grad()
        for part in x.chunk(2):
            net(part).mean().backward()
        sgd.step()
        return x.sum()

    return step, (torch.ones(4, 2, 4, 4),)


def trained(net: nn.Module) -> tuple[Any, tuple[Tensor, ...]]:
    """A step that ``train_step`` writes."""
    adamw = torch.optim.AdamW(net.parameters())
    return autostream.train_step(net, adamw, nn.L1Loss(), max_norm=1.0), (torch.ones(5, 2, 4, 4), torch.ones(5, 4))


def program_of(made: Callable[[nn.Module], tuple[Any, tuple[Tensor, ...]]]) -> Program:
    step, batch = made(Net())
    with fake_processes(2) as group:
        found: Program = step.over(group).traced(batch, Options()).program
        return found


def shape_of(program: Program) -> object:
    """The ops, what each reads and writes, and what has to come before it, all by number; and where values lie."""
    graph = analyze(program)
    number = {name: at for at, name in enumerate(graph.ops)}
    storages = {name: at for at, name in enumerate(graph.storages)}
    ops = [
        (op.target, sorted(storages[at] for at in op.reads), sorted(storages[at] for at in op.writes), op.elements)
        for op in graph.ops.values()
    ]
    hazards = sorted((number[each.before], number[each.after], each.hazard.value) for each in graph.dependencies)
    nodes = {node.name: node for node in program.module.graph.nodes}
    values = [
        [(value.shape, value.stride(), value.storage_offset()) for value in input_tensors(nodes[name])]
        for name in (*(name for op in graph.ops.values() for name in op.nodes), "output")
    ]
    return ops, hazards, values


@pytest.mark.parametrize("made", [clipped, accumulated, trained])
def test_a_step_is_the_same_as_if_traced_in_buckets(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[nn.Module], Any]
) -> None:
    program = program_of(made)
    assert not [node for node in program.module.graph.nodes if group_of(node)]
    for size in (1, 64, 1 << 20):
        sizes = Sizes(min(size, 64), size, min(size, 64))
        bucketed = in_buckets(program, [buckets(sums.like, sizes) for sums in sums_of(program)])

        def traced(
            self: DataParallel, gradients: list[Tensor], parameters: list[Tensor], sizes: Sizes = sizes
        ) -> list[Tensor]:
            return all_reduces.all_reduced(gradients, parameters, *self._reduction, buckets(parameters, sizes))

        monkeypatch.setattr(DataParallel, "in_graph", traced)
        assert shape_of(bucketed) == shape_of(program_of(made)), size


def test_tensors_of_odd_sizes_come_last_in_their_bucket() -> None:
    tensors = [torch.full((size,), float(size)) for size in (8, 3, 12, 5, 4)]
    with fake_processes(2) as group:
        found = all_reduces.all_reduced(tensors, tensors, "sum", 1.0, group.group_name, [(1, 3, 0), (2, 4)])
    assert [each.tolist() for each in found] == [each.tolist() for each in tensors]  # nothing adds to them
    assert [each.storage_offset() for each in found] == [0, 8, 0, 11, 12]


@pytest.mark.parametrize(("processes", "reduction"), [(1, "sum"), (2, "avg")])
def test_an_average_of_one_process_is_a_sum(processes: int, reduction: str) -> None:
    """Which takes NCCL no kernel, as there is nothing to add."""
    step, batch = trained(Net())
    with fake_processes(processes) as group:
        program = step.over(group).traced(batch, Options()).program
    (node,) = program.module.graph.find_nodes(op="call_function", target=ALL_REDUCES)
    assert node.args[2:] == (reduction, 1.0, group.group_name)


def test_memory_that_is_addressed_is_that_of_the_average() -> None:
    """An offset counts from the beginning of a storage: of the average's own as written, of its bucket here."""
    net = Net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd])
    def step(x: Tensor) -> list[Tensor]:
        sgd.zero_grad()
        net(x).square().mean().backward()
        found = [each.grad.as_strided((1,), (1,), 0) + 0 for each in net.parameters() if each.grad is not None]
        sgd.step()
        return found

    with fake_processes(2) as group:
        program = in_buckets(step.over(group).traced((torch.ones(5, 2, 4, 4),), Options()).program)
    nodes = program.module.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    offsets = [input_tensors(node)[0].storage_offset() for node in nodes]
    assert [node.args[3] for node in nodes] == offsets
    assert len(set(offsets)) > 3


def test_a_program_without_all_reduces_stays() -> None:
    step, batch = trained(Net())
    program = step.traced(batch, Options()).program
    assert in_buckets(program) is program
    assert gathered(program) is program


def reduced(tape: Tape, source: fx.Node, reduction: str = "sum", group: str = "0") -> fx.Node:
    """An all-reduce that is waited for at once, and read."""
    return tape.call(aten.neg.default, result_of(tape, source, reduction, group))


def result_of(tape: Tape, source: fx.Node, reduction: str = "sum", group: str = "0") -> fx.Node:
    return tape.call(c10d.wait_tensor.default, tape.call(c10d.all_reduce.default, source, reduction, group))


def sizes_of(tape: Tape, *outputs: fx.Node) -> list[int]:
    """How many tensors each op for all-reduces takes; 1 for an all-reduce that is not joined."""
    program = gathered(tape.case(list(outputs)).program)
    kinds = {ALL_REDUCES: lambda node: len(node.args[0]), c10d.all_reduce.default: lambda node: 1}
    return [kinds[node.target](node) for node in program.module.graph.nodes if node.target in kinds]


def test_all_reduces_of_what_is_there_are_one() -> None:
    """Inputs a, b, c ─▶ their sums ─▶ each scaled."""
    tape = Tape()
    inputs = [tape.input(4), tape.input(2, 3), tape.input(3, 2)]
    outputs = [tape.call(aten.mul.Tensor, reduced(tape, each), 0.5) for each in inputs]
    assert sizes_of(tape, *outputs) == [3]


def test_what_is_computed_later_does_not_delay_what_is_there() -> None:
    """Inputs a, b ─▶ their sums; the sum of a ─▶ sin ─▶ its sum, which that of c joins."""
    tape = Tape()
    a, b, c = tape.input(4), tape.input(4), tape.input(4)
    first, second = reduced(tape, a), reduced(tape, b)
    later = reduced(tape, tape.call(aten.sin.default, first))
    assert sizes_of(tape, second, later, reduced(tape, c)) == [2, 2]


def test_what_is_written_meanwhile_is_not_joined() -> None:
    tape = Tape()
    a, b = tape.call(aten.sin.default, tape.input(4)), tape.call(aten.cos.default, tape.input(4))
    first = reduced(tape, a)
    tape.call(aten.mul_.Tensor, b, 2.0)
    assert sizes_of(tape, first, reduced(tape, b)) == [1, 1]


def test_other_reductions_and_groups_are_not_joined() -> None:
    tape = Tape()
    a, b, c = tape.input(4), tape.input(4), tape.input(4)
    outputs = [reduced(tape, a), reduced(tape, b, "max"), reduced(tape, c, group="1"), reduced(tape, b)]
    assert sizes_of(tape, *outputs) == [2, 1, 1]


def test_results_that_are_returned_seen_as_views_or_written_keep_their_memory() -> None:
    """A view may need an aligned address, and a returned one would keep the whole bucket alive."""
    tape = Tape()
    inputs = [tape.input(4) for _ in range(5)]
    returned, viewed, written = (result_of(tape, each) for each in inputs[:3])
    view = tape.call(aten.neg.default, tape.call(aten.view.default, viewed, [2, 2]))
    tape.call(aten.mul_.Tensor, written, 2.0)
    outputs = [reduced(tape, each) for each in inputs[3:]]
    assert sizes_of(tape, returned, view, written, *outputs) == [1, 1, 1, 2]


def test_processes_compare_what_they_join_by_its_number() -> None:
    """Of four all-reduces of alike tensors, one is of what is computed late."""
    found = []
    for late in (1, 2):
        tape = Tape()
        inputs = [tape.input(4) for _ in range(4)]
        outputs = []
        for at, each in enumerate(inputs):
            outputs.append(reduced(tape, tape.call(aten.sin.default, outputs[-1]) if at == late else each))
        found.append(joinable(tape.case(outputs).program))
    assert found == [[[1, 2, 3]], [[0, 1], [2, 3]]]


def test_what_two_ops_wait_for_is_not_joined() -> None:
    tape = Tape()
    a, b = tape.input(4), tape.input(4)
    started = tape.call(c10d.all_reduce.default, a, "sum", "0")
    waits = [tape.call(aten.neg.default, tape.call(c10d.wait_tensor.default, started)) for _ in range(2)]
    assert sizes_of(tape, *waits, reduced(tape, b)) == [1, 1]


def test_a_result_laid_out_otherwise_is_not_joined() -> None:
    """An expanded tensor is copied before it is reduced, and the copy has other strides."""
    tape = Tape()
    expanded = tape.call(aten.expand.default, tape.input(1, 3), [4, 3])
    assert sizes_of(tape, reduced(tape, expanded), reduced(tape, tape.input(4))) == [1, 1]
