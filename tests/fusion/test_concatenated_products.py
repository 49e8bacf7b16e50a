"""Products that are flattened and concatenated are written to their place; all else Inductor does as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ConcatKernel, ExternKernelOut, NonOwningLayout
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autostream.fusion.concatenated_products import products_in_place
from autostream.fusion.inductor import with_settings

X, Y = torch.randn(8, 16, dtype=torch.float64), torch.randn(16, 32, dtype=torch.float64)
COUNT = 8 * 32
"""Elements of their product."""


def places(program: Callable[..., object], *inputs: Tensor) -> list[int | None]:
    """Where Inductor writes each product of a program in the concatenation, in elements; ``None`` if elsewhere."""
    module = make_fx(program, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    fake_mode = FakeTensorMode()
    fakes = [fake_mode.from_tensor(each) for each in inputs]
    graph = GraphLowering(module, example_inputs=fakes)
    with with_settings({}), products_in_place(), V.set_graph_handler(graph), V.set_fake_mode(fake_mode):
        graph.run(*fakes)
    layouts = [each.layout for each in graph.operations if isinstance(each, ExternKernelOut)]
    return [int(each.view.layout.offset) if isinstance(each, NonOwningLayout) else None for each in layouts]


def flattened(*factors: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([(x @ y).view(-1) for x, y in factors])


def test_products_are_written_to_where_they_are_concatenated() -> None:
    """X @ y ─▶ view ─┐
    x @ y ─▶ view ─┴▶ cat
    """
    assert places(lambda x, y: flattened((x, y), (x, y + 1)), X, Y) == [0, COUNT]


def test_products_of_batches_and_with_a_bias_are_too() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        sums, batch = torch.addmm(y[0], x, y), torch.bmm(x.view(2, 4, 16), y.expand(2, 16, 32))
        return torch.cat([sums.view(-1), batch.reshape(-1)])

    assert places(program, X, Y) == [0, COUNT]


@given(shapes=st.lists(st.tuples(*[st.integers(2, 5)] * 3), min_size=2, max_size=5))
@settings(max_examples=5, deadline=None)
def test_they_have_the_values_of_eager_products(shapes: Sequence[tuple[int, int, int]]) -> None:
    xs = [torch.randn(a, b, dtype=torch.float64) for a, b, _ in shapes]
    ys = [torch.randn(b, 2 * c, dtype=torch.float64) for _, b, c in shapes]

    def program(*tensors: Tensor) -> Tensor:
        return flattened(*zip(tensors[: len(xs)], tensors[len(xs) :], strict=True))

    assert places(program, *xs, *ys) == [sum(2 * a * c for a, _, c in shapes[:at]) for at in range(len(shapes))]
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False), products_in_place():
        torch.testing.assert_close(torch.compile(program)(*xs, *ys), program(*xs, *ys))


def first_is_returned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ y
    return product, torch.cat([product.view(-1), (x @ y).view(-1)])


def first_is_read_later(x: Tensor, y: Tensor) -> Tensor:
    product = x @ y
    result = torch.cat([product.view(-1), (x @ y).view(-1)])
    return result.mul_(2).sum() + product.sum()


def first_is_squeezed_and_read_later(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ y
    return torch.cat([product.squeeze(0).view(-1), (x @ y).view(-1)]).mul_(2), product + 1


def one_half_of_the_first(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([(x @ y).chunk(2)[0].reshape(-1), (x @ y).view(-1)])


def a_part_of_the_first(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([(x @ y)[:4].view(-1), (x @ y).view(-1)])


def first_is_transposed(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([(x @ y).t().reshape(-1), (x @ y).view(-1)])


def first_is_of_another_type(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([(x.float() @ y.float()).view(-1), (x @ y).view(-1)])


def first_is_changed(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([(x @ y).view(-1) + 1, (x @ y).view(-1)])


@pytest.mark.parametrize(
    ("program", "second"),
    [
        (first_is_returned, COUNT),
        (first_is_read_later, COUNT),
        (first_is_squeezed_and_read_later, COUNT),
        (one_half_of_the_first, COUNT // 2),
        (a_part_of_the_first, COUNT // 2),
        (first_is_transposed, COUNT),
        (first_is_of_another_type, COUNT),
        (first_is_changed, COUNT),
    ],
)
def test_a_product_that_is_not_concatenated_as_it_is_has_memory_of_its_own(
    program: Callable[..., object], second: int
) -> None:
    assert places(program, X, Y) == [None, second]


def test_a_product_that_is_there_twice_is_copied_once() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        flat = (x @ y).view(-1)
        return torch.cat([flat, flat, (x @ y).view(-1)])

    assert places(program, X, Y) == [0, 2 * COUNT]


def test_all_products_have_places_at_multiples_of_16_bytes_or_none_has() -> None:
    """Elsewhere cuBLAS is slower, and Inductor copies all that it copies at once::

    x @ y ─┐                    x @ y ─┐
    3 of 8 ┼▶ cat: copies       4 of 8 ┼▶ cat: in place
    x @ y ─┘                    x @ y ─┘
    """

    def program(x: Tensor, y: Tensor, other: Tensor) -> Tensor:
        return torch.cat([(x @ y).view(-1), other, (x @ y).view(-1)])

    for count, expected in ((3, [None, None]), (4, [0, COUNT + 4])):
        assert places(program, X, Y, torch.ones(count, dtype=torch.float64)) == expected
    assert places(lambda x, y, other: torch.cat([(x @ y).view(-1), other]), X, Y, torch.ones(3)) == [0]


def test_rows_and_columns_of_two_dimensions_are_concatenated_as_before() -> None:
    """The first are where Inductor writes them anyway; it copies what was reshaped, and what lies apart, at once."""
    assert places(lambda x, y: torch.cat([x @ y, x @ y]), X, Y) == [0, COUNT]
    for dimension in (0, 1):
        reshaped = partial(torch.cat, dim=dimension)
        assert places(lambda x, y: reshaped([(x @ y).view(4, -1), (x @ y).view(4, -1)]), X, Y) == [None, None]  # noqa: B023


def test_inductor_is_as_before_afterwards() -> None:
    names = ("realize_into", "can_realize_into_without_copy")
    before = [getattr(ConcatKernel, name).__func__ for name in names]
    with products_in_place():
        assert all(getattr(ConcatKernel, name).__func__ is not usual for name, usual in zip(names, before, strict=True))
    assert [getattr(ConcatKernel, name).__func__ for name in names] == before
