"""The values that travel from stage to stage.

All are immutable, all print, and none holds a tensor. An op is named after its fx node, so a name found in a report,
a JSON dump or a trace leads back to the graph and survives copying. Nothing here imports torch: whatever is computed
from these values alone can be tested without a device.

    Program ─▶ OpGraph ─▶ Costs ─▶ Assignment ─▶ Schedule ─▶ Timeline
    (traced)   (hazards)  (µs)     (streams)     (waits,     (when)
                                                  releases)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import networkx as nx
    from torch.fx import GraphModule

FORK = "<fork>"
"""The moment before the first op, on stream 0: everything that the caller enqueued earlier has happened by then."""

JOIN = "<join>"
"""The moment after the last op, on stream 0: whatever happens-before it, the caller's next op sees."""


class Role(Enum):
    """Who owns a storage."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    INTERMEDIATE = "intermediate"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One flat tensor that a program takes.

    Attributes:
        name: the fx placeholder's name.
        role: parameter, buffer, constant or input.
        target: the attribute path in the model (``"bn1.weight"``), or ``"0"``, ``"1"``, … for flat inputs.
        storage: placeholders with the same value share memory; it is the name of the first of them.
    """

    name: str
    role: Role
    target: str
    storage: str


@dataclass(frozen=True, slots=True)
class Program:
    """A traced model: a flat fx graph whose placeholders and outputs are all tensors.

    Attributes:
        module: takes the placeholders in order, returns a tuple of tensors; nodes carry ``meta["val"]`` (fake tensors
            that share a storage exactly where the real ones do) and ``meta["stack_trace"]``.
        placeholders: what each placeholder is.
        outputs: fx names of the tensors returned, in order; names may repeat and may be placeholders.
        level: what one op is: ``"aten"`` (an ATen call) or ``"inductor"`` (a kernel of TorchInductor's).
        device: where the ops run, ``"cuda:0"`` or ``"cpu"``.
        peers: other devices where some run, ``("cuda:1",)``: such a program is cut, for one device is scheduled at a
            time.
        frozen: positions of placeholders that are not read: the module computes with their values as of its making, and
            is wrong as soon as one of them has another.
    """

    module: GraphModule
    placeholders: tuple[Placeholder, ...]
    outputs: tuple[str, ...]
    level: str
    device: str
    peers: tuple[str, ...] = ()
    frozen: frozenset[int] = frozenset()

    @property
    def devices(self) -> tuple[str, ...]:
        """Where its ops run, beside the host."""
        return (self.device, *self.peers)


