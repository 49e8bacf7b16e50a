"""Programs to analyse: exported from small modules, or recorded by hand on fake tensors; and ways to run them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from autostream.ir import OpGraph, Placeholder, Program, Role

aten = torch.ops.aten

_ROLES = {
    "USER_INPUT": Role.INPUT,
    "PARAMETER": Role.PARAMETER,
    "BUFFER": Role.BUFFER,
    "CONSTANT_TENSOR": Role.CONSTANT,
}


@dataclass(frozen=True)
class Case:
    """A program and the tensors that it takes, in order."""

    program: Program
    tensors: tuple[Tensor, ...]

    @property
    def nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.program.module.graph.nodes}


def exported(model: nn.Module | Callable[..., object], *inputs: Tensor) -> Case:
    """Export a module, or a function of tensors, without the assertions that export adds."""
    module = model if isinstance(model, nn.Module) else _Function(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, inputs, strict=False)
    graph = program.graph_module.graph
    for node in reversed(list(graph.nodes)):
        if str(node.target).startswith("aten._assert_") or (not node.users and node.op == "get_attr"):
            graph.erase_node(node)
    state = {**program.state_dict, **program.constants}
    given = iter(inputs)
    specs = program.graph_signature.input_specs
    tensors = tuple(next(given) if spec.kind.name == "USER_INPUT" else state[spec.target] for spec in specs)
    owners: dict[int, str] = {}
    placeholders = tuple(
        Placeholder(
            spec.arg.name,
            _ROLES[spec.kind.name],
            str(spec.target),
            owners.setdefault(tensor.untyped_storage()._cdata, spec.arg.name),
        )
        for spec, tensor in zip(specs, tensors, strict=True)
    )
    program.graph_module.recompile()
    outputs = tuple(node.name for node in graph.output_node().args[0])
    return Case(Program(program.graph_module, placeholders, outputs, "aten", "cpu"), tensors)


class _Function(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Tensor) -> object:
        return self._function(*args)


class Tape:
    """Records calls on fake tensors into a program, exactly as given."""

    def __init__(self, device: str = "cpu") -> None:
        self.graph, self.root = fx.Graph(), nn.Module()
        self.device = device
        self.placeholders: list[Placeholder] = []
        self._live: dict[fx.Node, Any] = {}
        self._mode = FakeTensorMode()

    def input(
        self, *shape: int, role: Role = Role.INPUT, dtype: torch.dtype = torch.float32, device: str = ""
    ) -> fx.Node:
        """A new placeholder."""
        with self._mode:
            fake = torch.empty(shape, dtype=dtype, device=device or self.device)
        return self._placeholder(fake, role, "")

    def input_like(self, other: fx.Node) -> fx.Node:
        """A placeholder that aliases another one, although its fake value does not."""
        with self._mode:
            fake = torch.empty_like(self._live[other])
        owner = next(p.storage for p in self.placeholders if p.name == other.name)
        return self._placeholder(fake, Role.INPUT, owner)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Record a call of an operator, or of ``operator.getitem``."""
        node = self.graph.call_function(target, args, kwargs)
        live_args, live_kwargs = fx.node.map_arg((args, kwargs), self._live.__getitem__)
        with self._mode, torch.no_grad():
            self._live[node] = target(*live_args, **live_kwargs)
        self._describe(node)
        return node

    def number(self, target: Callable[..., Any], *args: Any, value: float = 1.5) -> fx.Node:
        """Record a call that returns a number, which fake tensors do not compute."""
        node = self.graph.call_function(target, args)
        self._live[node] = value
        self._describe(node)
        return node

    def same_tensor(self, left: fx.Node, right: fx.Node) -> bool:
        """Whether the values of two nodes are the same tensor object, as after an in-place call."""
        return self._live[left] is self._live[right]

    def case(self, outputs: Iterable[fx.Node]) -> Case:
        """The program, with random tensors to run it on."""
        results = tuple(outputs)
        self.graph.output(results)
        module = fx.GraphModule(self.root, self.graph)
        names = tuple(node.name for node in results)
        program = Program(module, tuple(self.placeholders), names, "aten", self.device)
        return Case(program, self._tensors() if self.device == "cpu" else ())

    def _placeholder(self, fake: Tensor, role: Role, owner: str) -> fx.Node:
        node = self.graph.placeholder(f"in{len(self.placeholders)}")
        self._live[node] = fake
        self._describe(node)
        self.placeholders.append(Placeholder(node.name, role, node.name, owner or node.name))
        return node

    def _describe(self, node: fx.Node) -> None:
        # In-place views such as t_ change a live fake tensor, so its present state is recorded.
        with self._mode:
            node.meta["val"] = tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, self._live[node])

    def _tensors(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        made: dict[str, Tensor] = {}
        for placeholder, node in zip(self.placeholders, self.graph.find_nodes(op="placeholder"), strict=True):
            fresh = torch.rand(node.meta["val"].shape, generator=generator)
            made[placeholder.name] = made[placeholder.storage].view_as(fresh) if placeholder.storage in made else fresh
        return tuple(made.values())


@dataclass(frozen=True)
class Run:
    """The results of a run: every node's value, the outputs, and the arguments after it."""

    values: dict[str, Any]
    outputs: tuple[Any, ...]
    arguments: tuple[Tensor, ...]


def run(case: Case, order: Sequence[str] | None = None) -> Run:
    """Run a program's nodes on copies of its tensors, in program order or in another."""
    nodes, arguments = case.nodes, _copies(case.tensors)
    inputs = case.program.module.graph.find_nodes(op="placeholder")
    values: dict[str, Any] = {node.name: tensor for node, tensor in zip(inputs, arguments, strict=True)}
    torch.manual_seed(0)
    with torch.no_grad():
        for name in order or [name for name, node in nodes.items() if node.op in ("call_function", "get_attr")]:
            values[name] = _execute(case.program.module, nodes[name], values)
    return Run(values, tuple(values[name] for name in case.program.outputs), arguments)


def topological_order(graph: OpGraph, seed: int | None) -> list[str]:
    """Nodes in an order that a graph allows: a random one, or without a seed the one most unlike program order."""
    choose = random.Random(seed)
    waiting = {op: set(graph.digraph.predecessors(op)) for op in graph.ops}
    order = list(graph.prelude)
    while waiting:
        ready = [op for op, before in waiting.items() if not before]
        op = ready[-1] if seed is None else choose.choice(ready)
        order += graph.ops[op].nodes
        del waiting[op]
        for before in waiting.values():
            before.discard(op)
    return order


def same(left: Iterable[Any], right: Iterable[Any]) -> bool:
    """Whether two lists of results are bitwise the same, NaNs included."""
    pairs = zip(tree_leaves(tuple(left)), tree_leaves(tuple(right)), strict=True)
    return all(torch.equal(_bits(a), _bits(b)) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _execute(module: fx.GraphModule, node: fx.Node, values: dict[str, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(module, str(node.target))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: values[source.name])
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _copies(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Copies that alias each other as the originals do."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    for tensor in tensors:
        original = tensor.untyped_storage()
        storage = storages.setdefault(original._cdata, original.clone())
        empty = torch.empty(0, dtype=tensor.dtype)
        copies.append(empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride()))
    return tuple(copies)
