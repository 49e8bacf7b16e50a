"""The intermediate representation: the immutable values that each stage takes from the one before it.

None holds a tensor. An op is named after its fx node, so a name in a report, a JSON dump or a trace leads back to the
graph. Nothing here imports torch, so code that computes from these values alone can be tested without a device.

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
"""The point before the first op, on stream 0: all work that the caller enqueued earlier is over."""

JOIN = "<join>"
"""The point after the last op, on stream 0: all that happens before it is visible to the caller's next op."""


class Role(Enum):
    """What a storage is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    INTERMEDIATE = "intermediate"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One tensor argument of a program.

    Attributes:
        name: the fx placeholder's name.
        role: parameter, buffer, constant or input.
        target: the attribute path in the model (``"bn1.weight"``), or ``"0"``, ``"1"``, … for flat inputs.
        storage: the name of the first placeholder that shares its memory, perhaps its own.
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
        placeholders: the arguments, in order.
        outputs: fx names of the tensors returned, in order; names may repeat and may be placeholders.
        level: ``"aten"`` if each op is an ATen call, ``"inductor"`` if each is a kernel of TorchInductor.
        device: the device of the ops, ``"cuda:0"`` or ``"cpu"``.
        peers: other devices of some ops, ``("cuda:1",)``: such a program is cut, since each schedule is for one device.
        frozen: positions of placeholders that are not read: their values are constants in the module, which is wrong
            once one of them changes.
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
        """The devices of its ops, without the host."""
        return (self.device, *self.peers)


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel launch, with the fx nodes that allocate memory or make views for it.

    Attributes:
        name: the name of the fx node that launches it.
        target: what it calls, e.g. ``"aten.conv2d.default"``.
        nodes: its fx nodes: those that allocate memory for it or for later ops, the one that launches it, then views of
            what it wrote.
        reads: the names of the storages, or parts of them, that it reads.
        writes: the names of those that it writes, including all that it allocates.
        allocates: storages that it allocates, on its stream.
        orders: resources whose users keep their program order, e.g. ``"rng"``, ``"collective:0"``, ``"world"``.
        device: the device that it runs on, ``"cuda:0"`` or ``"cpu"``; the destination of a copy between devices.
        dtype: the dtype that it computes in, e.g. ``"float16"``.
        flops: floating-point operations.
        bytes_read: bytes of its tensor arguments.
        bytes_written: bytes of its tensor results.
        elements: number of elements of its largest result, which limits how many threads it can use.
        source: the user's source line, ``"model.py:12: y = self.conv(x)"``, or ``""``.
        uncapturable: why a CUDA graph cannot hold it, or ``""``.
        crosses: ``"upload"`` if it copies from the host's memory to the device's, ``"download"`` if it copies back, and
            ``"peer"`` if from one device to another.
        group: the name of the process group over which it communicates, or ``""``.
        processes: how many processes that group has.
        terms: what else all of them have to say alike, such as how to reduce: ``"reduce_op=sum"``, or ``""``.
        sends: how many bytes it sends to each process of the group, if that need not be the same everywhere.
        receives: how many it takes from each.
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
    group: str = ""
    processes: int = 1
    terms: str = ""
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory that any number of tensors view.

    Attributes:
        name: the fx node that allocates it (``"split.1"`` for the second result of ``split``).
        role: only ``INTERMEDIATE`` storages are allocated and released by a schedule.
        bytes: its size.
        holders: fx nodes whose value keeps it alive, in program order.
        escapes: whether an output keeps it alive, so that no schedule may release it.
        parts: names of disjoint byte ranges of it, if some ops access only some of them; an op that names the storage
            itself accesses all.
        placeable: whether it is allocated by a call that does nothing else, so that it can be in the arena instead.
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
    """``before`` must have ended when ``after`` starts.

    ``resource`` is the storage, the part of one, or the resource in :attr:`Op.orders` that both use.
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
        dependencies: the hazards; those that others imply by transitivity may be absent.
        storages: by name.
        prelude: fx nodes that launch nothing and depend on placeholders alone, in topological order.
        device: the device that is scheduled; ops of other devices stay on stream 0.

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
        import networkx as nx  # takes as long to import as the rest of autostream

        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(self.ops)
        graph.add_edges_from((dependency.before, dependency.after) for dependency in self.dependencies)
        nx.freeze(graph)
        return graph

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """The ops that depend on each op, each once, as positions in program order."""
        return self._neighbours((dependency.before, dependency.after) for dependency in self.dependencies)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """The ops that each op depends on, each once, as positions in program order."""
        return self._neighbours((dependency.after, dependency.before) for dependency in self.dependencies)

    def _neighbours(self, pairs: Iterable[tuple[str, str]]) -> tuple[tuple[int, ...], ...]:
        position = {name: at for at, name in enumerate(self.ops)}
        neighbours: list[dict[int, None]] = [{} for _ in self.ops]
        for one, other in pairs:
            neighbours[position[one]][position[other]] = None
        return tuple(map(tuple, neighbours))

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """The ops that read, write or allocate each storage, or a part of it, in program order."""
        whole = {part: storage.name for storage in self.storages.values() for part in storage.parts}
        users: dict[str, list[str]] = {name: [] for name in self.storages}
        for op in self.ops.values():
            accessed = {*op.reads, *op.writes, *op.allocates}
            for name in {whole.get(name, name) for name in accessed} if whole else accessed:
                if name in users:
                    users[name].append(op.name)
        return {name: tuple(ops) for name, ops in users.items()}

    @cached_property
    def collectives(self) -> frozenset[str]:
        """Ops that communicate with other processes, without the waits for their results."""
        return frozenset(op.name for op in self.ops.values() if op.group)

    @cached_property
    def process_groups(self) -> tuple[str, ...]:
        """The names of the process groups of its collectives, sorted."""
        return tuple(sorted({op.group for op in self.ops.values()} - {""}))

    @cached_property
    def pinned(self) -> frozenset[str]:
        """Ops that must be on stream 0 in a run that is not captured.

        Those are ops of other devices, which run in launch order, and ops that allocate outputs: the caller may free
        outputs at any time, which is safe only on the caller's stream.
        """
        escaping = {name for name, storage in self.storages.items() if storage.escapes}
        return frozenset(
            op.name for op in self.ops.values() if op.device != self.device or not escaping.isdisjoint(op.allocates)
        )