@dataclass(frozen=True, slots=True)
class Op:
    """One launch of device work, with the fx nodes that only rename or reshape its result.

    Attributes:
        name: the launching fx node's name.
        target: what it calls, e.g. ``"aten.conv2d.default"``.
        nodes: fx nodes issued as one: what takes memory for it or for ops after it, the launching node, then views of
            what it wrote.
        reads: what it reads, by name: storages, or parts of them.
        writes: what it writes, likewise; all that it allocates is among it.
        allocates: storages that come into being here, on the stream that this op is given.
        orders: resources whose users keep their program order, e.g. ``"rng"``, ``"collective"``, ``"world"``.
        device: where it runs, ``"cuda:0"`` or ``"cpu"``; of a copy between devices, where to.
        dtype: what it computes in, e.g. ``"float16"``.
        flops: floating-point operations.
        bytes_read: bytes of its tensor arguments.
        bytes_written: bytes of its tensor results.
        elements: elements of its largest result, a measure of how many threads it can use.
        source: the user's source line, ``"model.py:12: y = self.conv(x)"``, or ``""``.
        uncapturable: why a CUDA graph cannot hold it, or ``""``.
        crosses: ``"upload"`` if it copies from the host's memory to the device's, ``"download"`` if it copies back, and
            ``"peer"`` if from one device to another.
    """

    name: str
    target: str
    nodes: tuple[str, ...]
    reads: frozenset[str]
    writes: frozenset[str]
    allocates: frozenset[str] = frozenset()
    orders: frozenset[str] = frozenset()
    device: str = "cuda:0"
    dtype: str = "float16"
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    elements: int = 0
    source: str = ""
    uncapturable: str = ""
    crosses: str = ""


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory, whatever the number of tensors that look at it.

    Attributes:
        name: the fx node that brings it into being (``"split.1"`` for the second result of ``split``).
        role: who owns it; only ``INTERMEDIATE`` storages are allocated and released by a schedule.
        bytes: its size.
        holders: fx nodes whose value keeps it alive, in program order.
        escapes: whether an output keeps it alive, so that no schedule may release it.
        parts: names of its parts, where some ops touch only some of them: parts have no byte in common, and an op that
            names the storage itself touches all.
        placeable: whether its memory is taken by a call that does nothing else, so that a schedule can say where it
            lies.
    """

    name: str
    role: Role
    bytes: int
    holders: tuple[str, ...]
    escapes: bool = False
    parts: tuple[str, ...] = ()
    placeable: bool = False


class Hazard(Enum):
    """Why one op must happen before another."""

    RAW = "read after write"
    WAR = "write after read"
    WAW = "write after write"
    ORDER = "program order"


@dataclass(frozen=True, slots=True)
class Dependency:
    """``before`` must have finished when ``after`` starts, because of ``resource``.

    That is a storage, a part of one, or what :attr:`Op.orders` names.
    """

    before: str
    after: str
    hazard: Hazard
    resource: str


@dataclass(frozen=True)
class OpGraph:
    """Ops in program order with the hazards between them.

    Attributes:
        ops: by name; iterates in program order, in which running them one by one is right.
        dependencies: hazards between direct neighbours; those that follow by transitivity may be absent.
        storages: by name.
        prelude: fx nodes that launch nothing and depend on placeholders alone, each after what it takes.
        device: the device that is scheduled; ops elsewhere stay on stream 0.

    Example:
        >>> a = Op("a", "aten.relu.default", ("a",), reads=frozenset({"x"}), writes=frozenset({"a"}))
        >>> graph = OpGraph({"a": a}, (), {}, (), "cuda:0")
        >>> list(graph.digraph)
        ['a']
    """

    ops: Mapping[str, Op]
    dependencies: tuple[Dependency, ...]
    storages: Mapping[str, Storage]
    prelude: tuple[str, ...]
    device: str

    @cached_property
    def digraph(self) -> nx.DiGraph[str]:
        """Ops as nodes, dependencies as edges, frozen; both iterate in program order."""
        import networkx as nx  # takes as long as the rest of autostream: planning needs it, importing does not

        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(self.ops)
        graph.add_edges_from((dependency.before, dependency.after) for dependency in self.dependencies)
        nx.freeze(graph)
        return graph

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """What depends on each op, each once, as positions in program order."""
        return self._neighbours((dependency.before, dependency.after) for dependency in self.dependencies)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """What each op depends on, likewise."""
        return self._neighbours((dependency.after, dependency.before) for dependency in self.dependencies)

    def _neighbours(self, pairs: Iterable[tuple[str, str]]) -> tuple[tuple[int, ...], ...]:
        position = {name: at for at, name in enumerate(self.ops)}
        found: list[dict[int, None]] = [{} for _ in self.ops]
        for one, other in pairs:
            found[position[one]][position[other]] = None
        return tuple(map(tuple, found))

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """The ops that read, write or allocate each storage, or a part of it, in program order."""
        whole = {part: storage.name for storage in self.storages.values() for part in storage.parts}
        users: dict[str, list[str]] = {name: [] for name in self.storages}
        for op in self.ops.values():
            touched = {*op.reads, *op.writes, *op.allocates}
            for name in {whole.get(name, name) for name in touched} if whole else touched:
                if name in users:
                    users[name].append(op.name)
        return {name: tuple(ops) for name, ops in users.items()}

    @cached_property
    def pinned(self) -> frozenset[str]:
        """Ops that an uncaptured run keeps on stream 0.

        Those are ops of other devices, whose order the host keeps, and ops that allocate what an output keeps alive:
        the caller frees that memory whenever they like, which is safe only on the stream that they work on.
        """
        escaping = {name for name, storage in self.storages.items() if storage.escapes}
        return frozenset(
            op.name for op in self.ops.values() if op.device != self.device or not escaping.isdisjoint(op.allocates)
        )


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one op needs.

    Attributes:
        duration_us: time alone on the device, µs.
        sm_share: share of the multiprocessors that it can fill, above 0 and at most 1.
        bandwidth_share: share of the memory bandwidth that it uses while it runs, 0 to 1.
        source: ``"measured"`` or ``"roofline"``.
    """

    duration_us: float
    sm_share: float
    bandwidth_share: float
    source: str


