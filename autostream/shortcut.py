"""The short way of a call that is like the one before it.

Most calls differ from the last in the values of their tensors alone. Finding that out the long way (a nested value
flattened, a signature made and looked up, each weight fetched) takes longer on the host than a small model takes on the
device. Here it takes one look at the arguments and the settings before the run, and one at the model during it, for
which the device does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autostream.execution.bound import Bound, looks_alike
from autostream.storages import storage_of
from autostream.tracing.guards import unusual_call
from autostream.tracing.numerics import watch_numerics
from autostream.tracing.state import LiveState, ModelWatch
from autostream.tracing.tree import TENSOR, Structure, unflatten

Launch = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
"""Runs with the model's tensors and the inputs, in the order of a program's placeholders."""


class Changed(Exception):  # noqa: N818 - a notice between modules, not an error
    """The model is not as it was: what was computed with its old tensors is dropped, and nothing shows of it."""


class Shortcut:
    """What calls like one that has just been made can run, without finding out again what they are.

    Only for runs that nobody can see: that write to nothing which lives on, and draw no random numbers.

    Args:
        launch: computes the outputs.
        structure: of the outputs.
        args: the tensors of that call, all of its arguments.
        bound: positions of arguments that are used where they are.
        state: the model's tensors, of which none was missing.
        watch: on the model's modules.

    Attributes:
        outdated: whether the model was found changed; no later call gets anything from it.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(2, 2)
        >>> args = (torch.ones(1, 2),)
        >>> with torch.no_grad():
        ...     state = LiveState(model, (), {})
        ...     shortcut = Shortcut(lambda tensors: [model(*tensors)], TENSOR, args, (), state, ModelWatch(model))
        ...     shortcut.fits(args), shortcut.fits((torch.ones(3, 2),))
        (True, False)
    """

    def __init__(
        self,
        launch: Launch,
        structure: Structure,
        args: Sequence[Tensor],
        bound: Sequence[int],
        state: LiveState,
        watch: ModelWatch,
    ) -> None:
        self._launch = launch
        self._structure = structure
        self._several = len(args) > 1
        self._alike = looks_alike(args)
        self._same_numerics = watch_numerics()
        self._state = state
        self._watch = watch
        self._training = watch.training()
        self._held = [tensor for tensor in state.tensors() if tensor is not None]
        self._bound = bound
        self._unmoved = Bound(self._used(args)).unmoved
        self.outdated = False

    def fits(self, args: tuple[Any, ...]) -> bool:
        """Whether a call with these positional arguments, in the present circumstances, is like the one before."""
        return (
            self._alike(args)
            and not torch.is_grad_enabled()
            and not unusual_call()
            and self._same_numerics()
            and not (self._several and _share(args))
        )

    def __call__(self, args: tuple[Tensor, ...]) -> Any:
        """What the model returns for arguments that fit.

        Raises:
            Changed: the model is another than it was.
        """
        outputs = self._launch([*self._held, *args])
        if not (self._intact() and self._unmoved(self._used(args))):
            self.outdated = True
            raise Changed
        return outputs[0] if self._structure is TENSOR else unflatten(self._structure, outputs)

    def _used(self, args: Sequence[Tensor]) -> list[Tensor]:
        """What a run uses where it is."""
        return [*self._held, *[args[index] for index in self._bound]] if self._bound else self._held

    def _intact(self) -> bool:
        watch, state = self._watch, self._state
        return (
            watch.intact()
            and not watch.hooked()
            and watch.training() == self._training
            and state.holds(self._held)
            and state.configured()
        )


def _share(tensors: Sequence[Tensor]) -> bool:
    return len({storage_of(tensor) for tensor in tensors}) < len(tensors)
