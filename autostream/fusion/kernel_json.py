"""A graph of kernels ⇄ JSON, and the contents of fx graphs as JSON has them.

    "kernels"   name and :attr:`~autostream.utils.kernels.Kernel.recipe` of each
    "calls"     in program order, of a kernel by its place in that list or of an operator by its name
    "outputs"   names of the nodes returned

A call has the user's line of an ATen op: which op that is is kept, and not the line, which may be another one by then.
Values are not kept: they follow from those of the arguments.

What is written down holds for the program that was fused, and for none that differs from it (``fingerprint.py``).
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

from autostream.ir import Program
from autostream.utils.kernels import Kernel

Json = Any
"""What ``json`` reads back as it was written."""


class Unwritable(Exception):  # noqa: N818 - a notice between modules, not an error
    """There is no form for something; the message names it."""


def to_json(fused: fx.GraphModule, program: Program) -> dict[str, Json]:
    """A graph of kernels, for :func:`from_json`.

    Args:
        fused: the graph.
        program: of the ATen ops that were fused into it.

    Raises:
        Unwritable: it holds tensors, or a kernel or an operator that cannot be found again by its name.
    """
    nodes = [node for node in fused.graph.nodes if node.op not in ("placeholder", "output")]
    for node in nodes:
        if node.op != "call_function":
            raise Unwritable(f"{node.name}, a {node.op}")
    kernels = list(dict.fromkeys(node.target for node in nodes if isinstance(node.target, Kernel)))
    lines = {node.stack_trace: at for at, node in reversed(list(enumerate(program.module.graph.nodes)))}
    return {
        "kernels": [{"name": kernel.__name__, "recipe": _recipe(kernel)} for kernel in kernels],
        "calls": [
            {
                "name": node.name,
                "target": kernels.index(node.target) if isinstance(node.target, Kernel) else operator_to_json(node),
                "args": argument_to_json(node.args),
                "kwargs": argument_to_json(node.kwargs),
                "line": lines.get(node.stack_trace) if node.stack_trace else None,
            }
            for node in nodes
        ],
        "outputs": [node.name for node in fused.graph.output_node().args[0]],  # type: ignore[union-attr]
    }


def from_json(
    data: Mapping[str, Json], program: Program, kernel: Callable[[str, Mapping[str, Json]], Kernel]
) -> fx.GraphModule:
    """The graph that :func:`to_json` has written down.

    Args:
        data: what it returned.
        program: one like that of then, whose arguments and lines these are.
        kernel: makes a kernel by its name and recipe.

    Returns:
        The graph. Its nodes have no values yet.
    """
    kernels = [kernel(entry["name"], entry["recipe"]) for entry in data["kernels"]]
    originals = list(program.module.graph.nodes)
    graph = fx.Graph()
    made = {placeholder.name: graph.placeholder(placeholder.name) for placeholder in program.placeholders}
    for call in data["calls"]:
        target = kernels[call["target"]] if isinstance(call["target"], int) else operator_from_json(call["target"])
        args, kwargs = argument_from_json(call["args"], made), argument_from_json(call["kwargs"], made)
        node = made[call["name"]] = graph.call_function(target, args, kwargs)
        node.name = call["name"]
        node.stack_trace = None if call["line"] is None else originals[call["line"]].stack_trace
    graph.output(tuple(made[name] for name in data["outputs"]))
    return fx.GraphModule(nn.Module(), graph)


def operator_to_json(node: fx.Node) -> str:
    """What a node calls, by name.

    Raises:
        Unwritable: it is neither an operator nor ``getitem``.

    Example:
        >>> operator_to_json(fx.Graph().call_function(torch.ops.aten.relu.default))
        'aten.relu.default'
    """
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    raise Unwritable(f"{node.name}, a call of {node.target}")


def operator_from_json(name: str) -> Any:
    """An operator by its name.

    Raises:
        ValueError: it is none: what else is found there might load a library.

    Example:
        >>> operator_from_json("aten.relu.default")
        <OpOverload(op='aten.relu', overload='default')>
    """
    if name == "getitem":
        return operator.getitem
    found = reduce(getattr, name.split("."), torch.ops)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{name} is no operator")
    return found


_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def argument_to_json(argument: object) -> Json:
    """An argument of a call: what JSON has no form for is a dict of one entry.

    Raises:
        Unwritable: no form is known for some of it.

    Example:
        >>> argument_to_json([(2, 3), torch.float16, torch.channels_last, torch.device("cuda", 0), "tanh"])
        [{'tuple': [2, 3]}, {'torch': 'float16'}, {'torch': 'channels_last'}, {'device': 'cuda:0'}, 'tanh']
    """
    match argument:
        case None | bool() | int() | float() | str():
            return argument
        case list():
            return [argument_to_json(item) for item in argument]
        case tuple():
            return {"tuple": [argument_to_json(item) for item in argument]}
        case dict():
            return {"dict": {name: argument_to_json(item) for name, item in argument.items()}}
        case fx.Node():
            return {"node": argument.name}
        case _ if isinstance(argument, _CONSTANTS):
            return {"torch": str(argument).removeprefix("torch.")}
        case torch.device():
            return {"device": str(argument)}
    raise Unwritable(f"{argument!r}, a {type(argument).__name__}")


def argument_from_json(written: Json, nodes: Mapping[str, fx.Node]) -> Any:
    """What :func:`argument_to_json` wrote.

    Args:
        written: what it returned.
        nodes: by name.

    Raises:
        ValueError: it names something of PyTorch's that is no dtype, layout or memory format.

    Example:
        >>> argument_from_json([[2, 3], {"torch": "float16"}], {})
        [[2, 3], torch.float16]
    """
    match written:
        case list():
            return [argument_from_json(item, nodes) for item in written]
        case {"tuple": list(items)}:
            return tuple(argument_from_json(item, nodes) for item in items)
        case {"dict": dict(items)}:
            return {name: argument_from_json(item, nodes) for name, item in items.items()}
        case {"node": name}:
            return nodes[name]
        case {"torch": str(name)}:
            found = getattr(torch, name, None)
            if not isinstance(found, _CONSTANTS):
                raise ValueError(f"torch.{name} is no constant")
            return found
        case {"device": name}:
            return torch.device(name)
    return written


def _recipe(kernel: Kernel) -> Json:
    try:
        same = kernel.recipe is not None and json.loads(json.dumps(kernel.recipe)) == kernel.recipe
    except TypeError:
        same = False
    if not same:
        raise Unwritable(f"{kernel}, a kernel that nothing makes again")
    return kernel.recipe