@dataclass(frozen=True, slots=True)
class OpCost:
    """The duration of one op, and how much of the device it uses.

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
"""The cost of every op of a graph, by name."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The properties of a device that the cost model uses.

    An *edge* is the time from the end of a kernel to the start of one that depends on it, in a CUDA graph. Edges
    between streams grow with the number of streams in use: see :meth:`over`.

    Attributes:
        name: as the driver reports it, e.g. ``"NVIDIA H200"``.
        multiprocessors: SMs, or cores of a CPU.
        bandwidth: memory bandwidth that a large copy reaches, bytes per µs (4.2 TB/s is 4.2e6).
        flops: dtype name to operations per µs that a large product reaches (700 TFLOP/s is 700e6).
        kernel_us: the shortest time that a kernel takes, µs.
        same_stream_edge_us: edge within a stream, µs.
        cross_stream_edge_us: edge between streams if two are in use, µs.
        fork_us: extra cost of forking a side stream if two are in use, µs.
        join_us: extra cost of waiting for a side stream at the end if two are in use, µs.
        source: ``"table"``, ``"properties"`` or ``"measured"``.
        per_stream_us: what each further stream in use adds to an edge between streams, µs.
        dispatch_us: least time between the starts of two kernels of one CUDA graph, on any streams, µs.
        launch_us: least time between the starts of two kernels that the host launches without a graph, µs.
        replay_us: overhead of a replay of a CUDA graph besides its kernels, µs.
        cache_bytes: size of the last-level cache.
        link_bandwidth: bandwidth of a large copy between the device and pinned memory on the host, bytes per µs; by
            default that of PCIe 3.0.
        peer_bandwidth: bandwidth of a large copy from another device of this kind, bytes per µs.
        memory_bytes: size of its memory, 0 if that is not known.
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
    memory_bytes: int = 0

    def over(self, streams: int) -> DeviceProfile:
        """The device with the costs of edges between streams, forks and joins for so many streams in use.

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
    """A choice and its reason, as ``explain`` prints it; ``op`` is ``""`` for a decision about the whole schedule."""

    op: str
    choice: str
    reason: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """The stream of each op, and the order in which the host launches them.

    Attributes:
        policy: the policy's name.
        streams: number of streams used; stream 0 is the caller's.
        order: every op once, each after all ops that it depends on.
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
    """One step of a schedule: waits, then the launch of an op, then releases.

    Attributes:
        op: the op to launch.
        stream: its stream.
        waits: ops on other streams (or ``FORK``) for whose ends this stream waits first.
        releases: storages to return to the allocator afterwards.
    """

    op: str
    stream: int
    waits: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arena:
    """One block of memory that storages share, some of them using the same bytes one after another.

    Attributes:
        bytes: its size.
        offsets: the first byte of each storage in it; other storages are allocated one by one.
    """

    bytes: int = 0
    offsets: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Schedule:
    """A complete plan for a graph, which lowering carries out without further decisions.

    Attributes:
        policy: the policy that assigned streams.
        streams: number of streams; stream 0 is the caller's.
        launches: in the order in which the host issues them.
        join_waits: ops for whose ends stream 0 waits before the caller goes on.
        decisions: why.
        arena: the storages that share one block of memory.
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
        """The number of event waits in one run, including those of fork and join."""
        return sum(len(launch.waits) for launch in self.launches) + len(self.join_waits)


@dataclass(frozen=True, slots=True)
class Slice:
    """The start and end of one op on its stream, µs from the start of the run."""

    op: str
    stream: int
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each op runs, simulated or measured."""

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
    """A limit that excluded a candidate and that the user can raise."""

    BUDGET = "memory budget"
    DEVICE = "device memory"
    TIME = "tuning time"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule that was considered for a graph, with its predicted and measured costs.

    Attributes:
        schedule: the schedule.
        captured: whether it runs as a CUDA graph.
        predicted_us: makespan by the simulator, µs.
        measured_us: median time of one run on the device, µs, or ``None`` if not measured. Times of one program's
            candidates are scaled to the speed of the device in the last rounds that measured the best one.
        refusal: why it was not measured or cannot run, or ``""``.
        limit: the limit that excluded it, if the user can raise that.
        memory_bytes: the most that the schedule allocates at a time, without libraries' workspaces.
        incomplete: whether it needs more than ``memory_bytes``: planning stops once the memory budget is exceeded.
    """

    schedule: Schedule
    captured: bool
    predicted_us: float
    measured_us: float | None = None
    refusal: str = ""
    limit: Limit | None = None
    memory_bytes: int = 0
    incomplete: bool = False
