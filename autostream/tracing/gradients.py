"""A model's forward and its backward, traced together with ``make_fx`` below autograd, and taken apart.

    state, inputs ──▶ forward ──▶ outputs
          │              │ saved
          ▼              ▼
    tangents ──▶ backward ──▶ gradients of what of the state and the inputs requires some

Both have the very ops that eager calls dispatch, in their order: what autograd computes in a backward, such as a part
of the model that is checkpointed, is computed there. Saved are values in between; views are made of them again, and
numbers asked of them again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.func import functional_call

from autostream.errors import TraceError
from autostream.excerpt import excerpt
from autostream.frontend.tree import TENSOR, Structure
from autostream.ir import Placeholder, Role
from autostream.operators import is_unknown, written_arguments
from autostream.storages import storage_of
from autostream.tracing.below_autograd import graph_of, reached_originals, state_of, tidied
from autostream.tracing.constants import names_given, registered
from autostream.tracing.export import Traced, check_one_device, ordinary, program_of
from autostream.tracing.flat import FlatModel, check_ordinary, tensors_in
from autostream.tracing.lines import keep_lines
from autostream.tracing.replica import replica, traced_apart
from autostream.tracing.state import name_of


@dataclass(frozen=True, slots=True)
class Tangent:
    """How the gradient of an output comes to the backward."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(value: Tensor) -> Tangent:
        """What this tensor is."""
        return Tangent(tuple(value.shape), value.stride(), value.dtype, value.device)

    def laid_out(self, gradient: Tensor | None) -> Tensor:
        """A gradient so: what is expanded, as that of a sum is, is written out; ``None``, of an unused output, is zero.

        Example:
            >>> Tangent((2,), (1,), torch.float32, torch.device("cpu")).laid_out(torch.ones(()).expand(2)).stride()
            (1,)
        """
        if gradient is None:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).zero_()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if gradient.stride() == self.strides:
            return gradient
        return gradient.new_empty_strided(self.shape, self.strides).copy_(gradient)


@dataclass(frozen=True, slots=True)
class Halves:
    """A differentiable call, taken apart. *Values* are the model's parameters and buffers, then the flat inputs.

    Attributes:
        forward: returns the outputs, flat, then what else is saved.
        saved: the places of what is saved among what ``forward`` returns.
        backward: makes, for the places of what is saved in some order, a graph that takes values, what is saved in that
            order, and tangents; it returns gradients.
        structure: of the model's outputs.
        tangents: how those of each output come; ``None`` for outputs that have none.
        parents: for each output, the positions of those with gradients that it is computed from, in the order in which
            they are computed.
        sources: for each of the gradients, the positions of the outputs whose tangents it depends on.
        state: what parameters and buffers there are.
        needed: positions of the values that ``backward`` takes.
        trained: positions of the values that it returns gradients of.
    """

    forward: Traced
    saved: tuple[int, ...]
    backward: Callable[[Sequence[int]], fx.GraphModule]
    structure: Structure
    tangents: tuple[Tangent | None, ...]
    parents: tuple[tuple[int, ...], ...]
    sources: tuple[frozenset[int], ...]
    state: tuple[Placeholder, ...]
    needed: tuple[int, ...]
    trained: tuple[int, ...]


def trace_gradients(
    model: nn.Module, tensors: Sequence[Tensor], structure: Structure, bound_inputs: Set[int] = frozenset()
) -> Halves:
    """Trace a call that records gradients, and its backward, without computing anything or changing a tensor.

    Args:
        model: any module.
        tensors: the flat tensors of its arguments.
        structure: the structure of ``(args, kwargs)`` that they were taken from.
        bound_inputs: positions of inputs that stay where they are from call to call: like the model's own state, they
            may be written.

    Raises:
        TraceError: it cannot be traced; the message says why.
    """
    check_ordinary(model)
    joint = traced_apart(
        model,
        replica(model),
        lambda own: _joint(own, model, tensors, structure),
        lambda found: reached_originals(found.module, model),
    )
    return _taken_apart(joint, model, tensors, bound_inputs)


@dataclass(frozen=True, slots=True)
class _Joint:
    """Both halves in one graph, that returns outputs, then the nodes that stand for tangents, then gradients."""

    module: fx.GraphModule
    structure: Structure
    outputs: int
    differentiable: tuple[bool, ...]
    trained: tuple[int, ...]


