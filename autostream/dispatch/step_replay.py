"""The short way of a step that is like the one before it: look whether it is, then replay.

    batch alike? ──▶ optimizer and its state as they were? ──▶ guards, addresses ──▶ replay

Steps write what they are given, so all is asked before the replay. Every question is one look in C at all tensors, or
at all that holds them: there may be thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor, nn

from autostream.dispatch.scheduled_program import NoSchedule
from autostream.dispatch.step_graphs import Done, Graphs, circumstances
from autostream.frontend.batches import Batch
from autostream.frontend.capture import GUARDS_SKIP_WEIGHTS
from autostream.frontend.eager_only import unusual_call
from autostream.frontend.optimizers import obstacle
from autostream.frontend.parameters import have_hooks
from autostream.frontend.settings import watch_unguarded
from autostream.frontend.tree import TENSOR, tensors_like
from autostream.runtime.addresses import SameEntries, metadata_check
from autostream.runtime.partial_call import PartialCall
from autostream.runtime.layouts import Layouts
from autostream.utils.storages import storage_of


class StepReplay:
    """What steps like one that has just been done run.

    Args:
        graphs: whose step it was.
        done: the step.

    Attributes:
        whole: whether such steps leave nothing to do.
        parameters: of the optimizer.

    Raises:
        NoSchedule: such steps have no short way.
    """

    def __init__(self, graphs: Graphs, done: Done) -> None:
        entry, call, step = done.entry, done.call, graphs.step
        scheduled, flat = entry.scheduled, done.tensors.flat()
        arguments = entry.traced.arguments(done.tensors)
        place = scheduled.reading(arguments)
        if scheduled.detached or (scheduled.captured is not None and place is None):
            raise NoSchedule("it is not known what a replay would read")
        self.graphs, self._entry, self._step = graphs, entry, step
        self.whole, self._optimizer = graphs.whole, step.optimizer
        self._key, self._steps = call.key, 0
        held = len(flat) - len(done.tensors.batch) - len(done.tensors.numbers)
        inputs = [at - held if isinstance(at, int) and at >= held else None for at in entry.traced.places]
        self._live = [own for own, at in zip(arguments, inputs, strict=True) if at is None]
        memory = [own.detach() for own in self._live]
        self._launch = PartialCall(scheduled, place, memory, inputs, len(flat) - held)
        self._unmoved = Layouts(self._live, whole=GUARDS_SKIP_WEIGHTS).unchanged
        self._structure, self._flat = (
            call.key.structure,
            all(own is TENSOR for own in call.key.structure.children or ()),
        )
        self._alike = metadata_check(call.tensors)
        self._own = frozenset(map(storage_of, self._live))
        if not self._apart(call.tensors):
            raise NoSchedule("tensors of the batch share memory")
        self._same_numerics = watch_unguarded()
        self._sizes = [len(group["params"]) for group in step.optimizer.param_groups]
        averaged = _dicts_of(step.average, step.model) if self.whole and step.average is not None else []
        self._state = step.optimizer.state
        self._entries = SameEntries([*averaged, self._state, *self._state.values()] if self.whole else [])
        self.parameters = call.parameters
        ours = set(map(id, call.parameters))
        others = [own for own in done.tensors.held if id(own) not in ours and own.requires_grad]
        self._hooked = [*call.parameters, *others]
        self._required = list(map(_REQUIRES_GRADIENTS, call.parameters)) if GUARDS_SKIP_WEIGHTS else None

    def fits(self, batch: Batch) -> Sequence[Tensor] | None:
        """The tensors of a step's batch, if all is as it was; called without gradients."""
        tensors: Sequence[Tensor] | None = batch if self._flat else tensors_like(self._structure, batch)
        graphs = self.graphs
        as_it_was = (
            tensors is not None
            and self._alike(tensors)
            and self._apart(tensors)
            and not unusual_call()
            and not circumstances()
            and not (self.whole and (obstacle(self._optimizer) or not graphs.hyperparameters.same()))
            and self._same_objects()
            and not have_hooks(self._hooked)
            and (self._required is None or list(map(_REQUIRES_GRADIENTS, self.parameters)) == self._required)
            and self._same_numerics()
            and self._unmoved()
            and self._entry.loss.stands_for(batch)
        )
        return tensors if as_it_was else None

    def __call__(self, tensors: Sequence[Tensor], batch: Batch) -> tuple[Any, list[Tensor | None] | None]:
        """The result of a step that fits, and gradients, where they are still to be used."""
        self._steps += 1
        outputs = self._launch([*tensors, *self.graphs.numbers(self.parameters)])
        return self._entry.put_together(outputs, batch)

    def end(self) -> None:
        """Tell how many steps there were."""
        if self._steps:
            self.graphs.replayed = self._key, self._steps

    def _apart(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors share no memory with each other, nor with what is the model's or the optimizer's."""
        storages = set(map(storage_of, tensors))
        return len(storages) == len(tensors) and self._own.isdisjoint(storages)

    def _same_objects(self) -> bool:
        """Whether the objects that a step goes by, and that Dynamo does not guard, are what they were.

        Nothing is made for it that the garbage collector would look at.
        """
        lists = [*map(_PARAMETERS, self._optimizer.param_groups)]
        return (
            list(map(len, lists)) == self._sizes
            and all(map(is_, chain.from_iterable(lists), self.parameters))
            and self._optimizer.state is self._state
            and self._entries.same()
        )


_PARAMETERS = itemgetter("params")
_REQUIRES_GRADIENTS = attrgetter("requires_grad")


def _dicts_of(*modules: nn.Module) -> list[dict[str, Any]]:
    """What modules hold their tensors and submodules in."""
    parts = chain.from_iterable(module.modules() for module in modules)
    return [own for part in parts for own in (part._parameters, part._buffers, part._modules)]


def replay_of(graphs: Graphs, done: Done) -> StepReplay | None:
    """The short way of steps like one that has been done, where there is one."""
    if graphs.paranoid:
        return None
    try:
        return StepReplay(graphs, done)
    except NoSchedule:
        return None
