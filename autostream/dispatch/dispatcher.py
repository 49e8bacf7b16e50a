"""What a call of a model runs.

call ──▶ like one before? ──▶ Replay: the graph first, then its guards
               │ no
               └─▶ an entry whose guards hold ──▶ Dynamo's bytecode around the scheduled graph
                       │ none
                       └─▶ capture ──▶ one graph ──▶ CompiledGraph, and a backward where gradients are recorded
                              └── graph breaks ──▶ torch.compile, each graph CompiledGraph
                                        └── no graph at all, or too many ──▶ the model itself
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from autostream.dispatch.admission import Admission
from autostream.dispatch.captured_call import CapturedCall
from autostream.dispatch.compiled_graph import CompiledGraph, InputNames, eager_reason
from autostream.dispatch.graph_breaks import GraphBreaks
from autostream.dispatch.optimized_callable import OptimizedCallable
from autostream.dispatch.paranoid import compared
from autostream.dispatch.replay import GuardFailed, Replay
from autostream.dispatch.scheduled_program import ModelContext, ScheduledProgram
from autostream.errors import AutostreamError, FastPathError, OptionError, TargetError, TraceError, first_line
from autostream.frontend.autograd import differentiable
from autostream.frontend.capture import Capture, capture
from autostream.frontend.eager_only import exporting, has_torchscript, traced_by_fx, unusual_call, unusual_tensor
from autostream.frontend.fakes import forget, mode_of
from autostream.frontend.inputs import names_of
from autostream.frontend.modules import name_of
from autostream.frontend.saved_tensors import hooks_are_set
from autostream.frontend.settings import numerics
from autostream.frontend.signature import aliases_of, described
from autostream.frontend.tree import flatten, unflatten
from autostream.frontend.trial import check_call, check_devices
from autostream.fusion.inductor import check_level
from autostream.ir import Decision
from autostream.options import Options, disabled, paranoid
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.input_buffers import BufferTable
from autostream.utils.locks import preparing

log = logging.getLogger(__name__)


class EagerCall:
    """The model itself, for calls that nothing else works for.

    Args:
        label: of the calls, readable.
        reason: why.
    """

    def __init__(self, label: str, reason: str) -> None:
        self.label, self.reason = label, reason

    def reports(self, model: str) -> tuple[Report, ...]:
        """Why."""
        refusal = Decision("", "plain", self.reason)
        return (Report(model, self.label, "plain", refusals=(refusal,), versions=versions()),)


Entry = CapturedCall | GraphBreaks | EagerCall


@dataclass(slots=True, eq=False)
class _Known:
    """The short way of calls like one that has been made.

    Attributes:
        replay: what runs them.
        key: of the call.
        entry: what ran it.
        own: what the replay holds of the model's parameters and buffers, by identity.
        calls: how many it has served since that was last asked.
    """

    replay: Replay
    key: Hashable
    entry: CapturedCall
    own: frozenset[int]
    calls: int = 0

    def is_of(self, own: frozenset[int]) -> bool:
        """Whether the model has these still, where they were: else the replay has memory that the model let go."""
        return self.own <= own and self.replay.is_in_place


class Dispatcher(OptimizedCallable):
    """Runs calls of a model, each by what was made for such calls.

    Args:
        model: the module to run.
        options: how to schedule it.

    Attributes:
        disabled: whether every call goes to the plain model: ``AUTOSTREAM_DISABLE`` was set when this was made.

    Example:
        >>> dispatcher = Dispatcher(nn.ReLU(), Options())
        >>> dispatcher(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
        >>> [report.signature for report in dispatcher.reports]
        ['2:float32 on cpu, train, no gradients']
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model = model
        self.options = options
        self.slots = BufferTable()
        self.disabled = disabled()
        self._context = ModelContext(options, GraphPools(), self.slots)
        self._paranoid = paranoid()
        self._lock = threading.RLock()
        self._forget()
        self._bypasses: dict[str, Report] = {}
        _dispatchers.add(self)

    def _forget(self) -> None:
        self._admission = Admission[list[Entry]](self.options.max_signatures)
        self._replays: tuple[_Known, ...] = ()  # the latest first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        replays, changed = self._replays, False
        for known in replays:
            if (tensors := known.replay.fits(args, kwargs)) is None:
                continue
            try:
                value = known.replay(tensors, args, kwargs)
                known.calls += 1
                if known is not replays[0]:
                    self._replays = (known, *(other for other in replays if other is not known))
                return value
            except GuardFailed:  # another may stand for this call, and this one for the next
                known.replay.look_first()
                changed = True
            except Exception:  # what else can be done is found on the long way
                self._drop_replays(known.entry)
                self._let_go()
                if not known.replay.repeatable:
                    raise
                changed = True
                break
        if changed:
            del known, replays  # which hold what the model may have let go
            self._let_go()
        if traced_by_fx():  # it looks for what is called among its root's submodules, and the model is not there
            return self.model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.disabled or exporting():
            return self.model(*args, **kwargs)
        if reason := self._unusual(args, kwargs):
            return self._plainly(reason, args, kwargs)
        return self._dispatched(args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Do now, without gradients, what the first call with such arguments would do; leave everything as it is.

        Raises:
            TargetError: an input lies on another device than the model's state, or the model itself fails at them.
            TraceError: with ``strict=True``, the model cannot be captured.
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
            TraceError: with ``strict=True``, the model cannot be captured.
        """
        found = self._scheduled(args, kwargs)
        if found is None:
            return args, kwargs
        scheduled, arguments = found
        static = {id(a): s for a, s in zip(arguments, scheduled.static_inputs(arguments), strict=True)}
        tensors, structure = flatten((args, kwargs))
        return unflatten(structure, [static.get(id(tensor), tensor) for tensor in tensors])

    def lowered(self, *args: Any, **kwargs: Any) -> GraphModule | None:
        """The graph that runs calls with these arguments, to be read: its ``code`` has the ops, streams and waits.

        Returns:
            A module over the flat tensors of the model and its inputs; ``None`` where there is no schedule.

        Raises:
            TargetError: the model itself fails at these arguments.
            TraceError: with ``strict=True``, the model cannot be captured.

        Example:
            >>> lowered = Dispatcher(nn.ReLU(), Options()).lowered(torch.ones(2))
            >>> "torch.ops.aten.relu" in lowered.code
            True
        """
        found = self._scheduled(args, kwargs)
        return None if found is None else found[0].lowered()

    def watched(self, *args: Any, **kwargs: Any) -> Report | None:
        """What is known of calls with these arguments, and a run of them that a profiler watched.

        Returns:
            The report, with the reason where no run could be watched; ``None`` where autostream is off.

        Raises:
            TargetError: the model itself fails at these arguments.
            TraceError: with ``strict=True``, the model cannot be captured.
        """
        found = self._scheduled(args, kwargs)
        if found is not None:
            scheduled, arguments = found
            return scheduled.watched(arguments)
        entry = None if self.disabled else self._prepared(args, kwargs)
        return None if entry is None else entry.reports(self._name)[0]

    @property
    def reports(self) -> tuple[Report, ...]:
        """What is known of each signature, the most recently used first, then calls that went to the plain model."""
        with self._lock:
            self._count_replays()
            entries = [entry for entries in reversed(self._admission.entries.values()) for entry in reversed(entries)]
            found = chain.from_iterable(entry.reports(self._name) for entry in entries)
            told = {(*_chosen(report), report.signature, report.mode): report for report in found}  # guards may differ
            return (*told.values(), *self._bypasses.values())

    def forget(self) -> None:
        """Drop all that was made: the memory that it was made for is the model's no longer."""
        self._forget()

    def _scheduled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ScheduledProgram, list[Tensor]] | None:
        """The schedule of calls with these arguments, and the program's arguments, where there is one."""
        entry = None if self.disabled else self._prepared(args, kwargs)
        if not isinstance(entry, CapturedCall):
            return None
        values = entry.captured.given(self.model, args, kwargs)
        ready = entry.compiled.ready(values) if entry.compiled else None
        scheduled = None if ready is None else ready.scheduled
        return None if ready is None or scheduled is None else (scheduled, ready.arguments(values))

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
        """What runs calls with these arguments, if that is not always the model."""
        with torch.no_grad():
            entry: Entry | str = self._unusual(args, kwargs)
            if not entry:
                key, label = self._key(args, kwargs)
                entry = self._entry(key, args, kwargs) or self._new_entry(key, label, args, kwargs, wanted=True)
            if isinstance(entry, str):
                if self.options.strict:
                    raise TraceError(entry)
                self._note(entry)
                return None
            if not isinstance(entry, CapturedCall):
                try:
                    check_call(self.model, args, kwargs)
                except TargetError:
                    self._drop(key, entry)
                    raise
            return entry

    def _dispatched(self, args: tuple[Any, ...], kwargs: dict[str, Any], unlike: Sequence[Entry] = ()) -> Any:
        self._count_replays()
        key, label = self._key(args, kwargs)
        entry: Entry | str | None = self._entry(key, args, kwargs, unlike)
        if entry is None:
            reason = eager_reason(self.options, chain(args, self.model.parameters()))
            entry = reason or self._new_entry(key, label, args, kwargs, unlike=unlike)
        if isinstance(entry, str):
            return self._plainly(entry, args, kwargs)
        if isinstance(entry, EagerCall | GraphBreaks):
            try:
                return entry(*args, **kwargs) if isinstance(entry, GraphBreaks) else self.model(*args, **kwargs)
            except Exception:
                if (
                    isinstance(entry, EagerCall) or not entry.has_returned
                ):  # what made this call fail may be why it is here
                    self._drop(key, entry)
                if isinstance(entry, GraphBreaks) and not entry.has_returned:
                    self._note(entry.reason)
                raise
        try:
            if self._paranoid:
                tensors, _ = flatten((args, kwargs))
                return compared(self.model, partial(entry, self.model, args, kwargs), tensors, args, kwargs)
            value = entry(self.model, args, kwargs)
        except GuardFailed:
            return self._dispatched(args, kwargs, (*unlike, entry))
        except Exception as error:
            ours = self._paranoid or isinstance(error, AutostreamError | torch.OutOfMemoryError)  # it may not run again
            if self.options.strict or not entry.repeatable or ours or hooks_are_set():
                raise
            return self._instead(key, entry, first_line(error), args, kwargs)
        guarded = self.options.guards == "dynamo"
        self._drop_replays(entry)
        if replay := entry.replay(self.model, args, kwargs, guarded=guarded):
            entries = self._admission.entries
            others = [known for known in self._replays if known.entry in entries.get(known.key, ())]
            self._replays = (_Known(replay, key, entry, self._own() & replay.held), *others)
        return value

    def _count_replays(self) -> None:
        """Count the calls that the short ways have served since this was last asked."""
        for known in reversed(self._replays):  # in the order of their latest calls
            if known.calls:
                self._admission.served(known.key, known.calls)
                known.entry.served(known.calls)
                known.calls = 0

    def _own(self) -> frozenset[int]:
        return frozenset(map(id, chain(self.model.parameters(), self.model.buffers())))

    def _let_go(self) -> None:
        """Hold no memory that the model has let go."""
        self._count_replays()
        own = self._own()
        self._replays = tuple(known for known in self._replays if known.is_of(own))

    def _drop_replays(self, entry: Entry) -> None:
        """There may be another short way of its calls, or none."""
        self._count_replays()
        self._replays = tuple(known for known in self._replays if known.entry is not entry)

    def _instead(
        self, key: Hashable, entry: CapturedCall, error: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the model returns where its schedule failed: if it does not fail too, it makes all such calls."""
        value = self.model(*args, **kwargs)
        reason = f"its schedule fails at some inputs ({error}), and the model does not: perhaps it catches that"
        log.warning("%s runs plainly: %s", self._name, reason)
        self._drop(key, entry)
        with self._lock:
            self._admission.entries.setdefault(key, []).append(EagerCall(entry.label, reason))
        return value

    def _unusual(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why a call must reach the plain model, or ``""``."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return unusual_call() or unusual_tensor(tensors)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, str]:
        """What tells most calls of different graphs apart before any guard is asked, and what to call such calls."""
        mode = "train" if self._training else "eval"
        recorded = torch.is_grad_enabled()
        try:
            tensors, structure = flatten((args, kwargs))
        except TraceError:  # Dynamo may know what we do not
            return (recorded, numerics()), f"some arguments, {mode}, {'gradients' if recorded else 'no gradients'}"
        kinds = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        required = recorded and any(t.requires_grad for t in chain(tensors, self.model.parameters()))
        label = f"{described(tensors)}, {mode}, {'gradients' if required else 'no gradients'}"
        return (structure, kinds, aliases_of(tensors), recorded, self._training, numerics()), label

    def _entry(
        self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], unlike: Sequence[Entry] = ()
    ) -> Entry | None:
        """What was made for such calls, if the guards hold; not what is known to be for other weights."""
        for entry in self._admission.entries.get(key, ()):
            if entry in unlike:
                continue
            if not isinstance(entry, CapturedCall) or entry.guards(self.model, args, kwargs):
                self._admission.served(key)
                return entry
        return None

    def _new_entry(
        self,
        key: Hashable,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        wanted: bool = False,
        unlike: Sequence[Entry] = (),
    ) -> Entry | str:
        """What runs calls like this from now on; or why there is nothing."""
        with self._lock, preparing:
            if found := self._entry(key, args, kwargs, unlike):  # another thread has been quicker
                return found
            admission = self._admission
            others = admission.entries.get(key, [])
            full = len(others) >= self.options.max_signatures
            refusal = _FULL if full and not admission.has_waited(key) else admission.refusal(key)
            if not wanted and (reason := refusal):
                admission.unserved(key)
                return self._thrashing(reason, key, args, kwargs)
            self._let_go()
            if failed := self._failed(others, args, kwargs):
                log.info("%s is captured again: %s", self._name, failed)
            entry = self._made(label, args, kwargs)
            if not isinstance(entry, str):
                if full and not wanted:  # the oldest goes
                    oldest, *others = others
                    self._drop_replays(oldest)
                admission.add(key, [*others, entry])
            return entry

    def _made(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | str:
        """Capture a call; or why that has to wait for another one."""
        model, options = self.model, self.options
        tensors = (*model.parameters(), *model.buffers(), *args)
        check_level(options.kernels, [tensor for tensor in tensors if isinstance(tensor, Tensor)])
        if any(map(is_lazy, model.parameters())):
            return _LAZY
        if has_torchscript(model):
            reason = "TorchScript cannot be captured: use the module that it was made from"
            return self._refused(label, TraceError(reason))
        try:
            captured = capture(model, args, kwargs)
        except TraceError as error:
            if options.strict or isinstance(error, FastPathError):
                return self._refused(label, error)
            log.warning("%s: %s; splitting it at graph breaks", self._name, str(error))  # records may be kept
            return GraphBreaks(model, label, str(error), self._graph)
        except Exception as error:
            return self._refused(label, error)
        if captured is None:
            return EagerCall(label, "it computes nothing with tensors")
        try:
            names = names_of(captured, model)
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in captured.tensors):
                made: list[CompiledGraph] = []
                run = differentiable(captured.module, captured.tensors, names, partial(self._graph, made))
                return CapturedCall(captured, run, label, halves=made)
            compiled = self._like(captured, names) or self._graph([], captured.module, names)
            ready = compiled.ready(captured.tensors, admitted=True)
        except Exception as error:
            return self._refused(label, error)
        finally:
            forget(mode_of(captured.module))
        if ready is None:
            return EagerCall(label, compiled.refusal)
        return CapturedCall(captured, compiled, label, ready)

    def _like(self, captured: Capture, names: InputNames) -> CompiledGraph | None:
        """What runs the same graph for other guards, such as those of inference mode."""
        entries = chain.from_iterable(self._admission.entries.values())
        known = (entry.compiled for entry in entries if isinstance(entry, CapturedCall) and entry.compiled)
        return next((compiled for compiled in known if compiled.is_of(captured.module, names)), None)

    def _refused(self, label: str, error: Exception) -> EagerCall:
        if self.options.strict or isinstance(error, OptionError | TargetError):
            raise error
        reason = str(error) if isinstance(error, TraceError) else f"it cannot be scheduled: {first_line(error)}"
        log.warning("%s runs plainly: %s", self._name, reason)
        return EagerCall(label, reason)

    def _graph(
        self, made: list[CompiledGraph], module: GraphModule, names: InputNames, *, half: str = ""
    ) -> CompiledGraph:
        """What runs a graph of the model's."""
        compiled = CompiledGraph(module, names, self._name, self._context, half=half)
        made.append(compiled)
        return compiled

    def _thrashing(self, reason: str, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why calls are not captured any more, with the guard that fails, if that is what makes them new."""
        failed = self._failed(self._admission.entries.get(key, []), args, kwargs)
        what = f"another graph for each call, since {failed}" if failed else _SIZES
        refusal = f"{reason}: {what}"
        if self.options.strict:
            raise TraceError(refusal)
        return refusal

    def _failed(self, entries: Sequence[Entry], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The guard of the latest of these entries that does not hold of a call, or ``""``."""
        whole = [entry for entry in entries if isinstance(entry, CapturedCall)]
        return whole[-1].guards.failed(self.model, args, kwargs) if whole else ""

    def _drop(self, key: Hashable, entry: Any) -> None:
        self._drop_replays(entry)
        with self._lock:
            others = [other for other in self._admission.entries.get(key, []) if other is not entry]
            if others:
                self._admission.entries[key] = others
            else:  # what was spent on it is spent: a model may fail at every second call
                self._admission.entries.pop(key, None)

    def _plainly(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.options.strict:
            raise TraceError(reason)
        self._note(reason)
        return self.model(*args, **kwargs)

    def _note(self, reason: str) -> None:
        """Remember, and say once, why a call went to the plain model."""
        if reason not in self._bypasses and len(self._bypasses) < _MOST_REASONS:
            log.warning("%s runs plainly: %s", self._name, reason)
            refusal = Decision("", "plain", reason)
            report = Report(self._name, "some calls", "plain", refusals=(refusal,), versions=versions())
            self._bypasses = {**self._bypasses, reason: report}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the model and the options; schedules are made anew."""
        return Dispatcher, (self.model, self.options)

    @property
    def _training(self) -> bool:
        return bool(getattr(self.model, "training", False))  # frozen TorchScript has none

    @property
    def _name(self) -> str:
        return name_of(self.model)


def _chosen(report: Report) -> tuple[int, ...]:
    return (id(report.chosen), *(id(part.chosen) for part in report.parts))


_FULL = "it has been captured as often as max_signatures allows for inputs of this kind"

_LAZY = "it has parameters that its first call makes"

_SIZES = "pad them to a few sizes with dynamic= (see autostream.Bucket), or raise max_signatures"

_MOST_REASONS = 100

_dispatchers: WeakSet[Dispatcher] = WeakSet()


def _renew_locks() -> None:
    """In a forked process, where no thread is left that could release them."""
    for dispatcher in _dispatchers:
        dispatcher._lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_locks)
