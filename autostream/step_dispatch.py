"""What a call of a model runs: a schedule made for calls like it, or the model itself, and why.

call ──▶ like the last one? ──▶ short way
               │ no
               └─▶ signature ──▶ entry, made in the first call that has it (``entries.py``)
                       └── no graph can do the same: the model itself
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autostream.build import Scheduled, Stale, Unsuitable
from autostream.comparison import compared
from autostream.differentiated import Differentiated
from autostream.entries import Entry, Plain, Refused, Refusing, Subject, entry_of, is_due, optimized_in_part, pieces_of
from autostream.errors import AutostreamError, TargetError, TraceError, first_line
from autostream.execution.cuda_graph import GraphPools
from autostream.execution.slots import SlotTable
from autostream.frontend.guards import anomalies_sought, exporting, traced_by_fx, unusual_call, unusual_tensor
from autostream.frontend.numerics import order_attention
from autostream.frontend.signature import Signature, signature_of
from autostream.frontend.tree import Structure, flatten, tensors_like, unflatten
from autostream.ir import Decision
from autostream.optimized import Optimized
from autostream.options import Options, disabled, paranoid
from autostream.pieces import Pieces
from autostream.pipeline import versions
from autostream.preparing import preparing
from autostream.reporting.report import Report
from autostream.shortcut import Changed, Direct, Shortcut
from autostream.tracing.export import MODELS, PIECES, SECTIONS, Tracer
from autostream.tracing.saved_tensors import hooks_are_set
from autostream.tracing.state import ModelWatch, name_of
from autostream.tracing.trial import check_call, check_devices
from autostream.ways import ShortWays, Ways

log = logging.getLogger(__name__)


class Dispatcher(Optimized):
    """Runs calls of a model, each by what was made for its signature.

    Args:
        model: the module to run.
        options: how to schedule it.
        bound_inputs: of a piece that Dynamo made, the flat positions of inputs that stay where they are from call to
            call, as weights do. A piece is not split any further.
        pools: of captured graphs; a piece shares those of its model.
        tracer: makes programs of such models.
        slots: where inputs may come in turn: captured graphs read them there.

    Attributes:
        disabled: whether every call goes to the plain model: ``AUTOSTREAM_DISABLE`` was set when this was made.

    Example:
        >>> dispatcher = Dispatcher(nn.ReLU(), Options())
        >>> dispatcher(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
        >>> [report.signature for report in dispatcher.reports]
        ['2:float32 on cpu, train, no gradients']
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        bound_inputs: frozenset[int] | None = None,
        pools: GraphPools | None = None,
        tracer: Tracer = MODELS,
        slots: SlotTable | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.slots = SlotTable() if slots is None else slots
        pools = GraphPools() if pools is None else pools
        self._subject = Subject(
            model,
            options,
            tracer,
            bound_inputs,
            pools,
            self.slots,
            make_piece=partial(_part, options, pools, PIECES),
            make_section=partial(_part, options, pools, SECTIONS),
        )
        self.disabled = disabled()
        self._paranoid = paranoid()
        self._lock = threading.RLock()
        self._entries: OrderedDict[Signature, Entry] = OrderedDict()
        self._proven: WeakSet[Entry] = WeakSet()
        self._bypasses: dict[str, Report] = {}
        self._shortcut: Shortcut | ShortWays | Direct | None = None
        self._direct: WeakKeyDictionary[Entry, Direct] = WeakKeyDictionary()
        self._dropped = False
        self._calls = self._renewals = 0
        self._watch = ModelWatch(model)
        _dispatchers.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments.

        Raises:
            Refused: no graph does the same, and the tracer says that the caller has another way.
        """
        shortcut = self._shortcut
        if shortcut is not None and not kwargs and (tensors := shortcut.fits(args)) is not None:
            try:
                outputs = shortcut(tensors)
                self._calls += 1
                return outputs
            except Exception as reason:  # what else can be done is found on the long way
                self._shortcut = None
                if not (isinstance(reason, Changed) or shortcut.repeatable):
                    raise
                shortcut = None
                self.let_go()
        if traced_by_fx():  # it looks for what is called among its root's submodules, and the model is not there
            return self.model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.disabled or exporting():
            return self.model(*args, **kwargs)
        try:
            return self._scheduled(args, kwargs)
        except _Bypass as bypass:
            self._note(str(bypass))
        return self.model(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Do now, without gradients, what the first call with such arguments would do; leave everything as it is.

        Raises:
            TargetError: an input lies on another device than the model's state, or the model itself fails at them.
            TraceError: with ``strict=True``, the model cannot be traced.
        """
        if not self.disabled and self._prepared(args, kwargs) is None:
            check_devices(self.model, (args, kwargs))

    def static_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments, with the tensors that a captured graph reads in place of those given.

        A call that is given these very tensors copies nothing in. Fill them before each call.

        Returns:
            ``(args, kwargs)``; the given tensors themselves where nothing is captured.

        Raises:
            TargetError: the model itself fails at them.
            TraceError: with ``strict=True``, the model cannot be traced.
        """
        entry = None if self.disabled else self._prepared(args, kwargs)
        if not isinstance(entry, Scheduled):
            return args, kwargs
        tensors, structure = flatten((args, kwargs))
        static = entry.static_inputs(tensors)
        return unflatten(structure, static) if static else (args, kwargs)

    def lowered(self, *args: Any, **kwargs: Any) -> GraphModule | None:
        """The graph that runs calls with these arguments, to be read: its ``code`` has the ops, streams and waits.

        Returns:
            A module over the flat tensors of the model and its inputs; ``None`` where there is no schedule.

        Raises:
            TargetError: the model itself fails at these arguments.
            TraceError: with ``strict=True``, the model cannot be traced.

        Example:
            >>> lowered = Dispatcher(nn.ReLU(), Options()).lowered(torch.ones(2))
            >>> "torch.ops.aten.relu" in lowered.code
            True
        """
        entry = None if self.disabled else self._prepared(args, kwargs)
        return entry.lowered() if isinstance(entry, Scheduled) else None

    def watched(self, *args: Any, **kwargs: Any) -> Report | None:
        """What is known of calls with these arguments, and a run of them that a profiler watched.

        Returns:
            The report, with the reason where no run could be watched; ``None`` where autostream is off.

        Raises:
            TargetError: the model itself fails at these arguments.
            TraceError: with ``strict=True``, the model cannot be traced.
        """
        entry = None if self.disabled else self._prepared(args, kwargs)
        if entry is None:
            return None
        return entry.watched(flatten((args, kwargs))[0]) if isinstance(entry, Scheduled) else entry.report

    @property
    def reports(self) -> tuple[Report, ...]:
        """What is known of each signature, the most recently used first, then calls that went to the plain model."""
        with self._lock:
            entries = [entry for entry in reversed(self._entries.values()) if not isinstance(entry, Refusing)]
            return (*(entry.report for entry in entries), *self._bypasses.values())

    def let_go(self) -> None:
        """Keep no memory for what was the model's: entries that nobody calls any more do not find out."""
        if not self._lock.acquire(blocking=False):
            return  # another thread makes an entry, and sees to it
        try:
            for entry in self._entries.values():
                if isinstance(entry, Scheduled | Differentiated):
                    entry.let_go()
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Drop all that was made: the memory that it was made for is the model's no longer."""
        # Without the lock: it is held while another thread prepares, and that may be waiting for this thread.
        self._entries = OrderedDict()
        self._shortcut = None

    def forget_refusals(self) -> None:
        """Try again what was refused, when calls like it come: they may have failed for what the caller did."""
        self._entries = OrderedDict(
            (signature, entry) for signature, entry in self._entries.items() if not isinstance(entry, Refusing)
        )

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
        """What runs calls with these arguments, if that is not always the model. It counts as proven."""
        with torch.no_grad():
            try:
                tensors, structure, signature, _ = self._signature(args, kwargs)
            except _Bypass as bypass:
                self._note(str(bypass))
                return None
            entry, proven = self._entry(tensors, structure, signature)
        tried = entry in self._proven or optimized_in_part(self.model)
        try:
            if isinstance(entry, Ways):
                entry = entry.prepare(tensors, args, kwargs) or (self._split(entry) if entry.over else entry)
            elif not isinstance(entry, Scheduled) and self._subject.tracer.may_try and not tried:
                check_call(self.model, args, kwargs)
        except TargetError:
            self._drop(entry)
            raise
        proven()
        return entry

    def _scheduled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._shortcut = None
        tensors, structure, signature, watch = self._signature(args, kwargs)
        full = signature not in self._entries and len(self._entries) >= self.options.max_signatures
        if full and (signature.gradients or not self._subject.tracer.may_renew or self._reads_another(signature)):
            what = signature.unlike(next(reversed(self._entries)))
            raise self._refused(f"it has as many schedules as max_signatures allows, and meets another: {what} changed")
        for _ in range(3):
            failed, (entry, proven) = "", self._entry(tensors, structure, signature)
            try:
                outputs = self._outputs(entry, tensors, args, kwargs)
            except Stale:
                if not self._worth_renewing():
                    proven()
                    raise self._refused(_CHANGES) from None
                self._drop(entry)
            except Unsuitable as reason:
                proven()
                raise self._refused(str(reason)) from None
            except Refused:
                proven()
                raise
            except Exception as error:
                if isinstance(entry, Plain) and not entry.works:  # the model failed, perhaps at this input only
                    self._drop(entry)
                if not isinstance(entry, Scheduled | Differentiated):
                    raise
                if not self._given_up(entry, error):
                    # A checkpoint ends a call early by an error of its hooks.
                    if self.options.strict or isinstance(error, AutostreamError) or hooks_are_set():
                        raise
                    failed = first_line(error)
                if not entry.repeatable:
                    raise
            else:
                proven()
                self._calls += 1
                if isinstance(entry, Ways) and entry.over:
                    entry = self._split(entry)
                stays = watch is self._watch and self._entries.get(signature) is entry
                if not kwargs and stays and not self._paranoid:
                    self._shortcut = self._short_way(entry, args, structure, signature)
                if isinstance(entry, Scheduled | Differentiated) and entry.noticed():
                    self.let_go()
                return outputs
            if failed:
                return self._instead(entry, failed, args, kwargs)
            del entry, proven  # what comes next may need their memory
        raise self._refused("the model's state changes while it is called")

    def _short_way(
        self, entry: Entry, args: tuple[Any, ...], structure: Structure, signature: Signature
    ) -> Shortcut | ShortWays | Direct | None:
        """For calls like one that was done by position, where there is one."""
        watch = self._watch
        if isinstance(entry, Scheduled | Ways):
            return entry.shortcut(args, structure, watch)
        if isinstance(entry, Differentiated) or torch.is_grad_enabled() or signature.aliases:
            return None
        (call, _) = structure.children or ()
        tensors = tensors_like(call, args)
        known = self._direct.get(entry)
        if tensors and (known is None or known.fits(args) is None):
            known = self._direct[entry] = Direct(entry, call, tensors, watch, signature.training, signature.read)
        return known if tensors else None

    def _reads_another(self, signature: Signature) -> bool:
        """Whether a schedule is there but for numbers that functions read elsewhere: the next will be others again."""
        return any(replace(signature, read=other.read) == other for other in self._entries)

    def _outputs(self, entry: Entry, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(entry, Scheduled | Differentiated | Ways):
            return entry(*args, **kwargs)
        call = (tensors, args, kwargs) if isinstance(entry, Ways) else (tensors,)
        if self._paranoid:
            return compared(self.model, partial(entry, *call), tensors, args, kwargs)
        return entry(*call)

    def _signature(self, args: Any, kwargs: Any) -> tuple[list[Tensor], Structure, Signature, ModelWatch]:
        """The flat inputs of a call, its signature, and the watch on the modules that it was made for."""
        try:
            tensors, structure = flatten((args, kwargs))
        except TraceError as error:
            raise self._unseen(str(error)) from None
        self._renew_watch()
        watch = self._watch
        hooked = "a submodule has forward hooks, which a graph would not call" if watch.hooked() else ""
        if reason := unusual_tensor(tensors) or unusual_call() or hooked:
            raise self._unseen(reason)
        gradients = self._gradients(tensors)
        if gradients and watch.hooked_backward():
            raise self._refused("a submodule has backward hooks, which a graph would not call")
        if gradients and (reason := anomalies_sought()):
            raise self._refused(reason)
        if gradients and self.better_alone(tensors):
            raise self._refused(_BETTER_ALONE)
        return tensors, structure, signature_of(structure, tensors, watch.training(), gradients, watch.read()), watch

    def _gradients(self, tensors: Sequence[Tensor]) -> bytes:
        """Which parameters and tensors a call would record gradients for."""
        if not torch.is_grad_enabled():
            return b""
        required = self._watch.required() + bytes([tensor.requires_grad for tensor in tensors])
        return required if any(required) else b""

    def better_alone(self, tensors: Sequence[Tensor]) -> bool:
        """Whether to leave calls that record gradients to the model: on a CPU, unless somebody asks for a schedule."""
        asked = self.options.strict or self.options.policy != "auto"
        return not asked and not self._subject.uses_gpu(tensors)

    def _renew_watch(self) -> None:
        """Look at the modules again where they are others.

        Raises:
            Exception: they are, time and again.
        """
        if self._watch.intact():
            return
        self._watch = ModelWatch(self.model)
        self.forget()
        if not self._worth_renewing():
            raise self._refused(_CHANGES)

    def _worth_renewing(self) -> bool:
        """Whether to make anew what was made for the model as it was: each answer counts, as a renewal or as a call."""
        worth = self._renewals < self.options.max_signatures + self._calls // _WORTH
        if worth:
            self._renewals += 1
        else:
            self._calls += 1  # what changes no more has a schedule again at some time
        return worth

    def _entry(
        self, tensors: list[Tensor], structure: Structure, signature: Signature
    ) -> tuple[Entry, Callable[[], None]]:
        """What runs calls of this signature, and what to call as soon as it has."""
        with self._lock:
            entries = self._entries
            if is_due(entries.get(signature)):
                with preparing:
                    order_attention()
                    # Again, for a trace in another thread sets flags for all threads that are part of a signature.
                    modes, read = self._watch.training(), self._watch.read()
                    signature = signature_of(structure, tensors, modes, signature.gradients, read)
                    former = entries.get(signature)
                    if is_due(former):
                        self.let_go()
                        made = entries[signature] = entry_of(self._subject, structure, tensors, signature)
                        if former is not None and isinstance(made, Plain):
                            made.passing = False  # it has not passed, nor will it
                        self._keep_to_limit(entries)
            entries.move_to_end(signature)
            entry = entries[signature]
            return entry, partial(self._prove, entries, signature, entry)

    def _prove(self, entries: OrderedDict[Signature, Entry], signature: Signature, entry: Entry) -> None:
        """Count an entry among those that have worked."""
        if entry not in self._proven:
            with self._lock:
                self._proven.add(entry)
                entries.setdefault(signature, entry)  # others may have taken its place while it ran
                entries.move_to_end(signature)
                self._keep_to_limit(entries)

    def _keep_to_limit(self, entries: OrderedDict[Signature, Entry]) -> None:
        """Drop what is too much: first what has not worked yet, then the least recently used.

        The last that has not worked yet is not counted. It takes the place of another when it works; and if it never
        does, it need not be made again for each call that fails.
        """
        proven = {signature: entry in self._proven for signature, entry in entries.items()}
        last = next((signature for signature in reversed(proven) if not proven[signature]), None)
        counted = sorted((signature for signature in proven if signature != last), key=proven.__getitem__)
        for signature in counted[: -self.options.max_signatures]:
            self._shortcut = None
            del entries[signature]
            if proven[signature]:
                level = logging.INFO if self._dropped else logging.WARNING  # those after the first say nothing new
                self._dropped = True
                log.log(level, "%s: dropped the schedule for %s; see max_signatures and dynamic", self._name, signature)

    def _drop(self, entry: Entry) -> None:
        self._shortcut = None
        with self._lock:
            for signature in self._signatures_of(entry):
                del self._entries[signature]

    def _given_up(self, entry: Entry, error: Exception) -> bool:
        """Run plainly from now on what has too little memory as scheduled: a graph keeps its own between calls too."""
        if self.options.strict or not isinstance(error, torch.OutOfMemoryError):
            return False
        reason = f"{_TOO_LITTLE_MEMORY} ({first_line(error)}): free some, or lower memory_budget, and optimize it again"
        log.warning("%s runs plainly: %s", self._name, reason)
        with self._lock:
            self._replace(entry, lambda signature: Plain(self.model, signature, reason))
        return True

    def _instead(self, entry: Entry, error: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns where its schedule failed: if it does not fail too, it makes all such calls."""
        outputs = self.model(*args, **kwargs)
        reason = f"its schedule fails at some inputs ({error}), and the model does not: perhaps it catches that"
        log.warning("%s runs plainly: %s", self._name, reason)
        with self._lock:
            self._replace(entry, lambda signature: Plain(self.model, signature, reason))
        return outputs

    def _signatures_of(self, entry: Entry) -> list[Signature]:
        return [signature for signature, other in self._entries.items() if other is entry]

    def _split(self, ways: Ways) -> Pieces:
        """Pieces, in the place of ways that are given up."""
        with self._lock:
            reason = f"{ways.reason}; in a graph for each way: {ways.over}"
            pieces = pieces_of(self._subject, ways.signature, reason)
            self._replace(ways, lambda _: pieces)
            return pieces

    def _replace(self, entry: Entry, other: Callable[[Signature], Entry]) -> None:
        for signature in self._signatures_of(entry):
            self._entries[signature] = other(signature)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the model and the options; schedules are made anew."""
        return Dispatcher, (self.model, self.options, self._subject.bound_inputs, None, self._subject.tracer)

    def _refused(self, reason: str) -> Exception:
        return TraceError(reason) if self.options.strict else _Bypass(reason)

    def _unseen(self, reason: str) -> Exception:
        """For a call that no graph does the same as."""
        may_refuse = self._subject.tracer.may_refuse and not self.options.strict
        return Refused(reason) if may_refuse else self._refused(reason)

    def _note(self, reason: str) -> None:
        """Remember, and say once, why a call went to the plain model."""
        if reason not in self._bypasses:
            log.warning("%s runs plainly: %s", self._name, reason)
            refusal = Decision("", "plain", reason)
            report = Report(self._name, "some calls", "plain", refusals=(refusal,), versions=versions())
            self._bypasses = {**self._bypasses, reason: report}

    @property
    def _name(self) -> str:
        return name_of(self.model)


def _part(
    options: Options, pools: GraphPools, tracer: Tracer, module: nn.Module, bound_inputs: frozenset[int]
) -> Dispatcher:
    """Runs a part of a model, of which it holds nothing else than the pools."""
    return Dispatcher(module, options, bound_inputs, pools, tracer)


_BETTER_ALONE = (
    "gradients are recorded on a CPU, where nothing is captured, so that a schedule of forward and backward takes the "
    "host longer than the model does: choose a policy to have one all the same"
)

_CHANGES = (
    "what schedules take for granted of the model changes in call after call, and each change takes a new one: numbers "
    "and containers that its modules have, layouts of its weights, and the modules that it has or refers to: give the "
    "model what changes as a tensor, and of modules all of them, each in a place of its own"
)

_WORTH = 1000
"""Calls, scheduled or not, for each of which as many a stale schedule is made anew, beside the first few: that takes
seconds."""

_TOO_LITTLE_MEMORY = "there is too little memory to run it as scheduled"

_dispatchers: WeakSet[Dispatcher] = WeakSet()


def _renew_locks() -> None:
    """In a forked process, where no thread is left that could release them."""
    for dispatcher in _dispatchers:
        dispatcher._lock = threading.RLock()
        dispatcher._subject = replace(dispatcher._subject, repeating=threading.RLock())
        for entry in dispatcher._entries.values():
            if isinstance(entry, Differentiated):
                entry.renew_locks(dispatcher._subject.repeating)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_locks)


class _Bypass(Exception):  # noqa: N818 - a notice within this file, not an error
    """A call must go to the plain model; the message says why."""
