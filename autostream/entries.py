"""How a new signature becomes an entry: what runs its calls, the first of these that can.

signature ──▶ a schedule of the whole model ──▶ Scheduled, or Differentiated where gradients are recorded
                    │ refused
                    ├─▶ its Python branches on values and does nothing else ──▶ Ways ──▶ Pieces, where they are over
                    ├─▶ it may be split ──▶ Pieces
                    ├─▶ the caller has another way ──▶ Refusing
                    └─▶ the model itself ──▶ Plain
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from autostream.build import Scheduled
from autostream.differentiated import Differentiated, Lock
from autostream.errors import (
    BranchError,
    ChangeError,
    ChoiceError,
    FastPathError,
    ObjectError,
    OptionError,
    TargetError,
    TraceError,
    first_line,
)
from autostream.execution.cuda_graph import GraphPools
from autostream.execution.slots import SlotTable
from autostream.frontend.signature import Signature, signature_of
from autostream.frontend.tree import Structure
from autostream.ir import Decision
from autostream.optimized import MakeSection as MakePiece
from autostream.optimized import Optimized
from autostream.options import Options
from autostream.pieces import Pieces
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.tracing.branches import Way
from autostream.tracing.export import Tracer, along
from autostream.tracing.inductor import check_level
from autostream.tracing.purity import impurity
from autostream.tracing.state import ModelWatch, name_of
from autostream.ways import Ways

log = logging.getLogger(__name__)


class Refused(Exception):  # noqa: N818 - a notice between modules, not an error
    """No graph does the same, and the caller has another way; the message says why. Nothing has been done."""


class Plain:
    """The model itself, for a signature for which nothing else works.

    Args:
        model: the live model.
        signature: what this is made for.
        reason: why it could not be scheduled.
        passing: whether that may have passed after a call.

    Attributes:
        report: says so.
        works: whether a call has returned something.
        passing: as given.
    """

    def __init__(self, model: nn.Module, signature: Signature, reason: str, passing: bool = False) -> None:
        self._model = model
        self.works, self.passing = False, passing
        refusal = Decision("", "plain", reason)
        self.report = Report(name_of(model), str(signature), "plain", refusals=(refusal,), versions=versions())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        outputs = self._model(*args, **kwargs)
        self.works = True
        return outputs


class Refusing(Plain):
    """What calls of a signature meet that no graph can do, where the caller has another way."""

    def __init__(self, model: nn.Module, signature: Signature, reason: str, passing: bool = False) -> None:
        super().__init__(model, signature, reason, passing)
        self.works = True
        self._reason = reason

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing.

        Raises:
            Refused: always.
        """
        raise Refused(self._reason)


Entry = Scheduled | Differentiated | Ways | Pieces | Plain
"""What calls of one signature run."""


def is_due(entry: Entry | None) -> bool:
    """Whether an entry is to be made: there is none, or what stood in the way of a schedule may have passed."""
    return entry is None or (isinstance(entry, Plain) and entry.passing and entry.works)