Costs = Mapping[str, OpCost]
"""Op name to cost; every op of the graph has one."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What the cost model knows of a device.

    An *edge* is the time from the end of a kernel to the start of one that depends on it, in a CUDA graph. Edges
    between streams grow with the number of streams in use: see :meth:`over`.

    Attributes:
        name: as the driver says it, e.g. ``"NVIDIA H200"``.
        multiprocessors: SMs, or cores of a CPU.
        bandwidth: memory bandwidth that a large copy reaches, bytes per µs (4.2 TB/s is 4.2e6).
        flops: dtype name to operations per µs that a large product reaches (700 TFLOP/s is 700e6).
        kernel_us: the shortest time that a kernel takes, µs.
        same_stream_edge_us: edge within a stream, µs.
        cross_stream_edge_us: edge between two streams where two are in use, µs.
        fork_us: extra cost of bringing a side stream in where two are in use, µs.
        join_us: extra cost of waiting for a side stream at the end where two are in use, µs.
        source: ``"table"``, ``"properties"`` or ``"measured"``.
        per_stream_us: what each further stream in use adds to an edge between streams, µs.
        dispatch_us: the least time between the starts of two kernels of one CUDA graph, whatever their streams, µs.
        launch_us: the same where no graph is captured and the host launches one op after the other, µs.
        replay_us: what a replay of a CUDA graph takes besides its kernels, µs.
        cache_bytes: size of the last-level cache.
        link_bandwidth: what a large copy between the host's pinned memory and the device's reaches, bytes per µs; that
            of PCIe 3.0 where nothing else is known.
        peer_bandwidth: what a large copy from another device of the kind reaches, bytes per µs.
    """

    name: str
    multiprocessors: int
    bandwidth: float
    flops: Mapping[str, float]
    kernel_us: float
    same_stream_edge_us: float
    cross_stream_edge_us: float
    fork_us: float
    join_us: float
    source: Literal["table", "properties", "measured"]
    per_stream_us: float = 0.0
    dispatch_us: float = 0.0
    launch_us: float = 0.0
    replay_us: float = 0.0
    cache_bytes: int = 0
    link_bandwidth: float = 13_600.0
    peer_bandwidth: float = 13_600.0

    def over(self, streams: int) -> DeviceProfile:
        """The device with so many streams in use: edges between them, forks and joins cost what they cost then.

        Example:
            >>> gpu = DeviceProfile("GPU", 132, 4.2e6, {}, 0.3, 0.9, 1.6, 1.2, 1.2, "table", per_stream_us=0.2)
            >>> gpu.over(4).cross_stream_edge_us
            2.0
        """
        more_us = self.per_stream_us * max(streams - 2, 0)
        return replace(
            self,
            cross_stream_edge_us=self.cross_stream_edge_us + more_us,
            fork_us=self.fork_us + more_us,
            join_us=self.join_us + more_us,
            per_stream_us=0.0,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """Something chosen, and why: what ``explain`` prints. ``op`` is ``""`` for a decision about the whole."""

    op: str
    choice: str
    reason: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which stream each op is given, and the order in which the host launches them.

    Attributes:
        policy: the policy's name.
        streams: number of streams used; stream 0 is the caller's.
        order: every op once, each after all that it depends on.
        stream: op name to stream.
        decisions: why.
    """

    policy: str
    streams: int
    order: tuple[str, ...]
    stream: Mapping[str, int]
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """One step of a schedule.

    Attributes:
        op: the op launched.
        stream: on this stream,
        waits: after making that stream wait for the ends of these ops (or ``FORK``), each on another stream;
        releases: afterwards, these storages are given back to the allocator.
    """

    op: str
    stream: int
    waits: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arena:
    """One block of memory in which storages lie, side by side or one after the other's end.

    Attributes:
        bytes: its size.
        offsets: storage to the first byte of it; storages that are not named are allocated one by one.
    """

    bytes: int = 0
    offsets: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Schedule:
    """A complete plan: everything that lowering needs to know and nothing that it must decide.

    Attributes:
        policy: the policy that assigned streams.
        streams: number of streams; stream 0 is the caller's.
        launches: in the order in which the host issues them.
        join_waits: ops for whose ends stream 0 waits before the caller goes on.
        decisions: why.
        arena: where storages lie.
    """

    policy: str
    streams: int
    launches: tuple[Launch, ...]
    join_waits: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    arena: Arena = Arena()

    @cached_property
    def stream_of(self) -> Mapping[str, int]:
        """Op name to stream."""
        return {launch.op: launch.stream for launch in self.launches}

    @property
    def wait_count(self) -> int:
        """Event waits issued in one run, those of fork and join among them."""
        return sum(len(launch.waits) for launch in self.launches) + len(self.join_waits)


@dataclass(frozen=True, slots=True)
class Slice:
    """One op's time on one stream, µs from the start of the run."""

    op: str
    stream: int
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each op ran, or would run: predicted and measured ones are the same type."""

    slices: tuple[Slice, ...]
    source: str = field(default="simulated")

    @property
    def makespan_us(self) -> float:
        """From the first start to the last end, µs."""
        return max((s.end_us for s in self.slices), default=0.0) - min((s.start_us for s in self.slices), default=0.0)

    @property
    def starts(self) -> dict[str, float]:
        """When each op starts, by name, µs."""
        return {s.op: s.start_us for s in self.slices}

    @property
    def ends(self) -> dict[str, float]:
        """When each op ends, by name, µs."""
        return {s.op: s.end_us for s in self.slices}


class Limit(StrEnum):
    """What kept a candidate out that somebody can raise."""

    BUDGET = "memory budget"
    DEVICE = "device memory"
    TIME = "tuning time"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a graph that was considered.

    Attributes:
        schedule: the plan.
        captured: whether it runs as a CUDA graph.
        predicted_us: makespan by the simulator, µs.
        measured_us: median time of one run on the device, µs, or ``None`` where nothing was measured. Candidates of one
            program are told at one pace of the device: that of the last rounds in which the best one was measured.
        refusal: why it was not measured or cannot run, or ``""``.
        limit: what it came up against, where that can be raised.
        memory_bytes: what it allocates at most, by its plan; libraries' workspaces come on top.
        incomplete: whether it needs more than ``memory_bytes``: one that exceeds the memory budget may not be
            planned to its end.
    """

    schedule: Schedule
    captured: bool
    predicted_us: float
    measured_us: float | None = None
    refusal: str = ""
    limit: Limit | None = None
    memory_bytes: int = 0
    incomplete: bool = False
