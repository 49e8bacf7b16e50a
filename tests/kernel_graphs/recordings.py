"""Programs of kernels as files, for tests of hazards and schedules on machines without a GPU.

A recording says all that those need of a program, and nothing can be run: what each call takes and what lies where, but
not what kernels compute. ``record.py`` makes them; to record anew, on a machine with a GPU and Triton::

    python -m tests.kernel_graphs.record

In the file, as in fx's own printing, ``"%buf0"`` is what the node ``buf0`` yields::

    "placeholders"    names, owners, and values, of the program's arguments
    "kernels"         by name, positions of the arguments that each writes, and of those that it does not read
    "nodes"           calls in program order, of kernels and of operators, and their values
    "outputs"         names of the nodes returned
    "storages"        bytes, by the name of the first node whose value lies there (``"buf1.1"``: its second result)
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
"""What is recorded runs here."""

Recording = Mapping[str, Any]
"""What is in the file."""


def read(name: str) -> Recording:
    """A recording as it is in the file."""
    recording: Recording = json.loads((FOLDER / f"{name}.json").read_text())
    return recording


def write(name: str, recording: Recording) -> None:
    """Make a file of a recording."""
    (FOLDER / f"{name}.json").write_text(text_of(recording))


def text_of(recording: Recording) -> str:
    """A recording as JSON, each call on a line of its own."""
    parts = [f'"{key}": {_on_lines(value)}' for key, value in recording.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def recorded(program: Program) -> Recording:
    """What to keep of a program of kernels."""
    nodes = list(program.module.graph.nodes)
    names: dict[int, str] = {}
    sizes: dict[str, int] = {}
    for node in nodes:
        for at, tensor in _tensors(node.meta.get("val")):
            name = names.setdefault(storage_of(tensor), f"{node.name}.{at}" if at else node.name)
            sizes[name] = tensor.untyped_storage().nbytes()
    calls = [node for node in nodes if node.op == "call_function"]
    kernels = {node.target for node in calls if isinstance(node.target, Kernel)}
    assert len(calls) + len(program.placeholders) + 1 == len(nodes), "a recording holds calls, and no tensors"
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
                "args": _written_down(node.args),
                "kwargs": _written_down(node.kwargs),
                "value": _described(node.meta["val"], names),
            }
            for node in calls
        ],
        "outputs": list(program.outputs),
        "storages": sizes,
    }


def program_of(recording: Recording) -> Program:
    """The program that was recorded: with fake values on its GPU, which need not be there, and kernels without code."""
    graph, made = fx.Graph(), dict[str, fx.Node]()
    targets: dict[str, Any] = {"getitem": operator.getitem}
    for name, kernel in recording["kernels"].items():
        targets[name] = Kernel(name, _refuse, frozenset(kernel["written"]), frozenset(kernel["overwritten"]))
    for placeholder in recording["placeholders"]:
        made[placeholder["name"]] = graph.placeholder(placeholder["name"])
    for call in recording["nodes"]:
        target = targets.get(call["target"]) or reduce(getattr, call["target"].split("."), torch.ops)
        args, kwargs = _read_back(call["args"], made), _read_back(call["kwargs"], made)
        made[call["name"]] = graph.create_node("call_function", target, tuple(args), kwargs, call["name"])
    graph.output(tuple(made[name] for name in recording["outputs"]))
    with FakeTensorMode():
        memory = {
            name: torch.empty(size, dtype=torch.uint8, device=DEVICE) for name, size in recording["storages"].items()
        }
    for entry in (*recording["placeholders"], *recording["nodes"]):
        made[entry["name"]].meta["val"] = _value(entry["value"], memory)
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
    """Of what an op returns, with their places there; of some, as of attention, parts are ``None`` or numbers."""
    results = value if isinstance(value, list | tuple) else [value]
    return [(at, result) for at, result in enumerate(results) if isinstance(result, Tensor)]


def _described(value: Any, names: Mapping[int, str]) -> Any:
    """Where a tensor lies, sizes counted in elements; a list for several results, and numbers as they are."""
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
    return _written_down(value)


def _value(described: Any, memory: Mapping[str, Tensor]) -> Any:
    match described:
        case dict():
            whole = memory[described["storage"]].view(_dtype(described["dtype"]))
            return whole.as_strided(described["shape"], described["stride"], described["offset"])
        case list():
            return tuple(_value(result, memory) for result in described)
    return described


# Arguments


def _written_down(argument: Any) -> Any:
    match argument:
        case None | bool() | int() | float():
            return argument
        case list() | tuple():
            return [_written_down(item) for item in argument]
        case dict():
            return {key: _written_down(item) for key, item in argument.items()}
        case fx.Node():
            return f"%{argument.name}"
        case torch.dtype() | torch.device():
            return str(argument)
    raise TypeError(f"no way is known to write down {argument!r}")


def _read_back(argument: Any, made: Mapping[str, fx.Node]) -> Any:
    match argument:
        case list():
            return [_read_back(item, made) for item in argument]
        case dict():
            return {key: _read_back(item, made) for key, item in argument.items()}
        case str() if argument.startswith("%"):
            return made[argument.removeprefix("%")]
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
