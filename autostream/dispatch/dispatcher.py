"""The dispatcher: decides what each call of a model runs.

    call ──▶ like an earlier one? ──▶ fast path: Replay runs the graph, then checks its guards
               │ no
               └─▶ slow path: an entry whose guards hold ──▶ Dynamo's bytecode around the scheduled graph
                       │ none
                       └─▶ worth it? ──▶ new_entry captures the call
                               │ no
                               └─▶ the model itself

An entry is what runs the calls of one signature for which its guards hold. On a CPU its first call is timed beside the
model itself, which becomes an EagerCall in its place where that is not slower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autostream.dispatch.admission import MISSED_SIGNATURES, Admission
from autostream.dispatch.cached_replays import MISSED, CachedReplays
from autostream.dispatch.captured_call import CapturedCall
from autostream.dispatch.compiled_graph import eager_reason
from autostream.dispatch.eager_call import EagerCall
from autostream.dispatch.entries import Entry, model_instead, new_entry
from autostream.dispatch.optimized_callable import OptimizedCallable
from autostream.dispatch.paranoid import compared
from autostream.dispatch.replay import GuardFailed, Replay
from autostream.dispatch.requirements import check_requirements
from autostream.dispatch.scheduled_program import ModelContext, ScheduledProgram
from autostream.dispatch.split_call import SplitCall
from autostream.errors import AutostreamError, TargetError, TraceError, first_line
from autostream.frontend.eager_only import (
    exporting,
    growing_cache,
    has_static_cache,
    traced_by_fx,
    unusual_call,
    unusual_tensor,
)
from autostream.frontend.guards import FailedGuard
from autostream.frontend.inputs import aliases_of, described
from autostream.frontend.modules import forward_of, name_of
from autostream.frontend.reasons import AS_A_TENSOR, ONE_CACHE, changed_number, failed_guard
from autostream.frontend.saved_tensors import hooks_are_set
from autostream.frontend.settings import numerics
from autostream.frontend.tree import Structure, flatten, map_tensors
from autostream.frontend.trial import check_call, check_devices
from autostream.ir import Decision
from autostream.options import Options, disabled, paranoid
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.input_buffers import BufferTable
from autostream.utils.locks import lock_of, preparing
from autostream.utils.logs import MOST_WARNINGS, Log, Warned

log = Log(__name__)


class Dispatcher(OptimizedCallable):
    """Runs the calls of a model, each with what was compiled for calls like it.

    Args:
        model: the module to run.
        options: how to schedule it.

    Attributes:
        disabled: whether every call runs eagerly, as ``AUTOSTREAM_DISABLE`` was set when this was made.

    Raises:
        OptionError: they require what this machine does not have.

    Example:
        >>> dispatcher = Dispatcher(nn.ReLU(), Options())
        >>> dispatcher(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
        >>> [report.signature for report in dispatcher.reports]
        ['2:float32 on cpu, train, no gradients']
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        check_requirements(options)
        self.model = model
        self.options = options
        self.input_buffers = BufferTable()
        self.disabled = disabled()
        self._warn = Warned(log)
        self._context = ModelContext(options, GraphPools(), self.input_buffers, warn=self._warn)
        self._paranoid = paranoid()
        self._lock = lock_of(self)
        self._forget()
        self._bypasses: dict[str, Report] = {}

    def _forget(self) -> None:
        self._admission = Admission[list[Entry]](self.options.max_signatures)
        self._raised = Counter[Hashable]()
        self._replays = CachedReplays(self.model, self._admission, self.options.max_signatures)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        value = self._replays(args, kwargs)
        if value is not MISSED:
            return value
        if traced_by_fx():  # fx looks for the callee among its root's submodules, and the model is not there
            return self.model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.disabled or exporting():
            return self.model(*args, **kwargs)
        if reason := self._unusual(args, kwargs):
            return self._run_eagerly(reason, args, kwargs)
        return self._dispatch(args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile now, without gradients, what the first call with such arguments would compile; change nothing else.

        Raises:
            TargetError: an input lies on another device than the model's state, or the model itself fails at them.
            TraceError: with ``strict=True``, the model cannot be captured.
        """
        if not self.disabled and self._prepare(args, kwargs) is None:
            check_devices(self.model, (args, kwargs))

    def static_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments, with the static inputs of the captured graph in place of the tensors.

        A call with these static inputs copies nothing in. Fill them before each call.

        Returns:
            ``(args, kwargs)``; the same tensors as given if nothing is captured.

        Raises:
            TargetError: the model itself fails at them.
            TraceError: with ``strict=True``, the model cannot be captured.
        """
        schedule = self._schedule_of(args, kwargs)
        if schedule is None:
            return args, kwargs
        scheduled, arguments = schedule
        static = {id(a): s for a, s in zip(arguments, scheduled.static_inputs(arguments), strict=True)}
        return map_tensors(lambda tensor: static.get(id(tensor), tensor), (args, kwargs))

    def lowered(self, *args: Any, **kwargs: Any) -> GraphModule | None:
        """The graph that runs calls with these arguments, for reading: its ``code`` has the ops, streams and waits.

        Returns:
            A module over the flat tensors of the model and its inputs; ``None`` if there is no schedule.

        Raises:
            TargetError: the model itself fails at these arguments.
            TraceError: with ``strict=True``, the model cannot be captured.

        Example:
            >>> lowered = Dispatcher(nn.ReLU(), Options()).lowered(torch.ones(2))
            >>> "torch.ops.aten.relu" in lowered.code
            True
        """
        schedule = self._schedule_of(args, kwargs)
        return None if schedule is None else schedule[0].lowered()

    def watched(self, *args: Any, **kwargs: Any) -> Report | None:
        """The report of calls with these arguments, with the timeline of a run under the profiler.

        Returns:
            The report, with the reason if no run could be profiled; ``None`` if autostream is disabled.

        Raises:
            TargetError: the model itself fails at these arguments.
            TraceError: with ``strict=True``, the model cannot be captured.
        """
        schedule = self._schedule_of(args, kwargs)
        if schedule is not None:
            scheduled, arguments = schedule
            return scheduled.watched(arguments)
        entry = None if self.disabled else self._prepare(args, kwargs)
        return None if entry is None else entry.reports(self.name)[0]

    @property
    def reports(self) -> tuple[Report, ...]:
        """A report for each signature, the most recently used first, then one for each reason to run eagerly."""
        with self._lock:
            self._replays.count()
            entries = [entry for entries in reversed(self._admission.entries.values()) for entry in reversed(entries)]
            reports = chain.from_iterable(entry.reports(self.name) for entry in entries)
            distinct = {(*_chosen(report), report.signature, report.mode): report for report in reports}
            return (*distinct.values(), *self._bypasses.values())

    def forget(self) -> None:
        """Drop everything compiled. Call this when the model's parameters move to other memory."""
        self._forget()

    def note(self, reason: str) -> None:
        """Add a reason why calls run eagerly to the reports, and log it once."""
        self._warn(f"{self.name} runs plainly: {reason}")
        self._record(reason)

    def _record(self, reason: str) -> None:
        """Add a reason why calls run eagerly to the reports."""
        if reason not in self._bypasses and len(self._bypasses) < MOST_WARNINGS:
            refusal = Decision("", "plain", reason)
            report = Report(self.name, "some calls", "plain", refusals=(refusal,), versions=versions())
            self._bypasses = {**self._bypasses, reason: report}

    def _schedule_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ScheduledProgram, list[Tensor]] | None:
        """The schedule of calls with these arguments, and the program's arguments; ``None`` if there is no schedule."""
        entry = None if self.disabled else self._prepare(args, kwargs)
        if not isinstance(entry, CapturedCall):
            return None
        values = entry.captured.graph_inputs(self.model, args, kwargs)
        signature = entry.compiled.signature(values) if entry.compiled else None
        scheduled = None if signature is None else signature.scheduled
        return None if signature is None or scheduled is None else (scheduled, signature.arguments(values))

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
        """The entry that runs calls with these arguments without gradients; ``None`` if they may not be captured."""
        with torch.no_grad():
            entry: Entry | str = self._unusual(args, kwargs)
            if not entry:
                key, label = self._key(args, kwargs)
                key = self._known(key, args, kwargs)
                entry = self._find(key, args, kwargs) or self._compile(key, label, args, kwargs, wanted=True)
            if isinstance(entry, str):
                if self.options.strict:
                    raise TraceError(entry)
                self.note(entry)
                return None
            if not isinstance(entry, CapturedCall):
                try:
                    check_call(self.model, args, kwargs)
                except TargetError:
                    self._drop(key, entry)
                    raise
                self._warn(entry.warning)
            return entry

    def _dispatch(self, args: tuple[Any, ...], kwargs: dict[str, Any], excluded: Sequence[Entry] = ()) -> Any:
        """The slow path.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            excluded: entries that were tried for this call already.
        """
        self._replays.count()
        key, label = self._key(args, kwargs)
        if self._raised[key] > 1:  # no capture, which raises as well, until the model has returned once
            value = self.model(*args, **kwargs)
            del self._raised[key]
            return value
        key = self._known(key, args, kwargs)
        entry: Entry | str | None = self._find(key, args, kwargs, excluded)
        if entry is None:
            if reason := eager_reason(self.options, chain(args, self.model.parameters())):
                value = self._run_eagerly(reason, args, kwargs)
                self._replays.add_eager(key, EagerCall(label, reason), args, kwargs)
                return value
            entry = self._compile(key, label, args, kwargs, excluded=excluded)
        if isinstance(entry, str):
            return self._run_eagerly(entry, args, kwargs)
        if isinstance(entry, EagerCall | SplitCall):
            try:
                value = entry(*args, **kwargs) if isinstance(entry, SplitCall) else self.model(*args, **kwargs)
            except Exception:
                if isinstance(entry, EagerCall):
                    if not entry.is_choice:  # the capture may have failed for the same reason
                        self._refund(key, entry)
                elif not entry.has_returned:
                    self._refund(key, entry)
                    self._record(entry.reason)
                raise
            self._warn(entry.warning)
            if isinstance(entry, SplitCall):
                self._contest(key, entry, None, args, kwargs)
            else:
                self._replays.add_eager(key, entry, args, kwargs)
            return value
        try:
            if self._paranoid and (tensors := self._comparable(args, kwargs)) is not None:
                return compared(self.model, partial(entry, self.model, args, kwargs), tensors, args, kwargs)
            value = entry(self.model, args, kwargs)
        except GuardFailed:
            return self._dispatch(args, kwargs, (*excluded, entry))
        except Exception as error:
            ours = self._paranoid or isinstance(error, AutostreamError | torch.OutOfMemoryError)
            if self.options.strict or not entry.repeatable or ours or hooks_are_set():
                raise
            return self._fall_back(key, entry, first_line(error), args, kwargs)
        guarded = self.options.guards == "dynamo"
        self._replays.drop(entry)
        replay = entry.replay(self.model, args, kwargs, guarded=guarded)
        if not self._contest(key, entry, replay, args, kwargs) and replay:
            self._replays.add(key, entry, replay)
        return value

    def _contest(
        self, key: Hashable, entry: Entry, replay: Replay | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """After the first call of an entry on a CPU: whether the model itself takes its place."""
        chosen = model_instead(entry, self.model, self.options, partial(self._run_again, entry, replay), args, kwargs)
        if chosen is None:
            return False
        with self._lock:
            entries = self._admission.entries
            if key in entries:  # another thread may have dropped it
                entries[key] = [chosen if other is entry else other for other in entries[key]]
        self._replays.drop(entry)
        self._replays.add_eager(key, chosen, args, kwargs)
        return True

    def _run_again(self, entry: Any, replay: Replay | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a call once more as an entry would, on the fast path or on the slow one."""
        tensors = replay.fits(args, kwargs) if replay else None
        if replay and tensors is not None:
            replay(tensors, args, kwargs)
            return
        self._key(args, kwargs)
        entry.guards(self.model, args, kwargs)
        entry(self.model, args, kwargs)

    def _fall_back(
        self, key: Hashable, entry: CapturedCall, error: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call eagerly whose schedule failed; if that succeeds, run all calls like it eagerly from now on."""
        value = self.model(*args, **kwargs)
        reason = f"its schedule fails at some inputs ({error}), and the model does not: perhaps it catches that"
        self._warn(f"{self.name} runs plainly: {reason}")
        self._drop(key, entry)
        with self._lock:
            self._admission.entries.setdefault(key, []).append(EagerCall(entry.label, reason))
        return value

    def _unusual(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why a call must run eagerly, or ``""``."""
        values = (*args, *kwargs.values())
        tensors = [value for value in values if isinstance(value, Tensor)]
        return unusual_call() or unusual_tensor(tensors) or growing_cache(values)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, str]:
        """A key by which to look up the entries whose guards may hold, and a description of such calls."""
        mode = "train" if self._training else "eval"
        recorded = torch.is_grad_enabled()
        try:
            # What an object holds is for the guards to compare.
            tensors, structure = flatten((args, kwargs), lambda value: Structure(type(value)))
        except TraceError:  # Dynamo may know how to flatten them
            return (recorded, numerics()), f"some arguments, {mode}, {'gradients' if recorded else 'no gradients'}"
        kinds = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        required = recorded and any(t.requires_grad for t in chain(tensors, self.model.parameters()))
        label = f"{described(tensors)}, {mode}, {'gradients' if required else 'no gradients'}"
        return (structure, kinds, aliases_of(tensors), recorded, self._training, numerics()), label

    def _known(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The key of a captured call that differs in integers alone, whose guards hold: it does not read them.

        The same key, if there is no such call. Calls that are split at graph breaks have guards of Dynamo's own, which
        would compile another graph for each integer that they do read.
        """
        if key not in self._admission.entries:
            for other, known in self._admission.alike(key):
                captured = (entry for entry in known if isinstance(entry, CapturedCall))
                if any(entry.guards(self.model, args, kwargs) for entry in captured):
                    return other
        return key

    def _comparable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """The tensors of a call; ``None`` with a warning if an argument may hold more, which a second call changes."""
        try:
            return flatten((args, kwargs))[0]
        except TraceError as error:
            self._warn(f"{self.name}: calls are not compared with eager ones: {error}")
            return None

    def _find(
        self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], excluded: Sequence[Entry] = ()
    ) -> Entry | None:
        """The cached entry whose guards hold for this call."""
        for entry in self._admission.entries.get(key, ()):
            if entry in excluded:
                continue
            if not isinstance(entry, CapturedCall) or entry.guards(self.model, args, kwargs):
                self._admission.hit(key)
                return entry
        return None

    def _compile(
        self,
        key: Hashable,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        wanted: bool = False,
        excluded: Sequence[Entry] = (),
    ) -> Entry | str:
        """Add an entry for calls like this one to the cache; or the reason why not.

        Args:
            key: of the call.
            label: describes such calls in reports.
            args: positional arguments.
            kwargs: keyword arguments.
            wanted: whether to compile it even if that does not look worth it.
            excluded: cached entries that do not fit this call though their guards hold.
        """
        with self._lock, preparing:
            if entry := self._find(key, args, kwargs, excluded):  # another thread has compiled it meanwhile
                return entry
            admission = self._admission
            others = admission.entries.get(key, [])
            full = len(others) >= self.options.max_signatures
            refusal = _FULL if full and not admission.recurs(key) else admission.refusal(key)
            if not wanted and (reason := refusal):
                admission.miss(key)
                return self._refusal(reason, key, args, kwargs)
            self._replays.drop_stale()
            if guard := self._failed_guard(others, args, kwargs):
                log.info("%s is captured again: %s", self.name, guard.code)
            compiled = self._capture(label, args, kwargs)
            if not isinstance(compiled, str):
                if full and not wanted:  # evict the oldest
                    oldest, *others = others
                    self._replays.drop(oldest)
                admission.add(key, [*others, compiled])
            return compiled

    def _capture(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | str:
        """Capture a call; or the reason why it has to be a later one."""
        entries = chain.from_iterable(self._admission.entries.values())
        known = (entry.compiled for entry in entries if isinstance(entry, CapturedCall) and entry.compiled)
        return new_entry(self.model, self._context, label, args, kwargs, known)

    def _refusal(self, reason: str, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """A reason not to compile, with advice."""
        refusal = f"{reason}: {self._advice(key, args, kwargs)}"
        if self.options.strict:
            raise TraceError(refusal)
        return refusal

    def _advice(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What to do where one call after the other is of a new kind: by the guard that fails, or by what is new."""
        entries = self._admission.entries
        if guard := self._failed_guard(entries.get(key, []), args, kwargs):
            return f"another graph for each call, since {failed_guard(guard)}"
        latest: Any = next(reversed(entries), key)
        structures = cast(Any, key)[0], latest[0]
        known = all(isinstance(each, Structure) for each in structures)
        if known and (name := changed_number(forward_of(self.model), *structures)):
            return f"a number in {name} changes: {AS_A_TENSOR}"
        return _CACHES if has_static_cache((*args, *kwargs.values())) else _SIZES

    def _failed_guard(
        self, entries: Sequence[Entry], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> FailedGuard | None:
        """The guard of the latest captured one of these entries that fails for a call, if one does."""
        captured = [entry for entry in entries if isinstance(entry, CapturedCall)]
        return captured[-1].guards.failed(self.model, args, kwargs) if captured else None

    def _drop(self, key: Hashable, entry: Any) -> None:
        self._replays.drop(entry)
        with self._lock:
            others = [other for other in self._admission.entries.get(key, []) if other is not entry]
            if others:
                self._admission.entries[key] = others
            else:  # without a refund: a model may fail in every second call
                self._admission.entries.pop(key, None)

    def _refund(self, key: Hashable, entry: Any) -> None:
        """Drop what was compiled for a call that raised; the user's mistakes do not count as signatures."""
        self._replays.drop(entry)
        with self._lock:
            if self._admission.entries.get(key) == [entry]:
                self._admission.drop(key)
        self._drop(key, entry)
        if len(self._raised) >= MISSED_SIGNATURES:
            self._raised.clear()
        self._raised[key] += 1

    def _run_eagerly(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.options.strict:
            raise TraceError(reason)
        self.note(reason)
        return self.model(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the model and the options, without what was compiled."""
        return Dispatcher, (self.model, self.options)

    @property
    def _training(self) -> bool:
        return bool(getattr(self.model, "training", False))  # frozen TorchScript has none

    @property
    def name(self) -> str:
        """The model's, for reports and logs."""
        return name_of(self.model)


def _chosen(report: Report) -> tuple[int, ...]:
    return (id(report.chosen), *(id(part.chosen) for part in report.parts))


_FULL = "it has been captured as often as max_signatures allows for inputs of this kind"

_CACHES = f"pad prompts to a few lengths, and for the cache, {ONE_CACHE}"

_SIZES = "pad them to a few sizes with dynamic= (see autostream.Bucket), or raise max_signatures"
