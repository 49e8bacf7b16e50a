"""A program launched again and again with other inputs, all of its other arguments being held.

inputs ──▶ a captured graph that needs nothing else: copied in, replayed
   └─────▶ put among the arguments that are held ──▶ run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from autostream.runtime.graphs_by_address import Place
from autostream.runtime.static_inputs import Output


class Launch:
    """Runs a program, given its inputs.

    Args:
        run: takes all arguments of the program; for when there is no graph.
        place: the captured graph that reads those held, where there is one.
        held: arguments that are the same in each call. Their memory is kept.
        positions: for each argument, which input it is; ``None`` for those held. Not every input need be an argument.
        count: of inputs.

    Example:
        >>> import torch
        >>> launch = Launch(lambda arguments: [arguments[0] * arguments[1]], None, [torch.ones(2) * 3], [None, 0], 1)
        >>> launch([torch.ones(2)])
        [tensor([3., 3.])]
    """

    def __init__(
        self,
        run: Callable[[Sequence[Tensor]], Sequence[Output]],
        place: Place | None,
        held: Sequence[Tensor],
        positions: Sequence[int | None],
        count: int,
    ) -> None:
        self._run = run if place is None else place.launch
        self._held = list(held)
        self._memory = [tensor.detach() for tensor in held]  # what is launched reads it, whoever lets it go
        self._positions = list(positions)
        copied = [at for at, position in enumerate(positions) if position is not None]
        inputs = [position for position in positions if position is not None]
        in_order = inputs == [*range(count)]
        self._in_order = in_order and copied == [*range(len(held), len(positions))]
        # To put thousands of tensors in a list takes longer than to launch a graph.
        self._short = place.launch_inputs if place and in_order and place.takes == copied else None

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Output]:
        """The program's outputs."""
        if self._short is not None and (outputs := self._short(inputs)) is not None:
            return outputs
        return self._run(self._arguments(inputs))

    def _arguments(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._in_order:
            return [*self._held, *inputs]
        held = iter(self._held)
        return [next(held) if at is None else inputs[at] for at in self._positions]
