"""The short way of a call that is like the one before it.

Most calls differ from the last in the values of their tensors alone. Finding that out the long way (a nested value
flattened, a signature made and looked up, each weight fetched) takes longer on the host than a small model takes on the
device. Here it takes one look at the arguments and the settings before the run, and one at the model: during the replay
of a captured graph, for which the device does not wait, and otherwise before the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autostream.execution.bound import looks_alike
from autostream.storages import storage_of
from autostream.tracing.guards import unusual_call
from autostream.tracing.numerics import watch_numerics
from autostream.tracing.state import LiveState, ModelWatch
from autostream.tracing.tree import TENSOR, Structure, unflatten


class Run(Protocol):
    """Runs with the model's tensors and the inputs, in the order of a program's placeholders."""

    looks_first: bool
    """Whether tensors that are not what they were would make it fail: it is then asked before it is launched."""

    def launch(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Compute the outputs."""

    def unmoved(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it can use these tensors where they are."""


class Changed(Exception):  # noqa: N818 - a notice between modules, not an error
    """The model is not as it was: what was computed with its old tensors is dropped, and nothing shows of it."""


class Shortcut:
    """What calls like one that has just been made can run, without finding out again what they are.

    Only for runs that nobody can see: that write to nothing which lives on, and draw no random numbers. What the model
    was like is told by the caller as of *before* that call: another thread may have changed it since.

    Args:
        run: computes the outputs.
        structure: of the outputs.
        args: the tensors of that call, all of its arguments.
        held: the model's tensors that it ran with.
        state: where to look for them.
        watch: on the model's modules.
        training: their modes.

    Attributes:
        outdated: whether the model was found changed; no later call gets anything from it.
    """

    def __init__(
        self,
        run: Run,
        structure: Structure,
        args: Sequence[Tensor],
        held: Sequence[Tensor],
        state: LiveState,
        watch: ModelWatch,
        training: bytes,
    ) -> None:
        self._run = run
        self._structure = structure
        self._several = len(args) > 1
        self._alike = looks_alike(args)
        self._same_numerics = watch_numerics()
        self._held = list(held)
        self._state = state
        self._entries = state.entries(held)
        self._watch = watch
        self._training = training
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
        run, tensors = self._run, [*self._held, *args]
        if run.looks_first and not self._intact(tensors):
            raise Changed
        outputs = run.launch(tensors)
        if not run.looks_first and not self._intact(tensors):
            raise Changed
        return outputs[0] if self._structure is TENSOR else unflatten(self._structure, outputs)

    def _intact(self, tensors: Sequence[Tensor]) -> bool:
        watch, state = self._watch, self._state
        self.outdated = self.outdated or not (
            watch.intact()
            and not watch.hooked()
            and watch.training() == self._training
            and (self._entries.unchanged() or (state.holds(self._held) and state.configured()))
            and state.contents_intact()
            and self._run.unmoved(tensors)
        )
        return not self.outdated


def _share(tensors: Sequence[Tensor]) -> bool:
    return len({storage_of(tensor) for tensor in tensors}) < len(tensors)
