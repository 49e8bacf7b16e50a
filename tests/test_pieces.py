"""A model that is split at graph breaks: what runs, what is reported, and when it is given up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint

import autostream
from autostream import turns
from autostream.pieces import Pieces
from autostream.reporting.report import Report
from autostream.frontend.signature import signature_of
from autostream.frontend.tree import flatten
from tests.data_branches import DYNAMOS_OWN, Branching, same_gradients, trained
from tests.semantics import Model, same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Piece:
    """Runs a piece of a model as it is."""

    reports = (Report("Piece", "", "one stream"),)

    def __init__(self, module: nn.Module, bound: frozenset[int]) -> None:
        self.module = module

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)


def signature() -> Any:
    tensors, structure = flatten(((t(3),), {}))
    return signature_of(structure, tensors, b"")


@torch.no_grad()
def test_pieces_are_reported_when_they_have_been_made() -> None:
    pieces = Pieces(Model(lambda s, x: x + 1 if x.sum() > 0 else x - 1), signature(), "no graph", Piece)
    assert (pieces.report.mode, pieces.report.parts) == ("not run yet", ())
    same(pieces(torch.ones(3)), torch.full((3,), 2.0))
    assert pieces.report.mode == "graph breaks"
    first, last = pieces.report.parts
    assert re.fullmatch(
        r"a branch depends on the value of a tensor \(.*test_pieces.py:\d+: .* if x.sum\(\) > 0 .*\)", first.ended
    )
    assert (last,) == Piece.reports, "the model returns"
    assert replace(first, ended="") == last
    assert [refusal.reason for refusal in pieces.report.refusals] == ["no graph"]


@torch.no_grad()
def test_a_model_without_pieces_is_plain_for_a_reason() -> None:
    pieces = Pieces(Model(lambda s, x: x), signature(), "no graph", Piece)
    same(pieces(t(3)), t(3))
    assert pieces.report.mode == "plain"
    assert [refusal.choice for refusal in pieces.report.refusals] == ["split at graph breaks", "plain"]
    assert "no piece" in pieces.report.refusals[1].reason


@torch.no_grad()
def test_the_body_of_a_loop_has_pieces_where_it_is_a_method() -> None:
    """With the break in the loop itself there are none, and the report says what to do."""

    def body(s: Model, x: Tensor) -> Tensor:
        return x.sin() if x.sum() > 0 else x.cos()

    def inside(s: Model, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.sin() if x.sum() > 0 else x.cos()
        return x

    def outside(s: Model, x: Tensor) -> Tensor:
        for _ in range(3):
            x = body(s, x)
        return x

    for function, mode in ((inside, "plain"), (outside, "graph breaks")):
        pieces = Pieces(Model(function), signature(), "no graph", Piece)
        same(pieces(t(3)), inside(Model(inside), t(3)))
        assert pieces.report.mode == mode
        told = any("make the body of the loop a method" in refusal.reason for refusal in pieces.report.refusals)
        assert told == (mode == "plain")


@torch.no_grad()
def test_a_model_that_dynamo_refuses_runs_as_it_is() -> None:
    """The branches of a ``cond`` must be traceable; run plainly, it does not compile them."""

    def breaks(s: Model, x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            torch.cond(x.sum() > 0, lambda x: print() or x + 1, lambda x: x - 1, (x,))
        return x + 1

    pieces = Pieces(Model(breaks), signature(), "no graph", Piece)
    for _ in range(2):
        same(pieces(t(3)), t(3) + 1)
    assert pieces.report.mode == "plain"
    assert [refusal.choice for refusal in pieces.report.refusals] == ["split at graph breaks", "plain"]
    assert "Dynamo cannot trace it either: UncapturedHigherOrderOpError" in pieces.report.refusals[1].reason


def numbered(function: Callable[[Model, Tensor], Tensor]) -> tuple[Pieces, list[nn.Module]]:
    """Pieces of a model after calls with other numbers each, and what was made for them."""
    made = []

    def make(module: nn.Module, bound: frozenset[int]) -> Piece:
        made.append(module)
        return Piece(module, bound)

    pieces = Pieces(model := Model(function), signature(), "no graph", make)
    for number in range(20):
        x = torch.full((3,), float(number))
        same(pieces(x), model(x))
    return pieces, made


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: (x + 1) * x.sum().item(),
        lambda s, x: (x + 1) * int(x.sum()),
        lambda s, x: (x + 1).clamp(max=float(x[0]) * 2 + 1) + 1,
    ],
    ids=["a number", "a whole number", "a number that bounds"],
)
def test_a_number_that_changes_from_call_to_call_is_no_constant_for_long(
    function: Callable[[Model, Tensor], Tensor],
) -> None:
    """It is one in nine pieces, and then an input of those that are made instead; 0 and 1 Dynamo treats apart."""
    pieces, made = numbered(function)
    assert len(made) <= 1 + 9 + 5
    assert pieces.report.mode == "graph breaks"
    assert len(pieces.report.parts) <= 5


@torch.no_grad()
def test_where_each_number_makes_another_piece_there_is_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """As where Dynamo is told to take numbers for constants."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        pieces, made = numbered(lambda s, x: (x + 1) * x.sum().item())
    assert len(made) == 2 * (1 + 9)
    assert pieces.report.mode == "plain"
    assert "a number that changes from call to call" in pieces.report.refusals[-1].reason
    assert "keep it a tensor" in caplog.text