class _ThereAndBack(nn.Module):
    """A flat model, and what is done with its outputs while its state is still what was given: a backward may ask."""

    def __init__(self, flat: FlatModel, back: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
        super().__init__()
        self.flat = flat
        self._back = back

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        with torch.enable_grad(), torch.autograd.set_detect_anomaly(True, check_nan=False):  # it keeps the user's lines
            return self._back(self.flat(*inputs))


def _joint(twin: nn.Module, model: nn.Module, tensors: Sequence[Tensor], structure: Structure) -> _Joint:
    state = state_of(model)
    with torch.no_grad():  # whether gradients are recorded the model may ask: they are
        flat = FlatModel(twin, structure, registered(model), "make_fx", names=names_given([*state.values(), *tensors]))
    names = [f"flat.model.{name}" for name in state]
    differentiable: list[bool] = []
    trained: list[int] = []

    def run(*values: Tensor) -> list[Tensor]:
        def back(outputs: Sequence[Tensor]) -> list[Tensor]:
            _check_outputs(outputs, values)
            differentiable[:] = [output.requires_grad for output in outputs]
            results = list(compress(outputs, differentiable))
            for result in results:
                keep_lines(result)
            tangents = [torch.empty_like(result, requires_grad=False) for result in results]
            wanted = [at for at, value in enumerate(values) if value.requires_grad]
            with flat.watched_generators(), _uncast():  # what is checkpointed draws again, and casts again by itself
                found = torch.autograd.grad(results, [values[at] for at in wanted], tangents, allow_unused=True)
            trained[:] = [at for at, gradient in zip(wanted, found, strict=True) if gradient is not None]
            gradients = [gradient for gradient in found if gradient is not None]
            if any(gradient.layout is not torch.strided for gradient in gradients):
                raise TraceError("a gradient is sparse")
            return [*outputs, *tangents, *gradients]

        held = dict(zip(names, values, strict=False))
        together: list[Tensor] = functional_call(_ThereAndBack(flat, back), held, values[len(names) :])
        return together

    stand_ins = zip(ordinary(tensors), tensors, strict=True)
    inputs = [own.detach().requires_grad_(tensor.requires_grad) for own, tensor in stand_ins]
    module = graph_of(run, {}, flat, [*state.values(), *inputs])
    return _Joint(module, flat.result.structure, len(differentiable), tuple(differentiable), tuple(trained))


@contextmanager
def _uncast() -> Iterator[None]:
    """No autocast inside: users go back outside of it."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


def _check_outputs(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """See that outputs lie in memory of their own: autograd would treat them as views of what else is there.

    Raises:
        TraceError: one does not, or none has a gradient.
    """
    if not any(output.requires_grad for output in outputs):
        raise TraceError("no output depends on what requires gradients")
    storages = list(map(storage_of, outputs))
    if len(set(storages)) < len(storages) or not set(storages).isdisjoint(map(storage_of, values)):
        raise TraceError(
            "an output shares memory with an input, a weight or another output, and gradients are recorded"
        )


def _taken_apart(joint: _Joint, model: nn.Module, tensors: Sequence[Tensor], bound_inputs: Set[int]) -> Halves:
    graph = joint.module.graph
    _ask_copies(graph)
    placeholders = list(graph.find_nodes(op="placeholder"))
    results: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    count = sum(joint.differentiable)
    outputs = results[: joint.outputs]
    tangents = results[joint.outputs : joint.outputs + count]
    gradients = results[joint.outputs + count :]
    nodes = list(graph.nodes)
    end = min(map(nodes.index, tangents))
    first, second = nodes[:end], [node for node in nodes[end:-1] if node not in tangents]
    crossing = {node for user in second for node in user.all_input_nodes}.union(gradients).intersection(first)
    bases, views = _origins(crossing)
    saved = [node for node in first if node in bases and node.op != "placeholder"]
    _check_saved(saved, outputs)
    _check_tangents(tangents)
    needed = [at for at, node in enumerate(placeholders) if node in bases]
    left = [*outputs, *(node for node in saved if node not in outputs)]
    forward = _graph(joint.module, "Forward", [], first, left)
    bound = [placeholders[at] for at in needed]
    seen = [node for node in first if node in views]

    def backward(order: Sequence[int]) -> fx.GraphModule:
        given = [*bound, *(left[place] for place in order), *tangents]
        return _graph(joint.module, f"{name_of(model)}Backward", given, [*seen, *second], gradients)

    roles = tidied(forward, model, tensors)
    program = program_of(forward, roles)
    check_one_device(program)
    passing = [p for p in roles if p.role is Role.INPUT and int(p.target) not in bound_inputs]
    if written := [p.target for p in passing if _is_written(forward, p.name)]:
        raise TraceError(f"the model writes to its input {written[0]}, and gradients are recorded")
    places = list(compress(range(joint.outputs), joint.differentiable))
    sources = _sources(second, dict(zip(tangents, places, strict=True)))
    layouts = iter([Tangent.of(node.meta["val"]) for node in tangents])
    return Halves(
        forward=Traced(program, Structure(list, None, (TENSOR,) * len(left)), {}),
        saved=tuple(map(left.index, saved)),
        backward=backward,
        structure=joint.structure,
        tangents=tuple(next(layouts) if has else None for has in joint.differentiable),
        parents=_parents(first, outputs, joint.differentiable),
        sources=tuple(sources[storage_of(gradient.meta["val"])] or frozenset(places) for gradient in gradients),
        state=tuple(Placeholder(name, Role.BUFFER, name, name) for name in state_of(model)),
        needed=tuple(needed),
        trained=joint.trained,
    )


def _parents(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], differentiable: Sequence[bool]
) -> tuple[tuple[int, ...], ...]:
    """For each output that has gradients, those others that a way leads from."""
    places = {node: at for at, node in enumerate(outputs) if differentiable[at]}
    ways = dict[fx.Node, frozenset[int]]()
    for node in nodes:
        ways[node] = frozenset[int]().union(*(ways[argument] for argument in node.all_input_nodes))
        if node in places:
            ways[node] |= {places[node]}
    order = [places[node] for node in nodes if node in places]
    return tuple(
        tuple(place for place in order if place in ways[node] and place != at) if differentiable[at] else ()
        for at, node in enumerate(outputs)
    )


def _ask_copies(graph: fx.Graph) -> None:
    """Have numbers asked of copies: a backward asks again, and by then others may have written to what was asked."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
        (asked,) = node.all_input_nodes
        with graph.inserting_before(node):
            copy = graph.call_function(torch.ops.aten.clone.default, (asked,))
        copy.meta = {**node.meta, "val": asked.meta["val"].clone()}
        node.replace_input_with(asked, copy)


def _sources(nodes: Sequence[fx.Node], tangents: Mapping[fx.Node, int]) -> Mapping[Hashable, frozenset[int]]:
    """For each storage, what was computed into it by these nodes depends on: the numbers of tangents."""
    found = defaultdict[Hashable, frozenset[int]](frozenset)
    found.update((storage_of(node.meta["val"]), frozenset([number])) for node, number in tangents.items())
    for node in nodes:
        taken = map(storage_of, chain.from_iterable(_tensors(argument) for argument in node.all_input_nodes))
        sources = frozenset[int]().union(*(found[storage] for storage in taken))
        for tensor in chain(_tensors(node), *map(_tensors, _written(node))):
            found[storage_of(tensor)] |= sources
    return found


def _tensors(node: fx.Node) -> list[Tensor]:
    return tensors_in(node.meta.get("val"))


def _check_saved(saved: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
    """See that what is saved are tensors, and that whoever writes to an output is found by autograd.

    Raises:
        TraceError: one is none, or none of a size that is known, or shares memory with an output and is not that
            output.
    """
    if any(not isinstance(node.meta.get("val"), Tensor) for node in saved):
        raise TraceError("its backward needs what is no tensor")
    if any(not isinstance(size, int) for node in saved for size in node.meta["val"].shape):
        raise TraceError("its backward needs a tensor whose shape depends on data: each new one would be traced anew")
    storages = {storage_of(node.meta["val"]) for node in saved if node not in outputs}
    if any(storage_of(node.meta["val"]) in storages for node in outputs):
        raise TraceError("an output shares memory with what its backward needs")


def _check_tangents(tangents: Sequence[fx.Node]) -> None:
    """See that gradients of outputs come in one layout, which they are brought into.

    Raises:
        TraceError: one has none that is known.
    """
    for node in tangents:
        value = node.meta["val"]
        if any(not isinstance(number, int) for number in (*value.shape, *value.stride())):
            raise TraceError("the shape of an output depends on data, and gradients are recorded")


def _origins(nodes: Iterable[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """What these are views of, and numbers of; and those views and numbers, which a backward makes once more."""
    origins, made, pending = set[fx.Node](), set[fx.Node](), list(nodes)
    for node in pending:
        if not (_is_view(node) or is_unknown(node.meta.get("val"))):
            origins.add(node)
        elif node not in made:
            made.add(node)
            pending += node.all_input_nodes
    return origins, made


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view and len(node.all_input_nodes) == 1


def _graph(
    module: fx.GraphModule, name: str, given: Sequence[fx.Node], nodes: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    """A part of a graph, as a module."""
    return fx.GraphModule(module, excerpt(fx.Graph(), given, nodes, results), name)


def _is_written(module: fx.GraphModule, name: str) -> bool:
    """Whether a graph writes to a placeholder, or to a view of it."""
    pending = [node for node in module.graph.find_nodes(op="placeholder") if node.name == name]
    for node in pending:
        for user in node.users:
            if node in _written(user):
                return True
            if isinstance(user.target, OpOverload) and user.target.is_view:
                pending.append(user)
    return False


def _written(node: fx.Node) -> list[fx.Node]:
    return written_arguments(node, node.target) if isinstance(node.target, OpOverload) else []
