"""Tensors that a run uses where they are: are they still there, and do they lie as they did?

Asked at every call of up to thousands of weights, so the common answer has to be quick. PyTorch's guards compare dtype,
sizes and strides of many tensors in one call; they also see what does not matter here (``requires_grad``, modes of the
thread), so a no of theirs is looked into. Addresses, which guards do not see, are compared by the function that
Inductor's CUDA graph trees have for it.

Private to PyTorch (seen on 2.11 and 2.13): ``TensorGuards``, the guard of a dictionary's version, and
``_tensors_data_ptrs_at_indices_equal``, which only builds for CUDA have. Where a version lacks them, each tensor or
entry is asked. Not documented either is ``StorageWeakRef``, by which processes share tensors.
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

from autostream.utils.storages import storage_of


class Bound:
    """What some tensors were like when this was made. Holds no reference to them.

    Args:
        tensors: to look at.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> bound = Bound([weight])
        >>> bound.unmoved([weight])
        True
        >>> weight.data = weight.data.t()
        >>> bound.unmoved([weight])
        False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._addresses = list(map(Tensor.data_ptr, tensors))
        self._alike = Alike(tensors)

    def unmoved(self, tensors: Sequence[Tensor]) -> bool:
        """Whether as many tensors are at the same addresses, with the same dtypes, sizes, strides and lazy signs."""
        return lie_at(list(tensors), self._addresses) and self._alike(tensors)


class Alike:
    """What some tensors were like when this was made, wherever they lie. Holds no reference to them.

    Args:
        tensors: to look at.
        gradients: whether it counts which of them require gradients.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> alike = Alike([weight], gradients=True)
        >>> weight.data = torch.zeros(2, 3)
        >>> alike([weight]), alike([weight.requires_grad_(False)])
        (True, False)
    """

    def __init__(self, tensors: Sequence[Tensor], *, gradients: bool = False) -> None:
        self._columns = (*_COLUMNS, *((attrgetter("requires_grad"),) if gradients else ()))
        self._seen = self._looked(tensors)
        self._guarded = _guard(tensors)

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Whether as many tensors have the same dtypes, sizes, strides and lazy signs."""
        if self._guarded(*tensors):
            return True
        if self._looked(tensors) != self._seen:
            return False
        self._guarded = _guard(tensors)
        return True

    def _looked(self, tensors: Sequence[Tensor]) -> list[list[object]]:
        """By column: a tuple for each of thousands of tensors would set off the garbage collector at every call."""
        return [list(map(column, tensors)) for column in self._columns]


class Entries:
    """Whether some dictionaries still have the keys and the values that they had, by identity. Holds all of them.

    Their versions are asked in one call, as Dynamo's guards do; where one has been written, each entry is.

    Args:
        dictionaries: to look at.

    Example:
        >>> state = {"step": torch.ones(1)}
        >>> entries = Entries([state])
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
        self._unwritten = _versions(self._dictionaries)

    def same(self) -> bool:
        """Whether nothing has come, gone or changed places."""
        if self._unwritten(self._dictionaries):
            return True
        if list(map(len, self._dictionaries)) != self._sizes or not all(map(is_, self._entries(), self._objects)):
            return False
        self._unwritten = _versions(self._dictionaries)  # what was written is what was there
        return True

    def _entries(self) -> Iterator[Any]:
        return chain.from_iterable(chain(own, own.values()) for own in self._dictionaries)


def still_there(tensors: Iterable[Tensor]) -> Callable[[], bool]:
    """A function that tells whether somebody still has the storages of all these tensors. It holds none of them.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> is_there = still_there([weight])
        >>> is_there()
        True
        >>> weight.data = torch.ones(3)
        >>> is_there()
        False
    """
    references: list[Any] = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]
    return lambda: not any(reference.expired() for reference in references)