@torch.no_grad()
def test_a_piece_has_so_many_schedules_and_the_others_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole number that a piece takes, each other one would make another schedule."""
    monkeypatch.setattr("autostream.pieces._MOST_ALIKE", 2)
    model = Model(lambda s, x: (x + 1).relu() * int(x.sum()) if x.sum() > 0 else x)
    fast = autostream.optimize(model, policy="sequential", max_signatures=2)
    for number in range(1, 12):
        same(fast(torch.full((3,), float(number))), model(torch.full((3,), float(number))))
    (report,) = fast.reports
    assert report.mode == "graph breaks", report.refusals
    modes = [part.mode for part in report.parts]
    assert "plain" in modes
    assert modes.count("one stream") >= 3
    reasons = [refusal.reason for part in report.parts for refusal in part.refusals]
    assert any("as many schedules as max_signatures allows" in reason for reason in reasons)


@torch.no_grad()
def test_blocks_that_differ_in_a_number_have_pieces_of_their_own() -> None:
    """A number that an op wants to know while it is traced is a constant, as long as there are not too many."""

    class Block(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate = rate

        def forward(self, x: Tensor) -> Tensor:
            return torch.dropout(x, self.rate, self.training).relu() + 1 if x.sum() < 1e9 else x

    model = nn.Sequential(*(Block(at / 10) for at in range(5))).eval()
    fast, x = autostream.optimize(model, policy="sequential"), t(3)
    for _ in range(2):
        same(fast(x), model(x))
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    assert {part.mode for part in report.parts} == {"one stream"}, [part.refusals for part in report.parts]


@torch.no_grad()
def test_pieces_that_are_the_same_may_be_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autostream.pieces._MOST_ALIKE", 1)
    pieces = Pieces(Model(lambda s, x: x + 1 if x.sum() > 0 else x - 1), signature(), "no graph", Piece)
    for _ in range(2):
        torch._dynamo.reset()
        same(pieces(torch.ones(3)), torch.full((3,), 2.0))
    assert (pieces.report.mode, len(pieces.report.parts)) == ("graph breaks", 4)


@torch.no_grad()
@pytest.mark.parametrize(("often", "mode"), [(1, "plain"), (2, "plain"), (12, "graph breaks")])
def test_pieces_that_are_made_again_too_often_come_to_an_end(
    often: int, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The model looks at a number that no piece computes with, and that is another after so many calls."""

    def looks(s: Model, x: Tensor) -> Tensor:
        s.last = s.number
        return x + 1 if x.sum() > 0 else x - 1

    made = []

    def make(module: nn.Module, bound: frozenset[int]) -> Piece:
        made.append(module)
        return Piece(module, bound)

    model = Model(looks, number=0, last=0)
    pieces = Pieces(model, signature(), "no graph", make)
    for call in range(130):
        model.number = call // often
        same(pieces(torch.ones(3)), torch.full((3,), 2.0))
        assert model.last == model.number
    assert pieces.report.mode == mode
    assert len(made) < 40, "some with numbers for constants, then as many again with numbers for inputs"
    if mode == "plain":
        assert "a number that counts calls" in pieces.report.refusals[-1].reason
        assert "keep it a tensor" in caplog.text


