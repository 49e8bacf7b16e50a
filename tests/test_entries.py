"""What is made for a new signature: a schedule, and what stands in for one, by why there is none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autostream
from autostream import entries
from autostream.build import Scheduled
from autostream.differentiated import Differentiated
from autostream.entries import Entry, Plain, Refused, Refusing, Subject, entry_of, is_due, optimized_in_part, pieces_of
from autostream.errors import (
    BranchError,
    ChoiceError,
    FastPathError,
    FusionError,
    OptionError,
    TargetError,
    TraceError,
)
from autostream.execution.cuda_graph import GraphPools
from autostream.execution.slots import SlotTable
from autostream.frontend.signature import Signature, signature_of
from autostream.frontend.tree import Structure, flatten
from autostream.ir import Decision
from autostream.options import Options
from autostream.pieces import Pieces
from autostream.tracing.export import MODELS, PIECES, SECTIONS, Tracer
from autostream.tracing.state import ModelWatch
from autostream.ways import Ways
from tests.semantics import Model, same

LAYER = nn.Linear(4, 4)


def make_piece(*given: object) -> Any:
    pytest.fail("no call comes to a piece")


def make_section(*given: object) -> Any:
    pytest.fail("nothing here is cut")


def subject(
    model: nn.Module = LAYER, tracer: Tracer = MODELS, bound_inputs: frozenset[int] | None = None, **options: Any
) -> Subject:
    kept = GraphPools(), SlotTable()
    return Subject(model, Options(**options), tracer, bound_inputs, *kept, make_piece, make_section)


def call_of(model: nn.Module, *args: Any) -> tuple[Structure, list[Tensor], Signature]:
    """How a call is made an entry for, in the present mode."""
    tensors, structure = flatten((args, {}))
    watch = ModelWatch(model)
    required = watch.required() + bytes(len(tensors)) if torch.is_grad_enabled() else b""
    return structure, tensors, signature_of(structure, tensors, watch.training(), required, watch.read())


def made(subject: Subject, *args: Any) -> Entry:
    return entry_of(subject, *call_of(subject.model, *(args or (torch.ones(2, 4),))))


def failing(error: Exception, tracer: Tracer = MODELS) -> Tracer:
    """A tracer that can do nothing else."""

    def trace(*args: object) -> Any:
        raise error

    return replace(tracer, trace=trace)


def reason(entry: Entry) -> str:
    """Why it is no schedule."""
    return entry.report.refusals[0].reason


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all models were."""
    monkeypatch.setattr(Subject, "uses_gpu", lambda *_: True)


# Schedules


@torch.no_grad()
def test_a_schedule_where_there_can_be_one() -> None:
    entry = made(subject())
    assert isinstance(entry, Scheduled)
    same(entry([torch.ones(2, 4)]), LAYER(torch.ones(2, 4)))


def test_forward_and_backward_where_gradients_are_recorded() -> None:
    backwards: list[frozenset[int]] = []
    entry = made(replace(subject(), make_piece=lambda graph, bound: backwards.append(bound)))
    assert isinstance(entry, Differentiated)
    assert len(backwards) == 1


