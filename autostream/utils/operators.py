"""Operator schemas and tags: arguments by name, mutated arguments, random operators, data-dependent numbers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx
    from torch._ops import OpOverload


def bound_arguments(node: fx.Node, target: OpOverload) -> dict[str, Any]:
    """The node's arguments by their names in the schema, defaults filled in."""
    bound = {arg.name: arg.default_value for arg in target._schema.arguments}
    bound.update(zip(bound, node.args, strict=False))
    bound.update(node.kwargs)
    return bound


def base_name(target: OpOverload) -> str:
    """An operator's name without namespace and overload.

    Example:
        >>> import torch
        >>> base_name(torch.ops.aten.add_.Tensor)
        'add_'
    """
    return target._schema.name.rpartition("::")[2]


def written_names(target: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that are mutated, by the schema.

    Example:
        >>> import torch
        >>> written_names(torch.ops.aten.add.out)
        ('out',)
    """
    return tuple(a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def written_and_returned(node: fx.Node, target: OpOverload) -> fx.Node | None:
    """The argument that a call writes in place and returns, by its schema; ``None`` if it returns something else.

    Example:
        >>> from torch import fx, ops
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> add, plus = ops.aten.add_.Scalar, ops.aten.add.Scalar
        >>> written_and_returned(graph.call_function(add, (x, 1)), add)
        x
        >>> print(written_and_returned(graph.call_function(plus, (x, 1)), plus))
        None
    """
    returns = [result.alias_info for result in target._schema.returns]
    if len(returns) != 1 or returns[0] is None or not returns[0].is_write:
        return None
    (written,) = written_names(target)
    return bound_arguments(node, target)[written]  # type: ignore[no-any-return]


def written_arguments(node: fx.Node, target: OpOverload) -> list[fx.Node]:
    """The nodes that a call mutates, by its schema, including those in lists.

    Example:
        >>> from torch import fx, ops
        >>> graph = fx.Graph()
        >>> x, y = graph.placeholder("x"), graph.placeholder("y")
        >>> add = ops.aten._foreach_add_.List
        >>> written_arguments(graph.call_function(add, ([x], [y])), add)
        [x]
    """
    bound = bound_arguments(node, target)
    written = (bound[name] for name in written_names(target))
    several = (value if isinstance(value, (list, tuple)) else (value,) for value in written)
    return [source for source in chain.from_iterable(several) if source is not None]


def is_unknown(value: object) -> bool:
    """Whether a value in a trace is a data-dependent number, which is known only at run time.

    Sizes of inputs are constants of a trace.

    Example:
        >>> is_unknown(3.0)
        False
    """
    return type(value).__name__ in ("SymInt", "SymFloat", "SymBool")


def draws(target: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether a call generates random numbers.

    Args:
        target: the operator.
        arguments: of the call, by name.

    Example:
        >>> import torch
        >>> draws(torch.ops.aten.rand.default, {"size": [2]})
        True
        >>> draws(torch.ops.aten.native_dropout.default, {"p": 0.5, "train": False})
        False
    """
    if not any(tag.name == "nondeterministic_seeded" for tag in target.tags):
        return False
    if arguments.get("train") is False or arguments.get("training") is False:
        return False
    if arguments.get("dropout_p") == 0 or arguments.get("dropout") == 0:
        return False
    # With p=0 dropouts return their argument, but native_dropout and bernoulli advance the generator.
    return not ("train" in arguments and arguments.get("p") == 0 and base_name(target) != "native_dropout")
