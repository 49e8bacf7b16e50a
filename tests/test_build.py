"""From a model and one signature to something that runs: what is reported, put back, and refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream import optimize, tuning
from autostream.build import Scheduled, Stale, Unsuitable
from autostream.costs.device import profile_named
from autostream.errors import CaptureError
from autostream.execution import bound
from autostream.execution.cuda_graph import GraphPools
from autostream.frontend.signature import signature_of
from autostream.frontend.tree import flatten
from autostream.ir import Decision, Program
from autostream.options import Options
from autostream.select import Selection
from autostream.storages import storage_of
from autostream.tracing import inductor
from autostream.tracing.kernel_values import named_as
from autostream.tracing.state import ModelWatch
from tests.captures import Captures
from tests.semantics import Model, force_streams, same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def scheduled(model: nn.Module, *args: Any, bound: frozenset[int] = frozenset(), **options: Any) -> Scheduled:
    """A model scheduled for these arguments."""
    tensors, structure = flatten((args, {}))
    signature = signature_of(structure, tensors, ModelWatch(model).training())
    return Scheduled(model, structure, tensors, signature, bound, Options(**options), GraphPools())


@pytest.fixture
def freezes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options with which weights become constants, as if there were fused kernels on the CPU."""

    def fuse(
        program: Program, settings: object, tensors: Sequence[Tensor], stopwatch: object
    ) -> tuple[Program, tuple[Decision, ...]]:
        functional = inductor._functional(program)
        constants = inductor._freezable(program, functional, tensors)
        module = named_as(inductor._frozen(functional, constants), program)
        outputs = tuple(node.name for node in module.graph.output_node().args[0])
        return replace(program, module=module, outputs=outputs, frozen=frozenset(constants)), ()

    monkeypatch.setattr(inductor, "obstacle", lambda device: "")
    monkeypatch.setattr(tuning, "fused_here", fuse)
    return {"kernels": "inductor", "inductor_options": {"freezing": True}}