@torch.no_grad()
def test_a_number_that_is_only_compared_leaves_the_pieces_as_they_are() -> None:
    """A check that never fires: the number is another in each call, and no piece computes with it."""

    def checks(s: Model, x: Tensor) -> Tensor:
        y = (x + 1).relu()
        if y.max().item() > 1e6:
            y = y / 2
        return y.sin()

    made = []

    def make(module: nn.Module, bound: frozenset[int]) -> Piece:
        made.append(module)
        return Piece(module, bound)

    model = Model(checks)
    pieces = Pieces(model, signature(), "no graph", make)
    for call in range(40):
        x = torch.full((3,), 1 + call / 10)
        same(pieces(x), model(x))
    assert pieces.report.mode == "graph breaks"
    assert len(made) < 26


@torch.no_grad()
def test_experts_have_pieces_of_their_own() -> None:
    """Which of them is called is a number of the device's."""

    def expert(s: Model, x: Tensor) -> Tensor:
        chosen = int(x[0])
        return s.scales[chosen] * (x + 1)

    model = Model(expert, scales=[torch.tensor(float(at)) for at in range(18)])
    pieces = Pieces(model, signature(), "no graph", Piece)
    for at in [*range(18), *range(18)]:
        x = torch.full((3,), float(at))
        same(pieces(x), at * (x + 1))
    assert pieces.report.mode == "graph breaks"


@torch.no_grad()
def test_what_dynamo_refused_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def refuse(*args: Any) -> None:
        tries.append(1)
        raise TorchDynamoException("no way")

    monkeypatch.setattr("autostream.pieces.split", lambda model, make_piece, refused: refuse)
    pieces = Pieces(nn.ReLU(), signature(), "no graph", Piece)
    for _ in range(3):
        same(pieces(t(3)), t(3).relu())
    assert len(tries) == 1
    assert pieces.report.mode == "plain"


@torch.no_grad()
def test_what_the_model_raises_is_no_refusal() -> None:
    def fails(s: Model, x: Tensor) -> Tensor:
        s.calls.append(1)
        raise KeyError("the model's own")

    model = Model(fails, calls=[])
    with pytest.raises(KeyError, match="the model's own"):
        Pieces(model, signature(), "no graph", Piece)(t(3))
    assert model.calls == [1]


# The faster is kept


