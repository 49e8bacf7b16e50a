"""``prefetch``: the next batches are copied to the device while the current one is computed on.

    next ──▶ read ahead: _Arriving │ _Arriving │ what the loader raised ──▶ the first in line, in its turn

The loader is read in the thread that asks for a batch, as ever. So nothing is left behind where a loop ends early, and
a loader of worker processes goes on working meanwhile as it would.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType, WrapperDescriptorType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from autostream.api import OptimizedModule
from autostream.errors import OptionError, TargetError, shown
from autostream.frontend.tree import map_tensors
from autostream.runtime.input_buffers import Memory, Slots, SlotTable, new_memory
from autostream.runtime.transfer import Transfer, home_of
from autostream.training import TrainStep

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")


def prefetch(
    loader: Iterable[Batch],
    device: str | torch.device | int,
    depth: int = 2,
    *,
    into: OptimizedModule | TrainStep | None = None,
) -> Iterable[Batch]:
    """Iterate over a loader's batches on a device, each copied there while the ones before it are computed on.

    It yields what ``batch.to(device)`` would be for the tensors in each batch, however nested, in the loader's order:
    ordinary tensors of the stream that is current when the batch is asked for, in whatever thread. What the loader
    raises is raised in its turn, with a note that says where. Each new iteration is one of the loader; one of a
    generator, or of another loader that is its own iterator, goes on where the last one was left. Where such a loader's
    ``__iter__`` does more than ``return self``, it may begin anew: it is not read ahead then, and a warning says so.

    The copies need pinned memory. Tensors that are not pinned are copied there first, which takes the host's time:
    prefer ``DataLoader(…, pin_memory=True)``, whose own thread does that. Pinned tensors are read while the loader goes
    on, so it must not write to them again. What is no tensor stays as it is, and so do tensors on the device.

    A captured graph reads its inputs in one place, so each batch is copied once more, on the device, in the call. Give
    ``into`` what is called, and that copy is left out: batches like the first, for the same stream, come in
    ``depth + 1`` places in turn, and the schedule is captured for each of them, in the first call with a batch there.
    That takes some milliseconds each and, while it lasts, a copy of what the call writes; the graphs compute in the
    same memory, where each has outputs of its own. Places and graphs are kept until what this function returns is gone:
    iterate over it again in the next epoch. A batch is not overwritten as long as anybody has it or a view of it; the
    next one then comes in new memory. Only ``record_stream`` has no effect on it: let other streams end their work
    before you drop it. What cannot be read where it is gets copied, as without ``into``: batches of other shapes, what
    is computed from a batch, parts of it that begin later, all in calls that record gradients (a training step records
    none), and in models that were split at graph breaks.

    Args:
        loader: a ``DataLoader``, or any other iterable of tensors, containers of them, and other values.
        device: a CUDA device; for ``"cpu"``, and where there is no CUDA, the loader itself is returned.
        depth: how many batches are read ahead and on the device before they are asked for, from 1. With 1, a copy
            waits for the work on the batch before; 2 is enough unless batches differ much in how long they take.
        into: what :func:`~autostream.optimize` or :func:`~autostream.train_step` returned, if batches are for that.

    Returns:
        An iterable of as many batches; ``len`` of it is the loader's, and so are attributes such as ``dataset``,
        also where they are set; ``depth`` and ``loader`` stay.

    Raises:
        OptionError: ``depth`` is no whole number from 1, or ``device`` names no device.
        TargetError: ``loader`` is no iterable, the device is neither the CPU nor a CUDA device that is here, or
            ``into`` is something else.

    Example:
        >>> batches = [{"x": torch.ones(2), "name": "first"}, {"x": torch.zeros(2), "name": "second"}]
        >>> for batch in prefetch(batches, "cuda" if torch.cuda.is_available() else "cpu"):
        ...     print(batch["name"], batch["x"].sum().item())
        first 2.0
        second 0.0
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TargetError(f"prefetch takes a DataLoader or another iterable of batches, not {loader!r}")
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise OptionError(f"depth={depth!r} is not allowed: use a whole number from 1")
    if not isinstance(into, OptimizedModule | TrainStep | None):
        raise TargetError(f"into takes what optimize or train_step returned, not {shown(into)}")
    place = _device_named(device)
    if place.type not in ("cpu", "cuda"):
        raise TargetError(f"prefetch copies to CUDA devices, not to {place}: iterate over the loader itself")
    if place.type == "cuda" and not torch.cuda.is_available():
        log.warning("prefetch: there is no CUDA device here, so batches stay where the loader puts them")
        return loader
    if place.type == "cpu":
        return loader
    index = torch.cuda.current_device() if place.index is None else place.index
    if index >= torch.cuda.device_count():
        raise TargetError(f"prefetch finds no {place} here: use cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    memory = new_memory if into is None else Slots(depth + 1, _slots_of(into)).memory
    return _Prefetched(loader, _Target(torch.device("cuda", index), memory), depth)


def _slots_of(called: OptimizedModule | TrainStep) -> SlotTable:
    return called.slots if isinstance(called, TrainStep) else called._autostream.slots


def _device_named(device: str | torch.device | int) -> torch.device:
    try:  # a number alone would be of no device where there is no CUDA
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f'device={device!r} is not allowed: use "cuda", "cuda:0" or "cpu"') from error


@dataclass(frozen=True, eq=False)
class _Target:
    """Where batches go: to a device, into memory that ``memory`` gives."""

    device: torch.device
    memory: Memory = field(repr=False)