class Frozen:
    """Whether what a program holds on to is still what some of its arguments hold, as far as that can be seen.

    They have to be the same tensors, where they were, and unwritten (:class:`Writes`). Keeps the tensors and their
    memory, so that nothing else can come to lie there.

    Args:
        positions: of those arguments.
        tensors: all arguments.
        writes: to all arguments, seen since before the program was made.

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
        self._unmoved = Bound(self._memory).unmoved

    def __bool__(self) -> bool:
        """Whether there is anything that the program holds on to."""
        return bool(self._positions)

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it holds of these arguments."""
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
    """What can be seen of writes to some tensors: their versions now, and from now on the steps of optimizers.

    PyTorch counts what ops write to a tensor, but not what a fused optimizer does. Nor does it count, and cannot be
    seen: writes through ``tensor.data``, NumPy or the storage, collectives, replays of a captured training step, and
    whatever is written to a tensor that was made in inference mode. Holds no reference to the tensors.

    Args:
        tensors: to look at. As soon as there are any, PyTorch tells this module of every step of an optimizer.

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
            _watching[id(self)] = self
            _watch_optimizers()

    def note(self, storages: frozenset[int]) -> None:
        """An optimizer has stepped on these."""
        self.stepped |= self._storages & storages


_watching: weakref.WeakValueDictionary[int, Writes] = weakref.WeakValueDictionary()


@cache
def _watch_optimizers() -> None:
    """One hook for good: another thread's optimizer may be going through PyTorch's hooks when one comes or goes."""
    register_optimizer_step_post_hook(torch.compiler.disable(_note_step))  # type: ignore[no-untyped-call]


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is of PyTorch's own kind and has a storage."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _note_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if watching := _watching.valuerefs():  # a copy
        tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
        storages = frozenset(map(storage_of, filter(is_ordinary, tensors)))
        for writes in filter(None, (reference() for reference in watching)):
            writes.note(storages)


def versions_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """How often each tensor has been written to; ``None`` where PyTorch does not count.

    Example:
        >>> versions_of([torch.ones(2).add_(1)])
        [1]
    """
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]


_VERSION = attrgetter("_version")


def looks_alike(tensors: Sequence[Tensor]) -> Callable[[Sequence[Any]], bool]:
    """A quick look at whether values are tensors of the same types, dtypes, devices, sizes and strides as these.

    It may say no where they are, but not yes where one is not. Holds no reference to the tensors.

    Example:
        >>> alike = looks_alike([torch.ones(2, 3)])
        >>> alike((torch.zeros(2, 3),)), alike((torch.zeros(3, 2),)), alike((3,)), alike(())
        (True, False, False, False)
    """
    check, types = _guard(tensors), list(map(type, tensors))
    # Asked for strides, a nested tensor ends the process.
    if len(types) == 1:  # as many models have it, in half the time
        (kind,) = types
        return lambda values: (
            len(values) == 1 and type(values[0]) is kind and not _IS_NESTED(values[0]) and check(values[0])
        )
    return lambda values: list(map(type, values)) == types and not any(map(_IS_NESTED, values)) and check(*values)


_IS_NESTED = attrgetter("is_nested")


def lie_at(tensors: list[Tensor], addresses: list[int]) -> bool:
    """Whether as many tensors lie at these addresses."""
    try:
        return len(tensors) == len(addresses) and _all_at(tensors, addresses, list(range(len(tensors))))
    except (RuntimeError, TypeError):  # sparse ones have no address, nor has what is no tensor
        return False


def _look_at_addresses(tensors: list[Tensor], addresses: list[int], places: list[int]) -> bool:
    return list(map(Tensor.data_ptr, tensors)) == addresses


_all_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _look_at_addresses)
"""Whether all tensors at some places in a list lie at the addresses there. Raises a RuntimeError for what has none."""


_COLUMNS: tuple[Callable[[Tensor], object], ...] = (
    Tensor.size, Tensor.stride, attrgetter("dtype"), Tensor.is_conj, Tensor.is_neg,
)  # fmt: skip


def _versions(dictionaries: Sequence[dict[Any, Any]]) -> Callable[[list[dict[Any, Any]]], bool]:
    """A quick look at whether no dictionary has been written since; it may say no where none has."""
    root: Any = getattr(getattr(torch._C._dynamo, "guards", None), "RootGuardManager", None)
    if not hasattr(root, "add_dict_version_guard"):
        return lambda dictionaries: False
    from torch._dynamo.guards import GuardManagerType

    manager = root()
    for at, own in enumerate(dictionaries):
        entry = manager.list_getitem_manager(at, f"L[{at}]", own, GuardManagerType.GUARD_MANAGER)
        entry.add_dict_version_guard(own, [f"L[{at}] has not been written"], None)
    check: Callable[[list[dict[Any, Any]]], bool] = manager.check
    return check


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A quick look that may say no where all is well, but not yes where it is not."""
    guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
    if guards is None or not tensors:
        return lambda *tensors: False
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check
