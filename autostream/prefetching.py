"""``prefetch``: copies the next batches to the device while the current one is computed on.

    next ──▶ read ahead: _Arriving │ _Arriving │ an exception of the loader ──▶ the first in the queue

The loader is read in the thread that asks for a batch. So no thread is left over where a loop ends early. Worker
processes of a ``DataLoader`` work meanwhile.
"""

from __future__ import annotations

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
from torch import Tensor, nn

from autostream.api import dispatcher_of
from autostream.dispatch.step_functions import StepFunction
from autostream.errors import OptionError, TargetError, shown
from autostream.frontend.tree import map_tensors
from autostream.runtime.input_buffers import InputBuffers, Memory, new_memory
from autostream.runtime.transfer import Transfer, allocation_stream
from autostream.training import TrainStep
from autostream.utils.logs import Log

log = Log(__name__)

Batch = TypeVar("Batch")


def prefetch(
    loader: Iterable[Batch],
    device: str | torch.device | int,
    depth: int = 2,
    *,
    into: nn.Module | TrainStep | StepFunction | None = None,
) -> Iterable[Batch]:
    """Iterate over a loader's batches on a device, each copied there while earlier ones are computed on.

    It yields ``batch.to(device)`` for the tensors in each batch, however nested, in the loader's order. They belong to
    the stream that is current when the batch is asked for, in any thread. An exception of the loader is raised when its
    batch would have come, with a note that says where it was raised. Each iteration iterates over the loader again. A
    generator, or another loader that is its own iterator, continues where it stopped; if its ``__iter__`` does more
    than ``return self``, it may start again, so it is not read ahead, and a warning says so.

    The copies need pinned memory. Tensors that are not pinned are copied there first, which takes the host's time:
    prefer ``DataLoader(…, pin_memory=True)``, which pins in a thread of its own. Pinned tensors are read while the
    loader continues, so it must not write to them again. Tensors on the device and other values are yielded as they
    are.

    A captured graph reads static inputs, so each call copies its batch once more, on the device. With ``into``, this
    copy is saved: batches like the first one, for the same stream, come in ``depth + 1`` buffers in turn, and a CUDA
    graph is captured for each of them, in the first call with a batch there. A capture takes some milliseconds and,
    meanwhile, a copy of the tensors that the call writes. The graphs share one memory pool, except for their outputs.
    Buffers and graphs live as long as the iterable that this function returns: iterate over it again in the next epoch.
    A batch is not overwritten as long as it or a view of it is referenced; the next one then comes in new memory. Only
    ``record_stream`` has no effect on it: let other streams end their work before you drop a batch. Other inputs are
    copied as without ``into``: batches of other shapes, tensors computed from a batch, views of it with an offset, and
    all inputs of calls that record gradients (a training step records none) and of models with graph breaks.

    Args:
        loader: a ``DataLoader``, or any other iterable of tensors, containers of them, and other values.
        device: a CUDA device; for ``"cpu"``, and if there is no CUDA, the loader itself is returned.
        depth: how many batches are read ahead and copied to the device, at least 1. With 1, a copy waits for the work
            on the batch before; 2 is enough unless batches differ much in how long they take.
        into: what :func:`~autostream.optimize`, :func:`~autostream.train_step` or :func:`~autostream.step` returned, if
            batches are for that.

    Returns:
        An iterable over as many batches. Its ``len`` and its attributes, such as ``dataset``, are the loader's, also
        when they are set; ``depth`` and ``loader`` cannot be set.

    Raises:
        OptionError: ``depth`` is no whole number from 1, or ``device`` names no device.
        TargetError: ``loader`` is no iterable, the device is neither the CPU nor an available CUDA device, or ``into``
            has another type.

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
    called = into if isinstance(into, TrainStep | StepFunction) else dispatcher_of(into)
    if called is None and into is not None:
        raise TargetError(f"into takes what optimize, train_step or step returned, not {shown(into)}")
    target = _device_named(device)
    if target.type not in ("cpu", "cuda"):
        raise TargetError(f"prefetch copies to CUDA devices, not to {target}: iterate over the loader itself")
    if target.type == "cuda" and not torch.cuda.is_available():
        log.warning("prefetch: there is no CUDA device here, so batches stay where the loader puts them")
        return loader
    if target.type == "cpu":
        return loader
    index = torch.cuda.current_device() if target.index is None else target.index
    if index >= torch.cuda.device_count():
        raise TargetError(f"prefetch finds no {target} here: use cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    memory = new_memory if called is None else InputBuffers(depth + 1, called.input_buffers).memory
    return _Prefetched(loader, _Target(torch.device("cuda", index), memory), depth)


def _device_named(device: str | torch.device | int) -> torch.device:
    try:  # torch.device(0) fails without CUDA
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f'device={device!r} is not allowed: use "cuda", "cuda:0" or "cpu"') from error


@dataclass(frozen=True, eq=False)
class _Target:
    """A device, and ``memory``, which allocates the memory that batches are copied to."""

    device: torch.device
    memory: Memory = field(repr=False)


@dataclass(init=False, eq=False)
class _Prefetched(Iterable[Batch]):
    """Behaves like ``loader``, but its batches are on ``_target``, with ``depth`` of them read ahead."""

    loader: Iterable[Batch] = field(repr=False)
    _target: _Target
    depth: int

    def __init__(self, loader: Iterable[Batch], target: _Target, depth: int) -> None:
        vars(self).update(loader=loader, _target=target, depth=depth)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        if batches is not self.loader:
            return _Ahead(batches, self._target, self.depth)
        return self._onward or _Ahead(batches, self._target, depth=1)  # one at a time: none is lost if the loop ends

    @cached_property
    def _onward(self) -> Iterator[Batch] | None:
        """The only iteration of a loader that is its own iterator, as batches read ahead cannot be read again.

        ``None`` if the loader may start again, so that batches read ahead might belong to an earlier iteration.
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
        if name.startswith("__") or name == "loader":  # copy.copy reads them before there is a loader
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            raise AttributeError(f"{name} of what prefetch returned stays as it is: call prefetch again")
        setattr(self.loader, name, value)

    def __bool__(self) -> bool:
        return bool(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # it raises a TypeError if it has none


def _goes_on(loader: Iterable[Any]) -> bool:
    """Whether ``iter`` is known not to change a loader that is its own iterator.

    That holds for Python's iterators, such as generators, and for an ``__iter__`` whose code is ``return self``.
    """
    method: Any = type(loader).__iter__
    if isinstance(method, WrapperDescriptorType):
        return method.__objclass__.__module__ in ("builtins", "itertools")
    inherited: Any = Iterator.__iter__
    return isinstance(method, FunctionType) and method.__code__.co_code == inherited.__code__.co_code


class _Arriving:
    """A batch that is being copied to the device."""

    def __init__(self, batch: Any, target: _Target, home: torch.cuda.Stream | None = None) -> None:
        tensors: list[Tensor] = []

        def collected(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        self._batch = map_tensors(collected, batch)  # copies the containers, as the loader may reuse them
        self._transfer = Transfer(tensors, target.device, home, target.memory)

    def take(self) -> Any:
        """The batch on the device."""
        arrived = iter(self._transfer.take())
        return map_tensors(lambda tensor: next(arrived), self._batch)


class _Waiting:
    """A batch for which there was too little memory: it is copied when it is asked for."""

    def __init__(self, batch: Any, target: _Target) -> None:
        self._batch, self._target, self._home = batch, target, allocation_stream(target.device)

    def take(self) -> Any:
        """The batch on the device.

        Raises:
            torch.OutOfMemoryError: there is still too little memory.
        """
        return _Arriving(self._batch, self._target, self._home).take()


class _Ahead(Iterator[Batch]):
    """One iteration: reads ahead up to ``depth`` batches, but not beyond an exception of the loader."""

    def __init__(self, batches: Iterator[Batch], target: _Target, depth: int) -> None:
        self._batches = batches
        self._target = target
        self._depth = depth
        self._queue: deque[_Arriving | _Waiting | Exception] = deque()
        self._lock = threading.Lock()

    def __next__(self) -> Batch:
        with self._lock:
            while len(self._queue) < self._depth and (not self._queue or isinstance(self._queue[-1], _Arriving)):
                self._queue.append(_next_batch(self._batches, self._target))
            first = self._queue.popleft()
        if isinstance(first, Exception):
            context = first.__context__
            try:
                raise first
            finally:
                first.__context__ = context or first.__context__  # the raise statement has replaced it
                del first, context  # else the traceback would keep this frame and all its batches alive
        try:
            batch: Batch = first.take()
        except torch.OutOfMemoryError:
            with self._lock:
                self._queue.appendleft(first)  # it can be asked for again
            raise
        return batch


def _next_batch(batches: Iterator[Any], target: _Target) -> _Arriving | _Waiting | Exception:
    """The loader's next batch, being copied, or its exception; ``StopIteration`` at its end."""
    handled = sys.exception()
    try:
        batch = next(batches)
    except StopIteration as end:
        return StopIteration(*end.args)  # without its traceback, whose frames hold the iteration
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
    """An exception that can be queued: a note says where it was raised, as its frames hold the iteration and batches.

    The same goes for its causes and contexts, except for the exception that the consumer was handling.

    Args:
        error: of the loader.
        handled: the exception that the consumer was handling.
    """
    chain = _chain(error, handled)
    if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):  # may be raised again
        error.add_note(f"{_NOTE}{''.join(traceback.format_exception(error))}".rstrip())
    for each in chain:
        each.__traceback__ = None
    return error


def _chain(error: BaseException, handled: BaseException | None) -> list[BaseException]:
    """An exception, its causes, contexts and members of groups, each once; ``handled`` is removed as a context."""
    chain: list[BaseException] = []
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is None or any(each is other for other in chain):
            continue
        chain.append(each)
        if each.__context__ is handled:
            each.__context__ = None
        rest += [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]
    return chain
