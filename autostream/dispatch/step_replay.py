"""The fast path of training steps: check that a step is like an earlier one, then replay its graph.

    same kind of arguments? ──▶ same optimizers and state? ──▶ guards, addresses ──▶ replay

A step mutates its inputs, so all checks come before the replay. Each check is one call in C for all tensors, or for all
dictionaries that hold them, since there may be thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from autostream.dispatch.captured_step import CapturedStep
from autostream.dispatch.replay import LikeCalls, are_apart
from autostream.dispatch.results import structure_of_result
from autostream.dispatch.scheduled_program import NoSchedule
from autostream.dispatch.step_calls import Call, WrittenStep, circumstances
from autostream.frontend.batches import detached
from autostream.frontend.eager_only import unusual_call
from autostream.frontend.optimizers import obstacle
from autostream.frontend.parameters import have_hooks, leave_no_gradients
from autostream.frontend.settings import watch_unguarded
from autostream.frontend.tree import TENSOR, Structure, flatten, merged, unflatten
from autostream.options import Options
from autostream.runtime.layouts import Layouts
from autostream.runtime.partial_call import PartialCall
from autostream.runtime.writes import SameEntries
from autostream.utils.storages import storage_of


class StepReplay(LikeCalls):
    """Checks whether a step is like an earlier one, and runs it.

    Args:
        step: as it is written.
        entry: the compiled step.
        call: an earlier call that it has run.
        inputs: of the captured graph in that call.
        options: say which guards to check.
        former: the replay of a call before that, which the same entry has run. Integers in which the two differ are
            read by no guard.

    Attributes:
        entry: the compiled step.
        key: of the earlier call.

    Raises:
        NoSchedule: such steps have no fast path.
    """

    def __init__(
        self,
        step: WrittenStep,
        entry: CapturedStep,
        call: Call,
        inputs: Sequence[Tensor],
        options: Options,
        former: LikeCalls | None = None,
    ) -> None:
        _, structure = flatten((call.args, call.kwargs))
        checks_all = options.guards == "dynamo"
        super().__init__(merged(former.call, structure) if former and checks_all else structure, call.tensors)
        scheduled, arguments = entry.scheduled, entry.traced.arguments(inputs, call.updates)
        place = scheduled.reading(arguments)
        if scheduled.detached or (scheduled.captured is not None and place is None):
            raise NoSchedule("it is not known what a replay would read")
        self.entry, self.key, self._body, self._steps = entry, call.key, step.body, 0
        self._guards, self._checks_all = entry.captured.guards, checks_all
        at_call = {id(tensor): at for at, tensor in enumerate(call.tensors)}
        given = {id(t) for t, item in zip(inputs, entry.captured.inputs, strict=True) if item.is_argument}
        if not given <= at_call.keys():
            raise NoSchedule("an argument is an object that holds a tensor")
        positions = [at_call.get(id(argument)) for argument in arguments]
        self._held = [argument for argument, at in zip(arguments, positions, strict=True) if at is None]
        self._launch = PartialCall(scheduled, place, self._held, positions, len(call.tensors))
        self._unmoved = Layouts(self._held, whole=True).unchanged
        self._storages = frozenset(map(storage_of, self._held))
        if not are_apart(call.tensors, self._storages):
            raise NoSchedule("arguments share memory")
        self._same_numerics = watch_unguarded()
        self._optimizers, self._updated = step.optimizers, step.updated
        self._hyperparameters = [
            *zip(step.hyperparameters, (each.numbers.device for each in call.updates), strict=True)
        ]
        self._sizes = [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]
        self._states = [optimizer.state for optimizer in self._updated]
        self._entries = SameEntries(chain.from_iterable([state, *state.values()] for state in self._states))
        self._parameters = call.every
        trained = set(map(id, self._parameters))
        others = [tensor for tensor in inputs if id(tensor) not in trained and id(tensor) not in at_call]
        self._watched = [*self._parameters, *others]
        self._required = list(map(_REQUIRES_GRADIENTS, self._watched))
        self._hooked = [tensor for tensor in self._watched if tensor.requires_grad]
        by_bytecode = entry.captured.effects or entry.traced.wholes
        self._returned = None if by_bytecode else _structure_of_result(entry, call)
        stores = entry.captured.stores
        self._cleared = [owner for owner, name, value in stores if _is_cleared(owner, name, value)]
        self._stores = [store for store in stores if not _is_cleared(*store)]

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor] | None:
        """The tensors in the arguments if the step is like the earlier one, else ``None``."""
        tensors = self.tensors_of(args, kwargs)
        as_it_was = (
            tensors is not None
            and are_apart(tensors, self._storages)
            and not any(map(_REQUIRES_GRADIENTS, tensors))
            and not unusual_call()
            and all(hyperparameters.same() for hyperparameters, _ in self._hyperparameters)
            and (not self._checks_all or self._is_unchanged(args, kwargs))
        )
        return tensors if as_it_was else None

    def _is_unchanged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether everything but the arguments and the optimizers' numbers is as it was."""
        return (
            not circumstances()
            and not any(map(obstacle, self._updated))
            and self._same_objects()
            and not have_hooks(self._hooked)
            and list(map(_REQUIRES_GRADIENTS, self._watched)) == self._required
            and self._same_numerics()
            and bool(self._unmoved())
            and self._guarded(args, kwargs)
        )

    def __call__(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step that fits; returns its result."""
        self._steps += 1
        for hyperparameters, device in self._hyperparameters:
            hyperparameters.numbers(device)
        outputs = self._launch(tensors)
        if self._returned is None:
            return detached(self.entry.restored(outputs, args, kwargs))
        leave_no_gradients(self._cleared)
        for owner, name, value in self._stores:
            setattr(owner, name, value)
        structure, sources = self._returned
        return outputs[sources[0]] if structure is TENSOR else unflatten(structure, [outputs[at] for at in sources])

    def count(self) -> int:
        """How many steps were run since the last call."""
        steps, self._steps = self._steps, 0
        return steps

    def is_current(self) -> bool:
        """Whether the step still has the tensors that it reads besides its arguments."""
        return self._same_objects() and bool(self._unmoved())

    def _same_objects(self) -> bool:
        """Whether the optimizers have the same parameters and state, which Dynamo does not guard.

        It creates no objects that the garbage collector tracks, except short lists.
        """
        lists = [*map(_PARAMETERS, chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers))]
        return (
            list(map(len, lists)) == self._sizes
            and all(map(is_, chain.from_iterable(lists), self._parameters))
            and all(optimizer.state is state for optimizer, state in zip(self._updated, self._states, strict=True))
            and self._entries.same()
        )

    def _guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        with torch.enable_grad():
            return self._guards(self._body, args, kwargs)


_PARAMETERS = itemgetter("params")
_REQUIRES_GRADIENTS = attrgetter("requires_grad")


def _is_cleared(owner: object, name: str, value: object) -> bool:
    return isinstance(owner, Tensor) and name == "grad" and value is None


def _structure_of_result(entry: CapturedStep, call: Call) -> tuple[Structure, list[int]] | None:
    """The structure of what the step returns, and which outputs of the graph are its tensors.

    ``None`` where only Dynamo's bytecode can make it.
    """
    try:
        structure, sources = structure_of_result(
            entry.captured.module, lambda outputs: entry.restored(outputs, call.args, call.kwargs)
        )
    except Exception:
        return None
    positions = [source for source in sources if isinstance(source, int)]
    return (structure, positions) if len(positions) == len(sources) else None