class Both:
    """A model in two pieces, on what takes itself for a GPU; what its calls did, and how long each way takes.

    After calls in pieces something else may take longer, too.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, pieces_us: float, plain_us: float, after_us: float = 0.0, **options: bool
    ) -> None:
        self.calls: list[str] = []
        self.after = {"pieces": after_us / 1e6, "plain": 0.0}
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(turns.time, "perf_counter", lambda: self.seconds)
        self.seconds, us = 0.0, {"piece": pieces_us / 2, "plain": plain_us}

        class Timed(Piece):
            def __call__(piece, *args: Any) -> Any:  # noqa: N805
                self.calls.append("piece")
                self.seconds += us["piece"] / 1e6
                return super().__call__(*args)

        def forward(s: Model, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                self.calls.append("plain")
                self.seconds += us["plain"] / 1e6
            return x + 1 if x.sum() > 0 else x - 1

        on_gpu = replace(signature(), tensors=((*signature().tensors[0][:3], torch.device("cuda", 0)),))
        self.pieces = Pieces(Model(forward), on_gpu, "no graph", Timed, **options)

    def ways(self, calls: int) -> list[str]:
        """How so many calls were made."""
        made = []
        for _ in range(calls):
            self.calls.clear()
            same(self.pieces(torch.ones(3)), torch.full((3,), 2.0))
            made.append("pieces" if "piece" in self.calls else "plain")
            self.seconds += self.after[made[-1]]
        return made

    @property
    def reasons(self) -> list[str]:
        """Why it runs as it is."""
        return [refusal.reason for refusal in self.pieces.report.refusals if refusal.choice == "plain"]


BY_TURNS = ["pieces", "plain"] * turns.ROUNDS
IN_A_ROW = (["pieces"] * 8 + ["plain"] * 8) * turns.ROUNDS


@torch.no_grad()
def test_once_no_pieces_come_calls_are_made_by_turns_and_the_faster_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Both(monkeypatch, 30.0, 20.0, choose=True)
    assert slow.ways(18) == ["pieces"] * 5 + BY_TURNS + ["plain"] * 3
    assert slow.pieces.report.mode == "plain"
    assert slow.reasons == ["calls alone take 30 µs in pieces and 20 as it is (second best of 5)"]
    fast = Both(monkeypatch, 20.0, 30.0, choose=True)
    assert fast.ways(100) == ["pieces"] * 5 + BY_TURNS + ["pieces"] + IN_A_ROW + ["pieces"] * 4
    assert fast.pieces.report.mode == "graph breaks"
    assert fast.reasons == []


@torch.no_grad()
@pytest.mark.parametrize("after_us", [10.2, 11.0])
def test_what_calls_in_a_row_hide_counts_and_a_few_percent_are_noise(
    after_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(monkeypatch, 20.0, 30.0, after_us, choose=True)
    faster = "pieces" if after_us < 10.9 else "plain"
    assert both.ways(100) == ["pieces"] * 5 + BY_TURNS + ["pieces"] + IN_A_ROW + ["pieces"] + [faster] * 3
    said = "8 calls in a row, and what is done between them, take 31 µs each in pieces and 30 as it is"
    assert both.reasons == ([f"{said} (second best of 5)"] if faster == "plain" else [])


@torch.no_grad()
def test_a_piece_that_comes_late_has_the_timing_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other branch is come to while the first is timed: in the call that makes it, a piece is captured."""
    both = Both(monkeypatch, 20.0, 30.0, choose=True)
    assert both.ways(8) == ["pieces"] * 5 + BY_TURNS[:3]
    both.pieces(torch.full((3,), -1.0))  # as it is
    same(both.pieces(torch.full((3,), -1.0)), torch.full((3,), -2.0))
    assert both.ways(14) == ["pieces"] * 4 + BY_TURNS


@torch.no_grad()
def test_what_looks_like_a_refusal_is_the_models_where_that_runs_as_it_is() -> None:
    """So it is not called again."""

    def fails(s: Model, x: Tensor) -> Tensor:
        s.calls.append(1)
        raise TorchDynamoException("the model's own")

    model = Model(fails, calls=[])
    pieces = Pieces(model, signature(), "no graph", Piece)
    with pytest.raises(TorchDynamoException):
        pieces(t(3))
    model.calls.clear()
    with pytest.raises(TorchDynamoException):
        pieces(t(3))
    assert model.calls == [1]


@torch.no_grad()
def test_pieces_that_were_asked_for_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Both(monkeypatch, 30.0, 20.0).ways(18) == ["pieces"] * 18


@torch.no_grad()
def test_on_the_cpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autostream.pieces.Turns", lambda *args: pytest.fail("timed"))
    pieces = Pieces(Model(lambda s, x: x + 1 if x.sum() > 0 else x - 1), signature(), "no graph", Piece, choose=True)
    for _ in range(8):
        same(pieces(torch.ones(3)), torch.full((3,), 2.0))


# Calls that record gradients


@DYNAMOS_OWN
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("backward", [{}, {"create_graph": True}, {"retain_graph": True}])
def test_forward_and_backward_of_each_piece_are_scheduled(backward: dict[str, bool]) -> None:
    model, plain = Branching(), Branching()
    fast = autostream.optimize(model, policy="critical_path")
    same_gradients(trained(model, fast, **backward), trained(plain, plain, **backward))
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    assert {part.mode for part in report.parts} == {"forward and backward"}
    assert all([half.half for half in part.parts][:1] == ["forward"] for part in report.parts)


