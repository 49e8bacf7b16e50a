"""The fast path of a call like an earlier one: replay its graph, and check the guards while the device computes.

    same input metadata? ──▶ copy in, replay, copy out ──▶ guards, addresses ──▶ outputs
                            (the device computes)         │ one fails
                                                          └─▶ outputs are dropped; the call takes the slow path

Checking all guards takes the host longer than a small model takes the device. If the user could notice a superfluous
replay (the graph writes, generates random numbers, or computes with indices), the guards are checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from autostream.frontend.eager_only import unusual_call
from autostream.frontend.guards import GUARDS_SKIP_WEIGHTS
from autostream.frontend.settings import watch_unguarded
from autostream.frontend.tree import TENSOR, Structure, objects_in, tensors_like, unflatten
from autostream.runtime.layouts import Layouts, metadata_check
from autostream.utils.storages import storage_of


class GuardFailed(Exception):  # noqa: N818 - a notice between modules, not an error
    """A guard fails for this call. Its outputs were dropped, and it had no side effects."""


class LikeCalls:
    """Calls whose inputs have the same structure and metadata as those of an earlier one, and that record gradients too
    if it did.

    Args:
        call: the structure of ``(args, kwargs)``.
        tensors: the tensors in them.

    Attributes:
        call: as given.
    """

    def __init__(self, call: Structure, tensors: Sequence[Tensor]) -> None:
        self.call = call
        args, kwargs = call.children or ()
        self._flat = all(child is TENSOR for child in args.children or ()) and not kwargs.children
        self._alike = metadata_check(tensors)
        self._recorded = torch.is_grad_enabled()

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor] | None:
        """The tensors of a call if it is like the earlier one; else ``None``."""
        if self._flat:
            tensors: Sequence[Tensor] | None = None if kwargs else args
        else:
            tensors = tensors_like(self.call, (args, kwargs))
        alike = tensors is not None and self._alike(tensors) and torch.is_grad_enabled() is self._recorded
        return tensors if alike else None


def are_apart(tensors: Sequence[Tensor], others: Set[int]) -> bool:
    """Whether no two tensors share memory, and none has one of these other storages."""
    storages = set(map(storage_of, tensors))
    return len(storages) == len(tensors) and others.isdisjoint(storages)


class Replay(LikeCalls):
    """Runs calls whose inputs have the same metadata as those of an earlier call.

    Args:
        launch: runs the program with the call's tensors; keeps the memory of its other arguments alive.
        held: the program's arguments that belong to the model, which the guards compare by identity.
        call: the structure of ``(args, kwargs)``.
        tensors: the tensors in them.
        returned: the structure of the model's return value, and for each tensor in it its index among the program's
            outputs, then the call's tensors, then ``held``.
        guards: take ``(args, kwargs)``; ``None`` if the user promises that only inputs change (``guards="inputs"``).
        holds: whether the tensors in objects among ``(args, kwargs)`` are those in ``held``; ``None`` without such.
        stores: objects, attribute names and the values that a call assigns to them.
        guards_first: whether to check the guards before the replay.
        writes: whether the program writes any of its arguments.

    Attributes:
        repeatable: whether a failed call may run again without side effects that the user could see.
        held: ids of the model's tensors that it holds.
        objects: among the arguments, whose tensors it holds too; weak references.
    """

    def __init__(
        self,
        launch: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
        held: Sequence[Tensor],
        call: Structure,
        tensors: Sequence[Tensor],
        returned: tuple[Structure, Sequence[int]],
        guards: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None,
        holds: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None,
        stores: Sequence[tuple[Any, str, Any]],
        *,
        guards_first: bool,
        writes: bool,
    ) -> None:
        super().__init__(call, tensors)
        self._launch, self._held, self._holds = launch, list(held), holds
        self._alone = len(tensors) == 1 and not writes
        self._written = frozenset(map(storage_of, held if writes else ()))
        self._unmoved = Layouts(held, whole=GUARDS_SKIP_WEIGHTS).unchanged
        self._structure, self._sources = returned
        self._single = self._structure is TENSOR and list(self._sources) == [0]
        self._guards, self._guards_first = guards, guards_first or guards is None
        self._stores = list(stores)
        self._same_numerics = watch_unguarded()
        self.repeatable = not writes
        self.held = frozenset(map(id, held))
        self.objects = objects_in(call)

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor] | None:
        """The tensors of a call if the graph may compute it; else ``None``."""
        tensors = self.tensors_of(args, kwargs)
        fits = (
            tensors is not None
            and not unusual_call()
            and (self._alone or are_apart(tensors, self._written))
            and (self._holds is None or self._holds(args, kwargs))
        )
        return tensors if fits else None

    @property
    def is_in_place(self) -> bool:
        """Whether the model's tensors are still at the addresses that the graph reads."""
        return bool(self._unmoved())

    def check_guards_first(self) -> None:
        """Check the guards before each replay from now on, as they have failed after one."""
        self._guards_first = True

    def __call__(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the graph and return what the model returns.

        Raises:
            GuardFailed: the graph was captured for other calls.
        """
        if self._guards_first and not self._guards_hold(args, kwargs):
            raise GuardFailed
        outputs = self._launch(tensors)
        if not self._guards_first and not self._guards_hold(args, kwargs):
            raise GuardFailed
        for owner, name, value in self._stores:
            setattr(owner, name, value)
        if self._single:
            return outputs[0]
        sources = [*outputs, *tensors, *self._held]
        return unflatten(self._structure, [sources[at] for at in self._sources])

    def _guards_hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        guards = self._guards
        return guards is None or (self._same_numerics() and guards(args, kwargs) and bool(self._unmoved()))
