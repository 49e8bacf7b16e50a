"""Builds the op graph of a program: its ops, the storages that they access and the dependencies between them.

Dependencies are computed on storages. Values that alias occupy the same storage. A value that only may alias an
argument occupies the argument's storage besides one of its own.

    x ──▶ conv ──▶ view ──▶ add_ ──▶ view_1 ──▶ matmul        op conv:   nodes conv, view
                                                              op add_:   nodes add_, view_1
                                                              op matmul: nodes matmul

A node that launches nothing is *folded*: it is issued together with the op that last wrote the storages it reads. This
adds no constraint if that op depends on the writers of all the other storages that the node reads, because users of the
node depend on that op anyway. Otherwise the node becomes an op of its own.

A node that only allocates is issued with the first op that uses the memory, right before it and on the same stream:

    empty ──▶ view ──▶ kernel                                 op kernel: nodes empty, view, kernel

A storage of which ops use different parts (see :mod:`~autostream.analysis.parts`) may have several first users, with no
order between them. It is allocated with the latest op on which all of its users depend: earlier uses of the same memory
on the stream of that op are over by the time that the users run. If there is no such op, it is allocated before the
fork.

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

from autostream.analysis.capturability import NUMBER, ON_CPU, copy_direction, dependence_of
from autostream.analysis.collectives import terms_of
from autostream.analysis.effects import (
    EVERY_GROUP,
    Effects,
    effects_of,
    group_of,
    reduces_for_all,
    waits_for_collective,
)
from autostream.analysis.hazards import AccessHistory
from autostream.analysis.memory import Memory, Names
from autostream.analysis.parts import Division, divide
from autostream.analysis.process_groups import processes_in
from autostream.analysis.source import user_line
from autostream.analysis.values import input_tensors, tensors_in, value_of
from autostream.analysis.work import Work, count_work
from autostream.ir import Dependency, Op, OpGraph, Program


def analyze(program: Program) -> OpGraph:
    """Find the ops of a program, the storages that they access and the hazards between them.

    Takes time linear in the number of nodes, arguments and accesses. If some storage has several first users, one union
    of two sets of ops for each dependency is added.

    Args:
        program: its nodes carry fake values that share a storage exactly where the real ones do.

    Returns:
        The ops in program order; the storages in order of allocation; at most one dependency for each pair of ops and
        kind of hazard.

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
    effects = _ordered({node: effects_of(node) for node in program.module.graph.nodes}, program.device)
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


def _ordered(effects: Mapping[fx.Node, Effects], device: str) -> Mapping[fx.Node, Effects]:
    """The same effects, with the order of each process group for a node that may communicate over any.

    On a CPU so has each wait, unless all collectives are all-reduces: other collectives are in flight one by one, where
    the program has them so. Gloo's all-gathers end the process, now and then, beside others (seen in 2.11 and 2.13).
    """
    groups = frozenset(order for each in effects.values() for order in each.orders if order.startswith(EVERY_GROUP))
    one_by_one = device == "cpu" and any(group_of(node) and not reduces_for_all(node) for node in effects)
    return {
        node: replace(each, orders=each.orders | groups)
        if EVERY_GROUP in each.orders or (one_by_one and waits_for_collective(node))
        else each
        for node, each in effects.items()
    }


@dataclass
class _Group:
    """An op under construction: a node that launches or could not be folded, and the nodes issued with it."""

    node: fx.Node
    effects: Effects
    reads: Names
    writes: Names
    allocates: Names
    members: list[str] = field(default_factory=list)


@dataclass
class _Shared:
    """A storage of which ops use different parts: its allocation and views, and the ops that use it."""

    nodes: list[str]
    users: list[str] = field(default_factory=list)