def test_where_dynamo_fails_calls_that_record_gradients_run_as_they_are() -> None:
    """Its own warning is an error here."""
    model, plain = Branching(), Branching()
    fast = autostream.optimize(model, policy="critical_path")
    same_gradients(trained(model, fast), trained(plain, plain))
    assert "Dynamo cannot trace it either" in " ".join(refusal.reason for refusal in fast.reports[0].refusals)


@DYNAMOS_OWN
def test_what_a_model_checkpoints_draws_the_same_numbers_once_more() -> None:
    """In Dynamo's form of a checkpoint it would not."""

    class Checkpointing(Branching):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return checkpoint(lambda y: torch.dropout(self.other(y).sin(), 0.5, True), y, use_reentrant=False)

    model, plain = Checkpointing(), Checkpointing()
    fast, found = autostream.optimize(model, policy="critical_path"), []
    for own, run in ((model, fast), (plain, plain)):
        torch.manual_seed(1)
        found.append(trained(own, run))
    same_gradients(*found)
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    assert "a part is checkpointed, whose" in " ".join(refusal.reason for refusal in report.refusals)


@DYNAMOS_OWN
def test_a_step_with_a_branch_on_data_is_scheduled_in_pieces() -> None:
    model, plain = Branching(), Branching()
    optimizers = [torch.optim.SGD(own.parameters(), lr=0.1) for own in (model, plain)]
    step = autostream.train_step(model, optimizers[0], lambda own, x: own(x).square().mean(), policy="critical_path")
    for seed in range(6):
        x = t(3, 4) + seed - 3
        found = step(x)
        optimizers[1].zero_grad()
        loss = plain(x).square().mean()
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(found, loss.detach())
    same(list(model.parameters()), list(plain.parameters()))
    assert "graph breaks" in [report.mode for report in step.reports]


@DYNAMOS_OWN
def test_calls_that_record_gradients_are_timed_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that is done until the next one; others are timed alone."""
    made: list[int] = []

    class Noted(turns.Turns):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(args[3])

    monkeypatch.setattr("autostream.pieces.Turns", Noted)
    for gradients, in_a_row in ((b"1", 8), (b"", 0)):  # those without have eight in a row after that
        pieces = Pieces(Branching(), replace(signature(), gradients=gradients), "no graph", Piece, choose=True)
        pieces._devices = {torch.device("cpu")}
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        with torch.set_grad_enabled(bool(gradients)):
            for _ in range(8):
                pieces(torch.ones(3, 4))
        assert made.pop() == in_a_row


@DYNAMOS_OWN
def test_a_checkpoint_computes_once_more_in_the_way_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second call ends early, with an exception: by turns, it would be the first of those made as the model is."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    model, plain = Branching(), Branching()
    fast = autostream.optimize(model, policy="critical_path")

    def checkpointed(x: Tensor) -> Any:
        return checkpoint(fast, x, use_reentrant=False)

    with monkeypatch.context() as patch:
        patch.setattr("autostream.entries.Pieces", on_what_takes_itself_for_a_gpu)
        for _ in range(4):
            same_gradients(trained(model, checkpointed), trained(plain, plain))
    assert [report.mode for report in fast.reports] == ["graph breaks"]


def on_what_takes_itself_for_a_gpu(*args: Any, **kwargs: Any) -> Pieces:
    pieces = Pieces(*args, **{**kwargs, "choose": True})
    pieces._devices = {torch.device("cpu")}
    return pieces


@pytest.mark.gpu
@DYNAMOS_OWN
@pytest.mark.parametrize("wrapped", [False, True], ids=["as it is", "checkpointed"])
def test_gradients_are_the_models_in_pieces_by_turns_and_afterwards(wrapped: bool) -> None:
    """The calls of eight rounds decide which way is kept; those of a checkpoint are made in pieces throughout."""
    model, plain = Branching().cuda(), Branching().cuda()
    fast = autostream.optimize(model, kernels="eager")

    def ours(x: Tensor) -> Any:
        return checkpoint(fast, x.cuda(), use_reentrant=False) if wrapped else fast(x.cuda())

    for _ in range(10):
        same_gradients(trained(model, ours), trained(plain, lambda x: plain(x.cuda())))
    modes = [report.mode for report in fast.reports]
    assert modes == ["graph breaks"] or (modes == ["plain"] and not wrapped)
