"""The short way of a call that is like the one before it.

Most calls differ from the last in the values of their tensors alone. Finding that out the long way (a nested value
flattened, a signature made and looked up, each weight fetched) takes longer on the host than a small model takes on the
device. Here it takes one look at the arguments and the settings before the run, and one at the model: during the replay
of a captured graph that nobody can see, for which the device does not wait, and otherwise before the run. What runs as
it is, or in pieces, needs less, and not in each call: it is never wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autostream.execution.bound import Bound, Frozen, looks_alike
from autostream.execution.places import Places
from autostream.execution.static import Output
from autostream.frontend.guards import traced_by_fx, unusual_call
from autostream.frontend.numerics import watch_modes, watch_numerics
from autostream.frontend.tree import TENSOR, Structure, tensors_like, unflatten
from autostream.storages import storage_of
from autostream.tracing.reads import Read
from autostream.tracing.state import LiveState, ModelWatch


class Launch(Protocol):
    """Runs with the model's tensors and the inputs, in the order of a program's placeholders."""

    def launch(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Compute the outputs."""


class Run(Protocol):
    """Finds what runs a call."""

    repeatable: bool
    """Whether a run more than asked changes nothing that anybody can see. If not, it may write to the model."""

    def guess(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | None] | None:
        """The outputs, of a run that is launched before it looks where the tensors are, if they are where it read them.

        Nothing is launched where it might do harm.
        """

    def find(self, tensors: Sequence[Tensor]) -> Launch | None:
        """What uses these tensors where they are, if there is anything."""

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors that it does not read, since it has what they held, hold that still."""


class Changed(Exception):  # noqa: N818 - a notice between modules, not an error
    """The model is not as it was: what was computed with its old tensors is dropped, and nothing shows of it."""


class Shortcut:
    """What calls like one that has just been made can run, without finding out again what they are.

    What the model was like is told by the caller as of *before* that call: another thread may have changed it since.

    Args:
        run: computes the outputs.
        structure: of the outputs.
        call: the structure of the positional arguments of that call; it had no others.
        args: their tensors.
        held: the model's tensors that it ran with.
        state: where to look for them.
        watch: on the model's modules.
        training: their modes.
        read: what their functions read elsewhere.

    Attributes:
        outdated: whether the model was found changed; no later call gets anything from it.
        repeatable: whether to run a call again that failed changes nothing that anybody can see.
    """

    def __init__(
        self,
        run: Run,
        structure: Structure,
        call: Structure,
        args: Sequence[Tensor],
        held: Sequence[Tensor],
        state: LiveState,
        watch: ModelWatch,
        training: bytes,
        read: Read = (),
    ) -> None:
        self._run = run
        self._structure = structure
        self._call = _nested(call)
        # Of a model that may be written to: inputs share no memory with it.
        self._own = frozenset() if run.repeatable else frozenset(map(storage_of, held))
        self._alone = len(args) == 1 and not self._own
        self._alike = looks_alike(args)
        self._same_numerics = watch_numerics()
        self._held = list(held)
        self._state = state
        self._entries = state.entries(held)
        self._watch = watch
        self._training = training
        self._read = read
        self.outdated = False
        self.repeatable = run.repeatable

    def current(self) -> bool:
        """Whether the model still has the tensors that this holds."""
        return not self.outdated and self._state.holds(self._held)

    def fits(self, args: tuple[Any, ...]) -> Sequence[Tensor] | None:
        """The tensors of these positional arguments, if a call with them, as things are now, is like the one before."""
        tensors = args if self._call is None else tensors_like(self._call, args)
        alike = (
            tensors is not None
            and self._alike(tensors)
            and not torch.is_grad_enabled()
            and not unusual_call()
            and self._same_numerics()
            and (self._alone or _apart(tensors, self._own))
        )
        return tensors if alike else None

    def __call__(self, args: Sequence[Tensor]) -> Any:
        """What the model returns for the tensors of arguments that fit.

        Raises:
            Changed: the model is another than it was; nothing that can be seen has been done.
        """
        run, tensors = self._run, [*self._held, *args]
        outputs, intact = run.guess(tensors), self._intact(tensors)
        if outputs is None and intact and (found := run.find(tensors)) is not None:
            outputs = found.launch(tensors)
        if outputs is None or not intact:
            self.outdated = True
            raise Changed
        return outputs[0] if self._structure is TENSOR else unflatten(self._structure, outputs)

    def _intact(self, tensors: Sequence[Tensor]) -> bool:
        watch, state = self._watch, self._state
        return (
            not self.outdated
            and watch.intact()
            and not watch.hooked()
            and watch.training() == self._training
            and watch.read() == self._read
            and (self._entries.unchanged() or (state.holds(self._held) and state.configured()))
            and state.contents_intact()
            and self._run.holds(tensors)
        )


class Unscheduled(Protocol):
    """Does calls by the model itself or by pieces of it that have guards of their own: right whatever has changed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""


