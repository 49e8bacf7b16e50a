"""A call of a model as one program, for those who plan, draw or measure it: nothing is run.

model, args, kwargs ──capture──▶ graph of torch ops ──aten──▶ Program ─▶ Traced
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autostream.errors import TraceError
from autostream.frontend.aten import program_of
from autostream.frontend.capture import Capture, capture
from autostream.frontend.inputs import names_of
from autostream.frontend.modules import name_of
from autostream.ir import Program


@dataclass(frozen=True, slots=True)
class Traced:
    """A program, and where its arguments come from.

    Attributes:
        program: of the call.
        captured: what it was made of.
        places: for each of its placeholders, which of the tensors that was captured with; ``None`` for constants.
        constants: that the graph makes, by target.
    """

    program: Program
    captured: Capture
    places: tuple[int | None, ...]
    constants: Mapping[str, Tensor]

    def arguments(
        self, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object] | None = None
    ) -> list[Tensor]:
        """What the program takes in a call: the model's own tensors as they are now, and these inputs'."""
        values = self.captured.given(model, tuple(args), dict(kwargs or {}))
        return [
            self.constants[placeholder.target] if at is None else values[at]
            for placeholder, at in zip(self.program.placeholders, self.places, strict=True)
        ]


def trace(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    device: str | None = None,
) -> Traced:
    """Capture a call without gradients as one program. Nothing is computed, and nothing of the model's changes.

    Args:
        model: any module.
        args: positional example inputs.
        kwargs: keyword example inputs.
        device: what to say that the ops run on, if that is another kind of device than the tensors are on: to plan for
            one that is not here.

    Raises:
        TraceError: it is no one program; the message has Dynamo's reason, and the user's line where it says which.

    Example:
        >>> traced = trace(nn.Linear(3, 4), [torch.ones(2, 3)])
        >>> [placeholder.target for placeholder in traced.program.placeholders][:2]
        ['weight', 'bias']
    """
    with torch.no_grad():
        try:
            captured = capture(model, tuple(args), dict(kwargs or {}))
        except TraceError as error:
            raise type(error)(f"{name_of(model)} is no one graph: {error}") from error
        if captured is None:
            raise TraceError(f"{name_of(model)} computes nothing with tensors")
        names = names_of(captured, model)
        given = [(*name, tensor) for name, tensor in zip(names, captured.tensors, strict=True)]
        program, constants = program_of(captured.module, given, device=device)
    known = {name: at for at, name in enumerate(names)}
    places = tuple(known.get((placeholder.role, placeholder.target)) for placeholder in program.placeholders)
    return Traced(program, captured, places, constants)