@torch.no_grad()
def test_a_schedule_has_what_all_of_its_model_share(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(entries, "Scheduled", lambda *args: (given.append(args), Scheduled(*args))[1])
    for tracer, section, bound in (MODELS, make_section, None), (PIECES, make_section, {0}), (SECTIONS, None, {0}):
        own = subject(tracer=tracer, bound_inputs=bound and frozenset(bound))
        made(own)
        *_, positions, options, pools, kind, slots, cut = given.pop()
        assert (positions, options, kind) == (bound or set(), own.options, tracer)
        assert cut is section
        assert pools is own.pools
        assert slots is own.slots


# What stands in for one

TRACE, CHOICE = TraceError("it cannot be traced"), ChoiceError("it branches")
"""Why a model is not scheduled."""


@torch.no_grad()
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("error", "tracer", "kind"),
    [
        (CHOICE, MODELS, Ways),
        (BranchError("it asks for a number"), MODELS, Pieces),
        (TRACE, MODELS, Pieces),
        (FastPathError("it packs its input"), MODELS, Plain),
        (CHOICE, PIECES, Plain),
        (TRACE, SECTIONS, Plain),
        (ZeroDivisionError("of ours"), MODELS, Plain),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else getattr(value, "__name__", ""),
)
def test_what_comes_instead_depends_on_why(error: Exception, tracer: Tracer, kind: type) -> None:
    entry = made(subject(tracer=failing(error, tracer)))
    assert type(entry) is kind
    ours = isinstance(error, ZeroDivisionError)
    assert reason(entry) == ("it cannot be scheduled: ZeroDivisionError: of ours" if ours else str(error))


@torch.no_grad()
@pytest.mark.usefixtures("on_gpu")
def test_graphs_of_dynamos_are_not_split_again() -> None:
    """Those of ``torch.compile(backend="autostream")`` are traced as models are."""
    assert type(made(subject(tracer=failing(CHOICE), bound_inputs=frozenset()))) is Plain


@torch.no_grad()
def test_what_branches_is_split_where_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = failing(CHOICE)
    assert type(made(subject(tracer=tracer))) is Pieces
    monkeypatch.setattr(Subject, "uses_gpu", lambda *_: True)
    assert type(made(subject(tracer=tracer, cuda_graph=False))) is Pieces


SEEN: list[Tensor] = []


def remembers(s: Model, x: Tensor) -> Tensor:
    SEEN.append(x)
    return x


@torch.no_grad()
@pytest.mark.usefixtures("on_gpu")
def test_what_does_more_than_compute_is_split_and_says_what() -> None:
    entry = made(subject(Model(remembers), failing(CHOICE)))
    assert type(entry) is Pieces
    assert reason(entry).startswith("it branches; it has no graph for each way, since ")


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("error", "kind"), [(CHOICE, Pieces), (TRACE, Plain)], ids=["branches", "refused"])
def test_where_gradients_are_recorded_only_what_branches_is_split(
    error: Exception, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autostream.differentiated.trace_gradients", failing(error).trace)
    assert type(made(subject())) is kind


@torch.no_grad()
@pytest.mark.parametrize(
    ("error", "options"),
    [
        (TRACE, {"strict": True}),
        (CHOICE, {"strict": True}),
        (FusionError("no kernels"), {"strict": True}),
        (OptionError("not here"), {}),
        (TargetError("not like this"), {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_nothing_comes_instead_where_that_is_not_wanted_or_the_call_is_wrong(
    error: Exception, options: dict[str, Any]
) -> None:
    with pytest.raises(type(error), match=str(error)):
        made(subject(tracer=failing(error), **options))


class Bulk:
    """What a trace holds, for a weak reference."""


@torch.no_grad()
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("error", [TRACE, CHOICE, ZeroDivisionError()], ids=lambda error: type(error).__name__)
def test_what_comes_instead_does_not_hold_what_the_trace_did(error: Exception) -> None:
    held: list[weakref.ref[Bulk]] = []

    def trace(*args: object) -> Any:
        bulk = Bulk()
        held.append(weakref.ref(bulk))
        raise type(error)("of no avail")

    entry = made(subject(tracer=replace(MODELS, trace=trace)))
    gc.collect()
    assert not isinstance(entry, Scheduled)
    assert held[0]() is None


@torch.no_grad()
def test_the_plain_model_has_worked_once_it_has_returned_something() -> None:
    plain, x = Plain(LAYER, call_of(LAYER, torch.ones(4))[-1], "it cannot be scheduled"), torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        plain(x.T)
    assert not plain.works
    same(plain(x), LAYER(x))
    assert plain.works
    assert (plain.report.model, plain.report.mode) == ("Linear", "plain")
    assert plain.report.refusals == (Decision("", "plain", "it cannot be scheduled"),)


@torch.no_grad()
def test_what_may_have_passed_is_due_after_a_call() -> None:
    signature = call_of(LAYER, torch.ones(4))[-1]
    assert is_due(None)
    assert not is_due(Plain(LAYER, signature, "it has hooks"))
    passing = Plain(LAYER, signature, "it changes something", passing=True)
    assert not is_due(passing)
    passing(torch.ones(4))
    assert is_due(passing)
    assert is_due(Refusing(LAYER, signature, "it changes something", passing=True)), "others have done the call"


def test_who_has_another_way_is_told_and_nothing_is_done() -> None:
    refusing = Refusing(Model(lambda s, x: pytest.fail("it is called")), call_of(LAYER)[-1], "it cannot be traced")
    with pytest.raises(Refused, match="it cannot be traced"):
        refusing(torch.ones(3))


# Ways and pieces


@torch.no_grad()
@pytest.mark.usefixtures("on_gpu")
def test_no_way_is_scheduled_for_a_signature_that_is_not_the_models_any_more() -> None:
    """Here by its own call, as it might be by another thread."""

    def turns(s: Model, x: Tensor) -> Tensor:
        return x.sin() if x.sum() > 0 else x

    model = Model(turns)
    entry, x = made(subject(model), torch.ones(3)), torch.ones(3)
    assert isinstance(entry, Ways)
    model.eval()
    same(entry([x], (x,), {}), x.sin())
    assert entry.over == "modes of the model or settings changed while it was called"


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "choose"), [({}, True), ({"policy": "sequential"}, False), ({"cuda_graph": False}, False)]
)
def test_pieces_that_nobody_asked_for_have_to_be_the_faster(
    options: dict[str, Any], choose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(entries, "Pieces", lambda *args, choose: (seen.append(choose), Pieces(*args, choose=choose))[1])
    _, _, signature = call_of(LAYER, torch.ones(2, 4))
    assert reason(pieces_of(subject(**options), signature, "it is said")) == "it is said"
    assert seen == [choose]


# What is looked at before anything is traced


@torch.no_grad()
@pytest.mark.usefixtures("as_with_a_gpu")
@pytest.mark.parametrize("model", [LAYER, Model(lambda s, x: x)], ids=["parameters", "none"])
def test_a_model_on_the_cpu_is_not_fused_and_not_traced(model: nn.Module) -> None:
    own = subject(model, failing(AssertionError("it is traced")), kernels="inductor")
    with pytest.raises(OptionError, match=r'is not to be had: .* runs on the CPU: use kernels="eager"'):
        made(own)


@torch.no_grad()
@pytest.mark.usefixtures("as_with_a_gpu")
def test_a_piece_on_the_cpu_is_not_fused_and_says_why() -> None:
    entry = made(subject(bound_inputs=frozenset(), kernels="inductor"))
    assert isinstance(entry, Scheduled)
    same(entry([torch.ones(2, 4)]), LAYER(torch.ones(2, 4)))
    assert entry.report.mode == "one stream"
    assert [refusal.choice for refusal in entry.report.refusals] == ["not fused"]
    assert "this program runs on the CPU" in reason(entry)


@torch.no_grad()
@pytest.mark.parametrize(
    ("wrap", "in_part"),
    [
        (lambda layer: layer, False),
        (lambda layer: nn.Sequential(layer), False),
        (lambda layer: autostream.optimize(layer), True),
        (lambda layer: nn.Sequential(nn.ReLU(), autostream.optimize(layer)), True),
    ],
    ids=["plain", "around it", "optimized", "around what is"],
)
def test_what_has_an_optimized_part_is_not_traced(wrap: Callable[[nn.Module], nn.Module], in_part: bool) -> None:
    model = wrap(LAYER)
    assert optimized_in_part(model) is in_part
    entry = made(subject(model))
    assert isinstance(entry, Pieces if in_part else Scheduled)
    assert not in_part or "optimized already" in reason(entry)


def test_a_call_uses_a_gpu_by_its_tensors_or_the_models_parameters() -> None:
    with FakeTensorMode():
        there = torch.empty(1, device="cuda")
        assert subject().uses_gpu([torch.empty(1), there])
        assert subject(Model(lambda s, x: x, w=nn.Parameter(there))).uses_gpu([])
        assert not subject().uses_gpu([torch.empty(1)])
