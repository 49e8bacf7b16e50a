"""Calls whose lengths differ share a schedule: arguments are padded before the signature is made, outputs cut after it.

call ──▶ its lengths ──▶ all fill a bucket, or one has none? ──▶ Dispatcher, as it is
             │ no
             └─▶ padded arguments ──▶ tried before? ──▶ Dispatcher ──▶ outputs, cut back
                                          │ no
                                          └─▶ the model with padding and without: where are the outputs longer, and is
                                              the rest the same? If not, Dispatcher, as it is
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autostream.dispatch.dispatcher import Dispatcher, Entry
from autostream.dispatch.paranoid import difference
from autostream.errors import TraceError, first_line
from autostream.frontend.buckets import (
    Cuts,
    Dynamic,
    Span,
    Unfit,
    can_cut,
    cut,
    cuts_of,
    narrowed,
    padded,
    places_of,
    shorter,
    spans_of,
)
from autostream.frontend.eager_only import exporting, has_torchscript, traced_by_fx, unusual_call, unusual_tensor
from autostream.frontend.modules import name_of, parameters_of
from autostream.frontend.tree import flatten, unflatten
from autostream.frontend.trial import Tried, tried
from autostream.ir import Decision
from autostream.options import Options
from autostream.reporting.report import Report
from autostream.utils.storages import storage_of

log = logging.getLogger(__name__)


class _Outdated(Exception):  # noqa: N818 - a notice within this file, not an error
    """What was found out about calls was found before the model changed. Nothing has been done."""


_MOST_VERDICTS = 1000
"""Then they are found anew: arguments that differ in other dimensions as well could be any number."""

_MOST_FAILURES = 3
"""Of trials of one bucket: whether one fails may be a matter of what is in its tensors."""

_MOST_REASONS = 100
"""What is kept of why calls were not padded: a reason may say how much something is off by."""


class PaddingDispatcher(Dispatcher):
    """Runs calls of a model at the sizes of buckets.

    Whether padding is safe is the user's word. It is tried all the same, once for each bucket, with copies of the model
    and of all tensors, and at the shortest length of the bucket as well: outputs, the model's state and its inputs have
    to be what they are without padding. Outputs that share memory may have their own, and random numbers are drawn for
    what is filled up as well. It is tried again before a bucket is captured anew, as it is when a guard does not hold.

    Args:
        model: the module to run.
        options: how to schedule it.
        dynamic: the dimensions that may be padded.

    Raises:
        OptionError: ``dynamic`` is something else, or names an argument that there is not.

    Example:
        >>> from autostream.frontend.buckets import Bucket
        >>> dispatcher = PaddingDispatcher(nn.ReLU(), Options(), {"input": {0: Bucket("length", 8)}})
        >>> dispatcher(-torch.ones(5)), dispatcher(torch.ones(6))
        (tensor([0., 0., 0., 0., 0.]), tensor([1., 1., 1., 1., 1., 1.]))
        >>> [report.signature for report in dispatcher.reports]
        ['8:float32 on cpu, train, no gradients']
    """

    def __init__(self, model: nn.Module, options: Options, dynamic: Dynamic) -> None:
        super().__init__(model, options)
        self._dynamic = dynamic
        self._places = places_of(dynamic, parameters_of(model))
        self._verdicts: dict[_Key, Cuts | str] = {}
        self._latest: set[_Key] = set()
        """Keys of verdicts since which nothing was captured that they are about."""
        self._failures = Counter[Hashable]()
        self._reasons: tuple[str, ...] = ()
        self._unfit = ""
        """Why no call is padded any more."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        while True:
            padding = self._padding(args, kwargs)
            try:
                if padding is None:
                    return super().__call__(*args, **kwargs)
                outputs = super().__call__(*padding.args, **padding.kwargs)
            except _Outdated:
                continue
            try:
                return padding.cut(outputs)
            except Unfit as reason:
                self._unfit = str(reason)
                self._note_unpadded(self._unfit)

    def static_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments at the size of their bucket, with the tensors that a captured graph reads in their place.

        Returns:
            ``(args, kwargs)``; the given tensors themselves where nothing is captured.

        Raises:
            TargetError: the model itself fails at them.
            TraceError: with ``strict=True``, the model cannot be captured.
        """
        padding = self._padding(args, kwargs)
        if padding is None:
            return super().static_inputs(*args, **kwargs)
        static, _ = flatten(super().static_inputs(*padding.args, **padding.kwargs))
        filled, _ = flatten((padding.args, padding.kwargs))
        given, structure = flatten((args, kwargs))
        places = zip(given, filled, static, strict=True)
        return unflatten(structure, [own if into is full else into for own, full, into in places])

    @property
    def reports(self) -> tuple[Report, ...]:
        """What is known of each signature; why calls were not padded is among the refusals of each."""
        notes = tuple(Decision("", "not padded", reason) for reason in self._reasons)
        return tuple(replace(report, refusals=(*notes, *report.refusals)) for report in super().reports)

    def forget(self) -> None:
        """Drop all that was made."""
        super().forget()
        self._verdicts, self._latest, self._unfit = {}, set(), ""
        self._failures.clear()

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
        while True:
            padding = self._padding(args, kwargs)
            try:
                return super()._prepared(*((args, kwargs) if padding is None else (padding.args, padding.kwargs)))
            except _Outdated:
                continue

    def _scheduled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        padding = self._padding(args, kwargs)
        return super()._scheduled(*((args, kwargs) if padding is None else (padding.args, padding.kwargs)))

    def _made(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | str:
        try:
            about = _about(self.model, (args, kwargs))
        except TraceError:  # such arguments are never padded
            return super()._made(label, args, kwargs)
        known = [key for key in list(self._verdicts) if key[1:] == about]
        if any(key not in self._latest for key in known):  # what is captured anew may be another model by now
            for key in known:
                self._verdicts.pop(key, None)
            raise _Outdated
        self._latest.difference_update(known)
        return super()._made(label, args, kwargs)

    def _padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Padding | None:
        """How a call is padded; ``None`` where it runs as it is."""
        if self._unfit or self.disabled or exporting() or traced_by_fx() or unusual_call():
            return None
        try:
            spans = spans_of(self._places, args, kwargs)
            if not spans or unusual_tensor(flatten((args, kwargs))[0]):
                return None
            filled = padded(self._places, spans, args, kwargs)
            return _Padding(*filled, spans, self._cuts((args, kwargs), filled, spans))
        except TraceError:  # what it is given cannot be seen: the dispatcher says so
            return None
        except Unfit as reason:
            self._note_unpadded(str(reason))
            return None

    def _cuts(self, plain: _Arguments, filled: _Arguments, spans: Mapping[str, Span]) -> Cuts:
        """Where outputs are to be cut, found once for each bucket.

        Raises:
            Unfit: the call cannot be padded.
        """
        key = (tuple(spans), *_about(self.model, filled))
        verdict = self._verdicts.get(key)
        if verdict is None:
            if len(self._verdicts) >= _MOST_VERDICTS:
                self._verdicts, self._latest = {}, set()
                self._failures.clear()
            verdict = self._verdicts[key] = self._verdict(plain, filled, spans, key)
            self._latest.add(key)
        if isinstance(verdict, str):
            raise Unfit(verdict)
        return verdict

    def _verdict(self, plain: _Arguments, filled: _Arguments, spans: Mapping[str, Span], key: Hashable) -> Cuts | str:
        """Where outputs are to be cut, or why calls of this key cannot be padded.

        Raises:
            Unfit: this call cannot; the next one may be another matter.
        """
        if has_torchscript(self.model):
            return "TorchScript cannot be tried with padding and without"
        if any(module._forward_hooks or module._forward_pre_hooks for module in self.model.modules()):
            return "it has hooks, which would see what is filled up"
        if len(set(spans.values())) < len(spans):
            raise Unfit(f"{' and '.join(spans)} are as long as each other: outputs do not tell which is which")
        try:
            without, with_padding = tried(self.model, *plain), tried(self.model, *filled)
        except Exception as error:
            reason = f"it fails when it is tried with padding and without ({first_line(error)})"
            self._failures[key] += 1
            if self._failures[key] == _MOST_FAILURES:
                return reason
            raise Unfit(reason) from None
        try:
            cuts = _same_but_longer(flatten(plain)[0], without, with_padding, spans)
            for other in shorter(self._places, spans):
                self._check_cuts(narrowed(self._places, other, *plain), other, cuts)
        except torch.OutOfMemoryError as error:
            raise Unfit(f"there is too little memory to try it at other lengths ({first_line(error)})") from None
        except (Unfit, TraceError) as refusal:
            return str(refusal)
        return cuts

    def _check_cuts(self, plain: _Arguments, spans: Mapping[str, Span], cuts: Cuts) -> None:
        """See whether shorter arguments for the same bucket have their outputs cut in the same places.

        Raises:
            Unfit: they have not. A model that does not take them is not asked.
            torch.OutOfMemoryError: there is too little memory to tell.
        """
        try:
            without, with_padding = tried(self.model, *plain), tried(self.model, *padded(self._places, spans, *plain))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a convolution is wider, a word that is looked for is not there
            return
        if _same_but_longer(flatten(plain)[0], without, with_padding, spans) != cuts:
            raise Unfit(f"which dimensions of outputs depend on {' and '.join(spans)} depends on how long that is")

    def _note_unpadded(self, reason: str) -> None:
        if reason not in self._reasons and len(self._reasons) < _MOST_REASONS:
            log.warning("%s runs at its own shape, not padded: %s", name_of(self.model), reason)
            self._reasons = (*self._reasons, reason)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the model and the options; schedules are made anew."""
        return PaddingDispatcher, (self.model, self.options, self._dynamic)


