"""Serializes graphs of kernels, and the arguments of fx nodes, to JSON and back.

    "kernels"   name and :attr:`~autostream.utils.kernels.Kernel.recipe` of each
    "calls"     in program order; the target is a kernel's index in that list, or the name of an operator
    "outputs"   names of the nodes returned

The user's line of a call is that of an ATen op of the program. The index of this op is saved, not the line, which may
have changed when the graph is loaded. Values are not saved: they are computed again from the arguments.

The JSON is only valid for a program with the same fingerprint (``fingerprint.py``).
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

from autostream.errors import a_type
from autostream.ir import Program
from autostream.utils.data import Json
from autostream.utils.kernels import Kernel


class NotSerializable(Exception):  # noqa: N818 - callers go on without the cache
    """Something has no JSON form; the message names it."""


def to_json(fused: fx.GraphModule, program: Program) -> dict[str, Json]:
    """Serialize a graph of kernels.

    Args:
        fused: the graph.
        program: the program of ATen ops that was fused into it.

    Raises:
        NotSerializable: the graph holds tensors, or a kernel or an operator that cannot be loaded by its name.
    """
    nodes = [node for node in fused.graph.nodes if node.op not in ("placeholder", "output")]
    for node in nodes:
        if node.op != "call_function":
            raise NotSerializable(f"{node.name}, a {node.op}")
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
    """Load the graph that :func:`to_json` serialized.

    Args:
        data: the result of :func:`to_json`.
        program: a program with the same fingerprint; it gives the graph its placeholders and lines.
        kernel: makes a kernel from its name and recipe.

    Returns:
        The graph. Its nodes have no values yet.
    """
    kernels = [kernel(entry["name"], entry["recipe"]) for entry in data["kernels"]]
    originals = list(program.module.graph.nodes)
    graph = fx.Graph()
    nodes = {placeholder.name: graph.placeholder(placeholder.name) for placeholder in program.placeholders}
    for call in data["calls"]:
        target = kernels[call["target"]] if isinstance(call["target"], int) else operator_from_json(call["target"])
        args, kwargs = argument_from_json(call["args"], nodes), argument_from_json(call["kwargs"], nodes)
        node = nodes[call["name"]] = graph.call_function(target, args, kwargs)
        node.name = call["name"]
        node.stack_trace = None if call["line"] is None else originals[call["line"]].stack_trace
    graph.output(tuple(nodes[name] for name in data["outputs"]))
    return fx.GraphModule(nn.Module(), graph)


def operator_to_json(node: fx.Node) -> str:
    """The name of the operator that a node calls.

    Raises:
        NotSerializable: it calls neither an operator nor ``getitem``.

    Example:
        >>> operator_to_json(fx.Graph().call_function(torch.ops.aten.relu.default))
        'aten.relu.default'
    """
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    raise NotSerializable(f"{node.name}, a call of {node.target}")


def operator_from_json(name: str) -> Any:
    """Look up an operator by its name.

    Raises:
        ValueError: the name is not that of an operator. Other attributes of ``torch.ops`` might load a library.

    Example:
        >>> operator_from_json("aten.relu.default")
        <OpOverload(op='aten.relu', overload='default')>
    """
    if name == "getitem":
        return operator.getitem
    target = reduce(getattr, name.split("."), torch.ops)
    if not isinstance(target, torch._ops.OpOverload):
        raise ValueError(f"{name} is no operator")
    return target


_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def argument_to_json(argument: object) -> Json:
    """Serialize an argument of a call; a value of a type that JSON lacks becomes a dict of one entry.

    Raises:
        NotSerializable: some of it has no form.

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
    raise NotSerializable(f"{argument!r}, {a_type(argument)}")


def argument_from_json(data: Json, nodes: Mapping[str, fx.Node]) -> Any:
    """Load the argument that :func:`argument_to_json` serialized.

    Args:
        data: the result of :func:`argument_to_json`.
        nodes: the nodes of the new graph by name.

    Raises:
        ValueError: it names an attribute of ``torch`` that is no dtype, layout or memory format.

    Example:
        >>> argument_from_json([[2, 3], {"torch": "float16"}], {})
        [[2, 3], torch.float16]
    """
    match data:
        case list():
            return [argument_from_json(item, nodes) for item in data]
        case {"tuple": list(items)}:
            return tuple(argument_from_json(item, nodes) for item in items)
        case {"dict": dict(items)}:
            return {name: argument_from_json(item, nodes) for name, item in items.items()}
        case {"node": name}:
            return nodes[name]
        case {"torch": str(name)}:
            constant = getattr(torch, name, None)
            if not isinstance(constant, _CONSTANTS):
                raise ValueError(f"torch.{name} is no constant")
            return constant
        case {"device": name}:
            return torch.device(name)
    return data


def _recipe(kernel: Kernel) -> Json:
    try:
        same = kernel.recipe is not None and json.loads(json.dumps(kernel.recipe)) == kernel.recipe
    except TypeError:
        same = False
    if not same:
        raise NotSerializable(f"{kernel}, a kernel that nothing makes again")
    return kernel.recipe
