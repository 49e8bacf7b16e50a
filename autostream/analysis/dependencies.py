"""Program → OpGraph: which op must come after which, because of which memory.

Everything is told by storages, never by names: values that look at one block of memory occupy the same storage, and
one that only may look at an argument's memory occupies that storage besides its own.

    x ──▶ conv ──▶ view ──▶ add_ ──▶ view_1 ──▶ matmul        op conv:   nodes conv, view
                                                              op add_:   nodes add_, view_1
                                                              op matmul: nodes matmul

A node that launches nothing is *folded*: issued together with the op that last wrote what it looks at. Nothing is lost
by it, since whoever uses the node depends on that op anyway, as long as whatever else the node looks at was written by
ops on which that op depends anyway. Where that is not certain the node is an op of its own.

A node that only takes memory is issued with the first op that uses it, right before it and on the same stream:

    empty ──▶ view ──▶ kernel                                 op kernel: nodes empty, view, kernel
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch._ops import OperatorBase

from autostream.analysis.capturability import NUMBER, ON_CPU
from autostream.analysis.effects import Effects, effects_of
from autostream.analysis.hazards import AccessHistory
from autostream.analysis.memory import Memory, Names
from autostream.analysis.source import user_line
from autostream.analysis.values import tensors_given, tensors_in, value_of
from autostream.analysis.work import Work, count_work
from autostream.ir import Dependency, Op, OpGraph, Placeholder, Program


def analyze(program: Program) -> OpGraph:
    """Find the ops of a program, the memory that they share and the hazards between them.

    Takes time linear in the number of nodes, arguments and accesses.

    Args:
        program: its nodes carry fake values that share a storage exactly where the real ones do.

    Returns:
        The ops in program order; the storages in the order in which they come into being; at most one dependency for
        each pair of ops and kind of hazard.

    Example:
        >>> from autostream.ir import Role
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> y = graph.call_function(torch.ops.aten.relu.default, (x,))
        >>> z = graph.call_function(torch.ops.aten.t.default, (y,))
        >>> _ = graph.output((z,))
        >>> x.meta["val"], y.meta["val"] = torch.ones(2, 3), torch.ones(2, 3)
        >>> z.meta["val"] = y.meta["val"].t()
        >>> module = fx.GraphModule(torch.nn.Module(), graph)
        >>> placeholder = Placeholder("x", Role.INPUT, "0", "x")
        >>> analyze(Program(module, (placeholder,), ("t_default",), "aten", "cpu")).ops["relu_default"].nodes
        ('relu_default', 't_default')
    """
    parts = _Parts(program.placeholders, program.device)
    for node in program.module.graph.nodes:
        parts.add(node)
    parts.finish()
    return OpGraph(
        ops=_ops(parts.groups, program.device),
        dependencies=tuple(parts.dependencies),
        storages=parts.memory.storages(program.outputs),
        prelude=tuple(parts.prelude),
        device=program.device,
    )


@dataclass
class _Group:
    """An op in the making: a node that launches, or that could not be folded, and what was folded into it."""

    node: fx.Node
    effects: Effects
    reads: Names
    writes: Names
    allocates: Names
    members: list[str] = field(default_factory=list)


class _Parts:
    """What an op graph is made of, filled in program order."""

    def __init__(self, placeholders: Iterable[Placeholder], device: str) -> None:
        self.memory = Memory()
        self.groups: dict[str, _Group] = {}
        self.dependencies: list[Dependency] = []
        self.prelude: list[str] = []
        self._placeholders = {placeholder.name: placeholder for placeholder in placeholders}
        self._history = AccessHistory()
        self._literals: set[str] = set()
        self._device = device
        self._unused: dict[str, list[fx.Node]] = {}  # by storage, what takes it and looks at it before any op does

    def add(self, node: fx.Node) -> None:
        """Take in the next node."""
        if node.op == "placeholder":
            self.memory.add_placeholder(node, self._placeholders[node.name])
        elif node.op == "get_attr":
            self.memory.add_attribute(node)
            self.prelude.append(node.name)
        elif node.op != "output":
            effects = effects_of(node)
            if effects.allocates and _device_of(node, self._device) == self._device:
                (storage,) = self.memory.add_results(node, effects)
                self._unused[storage] = [node]
            elif effects.launches or not self._fold(node, effects):
                self._launch(node, effects)

    def finish(self) -> None:
        """Take in memory that no op uses."""
        for storage in list(self._unused):
            self._take(storage)

    def _take(self, storage: str) -> None:
        """Make taking memory an op of its own."""
        node, *views = self._unused.pop(storage)
        names = [node.name, *(view.name for view in views)]
        self.groups[node.name] = _Group(node, effects_of(node), (), (storage,), (storage,), names)
        self.dependencies += self._history.record(node.name, (), (storage,))

    def _fold(self, node: fx.Node, effects: Effects) -> bool:
        """Issue a node that launches nothing with an earlier op or before all of them, if nothing is lost by it."""
        looked_at = self.memory.viewed(node)
        unused = [storage for storage in looked_at if storage in self._unused]
        if unused == list(looked_at) and len(unused) == 1 and tensors_in(value_of(node)):
            self._unused[unused[0]].append(node)
            self.memory.add_view(node)
            return True
        # A number that is asked for, or a look at several: an op may need it before it uses the memory.
        for storage in unused:
            self._take(storage)
        writers = {op for op in map(self._history.last_writer, looked_at) if op is not None}
        if writers:
            host = self._history.last(writers)
            if not writers <= {host} | self._history.directly_before(host):
                return False
            # If it copies after all, the copy must belong to the stream on which what it looks at is released.
            if effects.may_copy and not set(looked_at) <= set(self.groups[host].allocates):
                return False
            self.groups[host].members.append(node.name)
        else:
            self.prelude.append(node.name)
        self.memory.add_view(node)
        return True

    def _launch(self, node: fx.Node, effects: Effects) -> None:
        reads, writes = self.memory.occupied(effects.reads), self.memory.occupied(effects.writes)
        made = self.memory.add_results(node, effects)
        taken = tuple(storage for storage in dict.fromkeys(reads + writes) if storage in self._unused)
        members = [member.name for storage in taken for member in self._unused.pop(storage)]
        made = taken + made
        if effects.uncapturable == ON_CPU and self._computes_from_literals(effects, reads + writes):
            self._literals.update(made)
            effects = replace(effects, uncapturable="")
        elif not effects.uncapturable and not self._literals.issuperset(self.memory.occupied(_on_cpu(effects.reads))):
            effects = replace(effects, uncapturable=NUMBER)
        self.groups[node.name] = _Group(node, effects, reads, writes + made, made, [*members, node.name])
        self.dependencies += self._history.record(node.name, reads, writes + made, sorted(effects.orders))

    def _computes_from_literals(self, effects: Effects, accessed: Names) -> bool:
        """Whether a call yields the same in every run: a CUDA graph may keep what it yielded while it was captured."""
        # Only literals are lifted; tensors that a module holds can change from run to run.
        return not effects.orders and (effects.copies or self._literals.issuperset(accessed))


def _on_cpu(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """Those whose value is a tensor on the CPU."""
    return tuple(node for node in nodes if any(tensor.device.type == "cpu" for tensor in tensors_in(value_of(node))))


def _ops(groups: Mapping[str, _Group], device: str) -> dict[str, Op]:
    works = count_work({group.node: group.effects for group in groups.values()})
    return {name: _op(group, works[name], device) for name, group in groups.items()}


def _op(group: _Group, work: Work, device: str) -> Op:
    return Op(
        name=group.node.name,
        target=_target_name(group.node),
        nodes=tuple(group.members),
        reads=frozenset(group.reads),
        writes=frozenset(group.writes),
        allocates=frozenset(group.allocates),
        orders=group.effects.orders,
        device=_device_of(group.node, device),
        dtype=work.dtype,
        flops=work.flops,
        bytes_read=work.bytes_read,
        bytes_written=work.bytes_written,
        elements=work.elements,
        source=user_line(group.node.stack_trace),
        uncapturable=group.effects.uncapturable,
    )


def _target_name(node: fx.Node) -> str:
    named = isinstance(node.target, (str, OperatorBase))
    return str(node.target) if named else getattr(node.target, "__name__", str(node.target))


def _device_of(node: fx.Node, scheduled: str) -> str:
    """Where it runs: on the scheduled device if any of its tensors is there, else where its result is."""
    devices = [_device_name(tensor.device) for tensor in tensors_in(value_of(node)) + tensors_given(node)]
    return scheduled if scheduled in devices or not devices else devices[0]


def _device_name(device: torch.device) -> str:
    return str(device) if device.type == "cpu" or device.index is not None else f"{device.type}:0"