class _Draft:
    """An op graph under construction; nodes are added in program order."""

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
        self._resizes = program.level == "aten"  # an ATen op may resize the tensor that it writes to
        self._unused: dict[str, list[fx.Node]] = {}  # by storage no op has used yet: its allocation and views
        self._shared: dict[str, _Shared] = {}
        self._base = {view: division.base.name for division in divisions for view in division.views}
        self._divided = {division.base for division in divisions}

    def add(self, node: fx.Node, effects: Effects) -> None:
        """Add the next node."""
        if node.op == "placeholder":
            self.memory.add_placeholder(node, self._placeholders[node.name])
        elif node.op == "get_attr":
            self.memory.add_attribute(node)
            self.prelude.append(node.name)
        elif node in self._base:
            self._add_divided_view(node, self._base[node])
        elif effects.allocates and _device_of(node, self._devices[0]) in self._devices:
            allocate = self.memory.add_results if self._resizes else self.memory.add_memory
            (storage,) = allocate(node, effects)
            if node in self._divided:
                self._shared[storage] = _Shared([node.name])
            else:
                self._unused[storage] = [node]
        elif node.op != "output" and (effects.launches or not self._fold(node, effects)):
            self._launch(node, effects)

    def finish(self) -> None:
        """Add the allocations of storages that no op uses, and of storages with several first users."""
        for storage in list(self._unused):
            self._allocate_alone(storage)
        if self._shared:
            self._allocate_shared()
        for group in self.groups.values():
            if not group.effects.uncapturable:
                nodes = map(self._nodes.__getitem__, group.members)
                group.effects = replace(group.effects, uncapturable=next(filter(None, map(dependence_of, nodes)), ""))
            if any(order.startswith(EVERY_GROUP) for order in group.effects.orders):
                # The collective runs until its result is waited for. NCCL records its stream on blocks of the caching
                # allocator, but not on storages in the arena.
                self.memory.keep_apart(self.memory.occupied(group.effects.reads + group.effects.writes))

    def _allocate_alone(self, storage: str) -> None:
        """Make an allocation an op of its own."""
        node, *views = self._unused.pop(storage)
        names = [node.name, *(view.name for view in views)]
        self.groups[node.name] = _Group(node, effects_of(node), (), (storage,), (storage,), names)
        self.dependencies += self._history.record(node.name, (), (storage,))

    def _allocate_shared(self) -> None:
        """Issue each shared allocation with the latest op on which all of its users depend, or before all ops."""
        names = list(self.groups)
        past: dict[str, int] = {}  # op to the set of ops that happen before it, itself included, one bit for each
        for at, op in enumerate(names):
            past[op] = reduce(or_, map(past.__getitem__, self._history.directly_before(op)), 1 << at)
        for storage, shared in self._shared.items():
            common = reduce(and_, map(past.__getitem__, shared.users))
            if not common:
                self.prelude += shared.nodes
                continue
            # The users depend on this op already, so no dependency is added.
            group = self.groups[names[common.bit_length() - 1]]
            group.members[:0] = shared.nodes
            group.allocates += (storage,)
            group.writes += (storage,)

    def _add_divided_view(self, node: fx.Node, storage: str) -> None:
        """Issue a view of a divided storage with its allocation, on which all users of the view depend."""
        self.memory.add_view(node)
        (self._shared[storage].nodes if storage in self._shared else self.groups[storage].members).append(node.name)

    def _fold(self, node: fx.Node, effects: Effects) -> bool:
        """Issue a node that launches nothing with an earlier op or before all ops, if that adds no constraint."""
        viewed = self.memory.viewed(node)
        unused = [storage for storage in viewed if storage in self._unused]
        if unused == list(viewed) and len(unused) == 1 and tensors_in(value_of(node)):
            self._unused[unused[0]].append(node)
            self.memory.add_view(node)
            return True
        # A size, or a value of several storages: an op may need it before it uses the memory itself.
        for storage in unused:
            self._allocate_alone(storage)
        writers = {op for op in map(self._history.last_writer, self.memory.resources(viewed)) if op is not None}
        if writers:
            writer = self._history.last(writers)
            if not writers <= {writer} | self._history.directly_before(writer):
                return False
            # A storage is released after the last op that accesses it, so only such an op may issue a view of it.
            if not self._uses(writer, self.memory.intermediate(viewed)):
                return False
            # If the node copies after all, it must run on the stream on which the storages it reads are released.
            if effects.may_copy and not set(viewed) <= set(self.groups[writer].allocates):
                return False
            self.groups[writer].members.append(node.name)
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
        results = self.memory.add_results(node, effects)
        for storage in used:
            if storage in self._shared:
                self._shared[storage].users.append(node.name)
        first_used = tuple(storage for storage in used if storage in self._unused)
        members = [member.name for storage in first_used for member in self._unused.pop(storage)]
        allocates = first_used + results
        if effects.uncapturable == ON_CPU and self._computes_from_literals(effects, used):
            self._literals.update(allocates)
            effects = replace(effects, uncapturable="")
        elif not effects.uncapturable and not self._literals.issuperset(self.memory.occupied(_on_cpu(effects.reads))):
            effects = replace(effects, uncapturable=NUMBER)
        writes += allocates
        self.groups[node.name] = _Group(node, effects, reads, writes, allocates, [*members, node.name])
        self.dependencies += self._history.record(
            node.name,
            self.memory.resources(reads),
            self.memory.resources(writes),
            sorted(effects.orders),
        )

    def _computes_from_literals(self, effects: Effects, accessed: Names) -> bool:
        """Whether a call on the CPU returns the same in every run, so that a CUDA graph may bake its result in."""
        # Only literals are lifted (``lift_fresh_copy``); tensors that a module holds can change from run to run.
        return not effects.orders and (effects.copies or self._literals.issuperset(accessed))


def _on_cpu(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The nodes whose value is a tensor on the CPU."""
    return tuple(node for node in nodes if any(tensor.device.type == "cpu" for tensor in tensors_in(value_of(node))))


def _ops(groups: Mapping[str, _Group], device: str) -> dict[str, Op]:
    works = count_work({group.node: group.effects for group in groups.values()})
    lines = {trace: user_line(trace) for trace in {group.node.stack_trace for group in groups.values()}}
    return {name: _op(group, works[name], device, lines[group.node.stack_trace]) for name, group in groups.items()}


def _op(group: _Group, work: Work, device: str, source: str) -> Op:
    terms = terms_of(group.node)
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
        crosses=copy_direction(group.node),
        group=group_of(group.node),
        processes=processes_in(name) if (name := group_of(group.node)) else 1,
        terms=terms.alike,
        sends=terms.sends,
        receives=terms.receives,
    )


def _target_name(node: fx.Node) -> str:
    named = isinstance(node.target, (str, OperatorBase))
    return str(node.target) if named else getattr(node.target, "__name__", str(node.target))


def _device_of(node: fx.Node, default: str) -> str:
    """The device of a node: the host only if all of its tensors are there; of several devices, that of its result."""
    devices = [_device_name(tensor.device) for tensor in tensors_in(value_of(node)) + input_tensors(node)]
    return next((device for device in devices if device not in _NO_DEVICES), next(iter(devices), default))


_NO_DEVICES = ("cpu", "meta")


def _device_name(device: torch.device) -> str:
    return str(device) if device.type == "cpu" or device.index is not None else f"{device.type}:0"
