"""A model that cannot be traced whole: Dynamo splits it at graph breaks, and each piece is scheduled for itself."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule

from autostream.analysis.source import user_line
from autostream.errors import first_line
from autostream.frontend.signature import Signature
from autostream.ir import Decision
from autostream.optimized import MakeSection as MakePiece
from autostream.optimized import Optimized
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.tracing.dynamo import ending_of, is_refusal, split, without_numbers
from autostream.tracing.saved_tensors import hooks_are_set
from autostream.tracing.state import name_of
from autostream.turns import ROUNDS, Turns

log = logging.getLogger(__name__)


class Pieces:
    """A model that Dynamo splits at graph breaks, each piece scheduled for itself; or, if that fails, the plain model.

    Where the faster is to be kept, calls of a model on a GPU are made in pieces and as it is, by turns, once no new
    pieces come. Where saved tensors have hooks, pieces stay: a checkpoint needs its two calls to save the same.

    Args:
        model: the live model.
        signature: what this is made for.
        reason: why the whole model could not be traced.
        make_piece: makes what runs in the place of a piece; it has ``reports``.
        choose: whether to keep the faster; else pieces stay.
    """

    def __init__(
        self, model: nn.Module, signature: Signature, reason: str, make_piece: MakePiece, *, choose: bool = False
    ) -> None:
        self._model = model
        self._signature = signature
        self._refusals = {reason: Decision("", "split at graph breaks", reason)}
        self._pieces: list[tuple[Optimized, str]] = []
        """With the reason why each ends where it does."""
        self._alike = defaultdict[str, set[str]](set)
        """The code of pieces that differ in numbers only, by that code without them; of those before this call."""
        self._new: set[str] = set()
        """The code of pieces that this call has made."""
        self._calls = self._again = 0
        """How many there were, and how many of them made a piece that an earlier one had made."""
        self._devices = {device for *_, device in signature.tensors if device.type == "cuda"} if choose else set()
        self._steady = 0
        """Calls in a row that made no piece."""
        self._turns: Turns | None = None
        self._in_a_row = _IN_A_ROW[bool(signature.gradients) :]
        """How many calls are timed as one, in this contest and those after it."""

        self._make_piece = make_piece
        self._split = partial(split, model, partial(_piece_of, weakref.ref(self)), self._refuse)
        self._takes_numbers = False
        self._run: Callable[..., Any] = self._split()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        self._calls += 1
        if self._devices and hooks_are_set():
            log.info("%s stays in pieces: %s", name_of(self._model), _COMPARED)
            self._devices, self._turns = set(), None
        try:
            outputs = (self._turns or self._run)(*args, **kwargs)
        except Exception as error:
            if self._run is self._model or not is_refusal(error):
                raise
            self._refuse(first_line(error))
            self._give_up()
            return self._model(*args, **kwargs)
        if self._new:
            self._note_new()
        if self._again > _MOST_ALIKE + self._calls // _WORTH:
            self._take_numbers(_AGAIN)
        elif any(len(codes) > _MOST_ALIKE for codes in self._alike.values()):
            self._take_numbers(_NUMBERS)
        if self._devices and self._pieces:
            self._choose()
        return outputs

    def _choose(self) -> None:
        """Have calls made by turns, or end that and keep the faster."""
        self._steady += 1
        turns, (in_a_row, *later) = self._turns, self._in_a_row
        if turns is None:
            if self._steady > _STEADY:
                self._turns = Turns(self._run, self._model, self._devices, in_a_row)
        elif turns.verdict:
            pieces_us, plain_us = turns.verdict
            what = f"{in_a_row} calls in a row, and what is done between them, take" if in_a_row else "calls alone take"
            each = " each" if in_a_row else ""
            said = f"{what} {pieces_us:.0f} µs{each} in pieces and {plain_us:.0f} as it is (second best of {ROUNDS})"
            log.info("%s: %s", name_of(self._model), said)
            self._turns = None
            if plain_us < pieces_us * (1 - _NOISE if in_a_row else 1):
                self._refusals = {**self._refusals, said: Decision("", "plain", said)}
                self._give_up()
            if later and self._run is not self._model:
                self._in_a_row = tuple(later)
            else:
                self._devices = set()

    def _piece(self, module: GraphModule, bound_inputs: frozenset[int]) -> Optimized:
        made = self._make_piece(module, bound_inputs)
        self._steady, self._turns = 0, None
        self._pieces.append((made, _ending(module)))
        self._new.add(module.code)
        return made

    def _note_new(self) -> None:
        new, self._new = self._new, set()
        alike = [(code, self._alike[without_numbers(code)]) for code in new]
        self._again += any(code in codes for code, codes in alike)
        for code, codes in alike:
            codes.add(code)

    def _take_numbers(self, reason: str) -> None:
        """Make pieces that take numbers, or, where they are anew without end even so, none any more."""
        if self._takes_numbers:
            self._run_plainly(reason)
        else:
            self._takes_numbers = True
            self._start_again(self._split(take_numbers=True))

    def _run_plainly(self, reason: str) -> None:
        self._refusals = {**self._refusals, reason: Decision("", "plain", reason)}
        log.warning("%s runs plainly: %s", name_of(self._model), reason)
        self._give_up()

    def _give_up(self) -> None:
        self._start_again(self._model)

    def _start_again(self, run: Callable[..., Any]) -> None:
        self._run, self._pieces, self._steady, self._turns, self._again = run, [], 0, None, 0
        self._alike.clear()

    def _refuse(self, reason: str) -> None:
        reason = f"Dynamo cannot trace it either: {reason}"
        self._refusals = {**self._refusals, reason: Decision("", "plain", reason)}

    @property
    def report(self) -> Report:
        """What is known now: pieces are made in the calls that get to them."""
        return Report(
            model=name_of(self._model),
            signature=str(self._signature),
            mode=self._mode(),
            refusals=self._all_refusals(),
            versions=versions(),
            parts=tuple(replace(report, ended=ended) for piece, ended in self._pieces for report in piece.reports),
        )

    def _mode(self) -> str:
        if not self._calls:
            return "not run yet"
        return "graph breaks" if self._pieces else "plain"

    def _all_refusals(self) -> tuple[Decision, ...]:
        unexplained = self._mode() == "plain" and all(r.choice != "plain" for r in self._refusals.values())
        nothing = Decision("", "plain", _NO_PIECE)
        return (*self._refusals.values(), nothing) if unexplained else tuple(self._refusals.values())


def _piece_of(owner: weakref.ref[Pieces], module: GraphModule, bound_inputs: frozenset[int]) -> Callable[..., Any]:
    """A piece as Dynamo keeps it, for good: what is captured, and its memory, go with the model all the same."""
    pieces = owner()
    made = None if pieces is None else weakref.ref(pieces._piece(module, bound_inputs))
    return lambda *args: ((made and made()) or module)(*args)


_NO_PIECE = (
    "TorchDynamo finds no piece of it that it could trace: of a function with a graph break inside a loop it traces "
    "nothing; if that is what it is, make the body of the loop a method of its own"
)

_STEADY = 4
"""Calls that make no piece before any is timed: pieces have then been called with all that they were captured for."""

_IN_A_ROW = (0, 8)
"""Calls are timed alone, then by so many, with all that is done until the next: a loop may hide some of what one call
takes. Those that record gradients are timed in a row only: a step of training may make several, and has a backward."""

_NOISE = 0.03
"""What calls in a row may take longer in pieces: where somebody waits between them, little else is to be seen."""

_COMPARED = (
    "hooks of saved tensors are set, as checkpoints do, which compare what a call saves with what it saves when it is "
    "made once more: both have to be made in one way"
)

_MOST_ALIKE = 8
"""Numbers are constants of pieces, which is of use where blocks of a model differ in them. One that changes from call
to call makes a piece anew each time, even where Python only compares it: after so many, pieces take numbers; and after
as many more, all is given up."""

_NUMBERS = "its pieces hold a number that changes from call to call, such as one of .item(): keep it a tensor"

_WORTH = 8
"""Calls for each of which one may make a piece that is there already, beside the first few: it does where Dynamo looks
at a number which no piece computes with, such as one that counts calls, and finds another."""

_AGAIN = (
    "its pieces are made anew in call after call, and compute the same, since something that it reads in Python "
    "changes, such as a number that counts calls (self.calls += 1) or one of .item(), or since TorchDynamo is reset: "
    "keep it a tensor, or outside of the model"
)


def _ending(module: GraphModule) -> str:
    """Why a piece ends where it does, with the user's line."""
    reason, stack = ending_of(module)
    line = user_line(stack)
    return f"{reason} ({line})" if line else reason
