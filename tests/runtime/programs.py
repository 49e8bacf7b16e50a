"""Small models, traced and analysed, and random schedules of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from autostream.analysis.dependencies import analyze
from autostream.frontend.trace import trace
from autostream.fusion.kernel_values import evaluate
from autostream.ir import Assignment, Launch, OpGraph, Placeholder, Program, Role, Schedule
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from autostream.utils.kernels import Kernel
from tests.steps import program_of

Launches = Sequence[Launch]


@dataclass(frozen=True)
class Case:
    """A traced model, and the tensors that it was traced with in the order of its placeholders."""

    program: Program
    graph: OpGraph
    tensors: tuple[Tensor, ...]

    def args(self) -> list[Tensor]:
        """Copies of the tensors, for one run to write to."""
        return [tensor.detach().clone() for tensor in self.tensors]

    def expected(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Results of the ops in program order, and the arguments afterwards."""
        args = self.args()
        with torch.no_grad():
            return self.program.module(*args), args


def case_of(model: nn.Module | Callable[..., object], *inputs: Tensor) -> Case:
    """Trace a model, or a function of tensors, and analyse it."""
    module = model if isinstance(model, nn.Module) else _Function(model)
    traced = trace(module, inputs)
    return Case(traced.program, analyze(traced.program), tuple(traced.arguments(module, inputs)))


def step_case() -> Case:
    """A training step of two towers, one of them with batch norm, with momentum.

    x ─┬▶ linear ─▶ norm ─▶ tanh ─╮              ╭▶ gradients ─▶ momentum ─▶ weights, each for itself
       ╰▶ linear ─▶ sigmoid ──────┴▶ add ─▶ loss ┴▶ …
    """
    left = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
    right = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid())
    model = nn.ModuleList([left, right])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(6, 3), torch.randn(6, 4)

    def loss(towers: Any, x: Tensor, y: Tensor) -> Tensor:
        return (towers[0](x) + towers[1](x) - y).square().mean()  # type: ignore[no-any-return]

    program, tensors = program_of(model, optimizer, loss, batch)
    return Case(program, analyze(program), tuple(tensors))


def fused_case() -> Case:
    """Branches and a running mean, as TorchInductor writes them: kernels write to memory allocated before.

    x ─▶ mm ─▶ mm ─▶ relu ──▶ left half  ─╮
    │                                     ├▶ sum ─▶ scaled by what the norm has learnt
    ├──▶ mm ─▶ mm ─▶ sin ───▶ right half ─╯                 ▲
    ╰──▶ learn (writes mean) ───────────────────────────────╯
    """
    rows, width = 4, 6
    left_w, right_w = (torch.randn(width, width) for _ in range(2))  # the branches compute different things
    kernels = Kernels({"x": torch.randn(rows, width), "w": left_w, "v": right_w, "mean": torch.randn(width)})
    x, w, v, mean = kernels.arguments

    def multiplied(value: fx.Node, by: fx.Node) -> fx.Node:
        product = kernels.taken(rows, width)
        kernels.graph.call_function(torch.ops.aten.mm.out, (value, by), {"out": product})
        return product

    one, other = multiplied(multiplied(x, w), w), multiplied(multiplied(x, v), v)
    both = kernels.taken(rows, 2 * width)
    left, right = kernels.columns(both, 0, width), kernels.columns(both, width, 2 * width)
    kernels.launch("relu", lambda value, out: out.copy_(value.relu()), one, left)
    kernels.launch("sin", lambda value, out: torch.sin(value, out=out), other, right)
    kernels.launch("learn", lambda value, out: out.mul_(0.9).add_(value.mean(0)), x, mean, reads_too=True)
    total, result = kernels.taken(rows), kernels.taken(rows, width)
    kernels.launch("sum", lambda value, out: torch.sum(value, 1, out=out), both, total)
    kernels.launch("scale", lambda value, by, out: torch.mul(value[:, None], by, out=out), total, mean, result)
    return kernels.case(result, Role.INPUT, Role.PARAMETER, Role.PARAMETER, Role.BUFFER)


