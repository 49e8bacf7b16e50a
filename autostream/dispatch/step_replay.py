"""The fast path of training steps: check that a step is like the last one, then replay its graph.

    same kind of batch? ──▶ same optimizer and state? ──▶ guards, addresses ──▶ replay

A step mutates its inputs, so all checks come before the replay. Each check is one call in C for all tensors, or for all
dictionaries that hold them, since there may be thousands.
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
from autostream.frontend.eager_only import unusual_call
from autostream.frontend.guards import GUARDS_SKIP_WEIGHTS
from autostream.frontend.optimizers import obstacle
from autostream.frontend.parameters import have_hooks
from autostream.frontend.settings import watch_unguarded
from autostream.frontend.tree import TENSOR, tensors_like
from autostream.runtime.layouts import Layouts, metadata_check
from autostream.runtime.partial_call import PartialCall
from autostream.runtime.writes import SameEntries
from autostream.utils.storages import storage_of


class StepReplay:
    """Checks whether a step is like the last one, and runs it.

    Args:
        graphs: the graphs of the step.
        done: the last step.

    Attributes:
        whole: whether the graph updates the parameters too.
        parameters: of the optimizer.

    Raises:
        NoSchedule: such steps have no fast path.
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
        inputs = [at - held if isinstance(at, int) and at >= held else None for at in entry.traced.sources]
        self._state_tensors = [tensor for tensor, at in zip(arguments, inputs, strict=True) if at is None]
        memory = [tensor.detach() for tensor in self._state_tensors]
        self._launch = PartialCall(scheduled, place, memory, inputs, len(flat) - held)
        self._unmoved = Layouts(self._state_tensors, whole=GUARDS_SKIP_WEIGHTS).unchanged
        self._structure = call.key.structure
        self._flat = all(child is TENSOR for child in self._structure.children or ())
        self._alike = metadata_check(call.tensors)
        self._state_storages = frozenset(map(storage_of, self._state_tensors))
        if not self._are_disjoint(call.tensors):
            raise NoSchedule("tensors of the batch share memory")
        self._same_numerics = watch_unguarded()
        self._sizes = [len(group["params"]) for group in step.optimizer.param_groups]
        averaged = _dicts_of(step.average, step.model) if self.whole and step.average is not None else []
        self._state = step.optimizer.state
        self._entries = SameEntries([*averaged, self._state, *self._state.values()] if self.whole else [])
        self.parameters = call.parameters
        trained = set(map(id, call.parameters))
        others = [tensor for tensor in done.tensors.held if id(tensor) not in trained and tensor.requires_grad]
        self._hooked = [*call.parameters, *others]
        self._required = list(map(_REQUIRES_GRADIENTS, call.parameters)) if GUARDS_SKIP_WEIGHTS else None

    def fits(self, batch: Batch) -> Sequence[Tensor] | None:
        """The tensors of the batch if the step is like the last one, else ``None``; called with gradients disabled."""
        tensors: Sequence[Tensor] | None = batch if self._flat else tensors_like(self._structure, batch)
        graphs = self.graphs
        as_it_was = (
            tensors is not None
            and self._alike(tensors)
            and self._are_disjoint(tensors)
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
        """Run a step that fits; returns the result, and the gradients if the graph does not update the parameters."""
        self._steps += 1
        outputs = self._launch([*tensors, *self.graphs.numbers(self.parameters)])
        return self._entry.unpack(outputs, batch)

    def end(self) -> None:
        """Count the steps that were run as cache hits."""
        if self._steps:
            self.graphs.replayed = self._key, self._steps

    def _are_disjoint(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors share no memory with each other, nor with the model or the optimizer."""
        storages = set(map(storage_of, tensors))
        return len(storages) == len(tensors) and self._state_storages.isdisjoint(storages)

    def _same_objects(self) -> bool:
        """Whether the optimizer has the same parameters and state, which Dynamo does not guard.

        It creates no objects that the garbage collector tracks, except short lists.
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
    """The dictionaries that hold the tensors and submodules of modules."""
    parts = chain.from_iterable(module.modules() for module in modules)
    return [entries for part in parts for entries in (part._parameters, part._buffers, part._modules)]


def replay_of(graphs: Graphs, done: Done) -> StepReplay | None:
    """The fast path for steps like this one, or ``None`` if there is none."""
    if graphs.paranoid:
        return None
    try:
        return StepReplay(graphs, done)
    except NoSchedule:
        return None
