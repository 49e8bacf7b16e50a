"""Gradients that kernels write into their bucket: which ones are, and that nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autostream.analysis.dependencies import analyze
from autostream.frontend.data_parallel import DataParallel
from autostream.fusion.buckets import write_into_buckets
from autostream.fusion.collectives import functional_collectives
from autostream.fusion.kernel_json import from_json, to_json
from autostream.fusion.kernel_values import evaluate
from autostream.ir import Placeholder, Program, Role
from autostream.utils.kernels import Kernel

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
CAT, COPY = torch.ops.prims.cat.default, aten._foreach_copy_.default
VIEW = torch.ops.inductor._reinterpret_tensor.default
SIZE = 64
"""Elements of the argument."""


class Backward:
    """Builds a graph of kernels that compute gradients from one argument."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self._factors = iter(range(2, 1000))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def taken(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype = torch.float32) -> fx.Node:
        """Uninitialized memory."""
        options = {"dtype": dtype, "device": torch.device("cpu")}
        return self.call(aten.empty_strided.default, list(size), list(stride), **options)

    def write(self, memory: fx.Node) -> None:
        """A kernel that writes it."""
        factor = next(self._factors)

        def launch(x: Tensor, out: Tensor) -> None:
            out.copy_(torch.arange(out.numel()).reshape(out.shape) * factor + x.sum())

        recipe = {"factor": factor}
        self.call(Kernel(f"times_{factor}", launch, frozenset({1}), frozenset({1}), recipe=recipe), self.x, memory)

    def gradient(self, *size: int) -> fx.Node:
        """Memory that a kernel has written."""
        memory = self.taken(size, torch.empty(size, device="meta").stride())
        self.write(memory)
        return memory

    def flat(self, memory: fx.Node, size: int, offset: int = 0) -> fx.Node:
        """A view of one dimension."""
        return self.call(VIEW, memory, [size], [1], offset)

    def bucket(self, *flat: fx.Node) -> fx.Node:
        """What is reduced."""
        return self.call(CAT, list(flat), 0)

    def module(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(tuple(results))
        module = fx.GraphModule(nn.Module(), self.graph)
        with FakeTensorMode() as mode:
            evaluate(module, [mode.from_tensor(torch.empty(SIZE))])
        return module


def written(backward: Backward, *results: fx.Node) -> tuple[list[str], list[str]]:
    """The allocations that become parts, and the sources that are copied; the results have to stay the same."""
    module = backward.module(*results)
    x = torch.rand(SIZE)
    expected = [result.clone() for result in module(x)]
    allocated = {node.name for node in module.graph.find_nodes(op="call_function", target=aten.empty_strided.default)}
    write_into_buckets(module)
    module.graph.lint()
    assert all(map(torch.equal, module(x), expected))
    assert not module.graph.find_nodes(op="call_function", target=CAT)
    parts = [node.name for node in module.graph.nodes if node.target is VIEW and node.name in allocated]
    copies = module.graph.find_nodes(op="call_function", target=COPY)
    return parts, [source.name for copy in copies for source in copy.args[1]]


def test_gradients_become_parts_and_nothing_is_copied() -> None:
    backward = Backward()
    product, bias = backward.gradient(4, 8), backward.gradient(1, 8)
    transposed = backward.taken([4, 4], [1, 4])  # in the order of the bucket all the same
    backward.write(transposed)
    flats = [backward.flat(memory, size) for memory, size in ((product, 32), (bias, 8), (transposed, 16))]
    bucket = backward.bucket(*flats)
    parts, copied = written(backward, bucket)
    assert (parts, copied) == ([product.name, bias.name, transposed.name], [])
    (memory,) = backward.graph.find_nodes(op="call_function", target=aten.empty_strided.default)
    assert memory.name == bucket.name
    strides = {node.name: node.meta["val"].stride() for node in backward.graph.nodes if node.name in parts}
    assert strides == {product.name: (8, 1), bias.name: (8, 1), transposed.name: (1, 4)}
    assert not [node for node in backward.graph.nodes if node.target is VIEW and not node.users], "views for nothing"


def by_an_operator(backward: Backward) -> tuple[fx.Node, ...]:
    return (backward.call(aten.mul.Tensor, backward.x, 3),)


def an_argument(backward: Backward) -> tuple[fx.Node, ...]:
    return (backward.x,)


def an_output(backward: Backward) -> tuple[fx.Node, ...]:
    memory = backward.gradient(64)
    return memory, memory


def a_view_is_an_output(backward: Backward) -> tuple[fx.Node, ...]:
    memory = backward.gradient(8, 8)
    return backward.flat(memory, SIZE), backward.flat(memory, 8)


def half_of_an_allocation(backward: Backward) -> tuple[fx.Node, ...]:
    return (backward.flat(backward.gradient(128), 64, 64),)


def strided(backward: Backward) -> tuple[fx.Node, ...]:
    return (backward.call(VIEW, backward.gradient(128), [64], [2], 0),)


def repeated(backward: Backward) -> tuple[fx.Node, ...]:
    return (backward.call(VIEW, backward.gradient(64), [64], [0], 0),)


def of_another_dtype(backward: Backward) -> tuple[fx.Node, ...]:
    memory = backward.taken([64], [1], torch.int32)
    backward.write(memory)
    return (backward.call(aten.view.dtype, memory, torch.float32),)


@pytest.mark.parametrize(
    "make",
    [
        by_an_operator,
        an_argument,
        an_output,
        a_view_is_an_output,
        half_of_an_allocation,
        strided,
        repeated,
        of_another_dtype,
    ],
)
def test_what_cannot_be_a_part_is_copied_and_the_others_are_parts(
    make: Callable[[Backward], tuple[fx.Node, ...]],
) -> None:
    backward = Backward()
    before, empty = backward.gradient(16), backward.gradient(0)
    source, *more = make(backward)
    after = backward.gradient(32)
    bucket = backward.bucket(before, empty, source, after)
    assert written(backward, bucket, *more) == ([before.name, after.name], [source.name])


def test_a_gradient_that_is_used_later_is_copied() -> None:
    backward = Backward()
    early, late, updated = (backward.gradient(8) for _ in range(3))
    norm = backward.call(aten.sum.default, early)  # before the bucket is full
    bucket = backward.bucket(early, late, updated)
    twice = backward.call(aten.mul.Tensor, late, 2)
    backward.write(backward.call(VIEW, updated, [2, 4], [4, 1], 0))  # through a view
    assert written(backward, bucket, norm, twice) == ([early.name], [late.name, updated.name])


def test_one_place_of_a_gradient_that_has_two_is_copied() -> None:
    backward = Backward()
    memory, other = backward.gradient(8), backward.gradient(8)
    twice = backward.bucket(memory, other, memory)
    assert written(backward, twice) == ([memory.name, other.name], [memory.name])
    backward = Backward()
    shared, own = backward.gradient(8), backward.gradient(8)
    first, last = backward.bucket(own, shared), backward.bucket(shared)
    assert written(backward, first, last) == ([shared.name, own.name], [shared.name]), "a part of the last bucket"


@pytest.mark.parametrize(("size", "aligned"), [(1, False), (3, False), (4, True), (0, True)])
def test_parts_lie_at_multiples_of_sixteen_bytes(size: int, aligned: bool) -> None:
    backward = Backward()
    first, second = backward.gradient(size), backward.gradient(8)
    parts, copied = written(backward, backward.bucket(first, second))
    assert (second.name in parts, second.name in copied) == (aligned, not aligned)


@pytest.mark.parametrize("count", [256, 257])
def test_kernels_that_write_parts_do_not_wait_for_each_other(count: int) -> None:
    """More than a storage has parts are copied."""
    backward = Backward()
    gradients = [backward.gradient(4) for _ in range(count)]
    bucket = backward.bucket(*gradients)
    backward.call(c10d.all_reduce_.default, bucket, "avg", "0")
    backward.call(c10d.wait_tensor.default, bucket)
    module = backward.module(backward.call(aten.mul.Tensor, bucket, 2))
    write_into_buckets(module)
    graph = analyze(program_of(module))
    kernels = {node.name for node in module.graph.nodes if isinstance(node.target, Kernel)}
    assert len(kernels) == count
    assert not {dependency for dependency in graph.dependencies if dependency.after in kernels}
    (reduced,) = graph.collectives
    before = {dependency.before for dependency in graph.dependencies if dependency.after == reduced}
    copies = {node.name for node in module.graph.find_nodes(op="call_function", target=COPY)}
    assert before == (copies or kernels)
    assert bool(copies) == (count > 256)


def program_of(module: fx.GraphModule) -> Program:
    (result,) = module.graph.output_node().args[0]  # type: ignore[misc]
    placeholders = (Placeholder("x", Role.INPUT, "0", "x"),)
    return Program(module, placeholders, (result.name,), "inductor", "cpu")  # type: ignore[union-attr]


def test_the_graph_is_the_same_when_it_is_read_from_disk() -> None:
    backward = Backward()
    sources = [backward.gradient(8), backward.call(aten.mul.Tensor, backward.x, 3)]
    module = backward.module(backward.bucket(*sources))
    write_into_buckets(module)
    program = program_of(module)
    kernels = {node.target.__name__: node.target for node in module.graph.nodes if isinstance(node.target, Kernel)}
    data = json.loads(json.dumps(to_json(module, program)))
    again = from_json(data, program, lambda name, recipe: kernels[name])
    with FakeTensorMode() as mode:
        evaluate(again, [mode.from_tensor(torch.empty(SIZE))])
    assert again.code == module.code
    ours, theirs = (analyze(replace(program, module=each)) for each in (again, module))
    assert (ours.ops, ours.storages) == (theirs.ops, theirs.storages)


KINDS = [
    *(by_an_operator, an_argument, an_output, a_view_is_an_output),
    *(half_of_an_allocation, strided, repeated, of_another_dtype),
]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_buckets_hold_the_same_and_few_gradients_are_copied(data: st.DataObject) -> None:
    backward = Backward()
    sources, results = list[fx.Node](), list[fx.Node]()
    for kind in data.draw(st.lists(st.sampled_from([*KINDS, None]), min_size=1, max_size=6)):
        if kind is None:
            sources.append(backward.gradient(data.draw(st.integers(0, 9))))
        else:
            source, *more = kind(backward)
            sources.append(source)
            results += more
    for _ in range(data.draw(st.integers(1, 3))):
        results.append(backward.bucket(*data.draw(st.lists(st.sampled_from(sources), min_size=1, max_size=6))))
    if data.draw(st.booleans()):
        results.append(backward.call(aten.sum.default, data.draw(st.sampled_from(sources))))
    written(backward, *results)


# What TorchInductor is given


def test_what_fills_a_bucket_is_an_op_that_is_not_fused() -> None:
    """Unless something else comes between it and the collective, or it is no flat concatenation."""
    parameters = [torch.ones(2, 3), torch.ones(3)]
    assert filling(lambda *grads: DataParallel("0", 2, True).averages(grads, parameters), *parameters) == [CAT]
    assert filling(lambda *grads: DataParallel("0", 2).averages(grads, parameters), *parameters) == [aten.cat.default]

    def rows(*grads: Tensor) -> list[Tensor]:
        return [c10d.wait_tensor(c10d.all_reduce_(torch.cat(grads), "sum", "0"))]

    assert filling(rows, torch.ones(2, 3), torch.ones(1, 3)) == [aten.cat.default]
    assert filling(rows, torch.ones(3), torch.ones(2).double()) == [aten.cat.default]


def filling(reduce: Callable[..., list[Tensor]], *grads: Tensor) -> list[Any]:
    """What concatenates gradients for a reduction that is written like this."""
    module = functional_collectives(make_fx(reduce, tracing_mode="fake")(*grads))
    return [node.target for node in module.graph.nodes if node.target in (CAT, aten.cat.default)]


def test_inductor_keeps_what_fills_a_bucket() -> None:
    """It has neither a decomposition nor a lowering of its own; what it has once it has kept one is a fallback."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import fallbacks, lowerings

    assert CAT not in select_decomp_table()
    assert CAT not in lowerings or CAT in fallbacks