class Direct:
    """The short way of calls that have no schedule as a whole: of the model as it is, or in pieces.

    So all that is looked at is whether the call may have a schedule: one of another signature may. Of what changes more
    rarely than arguments and modes, every eighth call is told: the rest of the code between two calls is then not in
    the processor's caches, and looking takes several times what it does in a loop of its own.

    Args:
        run: does the calls; it is not kept alive.
        call: the structure of the positional arguments of a call that it did; there were no others.
        args: their tensors.
        watch: on the model's modules.
        training: their modes.
        read: what their functions read elsewhere.

    Attributes:
        repeatable: no: what the model does may be seen.
    """

    repeatable = False

    def __init__(
        self,
        run: Unscheduled,
        call: Structure,
        args: Sequence[Tensor],
        watch: ModelWatch,
        training: bytes,
        read: Read = (),
    ) -> None:
        self._run = weakref.ref(run)
        self._call = _nested(call)
        self._alike = looks_alike(args)
        self._same_numerics = watch_numerics()
        self._same_modes = watch_modes()
        self._watch, self._training, self._read = watch, training, read
        self._calls = 0

    def fits(self, args: tuple[Any, ...]) -> Sequence[Any] | None:
        """These arguments, if a call with them, as far as was looked, is like the one before."""
        tensors = args if self._call is None else tensors_like(self._call, args)
        watch = self._watch
        alike = (
            tensors is not None
            and self._alike(tensors)
            and not torch.is_grad_enabled()
            and not unusual_call()
            and not traced_by_fx()
            and self._same_modes()
            and (len(tensors) == 1 or _apart(tensors))
            and not watch.hooked()
            and watch.training() == self._training
        )
        self._calls += 1
        return args if alike and (self._calls % _LOOKS or self._unchanged()) else None

    def _unchanged(self) -> bool:
        return self._same_numerics() and self._watch.intact() and self._watch.read() == self._read

    def __call__(self, args: Sequence[Any]) -> Any:
        """What the model returns for arguments that fit.

        Raises:
            Changed: what did such calls is gone; nothing has been done.
        """
        run = self._run()
        if run is None:
            raise Changed
        return run(*args)


_LOOKS = 8
"""In one of so many calls all is looked at."""


def _nested(call: Structure) -> Structure | None:
    """The structure of positional arguments, unless they are tensors themselves: then there is nothing to take out."""
    return None if all(child is TENSOR for child in call.children or ()) else call


def _apart(tensors: Sequence[Tensor], others: frozenset[int] = frozenset()) -> bool:
    """Whether tensors share no memory with each other, nor lie in other storages."""
    storages = set(map(storage_of, tensors))
    return len(storages) == len(tensors) and others.isdisjoint(storages)


def _no_guess(tensors: Sequence[Tensor]) -> None:
    """Nothing is launched before it has been looked where the tensors are."""


class CapturedRun:
    """Captured graphs: a settled one reads memory that is held, so looking at the model's may wait until it runs.

    Args:
        places: the graphs.
        frozen: what they hold on to.
        looks_first: whether running once too often may do harm.
        repeatable: as of :class:`Run`.
    """

    def __init__(self, places: Places, frozen: Frozen, looks_first: bool, repeatable: bool) -> None:
        self.repeatable = repeatable
        self.guess = _no_guess if looks_first else places.guess
        self.find, self.holds = places.find, frozen


class UncapturedRun:
    """Ops that are launched one by one, with tensors that lie as they did.

    Args:
        execution: launches them.
        frozen: what they hold on to.
        held: the model's tensors.
        repeatable: as of :class:`Run`.
    """

    def __init__(
        self, execution: Callable[..., Sequence[Output]], frozen: Frozen, held: Sequence[Tensor], repeatable: bool
    ) -> None:
        self.repeatable = repeatable
        self.guess, self.holds = _no_guess, frozen
        self._execution = execution
        self._count, self._unmoved = len(held), Bound(held).unmoved

    def find(self, tensors: Sequence[Tensor]) -> UncapturedRun | None:
        """What runs them, if the model's own tensors lie as they did; inputs have been looked at."""
        return self if self._unmoved(tensors[: self._count]) else None

    def launch(self, tensors: Sequence[Tensor]) -> Sequence[Output]:
        """Launch them all."""
        return self._execution(*tensors)
