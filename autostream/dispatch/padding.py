"""Padding: calls of different lengths share a schedule, as their arguments are padded and their outputs cut back.

    call ──▶ its lengths ──▶ all equal a bucket's size, or one fits no bucket? ──▶ Dispatcher, without padding
             │ no
             └─▶ padded arguments ──▶ was such a call tried? ──▶ Dispatcher ──▶ outputs, cut back
                                          │ no
                                          └─▶ run the model with padding and without: which output dimensions are
                                              longer, and is the rest equal? If not, no call like it is padded

A dimension that is padded is said to be dynamic; a bucket has the sizes that it is padded to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autostream.dispatch.dispatcher import Dispatcher
from autostream.dispatch.entries import Entry
from autostream.dispatch.paranoid import difference
from autostream.errors import TraceError, first_line
from autostream.frontend.buckets import (
    Cuts,
    Dynamic,
    NotPaddable,
    Span,
    can_cut,
    cut,
    cuts_of,
    dynamic_dims_of,
    narrowed,
    padded,
    shorter,
    spans_of,
)
from autostream.frontend.eager_only import exporting, has_torchscript, traced_by_fx, unusual_call, unusual_tensor
from autostream.frontend.modules import forward_parameters, name_of
from autostream.frontend.tree import flatten, unflatten
from autostream.frontend.trial import Tried, tried
from autostream.ir import Decision
from autostream.options import Options
from autostream.reporting.report import Report
from autostream.utils.logs import Log
from autostream.utils.storages import storage_of

log = Log(__name__)


class _Outdated(Exception):  # noqa: N818 - a notice within this file, not an error
    """A trial of padding was made before the model changed. Nothing was run."""


_MOST_VERDICTS = 1000
"""How many results of trials are kept; then all are dropped, as arguments may differ in other dimensions too."""

_MOST_FAILURES = 3
"""How many trials of one bucket may fail: whether one does may depend on the values in its tensors."""

_MOST_REASONS = 100
"""How many reasons not to pad are kept: each may contain the size of an error."""


class PaddingDispatcher(Dispatcher):
    """Runs calls of a model with arguments padded to the sizes of buckets.

    The user promises that padding is safe. It is tried all the same, once for each bucket, with copies of the model and
    of all tensors, and at the shortest length of the bucket too: outputs, the model's state and its inputs must be
    equal with padding and without. Aliases among outputs may get lost, and random numbers are generated for the padding
    too. It is tried again before a bucket is captured again, e.g. when a guard has failed.

    Args:
        model: the module to run.
        options: how to schedule it.
        dynamic: the dimensions that may be padded.

    Raises:
        OptionError: ``dynamic`` is malformed, or names an argument that the model does not have.

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
        self._dims = dynamic_dims_of(dynamic, forward_parameters(model))
        self._verdicts: dict[_Key, Cuts | str] = {}
        self._latest: set[_Key] = set()
        """Keys of trials since which no call with their arguments was captured."""
        self._failures = Counter[Hashable]()
        self._reasons: tuple[str, ...] = ()
        self._unfit = ""
        """Why no call is padded any more; ``""`` if calls are."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
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
            except NotPaddable as reason:
                self._unfit = str(reason)
                self._note_unpadded(self._unfit)

    def static_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments, with the static inputs of the captured graph, which have the bucket's size, for the tensors.

        See :meth:`Dispatcher.static_inputs`.
        """
        padding = self._padding(args, kwargs)
        if padding is None:
            return super().static_inputs(*args, **kwargs)
        static, _ = flatten(super().static_inputs(*padding.args, **padding.kwargs))
        filled, _ = flatten((padding.args, padding.kwargs))
        tensors, structure = flatten((args, kwargs))
        triples = zip(tensors, filled, static, strict=True)
        return unflatten(structure, [tensor if buffer is full else buffer for tensor, full, buffer in triples])

    @property
    def reports(self) -> tuple[Report, ...]:
        """A report for each signature, each with the reasons why calls were not padded."""
        notes = tuple(Decision("", "not padded", reason) for reason in self._reasons)
        return tuple(replace(report, refusals=(*notes, *report.refusals)) for report in super().reports)

    def forget(self) -> None:
        """Drop everything compiled, and the results of all trials."""
        super().forget()
        self._verdicts, self._latest, self._unfit = {}, set(), ""
        self._failures.clear()

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
        while True:
            padding = self._padding(args, kwargs)
            try:
                return super()._prepare(*((args, kwargs) if padding is None else (padding.args, padding.kwargs)))
            except _Outdated:
                continue

    def _schedule_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        padding = self._padding(args, kwargs)
        return super()._schedule_of(*((args, kwargs) if padding is None else (padding.args, padding.kwargs)))

    def _capture(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | str:
        try:
            about = _about(self.model, (args, kwargs))
        except TraceError:  # such arguments are never padded
            return super()._capture(label, args, kwargs)
        keys = [key for key in list(self._verdicts) if key[1:] == about]
        if any(key not in self._latest for key in keys):  # the model may have changed since the trial
            for key in keys:
                self._verdicts.pop(key, None)
            raise _Outdated
        self._latest.difference_update(keys)
        return super()._capture(label, args, kwargs)

    def _padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Padding | None:
        """How a call is padded; ``None`` if it runs without padding."""
        if self._unfit or self.disabled or exporting() or traced_by_fx() or unusual_call():
            return None
        try:
            spans = spans_of(self._dims, args, kwargs)
            if not spans or unusual_tensor(flatten((args, kwargs))[0]):
                return None
            filled = padded(self._dims, spans, args, kwargs)
            return _Padding(*filled, spans, self._cuts((args, kwargs), filled, spans))
        except TraceError:  # an unknown container: the dispatcher reports it
            return None
        except NotPaddable as reason:
            self._note_unpadded(str(reason))
            return None

    def _cuts(self, plain: _Arguments, filled: _Arguments, spans: Mapping[str, Span]) -> Cuts:
        """Where to cut the outputs, found once for each bucket.

        Raises:
            NotPaddable: the call cannot be padded.
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
            raise NotPaddable(verdict)
        return verdict

    def _verdict(self, plain: _Arguments, filled: _Arguments, spans: Mapping[str, Span], key: Hashable) -> Cuts | str:
        """Where to cut the outputs, or why calls of this key cannot be padded.

        Raises:
            NotPaddable: this call cannot be padded, but the next one may be.
        """
        if has_torchscript(self.model):
            return "TorchScript cannot be tried with padding and without"
        if any(module._forward_hooks or module._forward_pre_hooks for module in self.model.modules()):
            return "it has hooks, which would see what is filled up"
        if len(set(spans.values())) < len(spans):
            raise NotPaddable(f"{' and '.join(spans)} are as long as each other: outputs do not tell which is which")
        try:
            without, with_padding = tried(self.model, *plain), tried(self.model, *filled)
        except Exception as error:
            reason = f"it fails when it is tried with padding and without ({first_line(error)})"
            self._failures[key] += 1
            if self._failures[key] == _MOST_FAILURES:
                return reason
            raise NotPaddable(reason) from None
        try:
            cuts = _same_but_longer(flatten(plain)[0], without, with_padding, spans)
            for other in shorter(self._dims, spans):
                self._check_cuts(narrowed(self._dims, other, *plain), other, cuts)
        except torch.OutOfMemoryError as error:
            raise NotPaddable(f"there is too little memory to try it at other lengths ({first_line(error)})") from None
        except (NotPaddable, TraceError) as refusal:
            return str(refusal)
        return cuts

    def _check_cuts(self, plain: _Arguments, spans: Mapping[str, Span], cuts: Cuts) -> None:
        """Check that the outputs of shorter arguments in the same bucket are cut in the same dimensions.

        Raises:
            NotPaddable: they are not. If the model fails for such arguments, there is nothing to check.
            torch.OutOfMemoryError: there is too little memory for the trial.
        """
        try:
            without, with_padding = tried(self.model, *plain), tried(self.model, *padded(self._dims, spans, *plain))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # e.g. a convolution is wider, or a token is missing
            return
        if _same_but_longer(flatten(plain)[0], without, with_padding, spans) != cuts:
            raise NotPaddable(
                f"which dimensions of outputs depend on {' and '.join(spans)} depends on how long that is"
            )

    def _note_unpadded(self, reason: str) -> None:
        if reason not in self._reasons and len(self._reasons) < _MOST_REASONS:
            log.warning("%s runs at its own shape, not padded: %s", name_of(self.model), reason)
            self._reasons = (*self._reasons, reason)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the model and the options, without what was compiled."""
        return PaddingDispatcher, (self.model, self.options, self._dynamic)


_OTHER_BRANCH = (
    "it returned outputs of other sizes than in calls of the same sizes, as models do that branch on values of tensors"
)

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_Key = tuple[Hashable, ...]
"""The names of the padded dimensions, then what :func:`_about` returns for the padded arguments."""


def _about(model: nn.Module, filled: _Arguments) -> tuple[Hashable, ...]:
    """Which calls the result of a trial holds for.

    Raises:
        TraceError: an argument is a container of an unknown type.
    """
    tensors, structure = flatten(filled)
    shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
    return structure, shapes, model.training


@dataclass(frozen=True)
class _Padding:
    """The padded arguments of a call, and how to cut its outputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spans: Mapping[str, Span]
    cuts: Cuts

    def cut(self, outputs: Any) -> Any:
        """Cut the outputs of the padded call back to the size of the call.

        Raises:
            NotPaddable: they are unlike those of the trial.
        """
        tensors, structure = flatten(outputs)
        if not can_cut(tensors, self.cuts):
            raise NotPaddable(_OTHER_BRANCH)
        return unflatten(structure, cut(tensors, self.cuts, self.spans))


@torch.no_grad()
def _same_but_longer(inputs: Sequence[Tensor], plain: Tried, filled: Tried, spans: Mapping[str, Span]) -> Cuts:
    """Where outputs with padding are longer than those without.

    Args:
        inputs: of the model, before the trial.
        plain: the trial without padding.
        filled: the trial with padding.
        spans: the padded dimensions.

    Raises:
        NotPaddable: outputs or state differ otherwise, or padding would break aliases of inputs.
    """
    if difference(_numbered("input", plain.inputs), _numbered("input", inputs)):
        raise NotPaddable("it writes to its inputs")
    (short, structure), (long, structure_filled) = flatten(plain.outputs), flatten(filled.outputs)
    if structure != structure_filled:
        raise NotPaddable("it returns other values or containers with padding")
    if _memory(_padded_inputs(plain, filled)) & _memory([*short, *long]):
        raise NotPaddable("an output is an input that is padded, or a view of one, and would be other memory")
    cuts = cuts_of(short, long, spans)
    ours = {**_numbered("output", cut(long, cuts, spans)), **filled.state}
    if reason := difference(ours, {**_numbered("output", short), **plain.state}):
        raise NotPaddable(f"something depends on what {' and '.join(spans)} is filled up with: {reason}")
    return cuts


def _padded_inputs(plain: Tried, filled: Tried) -> list[Tensor]:
    """The inputs that are longer with padding, from both trials; both trials share the other inputs."""
    pairs = zip(plain.inputs, filled.inputs, strict=True)
    return [tensor for pair in pairs if pair[0].shape != pair[1].shape for tensor in pair]


def _memory(tensors: Sequence[Tensor]) -> set[int]:
    return {storage_of(tensor) for tensor in tensors if tensor.layout is torch.strided}


def _numbered(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{name} {at}": tensor for at, tensor in enumerate(tensors)}
