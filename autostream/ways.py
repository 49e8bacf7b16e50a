"""A model that branches on values of tensors: a program for each way that calls have taken through it.

    x ──▶ a ──▶ b ──▶ b > 0?        way (True,)     a b expect(True) ── c d
                      │      ╰▶ e   way (False,)    a b expect(False) ── e
                      ╰──▶ c ──▶ d

A call runs the way that the last one took. Where a value is not as that expects, the call begins anew along another one
that has begun in the same way; where there is none, the model itself does it, is watched, and what it asked for is a
new way. So traces hang together in a tree, whose root is the call and whose forks are values (Gal et al.,
*Trace-based Just-in-Time Type Specialization for Dynamic Languages*, PLDI 2009; for models of tensors, Jeong et al.,
*JANUS: Fast and Flexible Deep Learning via Symbolic Graph Execution of Imperative Programs*, NSDI 2019). Ways that
cannot be scheduled are left to the model, as long as others can, and calls seldom begin along the wrong one.

Nothing shows of what was begun in vain: of no way does the program write to what is not its own, nor draw; and the
model's Python does nothing but compute (``tracing/purity.py``), so that a call that is made along a way leaves out
nothing that the model would have done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from autostream.build import Scheduled, Stale, Unsuitable
from autostream.errors import AutostreamError, TraceError, first_line
from autostream.frontend.signature import Signature
from autostream.frontend.tree import Structure
from autostream.ir import Decision
from autostream.pipeline import versions
from autostream.preparing import preparing
from autostream.reporting.report import Report
from autostream.shortcut import Changed, Shortcut
from autostream.tracing.branches import Way, noted
from autostream.tracing.expecting import OtherWay
from autostream.tracing.state import ModelWatch, name_of
from autostream.tracing.trial import check_call, tried

log = logging.getLogger(__name__)

Make = Callable[[Sequence[Tensor], Way], Scheduled]
"""Schedules one way through the model, at flat inputs that take it."""


class Ways:
    """A model that branches on values, with a schedule for each way that calls take; for one signature.

    Args:
        model: the live model.
        signature: what this is made for.
        reason: why the whole model could not be traced.
        make: schedules a way.

    Attributes:
        signature: what this is made for.
        reason: why the whole model could not be traced.
        over: why calls should be made otherwise from now on; ``""`` as long as they should not.
    """

    def __init__(self, model: nn.Module, signature: Signature, reason: str, make: Make) -> None:
        self.signature, self.reason = signature, reason
        self._model, self._make = model, make
        self._known: dict[Way, Known] = {}
        self._refused: dict[Way, str] = {}
        """Why the model itself makes calls that take these ways."""
        self._turns = count(1)
        self._calls = self._diverged = 0
        """How many there were lately, and how many of them began along a way that they did not take."""
        self.over = ""

    def __call__(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns for these arguments, whose flat tensors are given too.

        Raises:
            Stale: of a way, as :class:`~autostream.build.Scheduled` raises it.
            Unsuitable: likewise.
        """
        return self.along(lambda known: known.scheduled(tensors), tensors, args, kwargs)

    def prepare(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scheduled | None:
        """Schedule, without gradients, the way that a call with these arguments takes: copies of all tensors tell.

        Returns:
            What would run it, unless it is over.

        Raises:
            TargetError: the model itself fails at them.
        """
        try:
            with noted() as outcomes:
                tried(self._model, args, kwargs)
        except Exception:  # which a call may have nonetheless that records gradients, or could not be tried
            check_call(self._model, args, kwargs)
            return None
        way = tuple(outcomes)
        with torch.no_grad():
            self._learn(tensors, way)
        return self._known[way].scheduled if way in self._known and not self.over else None

    def shortcut(self, args: tuple[Any, ...], structure: Structure, watch: ModelWatch) -> ShortWays | None:
        """The short way for calls like one that has just been made, as of :meth:`Scheduled.shortcut`."""
        known = self.latest()
        if known is not None:
            known.shortcut = known.scheduled.shortcut(args, structure, watch)
        return ShortWays(self) if known is not None and known.shortcut is not None else None

    @property
    def report(self) -> Report:
        """What is known now: ways are scheduled in the calls that take them first."""
        choice = "plain" if self.over else "a way runs plainly"
        reasons = filter(None, dict.fromkeys([*self._refused.values(), self.over]))
        refusals = (Decision("", choice, reason) for reason in reasons)
        return Report(
            model=name_of(self._model),
            signature=str(self.signature),
            mode="ways" if self._known else "not run yet",
            refusals=(Decision("", "a graph for each way", self.reason), *refusals),
            versions=versions(),
            parts=tuple(known.report() for known in list(self._known.values())),
        )

    def latest(self, begun: Way = ()) -> Known | None:
        """Of the ways that begin with these outcomes, the one that was taken last, if there is one."""
        alike = (known for known in list(self._known.values()) if known.way[: len(begun)] == begun)
        return max(alike, key=lambda known: known.turn, default=None)

    def along(
        self, run: Callable[[Known], Any], tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the way that a call takes; or the model, where it is not known or fails, and learn which way that takes.

        Args:
            run: runs a way.
            tensors: of the arguments.
            args: of the call.
            kwargs: of the call.
        """
        known = self.latest()
        self._count(diverged=False)
        for attempt in range(len(self._known)):
            if known is None:
                break
            try:
                outputs = run(known)
            except OtherWay as other:
                if not attempt:
                    self._count(diverged=True)
                known = self.latest((*known.way[: other.at], other.outcome))
            except (Stale, Unsuitable, Changed, AutostreamError):
                raise
            except torch.OutOfMemoryError as error:
                self.over = f"there is too little memory to run a way ({first_line(error)})"
                break
            except Exception:  # the model's own, or of a check (torch._check) that a trace has moved before a branch
                log.debug("%s: the model itself is called, for a way fails", name_of(self._model), exc_info=True)
                break
            else:
                known.turn = next(self._turns)
                return outputs
        with noted() as outcomes:
            outputs = self._model(*args, **kwargs)
        self._learn(tensors, tuple(outcomes))
        return outputs

    def _count(self, *, diverged: bool) -> None:
        if diverged:
            self._diverged += 1
            self.over = self.over or (_DIVERGES if self._diverged > _MANY // 4 else "")
        elif self._calls == _MANY:
            self._calls = self._diverged = 0
        else:
            self._calls += 1

    def _learn(self, tensors: Sequence[Tensor], way: Way) -> None:
        """Schedule a way that a call has taken, unless it is known, or remember why not."""
        with preparing:
            tried = len(self._known) + len(self._refused)
            if way not in self._known and way not in self._refused and tried <= _MOST and not self.over:
                reason = _TOO_MANY if tried == _MOST else self._refusal(tensors, way)
                if reason:
                    self._refused[way] = reason
                    log.info("%s: a way through it runs plainly: %s", name_of(self._model), reason)
                if not self._known:
                    self.over = reason
            if way in self._known:
                self._known[way].turn = next(self._turns)

    def _refusal(self, tensors: Sequence[Tensor], way: Way) -> str:
        """Why a new way is not scheduled; ``""`` where it is."""
        if len(way) > _LONGEST:
            return f"it branches {len(way)} times in a call, of which a graph may hold {_LONGEST}, as loops on data do"
        try:
            scheduled = self._make(tensors, way)
        except OtherWay:
            return _UNSTEADY
        except Exception as error:
            return str(error) if isinstance(error, TraceError) else first_line(error)
        if not scheduled.repeatable:
            return _SEEN
        self._known[way] = Known(way, scheduled)
        log.info("%s: way %d through it is scheduled", name_of(self._model), len(self._known))
        return ""


@dataclass(eq=False)
class Known:
    """A way that is scheduled.

    Attributes:
        way: the outcomes that it expects.
        scheduled: what runs it.
        turn: when it was last taken.
        shortcut: the short way along it.
    """

    way: Way
    scheduled: Scheduled
    turn: int = 0
    shortcut: Shortcut | None = None

    def fits(self, args: tuple[Any, ...]) -> Sequence[Tensor] | None:
        """The tensors of positional arguments, if a call with them may take the short way along this one."""
        return None if self.shortcut is None else self.shortcut.fits(args)

    def report(self) -> Report:
        """What is known of it, and where it goes."""
        choices = zip(self.way, self.scheduled.choices, strict=False)  # some may be one op, in one autocast region
        said = ", ".join(f"{outcome} at {source}" if source else str(outcome) for outcome, source in choices)
        return replace(self.scheduled.report, ended=f"the model returns, after {said}")


class ShortWays:
    """The short way of calls that take any of the ways which have one.

    Attributes:
        repeatable: no: if a call fails, that is the model's.
    """

    repeatable = False

    def __init__(self, ways: Ways) -> None:
        self._ways = ways

    def fits(self, args: tuple[Any, ...]) -> Sequence[Any] | None:
        """What to call this with, if a call with these positional arguments is like one before."""
        known = None if self._ways.over else self._ways.latest()
        tensors = None if known is None else known.fits(args)
        return None if tensors is None else (known, tensors, args)

    def __call__(self, fit: Sequence[Any]) -> Any:
        """What the model returns for arguments that fit.

        Raises:
            Changed: the model is another than it was, or the call takes a known way that has no short one; nothing
                that can be seen has been done.
        """
        first, looked_at, args = fit

        def run(known: Known) -> Any:
            tensors, shortcut = looked_at if known is first else known.fits(args), known.shortcut
            if tensors is None or shortcut is None:
                raise Changed
            return shortcut(tensors)

        return self._ways.along(run, looked_at, args, {})


_MOST = 8
"""Ways: each takes a trace, and memory."""

_LONGEST = 32
"""Outcomes of one way: a loop goes on for another number of rounds in each call, and all of its ops are traced anew."""

_TOO_MANY = f"calls take more than {_MOST} ways through it"

_MANY = 64
"""Calls, of which no more than a quarter may begin along another way than they take: what they did there is lost."""

_DIVERGES = (
    f"more than {_MANY // 4} of {_MANY} calls took another way than the one before, and what they had begun was lost"
)

_UNSTEADY = "what it branches by is another value in a second call with the same inputs"

_SEEN = "a way that it takes writes to its state or inputs, or draws random numbers: it could not be begun in vain"