@dataclass(init=False, eq=False)
class _Prefetched(Iterable[Batch]):
    """What ``loader`` is, but for its batches: they are at ``_target``, ``depth`` of them before they are asked for."""

    loader: Iterable[Batch] = field(repr=False)
    _target: _Target
    depth: int

    def __init__(self, loader: Iterable[Batch], target: _Target, depth: int) -> None:
        vars(self).update(loader=loader, _target=target, depth=depth)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        if batches is not self.loader:
            return _Ahead(batches, self._target, self.depth)
        return self._onward or _Ahead(batches, self._target, depth=1)  # nothing is left where its loop ends

    @cached_property
    def _onward(self) -> Iterator[Batch] | None:
        """The one iteration of a loader that is its own iterator: what was read ahead cannot be read again.

        ``None`` where the loader may begin anew, and what was read ahead would be of an iteration that is over.
        """
        if _goes_on(self.loader):
            return _Ahead(cast(Iterator[Batch], self.loader), self._target, self.depth)
        kind = type(self.loader).__qualname__
        log.warning(
            f"prefetch: {kind} is its own iterator, and {kind}.__iter__ may begin anew, so no batch is read before it "
            "is asked for: let __iter__ do nothing but return self, or return an iterator of its own"
        )
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # what a copy is asked for before it has any
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            raise AttributeError(f"{name} of what prefetch returned stays as it is: call prefetch again")
        setattr(self.loader, name, value)

    def __bool__(self) -> bool:
        return bool(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # it may have none, and then says so


def _goes_on(loader: Iterable[Any]) -> bool:
    """Whether it is sure that ``iter`` changes nothing of a loader that is its own iterator.

    So it is with Python's own, such as generators, and with an ``__iter__`` whose code is ``return self``.
    """
    method: Any = type(loader).__iter__
    if isinstance(method, WrapperDescriptorType):
        return method.__objclass__.__module__ in ("builtins", "itertools")
    inherited: Any = Iterator.__iter__
    return isinstance(method, FunctionType) and method.__code__.co_code == inherited.__code__.co_code


class _Arriving:
    """A batch on its way."""

    def __init__(self, batch: Any, target: _Target, home: torch.cuda.Stream | None = None) -> None:
        tensors: list[Tensor] = []

        def noted(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        self._batch = map_tensors(noted, batch)  # containers of our own: the loader may fill its own again
        self._transfer = Transfer(tensors, target.device, home, target.memory)

    def take(self) -> Any:
        """The batch on the device."""
        arrived = iter(self._transfer.take())
        return map_tensors(lambda tensor: next(arrived), self._batch)


class _Waiting:
    """A batch for which there was no memory yet: it is copied when it is asked for."""

    def __init__(self, batch: Any, target: _Target) -> None:
        self._batch, self._target, self._home = batch, target, home_of(target.device)

    def take(self) -> Any:
        """The batch on the device.

        Raises:
            torch.OutOfMemoryError: there is no memory now either.
        """
        return _Arriving(self._batch, self._target, self._home).take()


class _Ahead(Iterator[Batch]):
    """One iteration: reads ahead up to ``depth`` batches, and never beyond what the loader has raised."""

    def __init__(self, batches: Iterator[Batch], target: _Target, depth: int) -> None:
        self._batches = batches
        self._target = target
        self._depth = depth
        self._line: deque[_Arriving | _Waiting | Exception] = deque()
        self._lock = threading.Lock()

    def __next__(self) -> Batch:
        with self._lock:
            while len(self._line) < self._depth and (not self._line or isinstance(self._line[-1], _Arriving)):
                self._line.append(_next_in_line(self._batches, self._target))
            first = self._line.popleft()
        if isinstance(first, Exception):
            context = first.__context__
            try:
                raise first
            finally:
                first.__context__ = context or first.__context__  # rather than only what is handled here
                del first, context  # it would keep itself alive, and this iteration with all its batches
        try:
            batch: Batch = first.take()
        except torch.OutOfMemoryError:
            with self._lock:
                self._line.appendleft(first)  # it can be asked for again
            raise
        return batch


def _next_in_line(batches: Iterator[Any], target: _Target) -> _Arriving | _Waiting | Exception:
    """The loader's next batch on its way, or what the loader raised: ``StopIteration`` at its end."""
    handled = sys.exception()
    try:
        batch = next(batches)
    except StopIteration as end:
        return StopIteration(*end.args)  # without the frames that it went through, which hold the iteration
    except Exception as error:
        return _noted(error, handled)
    try:
        return _Arriving(batch, target)
    except torch.OutOfMemoryError:
        return _Waiting(batch, target)
    except Exception as error:
        return _noted(error, handled)


_NOTE = "Raised while prefetch read ahead:\n"


def _noted(error: Exception, handled: BaseException | None) -> Exception:
    """An error that can wait in line: a note says where it was raised, since frames hold the iteration and batches.

    So do those of the errors that it came from, but for what the consumer was handling, which is none of the loader's.
    """
    family = _family(error, handled)
    if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):  # it may come again
        error.add_note(f"{_NOTE}{''.join(traceback.format_exception(error))}".rstrip())
    for each in family:
        each.__traceback__ = None
    return error


def _family(error: BaseException, handled: BaseException | None) -> list[BaseException]:
    """An error, those that it came from, and those in groups, each once; no longer with what was handled outside."""
    family: list[BaseException] = []
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is None or any(each is other for other in family):
            continue
        family.append(each)
        if each.__context__ is handled:
            each.__context__ = None
        rest += [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]
    return family