def sliced_case() -> Case:
    """Branches that write columns of one matrix, some of which are read or updated before all are written.

    x ─▶ stem ─┬▶ sin ──▶ left ──▶ scale (in place) ─╮
               ├▶ cos ──▶ middle ────────────────────┼▶ total ─▶ mix
               ╰▶ exp ──▶ right ─┬───────────────────╯            ▲
                                 ╰▶ square ───────────────────────╯
    """
    rows, width = 4, 3
    kernels = Kernels({"x": torch.randn(rows, width)})
    (x,) = kernels.arguments
    stem = kernels.taken(rows, width)
    kernels.launch("stem", lambda value, out: torch.mul(value, 2, out=out), x, stem)
    matrix = kernels.taken(rows, 3 * width)
    for at, function in enumerate((torch.sin, torch.cos, torch.exp)):
        # Inductor makes a view right before the kernel that writes it.
        columns = kernels.columns(matrix, at * width, (at + 1) * width)
        kernels.launch(function.__name__, lambda value, out, f=function: f(value, out=out), stem, columns)
    kernels.launch("scale", lambda out: out.mul_(3), kernels.columns(matrix, 0, width), reads_too=True)
    squares, total, result = kernels.taken(rows, width), kernels.taken(rows), kernels.taken(rows, width)
    right = kernels.columns(matrix, 2 * width, 3 * width)
    kernels.launch("square", lambda value, out: torch.square(value, out=out), right, squares)
    kernels.launch("total", lambda value, out: torch.sum(value, 1, out=out), matrix, total)
    kernels.launch("mix", lambda value, by, out: torch.mul(value[:, None], by, out=out), total, squares, result)
    return kernels.case(result, Role.INPUT)


