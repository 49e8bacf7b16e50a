"""Reads and writes recorded programs of kernels, for tests of hazards and schedules on machines without a GPU.

A recording has the calls, their arguments and the layout of all tensors, but not the code of kernels: it cannot be run.
``record.py`` makes recordings; to make them again, on a machine with a GPU and Triton::

    python -m tests.kernel_graphs.record

In the file, as in fx's own printing, ``"%buf0"`` is the value of the node ``buf0``::

    "placeholders"    names, roles and values of the program's arguments
    "kernels"         by name: positions of the arguments that it writes, and of those that it does not read
    "nodes"           calls of kernels and operators in program order, with their values
    "outputs"         names of the nodes returned
    "storages"        bytes, by the name of the first node with a value in it (``"buf1.1"``: its second result)
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from autostream.ir import Placeholder, Program, Role
from autostream.utils.kernels import Kernel
from autostream.utils.storages import storage_of

FOLDER = Path(__file__).parent

NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))

DEVICE = "cuda:0"
"""The device of all recordings."""

Recording = Mapping[str, Any]
"""The content of a file."""


def read(name: str) -> Recording:
    """Read a recording from its file."""
    recording: Recording = json.loads((FOLDER / f"{name}.json").read_text())
    return recording


def write(name: str, recording: Recording) -> None:
    """Write a recording to its file."""
    (FOLDER / f"{name}.json").write_text(text_of(recording))


def text_of(recording: Recording) -> str:
    """A recording as JSON, each call on a line of its own."""
    parts = [f'"{key}": {_on_lines(value)}' for key, value in recording.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def recorded(program: Program) -> Recording:
    """The recording of a program of kernels."""
    nodes = list(program.module.graph.nodes)
    names: dict[int, str] = {}
    sizes: dict[str, int] = {}
    for node in nodes:
        for at, tensor in _tensors(node.meta.get("val")):
            name = names.setdefault(storage_of(tensor), f"{node.name}.{at}" if at else node.name)
            sizes[name] = tensor.untyped_storage().nbytes()
    calls = [node for node in nodes if node.op == "call_function"]
    kernels = {node.target for node in calls if isinstance(node.target, Kernel)}
    assert len(calls) + len(program.placeholders) + 1 == len(nodes), "a recording cannot hold constants"
    return {
        "placeholders": [
            {
                "name": placeholder.name,
                "role": placeholder.role.value,
                "target": placeholder.target,
                "storage": placeholder.storage,
                "value": _described(node.meta["val"], names),
            }
            for placeholder, node in zip(program.placeholders, nodes[: len(program.placeholders)], strict=True)
        ],
        "kernels": {
            kernel.__name__: {"written": sorted(kernel.written), "overwritten": sorted(kernel.overwritten)}
            for kernel in sorted(kernels, key=str)
        },
        "nodes": [
            {
                "name": node.name,
                "target": "getitem" if node.target is operator.getitem else str(node.target),
                "args": _argument_to_json(node.args),
                "kwargs": _argument_to_json(node.kwargs),
                "value": _described(node.meta["val"], names),
            }
            for node in calls
        ],
        "outputs": list(program.outputs),
        "storages": sizes,
    }


def program_of(recording: Recording) -> Program:
    """The recorded program, with fake values on a GPU that need not exist, and kernels without code."""
    graph, nodes_by_name = fx.Graph(), dict[str, fx.Node]()
    targets: dict[str, Any] = {"getitem": operator.getitem}
    for name, kernel in recording["kernels"].items():
        targets[name] = Kernel(name, _refuse, frozenset(kernel["written"]), frozenset(kernel["overwritten"]))
    for placeholder in recording["placeholders"]:
        nodes_by_name[placeholder["name"]] = graph.placeholder(placeholder["name"])
    for call in recording["nodes"]:
        target = targets.get(call["target"]) or reduce(getattr, call["target"].split("."), torch.ops)
        args, kwargs = (
            _argument_from_json(call["args"], nodes_by_name),
            _argument_from_json(call["kwargs"], nodes_by_name),
        )
        nodes_by_name[call["name"]] = graph.create_node("call_function", target, tuple(args), kwargs, call["name"])
    graph.output(tuple(nodes_by_name[name] for name in recording["outputs"]))
    with FakeTensorMode():
        memory = {
            name: torch.empty(size, dtype=torch.uint8, device=DEVICE) for name, size in recording["storages"].items()
        }
    for entry in (*recording["placeholders"], *recording["nodes"]):
        nodes_by_name[entry["name"]].meta["val"] = _value(entry["value"], memory)
    placeholders = tuple(
        Placeholder(entry["name"], Role(entry["role"]), entry["target"], entry["storage"])
        for entry in recording["placeholders"]
    )
    module = fx.GraphModule(nn.Module(), graph)
    return Program(module, placeholders, tuple(recording["outputs"]), "inductor", DEVICE)


def _refuse(*args: object) -> None:
    raise RuntimeError("this kernel was recorded without its code; nothing can run it")


# Values


def _tensors(value: Any) -> list[tuple[int, Tensor]]:
    """The tensors among the results of an op, with their positions; attention also returns ``None`` and numbers."""
    results = value if isinstance(value, list | tuple) else [value]
    return [(at, result) for at, result in enumerate(results) if isinstance(result, Tensor)]


def _described(value: Any, names: Mapping[int, str]) -> Any:
    """A tensor as storage, dtype and layout in elements; several results as a list; numbers as they are."""
    match value:
        case Tensor():
            return {
                "storage": names[storage_of(value)],
                "dtype": str(value.dtype),
                "shape": list(value.shape),
                "stride": list(value.stride()),
                "offset": value.storage_offset(),
            }
        case list() | tuple():
            return [_described(result, names) for result in value]
    return _argument_to_json(value)


def _value(described: Any, memory: Mapping[str, Tensor]) -> Any:
    match described:
        case dict():
            whole = memory[described["storage"]].view(_dtype(described["dtype"]))
            return whole.as_strided(described["shape"], described["stride"], described["offset"])
        case list():
            return tuple(_value(result, memory) for result in described)
    return described


# Arguments


def _argument_to_json(argument: Any) -> Any:
    match argument:
        case None | bool() | int() | float():
            return argument
        case list() | tuple():
            return [_argument_to_json(item) for item in argument]
        case dict():
            return {key: _argument_to_json(item) for key, item in argument.items()}
        case fx.Node():
            return f"%{argument.name}"
        case torch.dtype() | torch.device():
            return str(argument)
    raise TypeError(f"there is no JSON form for {argument!r}")


def _argument_from_json(argument: Any, nodes_by_name: Mapping[str, fx.Node]) -> Any:
    match argument:
        case list():
            return [_argument_from_json(item, nodes_by_name) for item in argument]
        case dict():
            return {key: _argument_from_json(item, nodes_by_name) for key, item in argument.items()}
        case str() if argument.startswith("%"):
            return nodes_by_name[argument.removeprefix("%")]
        case str() if argument.startswith("torch."):
            return _dtype(argument)
        case str():
            return torch.device(argument)
    return argument


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


# Lines


def _on_lines(value: Any) -> str:
    if value and isinstance(value, list) and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n]"
    if value and isinstance(value, dict):
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"
    return json.dumps(value)