@dataclass(frozen=True)
class Subject:
    """A model, and all else that its entries are made of, whatever their signatures.

    Attributes:
        model: the live model.
        options: how to schedule it.
        tracer: makes programs of such models.
        bound_inputs: of a piece, the flat positions of inputs that stay where they are from call to call, as weights
            do; it is not split any further. ``None`` for a whole model.
        pools: of captured graphs, of all signatures.
        slots: where inputs may come in turn: captured graphs read them there.
        make_piece: makes what runs in the place of a piece of the model, or of a backward.
        make_section: makes what runs in the place of a part of a program, where a CUDA graph cannot hold the whole.
        repeating: held while the model computes a call once more, for which it is as that call found it.
    """

    model: nn.Module
    options: Options
    tracer: Tracer
    bound_inputs: frozenset[int] | None
    pools: GraphPools
    slots: SlotTable
    make_piece: MakePiece
    make_section: MakePiece
    repeating: Lock = field(default_factory=threading.RLock)

    def uses_gpu(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a call with these flat tensors has some of them, or of the model's parameters, on a GPU."""
        return any(tensor.is_cuda for tensor in chain(tensors, self.model.parameters()))


def entry_of(subject: Subject, structure: Structure, tensors: Sequence[Tensor], signature: Signature) -> Entry:
    """Make what runs calls of a signature: a schedule, or what does as much of it as can be had.

    Args:
        subject: whose calls they are.
        structure: of ``(args, kwargs)``.
        tensors: the flat example inputs.
        signature: of the calls.

    Raises:
        OptionError: an option cannot be had here.
        TargetError: the model cannot be used as it is.
        Exception: with ``strict=True``, whatever keeps the model from being scheduled as a whole.
    """
    try:
        return _whole(subject, structure, tensors, signature)
    except Exception as error:
        if subject.options.strict or isinstance(error, OptionError | TargetError):
            raise
        return _instead(subject, structure, tensors, signature, error)


def pieces_of(subject: Subject, signature: Signature, reason: str) -> Pieces:
    """Make what runs calls of a signature in pieces.

    Args:
        subject: whose calls they are.
        signature: of the calls.
        reason: why they are not scheduled as a whole.
    """
    log.warning("%s: %s; splitting it at graph breaks", name_of(subject.model), reason)
    choose = (subject.options.policy, subject.options.cuda_graph) == ("auto", "auto")
    return Pieces(subject.model, signature, reason, subject.make_piece, choose=choose)


def optimized_in_part(model: nn.Module) -> bool:
    """Whether this model, or a module within it, is one that something of ours runs."""
    return any(isinstance(value, Optimized) for module in model.modules() for value in vars(module).values())


def _whole(
    subject: Subject, structure: Structure, tensors: Sequence[Tensor], signature: Signature
) -> Scheduled | Differentiated:
    model, options = subject.model, subject.options
    if subject.bound_inputs is None:  # of pieces some may well be on the CPU
        check_level(options.kernels, chain(model.parameters(), model.buffers(), tensors))
    if optimized_in_part(model):
        raise TraceError("it, or a part of it, is optimized already: give the model itself, and optimize no part of it")
    if signature.gradients:
        call, bound_inputs = (model, structure, tensors, signature), subject.bound_inputs or frozenset()
        return Differentiated(*call, bound_inputs, options, subject.make_piece, subject.make_section, subject.repeating)
    entry = _scheduled(subject, structure, tensors, signature)
    log.info("%s, %s: %s", name_of(model), signature, entry.report.mode)
    return entry


def _scheduled(subject: Subject, structure: Structure, tensors: Sequence[Tensor], signature: Signature) -> Scheduled:
    return Scheduled(
        subject.model,
        structure,
        tensors,
        signature,
        subject.bound_inputs or frozenset(),
        subject.options,
        subject.pools,
        subject.tracer,
        subject.slots,
        subject.make_section if subject.tracer.may_cut else None,
    )


def _instead(
    subject: Subject, structure: Structure, tensors: Sequence[Tensor], signature: Signature, error: Exception
) -> Ways | Pieces | Plain:
    """What runs calls that cannot be scheduled as a whole, for this error, of which only the message is kept."""
    model, reason = subject.model, str(error)
    if subject.tracer.may_split and subject.bound_inputs is None and _has_pieces(error, signature):
        captures = subject.options.cuda_graph is not False and subject.uses_gpu(tensors)
        if isinstance(error, ChoiceError) and captures and not signature.gradients:
            if not (does := impurity(model)):
                return Ways(model, signature, reason, partial(_along, subject, structure, signature))
            reason = f"{reason}; it has no graph for each way, since {does}"
        return pieces_of(subject, signature, reason)
    passing = isinstance(error, ChangeError)  # such as what a first call makes for all others
    if isinstance(error, TraceError):
        if subject.tracer.may_refuse:
            return Refusing(model, signature, reason, passing)
    else:
        reason = f"it cannot be scheduled: {first_line(error)}"
    log.warning("%s runs plainly: %s", name_of(model), reason)
    return Plain(model, signature, reason, passing)


def _has_pieces(error: Exception, signature: Signature) -> bool:
    """Whether pieces may do what cannot be traced whole.

    With gradients, they are no better where it is the backward that cannot. Nor are they where a model changes its own
    attributes: Dynamo looks no second time for one that was missing, nor does what a checkpoint calls once more.
    """
    if signature.gradients:
        return isinstance(error, BranchError | ObjectError)
    return isinstance(error, TraceError) and not isinstance(error, FastPathError)


def _along(
    subject: Subject, structure: Structure, signature: Signature, tensors: Sequence[Tensor], way: Way
) -> Scheduled:
    """A schedule of one way through a model that branches on values, for calls of a signature.

    Raises:
        TraceError: since the call that took it began, the model or a setting has changed, perhaps by another thread.
    """
    watch = ModelWatch(subject.model)
    if signature_of(structure, tensors, watch.training(), signature.gradients, watch.read()) != signature:
        raise TraceError("modes of the model or settings changed while it was called")
    return _scheduled(replace(subject, tracer=along(way)), structure, tensors, signature)
