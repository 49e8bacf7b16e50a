"""Checks that what a captured graph depends on has not been written, replaced or freed since.

- :class:`Frozen` checks constants that were folded into a program, by means of :class:`Writes`.
- :class:`SameEntries` checks the entries of dictionaries, such as an optimizer's state.
- :func:`storages_alive` checks whether memory that a graph reads in place is still allocated.

Private to PyTorch (seen on 2.11 and 2.13): the guard of a dictionary's version; where a version lacks it, each entry is
compared. Not documented either is ``StorageWeakRef``, by which processes share tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from autostream.runtime.layouts import SameLayout
from autostream.utils.storages import storage_of


class Frozen:
    """Checks whether constants that were folded into a program are still what some of its arguments hold.

    They have to be the same tensors, at the same addresses, and not written (:class:`Writes`). Keeps the tensors and
    their memory alive, so that no other tensor can be allocated there.

    Args:
        positions: of those arguments.
        tensors: all arguments.
        writes: to all arguments, observed since before the program was made.

    Example:
        >>> weight = torch.ones(2)
        >>> frozen = Frozen({0}, [weight], Writes([weight]))
        >>> frozen([weight])
        True
        >>> _ = weight.mul_(2)
        >>> frozen([weight])
        False
    """

    def __init__(self, positions: Collection[int], tensors: Sequence[Tensor], writes: Writes) -> None:
        self._positions = sorted(positions)
        if not self._positions:
            return
        self._tensors = [tensors[at] for at in self._positions]
        self._versions = [writes.versions[at] for at in self._positions]
        self._writes = writes
        self._memory = [tensor.detach() for tensor in self._tensors]
        self._storages = frozenset(map(storage_of, self._memory))
        self._unmoved = SameLayout(self._memory).unmoved

    def __bool__(self) -> bool:
        """Whether the program has any such constants."""
        return bool(self._positions)

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the program may run with these arguments."""
        if not self._positions:
            return True
        now = [tensors[at] for at in self._positions]
        return (
            all(map(is_, now, self._tensors))
            and versions_of(now) == self._versions
            and self._writes.stepped.isdisjoint(self._storages)
            and self._unmoved(now)
        )


class Writes:
    """Observes writes to tensors: their version counters now, and steps of optimizers from now on. Keeps none alive.

    PyTorch counts what ops write to a tensor, but not what a fused optimizer writes. Neither counted nor observed are
    writes through ``tensor.data``, NumPy or the storage, collectives, replays of a captured training step, and all
    writes to a tensor that was made in inference mode.

    Args:
        tensors: to observe. If there are any, a hook is registered for all steps of optimizers.

    Attributes:
        versions: of each tensor when this was made.
        stepped: storages of those tensors that an optimizer has stepped on since.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> writes = Writes([weight])
        >>> torch.optim.SGD([weight]).step()
        >>> writes.stepped == {storage_of(weight)}
        True
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.versions = versions_of(tensors)
        self.stepped: set[int] = set()
        self._storages = frozenset(map(storage_of, tensors))
        if tensors:
            _observers[id(self)] = self
            _observe_optimizers()

    def note(self, storages: frozenset[int]) -> None:
        """Take note that an optimizer has stepped on these storages."""
        self.stepped |= self._storages & storages


_observers: weakref.WeakValueDictionary[int, Writes] = weakref.WeakValueDictionary()


@cache
def _observe_optimizers() -> None:
    """Register one hook that stays: another thread's optimizer may be iterating over PyTorch's hooks at any time."""
    register_optimizer_step_post_hook(torch.compiler.disable(_note_step))  # type: ignore[no-untyped-call]


def _note_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if observers := _observers.valuerefs():  # a copy
        tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
        storages = frozenset(map(storage_of, filter(_has_storage, tensors)))
        for writes in filter(None, (reference() for reference in observers)):
            writes.note(storages)


def _has_storage(tensor: Tensor) -> bool:
    """Whether a tensor is of PyTorch's own class and has a storage."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def versions_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """The version counter of each tensor: how often it has been written. ``None`` where PyTorch does not count.

    Example:
        >>> versions_of([torch.ones(2).add_(1)])
        [1]
    """
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]


_VERSION = attrgetter("_version")


class SameEntries:
    """Checks whether dictionaries still have the same keys and values, by identity. Keeps all of them alive.

    One guard checks the versions of all dictionaries, as Dynamo does. Where one has been written, its entries are
    compared.

    Args:
        dictionaries: to check.

    Example:
        >>> state = {"step": torch.ones(1)}
        >>> entries = SameEntries([state])
        >>> state["step"] = state["step"].add_(1)
        >>> entries.same()
        True
        >>> state["step"] = torch.ones(1)
        >>> entries.same()
        False
    """

    def __init__(self, dictionaries: Iterable[dict[Any, Any]]) -> None:
        self._dictionaries = list(dictionaries)
        self._sizes = list(map(len, self._dictionaries))
        self._objects = list(self._entries())
        self._unwritten = _version_check(self._dictionaries)

    def same(self) -> bool:
        """Whether no entry was added, removed, replaced or reordered."""
        if self._unwritten(self._dictionaries):
            return True
        if list(map(len, self._dictionaries)) != self._sizes or not all(map(is_, self._entries(), self._objects)):
            return False
        self._unwritten = _version_check(self._dictionaries)  # the same objects were written again
        return True

    def _entries(self) -> Iterator[Any]:
        return chain.from_iterable(chain(dictionary, dictionary.values()) for dictionary in self._dictionaries)


def _version_check(dictionaries: Sequence[dict[Any, Any]]) -> Callable[[list[dict[Any, Any]]], bool]:
    """A fast check that no dictionary has been written since; it may fail where none has."""
    root: Any = getattr(getattr(torch._C._dynamo, "guards", None), "RootGuardManager", None)
    if not hasattr(root, "add_dict_version_guard"):
        return lambda dictionaries: False
    from torch._dynamo.guards import GuardManagerType

    manager = root()
    for at, dictionary in enumerate(dictionaries):
        entry = manager.list_getitem_manager(at, f"L[{at}]", dictionary, GuardManagerType.GUARD_MANAGER)
        entry.add_dict_version_guard(dictionary, [f"L[{at}] has not been written"], None)
    check: Callable[[list[dict[Any, Any]]], bool] = manager.check
    return check


def storages_alive(tensors: Iterable[Tensor]) -> Callable[[], bool]:
    """A function that tells whether the storages of all these tensors are still alive. It keeps none of them alive.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> alive = storages_alive([weight])
        >>> alive()
        True
        >>> weight.data = torch.ones(3)
        >>> alive()
        False
    """
    references: list[Any] = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]
    return lambda: not any(reference.expired() for reference in references)
