"""A call of a model as one program, to plan, draw or measure it without running it.

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
from autostream.frontend.tensor_parallel import in_local_tensors
from autostream.ir import Program


@dataclass(frozen=True, slots=True)
class Traced:
    """A program, and where its arguments come from.

    Attributes:
        program: of the call.
        captured: the capture that it was made of.
        sources: for each placeholder, the position of the captured graph's input; ``None`` for constants.
        constants: tensors that the graph itself makes, by target.
    """

    program: Program
    captured: Capture
    sources: tuple[int | None, ...]
    constants: Mapping[str, Tensor]

    def arguments(
        self, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object] | None = None
    ) -> list[Tensor]:
        """The program's arguments in a call: the model's tensors as they are now, and those of these inputs."""
        values = self.captured.graph_inputs(model, tuple(args), dict(kwargs or {}))
        return [
            self.constants[placeholder.target] if at is None else values[at]
            for placeholder, at in zip(self.program.placeholders, self.sources, strict=True)
        ]


def trace(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    device: str | None = None,
) -> Traced:
    """Capture a call without gradients as one program. Nothing is computed, and the model does not change.

    Args:
        model: any module.
        args: positional example inputs.
        kwargs: keyword example inputs.
        device: the device that the program is for, if that is another type of device than the tensors are on: to plan
            for one that this machine lacks.

    Raises:
        TraceError: it is not one graph; the message has Dynamo's reason, and the user's line where it is known.

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
        captured = in_local_tensors(captured)
        names = names_of(captured, model)
        inputs = [(*name, tensor) for name, tensor in zip(names, captured.tensors, strict=True)]
        program, constants = program_of(captured.module, inputs, device=device)
    known = {name: at for at, name in enumerate(names)}
    sources = tuple(known.get((placeholder.role, placeholder.target)) for placeholder in program.placeholders)
    return Traced(program, captured, sources, constants)
