"""Outputs of one call of which some are computed from others: gradients come from one to the other, for who asks.

    the call's one node ──▶ h̃ ──▶ link ──▶ h ──┐      h̃, ỹ: where the gradients of h and y go in, and no memory
                       └──▶ ỹ ──▶ link ◀───────┘
                                   └──▶ y

The call's backward takes the gradients of all outputs at once, and so nothing comes from y to h: what hooks on h see,
``retain_grad`` keeps, or ``torch.autograd.grad(y, h)`` returns, would be a part of it or nothing. Where somebody may
look, the link of y sends to h what comes by that way, and takes it off again behind h, where it would count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autostream.tracing.saved_tensors import keeps_graph

Derive = Callable[[int, Sequence[int], Tensor], Sequence[Tensor | None]]
"""From the gradient of an output, by position, to those of outputs that it is computed from, in the order of these:
what of each comes from it by way of no other of them."""


def stand_in(output: Tensor) -> Tensor:
    """A tensor like an output that takes no memory.

    Example:
        >>> stand_in(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    return output.new_empty(()).expand(output.shape)


def linked(
    outputs: Sequence[Tensor], nodes: Sequence[Tensor], parents: Sequence[Sequence[int]], derive: Derive
) -> list[Tensor]:
    """The outputs of a call; those that others are computed from, and these, with nodes of their own.

    Args:
        outputs: of a call, known to no autograd yet.
        nodes: what the call's node has for outputs: these, or what stands in for those that get another node.
        parents: for each output those that it is computed from, by position, in the order in which they are computed.
        derive: what comes from one to the other; ``RuntimeError`` where it cannot be known any more.

    Example:
        >>> x = torch.tensor([2.0], requires_grad=True)
        >>> h, y = (x * 3).detach(), (x * 3).square().detach()
        >>> nodes = x * 3, (x * 3).square()
        >>> h, y = linked([h, y], nodes, [(), (0,)], lambda at, parents, gradient: [gradient * 2 * h.detach()])
        >>> h.retain_grad()
        >>> y.sum().backward()
        >>> h.grad, x.grad
        (tensor([12.]), tensor([36.]))
    """
    found, sentinel = list(nodes), torch.empty(0, requires_grad=True)
    # What is computed first has the fewest parents: they are all that it is computed from, by whatever way.
    for at in sorted(linked_in(parents), key=lambda at: len(parents[at])):
        ups = [(nodes[up], found[up]) for up in parents[at]]
        found[at] = _Link.apply(  # type: ignore[no-untyped-call]
            [outputs[at]], (derive, at, parents[at]), sentinel, nodes[at], *chain.from_iterable(ups)
        )
    return found


def linked_in(parents: Sequence[Sequence[int]]) -> frozenset[int]:
    """The outputs that are computed from others, and these.

    Example:
        >>> sorted(linked_in([(), (), (1,)]))
        [1, 2]
    """
    return frozenset(chain(chain.from_iterable(parents), (at for at, own in enumerate(parents) if own)))


def shares(output: Tensor, parents: Sequence[Tensor], gradient: Tensor) -> Sequence[Tensor | None]:
    """What tensors are due of the gradient of one that is computed from them, recorded by autograd.

    Args:
        output: the one.
        parents: the others, in the order in which they are computed.
        gradient: of ``output``.

    Returns:
        For each of them, what comes to it by way of no later one.

    Example:
        >>> first = torch.tensor(2.0, requires_grad=True)
        >>> second = first * 3
        >>> output = second * first
        >>> with torch.no_grad():  # by way of the second come 6 more to the first
        ...     shares(output, [first, second], torch.tensor(1.0))
        [tensor(6.), tensor(2.)]
    """
    derive = partial(torch.autograd.grad, create_graph=torch.is_grad_enabled(), retain_graph=True, allow_unused=True)
    found = list(derive(output, parents, gradient))
    for at in reversed(range(len(parents))):
        for later in range(at + 1, len(parents)):
            own, share = found[at], found[later]
            if own is not None and share is not None:
                (less,) = derive(parents[later], parents[at], share)
                found[at] = own if less is None else own - less
    return found


class _Link(torch.autograd.Function):
    """An output's own node: its gradient goes to the call's node, and what others are due of it to them."""

    @staticmethod
    def forward(ctx: Any, given: list[Tensor], derivation: Any, sentinel: Tensor, node: Tensor, *ups: Tensor) -> Tensor:
        ctx.derivation, ctx.ups = derivation, ups[1::2]
        ctx.sentinel = get_gradient_edge(sentinel).node
        ctx.set_materialize_grads(False)
        return given.pop()  # as an argument it would become a view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        derive, at, parents = ctx.derivation
        due: Sequence[Tensor | None] = [None] * len(parents)
        if gradient is not None and parents and _somebody_looks(ctx):
            due = derive(at, parents, gradient)
        if not keeps_graph():
            ctx.ups = ()  # losses may be kept
        return None, None, None, gradient, *chain.from_iterable((None if own is None else -own, own) for own in due)


def _somebody_looks(ctx: Any) -> bool:
    """Whether a gradient on its way matters, or may: of what is asked for by name, nobody tells which it is.

    Private to PyTorch (seen in 2.11 and 2.13): whether a node is run in a backward, as the sentinel's is in one that
    goes everywhere. Where a version lacks it, somebody may look.
    """
    executes = getattr(torch._C, "_will_engine_execute_node", None)
    return not (executes and executes(ctx.sentinel)) or any(own._backward_hooks or own.retains_grad for own in ctx.ups)
