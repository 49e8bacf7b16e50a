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

Memory of which ops use different parts (see :mod:`~autostream.analysis.parts`) may have several first users, none of
them before the others. It is taken with the latest op that all of its users come after: whatever had that memory on the
stream of that op is over for them by then. Where there is no such op, it is taken before the fork.

            ╭▶ left ──▶ half of both ─╮                       op stem: nodes both, halves, stem
    stem ──▶┤                         ├─▶ sum
            ╰▶ right ─▶ half of both ─╯
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_, or_

import torch
from torch import fx
from torch._ops import OperatorBase

from autostream.analysis.capturability import NUMBER, ON_CPU, crosses, dependence_of
from autostream.analysis.effects import Effects, effects_of
from autostream.analysis.hazards import AccessHistory
from autostream.analysis.memory import Memory, Names
from autostream.analysis.parts import Division, divide
from autostream.analysis.source import user_line
from autostream.analysis.values import tensors_given, tensors_in, value_of
from autostream.analysis.work import Work, count_work
from autostream.ir import Dependency, Op, OpGraph, Program


def analyze(program: Program) -> OpGraph:
    """Find the ops of a program, the memory that they share and the hazards between them.

    Takes time linear in the number of nodes, arguments and accesses; the union of two sets of ops, for each dependency,
    is added where memory has several first users.

    Args:
        program: its nodes carry fake values that share a storage exactly where the real ones do.

    Returns:
        The ops in program order; the storages in the order in which they come into being; at most one dependency for
        each pair of ops and kind of hazard.

    Example:
        >>> from autostream.ir import Placeholder, Role
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
    effects = {node: effects_of(node) for node in program.module.graph.nodes}
    draft = _Draft(program, divide(effects))
    for node, effect in effects.items():
        draft.add(node, effect)
    draft.finish()
    return OpGraph(
        ops=_ops(draft.groups, program.device),
        dependencies=tuple(draft.dependencies),
        storages=draft.memory.storages(program.outputs),
        prelude=tuple(draft.prelude),
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


@dataclass
class _Shared:
    """Memory to take for ops that use different parts of it, what looks at it, and who uses it."""

    nodes: list[str]
    users: list[str] = field(default_factory=list)


class _Draft:
    """What an op graph is made of, filled in program order."""

    def __init__(self, program: Program, divisions: Iterable[Division]) -> None:
        self.memory = Memory(divisions)
        self.groups: dict[str, _Group] = {}
        self.dependencies: list[Dependency] = []
        self.prelude: list[str] = []
        self._placeholders = {placeholder.name: placeholder for placeholder in program.placeholders}
        self._nodes = {node.name: node for node in program.module.graph.nodes}
        self._history = AccessHistory()
        self._literals: set[str] = set()
        self._devices = program.devices
        self._resizes = program.level == "aten"  # there, what is written to may become larger
        self._unused: dict[str, list[fx.Node]] = {}  # by storage, what takes it and looks at it before any op does
        self._shared: dict[str, _Shared] = {}
        self._maker = {look: division.maker.name for division in divisions for look in division.looks}
        self._divided = {division.maker for division in divisions}

    def add(self, node: fx.Node, effects: Effects) -> None:
        """Take in the next node."""
        if node.op == "placeholder":
            self.memory.add_placeholder(node, self._placeholders[node.name])
        elif node.op == "get_attr":
            self.memory.add_attribute(node)
            self.prelude.append(node.name)
        elif node in self._maker:
            self._look(node, self._maker[node])
        elif effects.allocates and _device_of(node, self._devices[0]) in self._devices:
            taken = self.memory.add_results if self._resizes else self.memory.add_memory
            (storage,) = taken(node, effects)
            if node in self._divided:
                self._shared[storage] = _Shared([node.name])
            else:
                self._unused[storage] = [node]
        elif node.op != "output" and (effects.launches or not self._fold(node, effects)):
            self._launch(node, effects)

    def finish(self) -> None:
        """Take in memory that no op uses, and memory that several may be the first to use."""
        for storage in list(self._unused):
            self._take(storage)
        if self._shared:
            self._take_shared()
        for group in self.groups.values():
            if not group.effects.uncapturable:
                nodes = map(self._nodes.__getitem__, group.members)
                group.effects = replace(group.effects, uncapturable=next(filter(None, map(dependence_of, nodes)), ""))
            if "collective" in group.effects.orders:
                # It only starts here, and reads on until somebody waits for its result; of blocks, NCCL sees to that.
                self.memory.keep_apart(self.memory.occupied(group.effects.reads + group.effects.writes))

    def _take(self, storage: str) -> None:
        """Make taking memory an op of its own."""
        node, *views = self._unused.pop(storage)
        names = [node.name, *(view.name for view in views)]
        self.groups[node.name] = _Group(node, effects_of(node), (), (storage,), (storage,), names)
        self.dependencies += self._history.record(node.name, (), (storage,))

    def _take_shared(self) -> None:
        """Issue what takes memory with the latest op that all of its users come after, or before all ops."""
        names = list(self.groups)
        past: dict[str, int] = {}  # op to a bit for each op that it comes after, itself included
        for at, op in enumerate(names):
            past[op] = reduce(or_, map(past.__getitem__, self._history.directly_before(op)), 1 << at)
        for storage, shared in self._shared.items():
            common = reduce(and_, map(past.__getitem__, shared.users))
            if not common:
                self.prelude += shared.nodes
                continue
            # What the users depend on already needs no dependency of its own.
            group = self.groups[names[common.bit_length() - 1]]
            group.members[:0] = shared.nodes
            group.allocates += (storage,)
            group.writes += (storage,)

    def _look(self, node: fx.Node, storage: str) -> None:
        """Issue a look at divided memory with what makes it: all that use it come after that."""
        self.memory.add_view(node)
        (self._shared[storage].nodes if storage in self._shared else self.groups[storage].members).append(node.name)

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
        writers = {op for op in map(self._history.last_writer, self.memory.resources(looked_at)) if op is not None}
        if writers:
            host = self._history.last(writers)
            if not writers <= {host} | self._history.directly_before(host):
                return False
            # Memory is released after its last use, and this would be none of memory that the host does not use.
            if not self._uses(host, self.memory.made(looked_at)):
                return False
            # If it copies after all, the copy must belong to the stream on which what it looks at is released.
            if effects.may_copy and not set(looked_at) <= set(self.groups[host].allocates):
                return False
            self.groups[host].members.append(node.name)
        else:
            self.prelude.append(node.name)
        self.memory.add_view(node)
        return True

    def _uses(self, op: str, storages: Names) -> bool:
        """Whether an op accesses all of these storages, or parts of them."""
        used = self.memory.resources(self.groups[op].reads + self.groups[op].writes)
        return not any(set(self.memory.resources((storage,))).isdisjoint(used) for storage in storages)

    def _launch(self, node: fx.Node, effects: Effects) -> None:
        used = self.memory.occupied(effects.reads + effects.writes)
        reads, writes = self.memory.touched(effects.reads), self.memory.touched(effects.writes)
        made = self.memory.add_results(node, effects)
        for storage in used:
            if storage in self._shared:
                self._shared[storage].users.append(node.name)
        taken = tuple(storage for storage in used if storage in self._unused)
        members = [member.name for storage in taken for member in self._unused.pop(storage)]
        made = taken + made
        if effects.uncapturable == ON_CPU and self._computes_from_literals(effects, used):
            self._literals.update(made)
            effects = replace(effects, uncapturable="")
        elif not effects.uncapturable and not self._literals.issuperset(self.memory.occupied(_on_cpu(effects.reads))):
            effects = replace(effects, uncapturable=NUMBER)
        writes += made
        self.groups[node.name] = _Group(node, effects, reads, writes, made, [*members, node.name])
        self.dependencies += self._history.record(
            node.name,
            self.memory.resources(reads),
            self.memory.resources(writes),
            sorted(effects.orders),
        )

    def _computes_from_literals(self, effects: Effects, accessed: Names) -> bool:
        """Whether a call yields the same in every run: a CUDA graph may keep what it yielded while it was captured."""
        # Only literals are lifted; tensors that a module holds can change from run to run.
        return not effects.orders and (effects.copies or self._literals.issuperset(accessed))


def _on_cpu(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """Those whose value is a tensor on the CPU."""
    return tuple(node for node in nodes if any(tensor.device.type == "cpu" for tensor in tensors_in(value_of(node))))


def _ops(groups: Mapping[str, _Group], device: str) -> dict[str, Op]:
    works = count_work({group.node: group.effects for group in groups.values()})
    lines = {trace: user_line(trace) for trace in {group.node.stack_trace for group in groups.values()}}
    return {name: _op(group, works[name], device, lines[group.node.stack_trace]) for name, group in groups.items()}


def _op(group: _Group, work: Work, device: str, source: str) -> Op:
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
        source=source,
        uncapturable=group.effects.uncapturable,
        crosses=crosses(group.node),
    )


def _target_name(node: fx.Node) -> str:
    named = isinstance(node.target, (str, OperatorBase))
    return str(node.target) if named else getattr(node.target, "__name__", str(node.target))


def _device_of(node: fx.Node, default: str) -> str:
    """Where it runs: on the host only if all of its tensors are there, and of devices, where its result is."""
    devices = [_device_name(tensor.device) for tensor in tensors_in(value_of(node)) + tensors_given(node)]
    return next((device for device in devices if device not in _NO_DEVICES), next(iter(devices), default))


_NO_DEVICES = ("cpu", "meta")


def _device_name(device: torch.device) -> str:
    return str(device) if device.type == "cpu" or device.index is not None else f"{device.type}:0"