def noisy() -> nn.Module:
    """Writes buffers and draws random numbers."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


@torch.no_grad()
def test_the_report_tells_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda s, x: (x.sin() + x.cos()) * s.w, w=nn.Parameter(t(4)))
    report = scheduled(model, t(3, 4), **force_streams(monkeypatch)).report
    assert (report.model, report.signature) == ("Model", "3x4:float32 on cpu, train, no gradients")
    assert report.mode == "threads"
    assert list(report.graph.ops) == list(report.costs) == ["sin", "cos", "add", "mul"]
    assert [candidate.schedule.streams for candidate in report.candidates] == [1, 2]
    assert report.chosen is report.candidates[1]
    assert [round(c.measured_us, 1) for c in report.candidates] == [1.0, 0.5]
    assert {piece.op for piece in report.timeline.slices} >= set(report.graph.ops)
    assert report.refusals == ()
    assert list(report.seconds) == ["trace", "analyze", "price", "schedule", "verify", "select"]
    assert report.versions["torch"] == torch.__version__


@torch.no_grad()
@pytest.mark.parametrize("costs", ["roofline", "measured"])
def test_preparing_puts_everything_back(costs: str) -> None:
    model = noisy()
    x = t(3, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    scheduled(model, x, costs=costs)
    same(dict(model.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), generator)
    same(x, t(3, 4))


@torch.no_grad()
def test_a_failure_while_preparing_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(timers: Sequence[Any]) -> list[float]:
        raise MemoryError

    monkeypatch.setattr("autostream.select.interleaved", failing)
    model = noisy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    with pytest.raises(MemoryError):
        scheduled(model, t(3, 4))
    same(dict(model.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), generator)


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "w", nn.Parameter(t(1))),
        lambda model: setattr(model, "w", nn.Parameter(t(4).double())),
        lambda model: setattr(model, "w", nn.Parameter(t(8)[::2])),
        lambda model: setattr(model, "w", None),
        lambda model: delattr(model, "w"),
        lambda model: setattr(model, "twin", nn.Parameter(t(4))),
        lambda model: setattr(model, "factor", 3),
    ],
)
def test_state_of_another_kind_is_stale_and_nothing_has_run(change: Any) -> None:
    def writes(s: Model, x: Tensor) -> Tensor:
        x.add_(1)
        return x * s.w * s.twin * s.factor

    weight = nn.Parameter(t(4))
    model = Model(writes, w=weight, twin=weight, factor=2)
    entry = scheduled(model, t(4))
    change(model)
    x = t(4)
    with pytest.raises(Stale):
        entry([x])
    same(x, t(4))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_a_weight_whose_sign_is_set_lazily_is_stale(dtype: torch.dtype) -> None:
    model = Model(lambda s, x: x * s.w, w=t(4, 2)[:, 0].to(dtype))
    entry = scheduled(model, t(4))
    model.w = model.w.conj() if dtype.is_complex else torch.view_as_complex(t(4, 2)).conj().imag
    with pytest.raises(Stale):
        entry([t(4)])


@torch.no_grad()
def test_a_weight_without_an_address_is_stale_though_the_model_writes() -> None:
    def writes(s: Model, x: Tensor) -> Tensor:
        s.c.add_(1)
        return s.w @ x

    model = Model(writes, w=nn.Parameter(t(4, 4)), c=nn.Buffer(torch.zeros(1)))
    fast, x = optimize(model), t(4, 2)
    fast(x)
    model.w = nn.Parameter(model.w.to_sparse())
    same(fast(x), model.w @ x)
    assert model.c.item() == 2


@torch.no_grad()
def test_an_input_in_memory_that_the_model_writes_is_unsuitable() -> None:
    def writes(s: Model, x: Tensor) -> Tensor:
        s.b.add_(1)
        return x * 2

    model = Model(writes, b=nn.Buffer(torch.zeros(4)))
    entry = scheduled(model, t(2))
    with pytest.raises(Unsuitable, match="shares memory with the model's own state"):
        entry([model.b[:2]])
    assert model.b.tolist() == [0] * 4
    same(entry([t(2)]), t(2) * 2)


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [lambda model: setattr(model, "b", model.a), lambda model: setattr(model.b, "data", model.a)],
    ids=["the same", "its memory"],
)
def test_state_that_comes_to_share_memory_is_stale_where_the_model_writes(change: Any) -> None:
    """``a += x ──▶ b * 2`` is an edge then, which the graph of the schedule has not."""

    def writes(s: Model, x: Tensor) -> Tensor:
        s.a.add_(x)
        return s.b * 2

    model = Model(writes, a=nn.Buffer(torch.zeros(8)), b=nn.Buffer(torch.zeros(8)))
    entry = scheduled(model, t(8))
    model.b = model.b.clone()
    same(entry([t(8)]), torch.zeros(8))
    before = model.a.clone()
    change(model)
    with pytest.raises(Stale):
        entry([t(8)])
    same(model.a, before)


@torch.no_grad()
def test_state_that_comes_to_share_memory_is_fine_where_the_model_only_reads() -> None:
    model = Model(lambda s, x: x * s.a + s.b, a=nn.Buffer(t(4)), b=nn.Buffer(t(4)))
    entry = scheduled(model, t(4))
    model.b = model.a
    same(entry([t(4)]), t(4) * model.a + model.a)


@torch.no_grad()
def test_an_input_in_memory_that_the_model_only_reads_is_fine() -> None:
    model = Model(lambda s, x: x * s.b[:2], b=nn.Buffer(t(4)))
    same(scheduled(model, t(2))([model.b[2:]]), model.b[2:] * model.b[:2])


@torch.no_grad()
def test_the_report_tells_what_was_wrong_with_keeping_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Decision("", "not cached", "the disk is full")
    monkeypatch.setattr("autostream.pipeline.profile_here", lambda device: (profile_named(device), (kept,)))
    assert kept in scheduled(Model(lambda s, x: x.sin() + x.cos()), t(3, 4)).report.refusals


def test_gradients_that_would_be_recorded_are_unsuitable() -> None:
    model = Model(lambda s, x: x * s.w, w=t(4).requires_grad_())
    with torch.no_grad():
        entry = scheduled(model, t(4))
        assert not entry([t(4)]).requires_grad
    with pytest.raises(Unsuitable, match="gradients are recorded"):
        entry([t(4)])


@torch.no_grad()
def test_detached_views_of_an_input_that_requires_gradients_are_unsuitable() -> None:
    """A graph that was captured hands out tensors in the same memory, and does not know which of them were detached."""
    model = Model(lambda s, x: (x.detach(), x.t()))
    entry = scheduled(model, t(4, 4))
    same(entry([t(4, 4)]), model(t(4, 4)))
    assert [view.requires_grad for view in model(t(4, 4).requires_grad_())] == [False, True]
    with pytest.raises(Unsuitable, match="an output is a detached view of an input that requires gradients"):
        entry([t(4, 4).requires_grad_()])


@torch.no_grad()
def test_a_bound_input_that_is_seen_through_another_is_copied_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is written to one would not be seen through the other, and copying that back would undo it."""
    seen: list[Sequence[bool]] = []

    def spy(program: Any, graph: Any, candidates: Any, tensors: Any, bound: Sequence[bool], *_: Any) -> Selection:
        seen.append(bound)
        assert storage_of(tensors[1]) == storage_of(tensors[2])
        return Selection(program.module.forward, candidates[0], tuple(candidates))

    monkeypatch.setattr("autostream.tuning.select", spy)
    state, other = t(4), t(4)
    model = Model(lambda s, x, y, z: x.add_(1) * s.w * z + y.sum(), w=nn.Parameter(t(4)))
    scheduled(model, state, state[1:], other, bound=frozenset({0, 2}))
    assert seen == [(True, False, False, True)]


