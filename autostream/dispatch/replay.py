"""The short way of a call that is like the one before it: replay first, then ask whether that was right.

    inputs alike? ──▶ copy in, replay, copy out ──▶ guards, addresses ──▶ outputs
                            (the device computes)         │ no
                                                          └─▶ outputs are dropped; the call goes the long way

Asking all guards takes the host longer than a small model takes the device, so they are asked while it computes. Where
a run more than asked could be seen (it writes, draws random numbers, or computes with indices), they are asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autostream.frontend.capture import GUARDS_SKIP_WEIGHTS
from autostream.frontend.eager_only import unusual_call
from autostream.frontend.settings import watch_unguarded
from autostream.frontend.tree import TENSOR, Structure, tensors_like, unflatten
from autostream.runtime.addresses import metadata_check
from autostream.runtime.layouts import Layouts
from autostream.utils.storages import storage_of


class GuardFailed(Exception):  # noqa: N818 - a notice between modules, not an error
    """A guard does not hold: what was computed is dropped, and nothing shows of it."""


class Replay:
    """What calls like one that has just been made run.

    Args:
        launch: runs the program, given the call's tensors; keeps the memory of what else it takes.
        held: the program's arguments that are the model's, which the guards know by identity.
        call: the structure of ``(args, kwargs)``.
        tensors: its tensors.
        returned: the structure of what the model returns, and where its tensors come from: outputs of the program, then
            the call's tensors, then what is held.
        guards: take ``(args, kwargs)``; ``None`` where the caller has said that nothing but inputs changes.
        stores: what a call leaves in attributes of Python objects.
        looks_first: whether to ask the guards before the run.
        writes: whether the program writes any of its arguments.

    Attributes:
        repeatable: whether to run a call again that failed changes nothing that anybody can see.
        held: the model's tensors, by identity.
    """

    def __init__(
        self,
        launch: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
        held: Sequence[Tensor],
        call: Structure,
        tensors: Sequence[Tensor],
        returned: tuple[Structure, Sequence[int]],
        guards: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None,
        stores: Sequence[tuple[Any, str, Any]],
        *,
        looks_first: bool,
        writes: bool,
    ) -> None:
        self._launch, self._call = launch, call
        self._held = list(held)
        self._unmoved = Layouts(held, whole=GUARDS_SKIP_WEIGHTS).unchanged
        args, kwargs = call.children or ()
        self._flat = all(child is TENSOR for child in args.children or ()) and not kwargs.children
        self._alike = metadata_check(tensors)
        self._one = len(tensors) == 1 and not writes
        self._own = frozenset(map(storage_of, held)) if writes else frozenset()
        self._structure, self._sources = returned
        self._single = self._structure is TENSOR and list(self._sources) == [0]
        self._guards, self._looks_first = guards, looks_first or guards is None
        self._stores = list(stores)
        self._recorded = torch.is_grad_enabled()
        self._same_numerics = watch_unguarded()
        self.repeatable = not writes
        self.held = frozenset(map(id, held))

    @property
    def is_in_place(self) -> bool:
        """Whether the model's tensors lie where they did when this was made."""
        return bool(self._unmoved())

    def look_first(self) -> None:
        """Ask the guards before the run from now on: they have failed, so that the run was for nothing."""
        self._looks_first = True

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor] | None:
        """The tensors of a call, if it is like the one before as far as its inputs tell."""
        if self._flat:
            tensors: Sequence[Tensor] | None = None if kwargs else args
        else:
            tensors = tensors_like(self._call, (args, kwargs))
        alike = (
            tensors is not None
            and self._alike(tensors)
            and torch.is_grad_enabled() is self._recorded
            and not unusual_call()
            and (self._one or self._apart(tensors))
        )
        return tensors if alike else None

    def __call__(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns.

        Raises:
            GuardFailed: this call is not what the graph was captured for.
        """
        if self._looks_first and not self._intact(args, kwargs):
            raise GuardFailed
        outputs = self._launch(tensors)
        if not self._looks_first and not self._intact(args, kwargs):
            raise GuardFailed
        for owner, name, value in self._stores:
            setattr(owner, name, value)
        if self._single:
            return outputs[0]
        known = [*outputs, *tensors, *self._held]
        return unflatten(self._structure, [known[at] for at in self._sources])

    def _intact(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        guards = self._guards
        return guards is None or (self._same_numerics() and guards(args, kwargs) and bool(self._unmoved()))

    def _apart(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors share no memory with each other, nor with the model's where that may be written."""
        storages = set(map(storage_of, tensors))
        return len(storages) == len(tensors) and self._own.isdisjoint(storages)