class Kernels:
    """Builds a program of kernels; all of its tensors have one dtype.

    Attributes:
        arguments: the nodes of the program's arguments.
        graph: the nodes so far.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.graph = fx.Graph()
        self.arguments = tuple(map(self.graph.placeholder, inputs))
        self._inputs = inputs
        (self._dtype,) = {tensor.dtype for tensor in inputs.values()}

    def taken(self, *shape: int) -> fx.Node:
        """Uninitialized memory."""
        strides = torch.empty(shape, device="meta").stride()
        options = {"dtype": self._dtype, "device": torch.device("cpu")}
        return self.graph.call_function(torch.ops.aten.empty_strided.default, (list(shape), list(strides)), options)

    def columns(self, matrix: fx.Node, start: int, end: int) -> fx.Node:
        """A view of some columns of a matrix."""
        rows, width = matrix.args[0]  # type: ignore[misc]
        args = (matrix, [rows, end - start], [width, 1], start)
        return self.graph.call_function(torch.ops.inductor._reinterpret_tensor.default, args)

    def launch(
        self, name: str, function: Callable[..., object], *args: object, reads_too: bool = False, written: int = 1
    ) -> None:
        """A kernel that writes its last argument, or as many of the last ones as ``written`` says."""
        last = frozenset(range(len(args) - written, len(args)))
        self.graph.call_function(Kernel(name, function, last, frozenset() if reads_too else last), args)

    def case(self, result: fx.Node, *roles: Role) -> Case:
        """The program that returns this."""
        self.graph.output((result,))
        module = fx.GraphModule(nn.Module(), self.graph)
        with FakeTensorMode() as mode:
            evaluate(module, [mode.from_tensor(tensor) for tensor in self._inputs.values()])
        placeholders = tuple(
            Placeholder(name, role, name, name) for name, role in zip(self._inputs, roles, strict=True)
        )
        program = Program(module, placeholders, (result.name,), "inductor", "cpu")
        return Case(program, analyze(program), tuple(self._inputs.values()))


def schedule_of(launches: Launches, join_waits: Sequence[str] = ()) -> Schedule:
    """A schedule by hand."""
    return Schedule("by hand", max(launch.stream for launch in launches) + 1, tuple(launches), tuple(join_waits))


def random_schedule(graph: OpGraph, streams: int, seed: int) -> Schedule:
    """A correct schedule: a random topological order and random streams, except for pinned ops; waits and releases."""
    return place_releases(graph, synchronize(graph, random_assignment(graph, graph.pinned, streams, Random(seed))))


def random_assignment(graph: OpGraph, pinned: Collection[str], streams: int, choose: Random) -> Assignment:
    """A random topological order, and random streams, except for pinned ops."""
    missing = {name: graph.digraph.in_degree(name) for name in graph.ops}
    order: list[str] = []
    while len(order) < len(missing):
        name = choose.choice([name for name, count in missing.items() if count == 0 and name not in order])
        order.append(name)
        for after in graph.digraph.successors(name):
            missing[after] -= 1
    stream = {name: 0 if name in pinned else choose.randrange(streams) for name in order}
    return Assignment("random", streams, tuple(order), stream)


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether tensors are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class _Function(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: Tensor) -> object:
        return self._function(*tensors)


class Towers(nn.Module):
    """Towers of linear layers on one input, added up."""

    def __init__(self, towers: int = 3, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
            for _ in range(towers)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([tower(x) for tower in self.towers]).sum(0)


class Inception(nn.Module):
    """Four branches over one input, as in GoogLeNet, with batch norms in training mode."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.stem = self._block(channels, 1)
        self.one = self._block(channels, 1)
        self.three = nn.Sequential(self._block(channels, 1), self._block(channels, 3))
        self.five = nn.Sequential(self._block(channels, 1), self._block(channels, 3))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), self._block(channels, 1))

    @staticmethod
    def _block(channels: int, size: int) -> nn.Module:
        convolution = nn.Conv2d(channels, channels, size, padding=size // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


class Normalized(nn.Module):
    """Two branches through one batch norm in training mode: three buffers are written twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.sin()) + self.norm(x.cos())


def in_place(x: Tensor) -> Tensor:
    """Reads and writes of one storage in turn, through itself and through views."""
    a = x + 1
    b = a.sin()
    a.mul_(2)
    c = a.cos()
    half = a[:2]
    half.add_(b[2:])
    d = a.exp()
    return b + c * d


def views(x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of intermediates and of inputs, of which one is returned."""
    left, right = (x * 3).split(2)
    turned = x.t()
    product = left @ turned[:, :2]
    return product.relu(), (right + 1).view(-1)


def several(x: Tensor) -> Tensor:
    """Ops of several results, some unused; integers and booleans."""
    values, indices = x.max(1)
    order = x.argsort(0)
    mean = torch.var_mean(x, 0)[1]
    mask = x > 0
    chosen = torch.where(mask, x, -x).gather(0, order)
    return chosen.sum(1) + values * indices + mean.sum()


def aliased(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Writes an input, and returns it."""
    z = x * y
    x.add_(z.sin())
    return x, z + y


MODELS: Mapping[str, tuple[Callable[[], nn.Module | Callable[..., object]], Sequence[tuple[int, ...]]]] = {
    "towers": (Towers, [(2, 8)]),
    "normalized": (Normalized, [(6, 4)]),
    "in_place": (lambda: in_place, [(4, 4)]),
    "views": (lambda: views, [(4, 4)]),
    "several": (lambda: several, [(4, 4)]),
    "aliased": (lambda: aliased, [(4, 4), (4, 4)]),
}
"""The models above, by name, with the shapes of their inputs."""


@cache
def sample(name: str) -> Case:
    """One of ``MODELS``, traced."""
    torch.manual_seed(0)
    model, shapes = MODELS[name]
    return case_of(model(), *map(torch.randn, shapes))