@torch.no_grad()
def test_weights_and_bound_inputs_are_used_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is that of the placeholders: the weight, then the inputs, of which the second one stays put."""
    seen: list[Sequence[bool]] = []

    def spy(
        program: Any, graph: Any, candidates: Any, tensors: Sequence[Tensor], bound: Sequence[bool], *_: Any
    ) -> Selection:
        seen.append(bound)
        assert [tensor is given for tensor, given in zip(tensors, [model.w, x, y], strict=True)] == list(bound)
        return Selection(program.module.forward, candidates[0], tuple(candidates))

    monkeypatch.setattr("autostream.tuning.select", spy)
    x, y = t(4), t(4)
    model = Model(lambda s, x, y: x * s.w + y, w=nn.Parameter(t(4)))
    entry = scheduled(model, x, y, bound=frozenset({1}))
    assert seen == [(True, False, True)]
    assert entry.static_inputs([x, y]) is None


@torch.no_grad()
@pytest.mark.parametrize("failure", [CaptureError("no way"), torch.OutOfMemoryError("no memory")])
def test_where_it_cannot_be_captured_again_it_is_stale(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller makes a new one, or runs the model plainly; the graph is of no use to anybody."""
    captures, model = Captures(monkeypatch), nn.Linear(4, 4)
    entry = scheduled(model, t(4))
    captures.failure = failure
    model.weight.data = t(4, 4)
    with pytest.raises(Stale):
        entry([t(4)])


@torch.no_grad()
@pytest.mark.parametrize("failure", [CaptureError("no way"), torch.OutOfMemoryError("no memory")])
def test_where_it_cannot_be_captured_once_more_the_others_stay(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is not tried again."""
    captures, model = Captures(monkeypatch), nn.Linear(4, 4)
    entry, kept = scheduled(model, t(4)), model.weight.data
    captures.failure = failure
    model.weight.data = t(4, 4)
    for _ in range(2):
        with pytest.raises(Unsuitable, match=r"captured again where its weights lie now, it fails: .*: no "):
            entry([t(4)])
        captures.failure = None
    model.weight.data = kept
    torch.testing.assert_close(entry([t(4)]), model(t(4)))
    assert captures.count == 1


def test_a_model_that_asks_for_the_grad_mode_gets_that_of_its_call() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if torch.is_grad_enabled() else x - 1

    model = Asks()
    fast = optimize(model)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode) * 2:
        with mode():
            assert torch.equal(fast(t(3)), model(t(3)))
    assert {report.mode for report in fast.reports} == {"plain", "one stream"}


# Frozen weights


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.mul_(2),
        lambda layer: layer.load_state_dict({"weight": t(4, 4) + 1, "bias": t(4)}),
        lambda layer: setattr(layer.weight, "data", t(4, 4) + 1),
        lambda layer: setattr(layer, "weight", nn.Parameter(t(4, 4) + 1)),
        lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.data)),
    ],
)
def test_a_program_that_holds_weights_is_stale_once_they_are_changed(change: Any, freezes: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    entry = scheduled(model, t(3, 4), **freezes)
    torch.testing.assert_close(entry([t(3, 4)]), model(t(3, 4)))
    change(model[0])
    with pytest.raises(Stale):
        entry([t(3, 4)])


@torch.no_grad()
def test_a_graph_that_holds_weights_is_not_captured_again_where_others_lie(
    freezes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures, model = Captures(monkeypatch), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    entry = scheduled(model, t(3, 4), **freezes)
    torch.testing.assert_close(entry([t(3, 4)]), model(t(3, 4)))
    entry._harmless = True  # as with most fused kernels, so that nobody looks at the model before
    model[0].weight.data = t(4, 4) + 1
    with pytest.raises(Stale):
        entry([t(3, 4)])
    assert captures.count == 1


@torch.no_grad()
def test_changed_weights_are_seen_though_they_are_frozen(freezes: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    fast = optimize(model, **freezes)
    for _ in range(3):
        torch.testing.assert_close(fast(t(3, 4)), model(t(3, 4)))
        model[0].weight.add_(1)
        torch.testing.assert_close(fast(t(3, 4)), model(t(3, 4)))
        model[1].running_mean.add_(1)
    assert len(fast.reports) == 1


def test_steps_of_a_fused_optimizer_are_seen_though_pytorch_does_not_count_them(freezes: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    fast, optimizer = optimize(model, **freezes), torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(fast(t(3, 4)), model(t(3, 4)))
        model(t(3, 4)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(fast(t(3, 4)), model(t(3, 4)))
        torch.testing.assert_close(fast(t(3, 4)), model(t(3, 4)))


@torch.no_grad()
def test_frozen_weights_go_with_what_was_made(freezes: dict[str, Any]) -> None:
    entry = scheduled(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), t(3, 4), **freezes)
    constants = [weakref.ref(constant) for constant in entry._program.module.buffers()]
    del entry
    gc.collect()
    assert constants
    assert {constant() for constant in constants} == {None}


@pytest.mark.parametrize("freezing", [True, False])
def test_optimizers_are_watched_only_for_who_freezes(
    freezing: bool, freezes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[bool] = []
    monkeypatch.setattr(bound, "_watch_optimizers", lambda: watched.append(True))
    scheduled(nn.Linear(4, 4), t(3, 4), **(freezes if freezing else {}))
    assert watched == [True] * freezing
