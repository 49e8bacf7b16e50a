"""Calls a program with some of its arguments fixed, as ``functools.partial`` does: weights are fixed, inputs are not.

inputs ──▶ a captured graph that needs inputs only: copy them in, replay     (fast path)
   └─────▶ all arguments, inputs put between the fixed ones ──▶ run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from autostream.runtime.graphs_by_address import BoundGraph
from autostream.runtime.static_inputs import Output


class PartialCall:
    """Runs a program on its inputs; all other arguments are fixed.

    Args:
        run: takes all arguments of the program; used if there is no graph.
        graph: the captured graph that reads the fixed arguments in place, if there is one.
        fixed: arguments that are the same in each call. Their memory is kept alive.
        positions: for each argument, which input it is; ``None`` for a fixed one. An input need not be an argument.
        count: of inputs.

    Example:
        >>> import torch
        >>> call = PartialCall(lambda arguments: [arguments[0] * arguments[1]], None, [torch.ones(2) * 3], [None, 0], 1)
        >>> call([torch.ones(2)])
        [tensor([3., 3.])]
    """

    def __init__(
        self,
        run: Callable[[Sequence[Tensor]], Sequence[Output]],
        graph: BoundGraph | None,
        fixed: Sequence[Tensor],
        positions: Sequence[int | None],
        count: int,
    ) -> None:
        self._run = run if graph is None else graph.launch
        self._fixed = list(fixed)
        self._memory = [tensor.detach() for tensor in fixed]  # launched work reads it, even if a tensor gets other data
        self._positions = list(positions)
        copied = [at for at, position in enumerate(positions) if position is not None]
        inputs = [position for position in positions if position is not None]
        in_order = inputs == [*range(count)]
        self._in_order = in_order and copied == [*range(len(fixed), len(positions))]
        # To put thousands of tensors in a list takes longer than to launch a graph.
        self._launch_inputs = graph.launch_inputs if graph and in_order and graph.needed == copied else None

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Output]:
        """The program's outputs."""
        if self._launch_inputs is not None and (outputs := self._launch_inputs(inputs)) is not None:
            return outputs
        return self._run(self._arguments(inputs))

    def _arguments(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._in_order:
            return [*self._fixed, *inputs]
        fixed = iter(self._fixed)
        return [next(fixed) if at is None else inputs[at] for at in self._positions]
