"""Which line of the user's code an op of a backward comes from, noted while it is traced."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx.traceback import set_stack_trace


def keep_lines(loss: Tensor) -> None:
    """Let what a backward computes have the user's lines of what was computed forward.

    Args:
        loss: computed in anomaly mode, in which autograd notes lines.
    """
    pending, seen = [loss.grad_fn], set()
    while pending:
        node: Any = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            if lines := node.metadata.get("traceback_"):
                node.register_prehook(lambda gradients, lines=lines: set_stack_trace(lines))