_OTHER_BRANCH = (
    "it returned outputs of other sizes than in calls of the same sizes, as models do that branch on values of tensors"
)

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_Key = tuple[Hashable, ...]
"""The names of what is filled up, then what :func:`_about` says of a call with padding."""


def _about(model: nn.Module, filled: _Arguments) -> tuple[Hashable, ...]:
    """Which calls a verdict is about.

    Raises:
        TraceError: an argument is of no known container.
    """
    tensors, structure = flatten(filled)
    shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
    return structure, shapes, model.training


@dataclass(frozen=True)
class _Padding:
    """The arguments that a call is run with, and the way back."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spans: Mapping[str, Span]
    cuts: Cuts

    def cut(self, outputs: Any) -> Any:
        """What the model returns, from what it returns with padding.

        Raises:
            Unfit: that is not what was found out about such calls.
        """
        tensors, structure = flatten(outputs)
        if not can_cut(tensors, self.cuts):
            raise Unfit(_OTHER_BRANCH)
        return unflatten(structure, cut(tensors, self.cuts, self.spans))


@torch.no_grad()
def _same_but_longer(given: Sequence[Tensor], plain: Tried, filled: Tried, spans: Mapping[str, Span]) -> Cuts:
    """Where the outputs with padding are longer than those without, which they contain.

    Raises:
        Unfit: something else is different.
    """
    if difference(_numbered("input", plain.inputs), _numbered("input", given)):
        raise Unfit("it writes to its inputs")
    (short, structure), (long, structure_filled) = flatten(plain.outputs), flatten(filled.outputs)
    if structure != structure_filled:
        raise Unfit("it returns other values or containers with padding")
    if _memory(_padded_inputs(plain, filled)) & _memory([*short, *long]):
        raise Unfit("an output is an input that is padded, or a view of one, and would be other memory")
    cuts = cuts_of(short, long, spans)
    ours = {**_numbered("output", cut(long, cuts, spans)), **filled.state}
    if reason := difference(ours, {**_numbered("output", short), **plain.state}):
        raise Unfit(f"something depends on what {' and '.join(spans)} is filled up with: {reason}")
    return cuts


def _padded_inputs(plain: Tried, filled: Tried) -> list[Tensor]:
    """Those that are longer with padding, as they are with it and without; the others are given as they are."""
    pairs = zip(plain.inputs, filled.inputs, strict=True)
    return [tensor for pair in pairs if pair[0].shape != pair[1].shape for tensor in pair]


def _memory(tensors: Sequence[Tensor]) -> set[int]:
    return {storage_of(tensor) for tensor in tensors if tensor.layout is torch.strided}


def _numbered(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{name} {at}": tensor for at, tensor in enumerate(tensors)}
