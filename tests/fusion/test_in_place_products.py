"""Products that are added in place, through TorchInductor, which compiles products for the CPU, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autostream.fusion.in_place_products import keep_in_place, restore_in_place
from autostream.fusion.inductor import _compiled, _traced, with_settings

aten = torch.ops.aten


def compiled(function: Callable[..., Any], *tensors: Tensor) -> tuple[fx.GraphModule, int]:
    """A function of products in Inductor's kernels, and how many buffers these allocate."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        module = make_fx(function)(*map(mode.from_tensor, tensors))
    code = module.code
    with with_settings({}), torch.no_grad():
        kept = keep_in_place(module)
        kernels = restore_in_place(_compiled(_traced(kept, fx.Interpreter(kept), {}), torch.device("cpu"), {}))
    assert module.code == code
    return kernels, len(kernels.graph.find_nodes(op="call_function", target=aten.empty_strided.default))


def assert_same(function: Callable[..., Any], kernels: fx.GraphModule, *tensors: Tensor) -> None:
    """Both return the same and leave the same in their arguments."""
    ours, theirs = ([tensor.clone() for tensor in tensors] for _ in range(2))
    torch.testing.assert_close(kernels(*ours), function(*theirs))
    torch.testing.assert_close(ours, theirs)


TENSORS = tuple(torch.randn(4, 4, dtype=torch.float64) for _ in range(3))


def sums(total: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first = torch.mm(x, y)
    for left, right in ((y, x), (x, x)):
        first.addmm_(left, right)
    return (first,)


def to_an_argument(total: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    total.addmm_(x, y)
    return (torch.mm(total, y),)


def returned(total: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (torch.mm(total.addmm_(x, y), y),)


@pytest.mark.parametrize(("function", "calls"), [(sums, 2), (to_an_argument, 1), (returned, 1)])
def test_products_are_added_where_the_sum_is(function: Callable[..., Any], calls: int) -> None:
    kernels, buffers = compiled(function, *TENSORS)
    assert len(kernels.graph.find_nodes(op="call_function", target=aten.addmm_.default)) == calls
    assert buffers == 1
    assert_same(function, kernels, *TENSORS)


def test_what_is_needed_as_it_was_is_copied_or_read_first() -> None:
    def function(total: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        before = torch.mm(total, total)
        total.addmm_(x, y)
        return before, torch.mm(total, total)

    kernels, _ = compiled(function, *TENSORS)
    assert_same(function, kernels, *TENSORS)


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (lambda x, y: (x @ y, x.clone().addmm_(x, y, beta=2.0)), 4),
        (lambda x, y: x.clone().addmm_(x, y), 3),
        (lambda x, y: x.clone().add_(x @ y), 4),
    ],
    ids=["scaled", "what may be padded", "none"],
)
def test_other_graphs_stay(function: Callable[..., Any], size: int) -> None:
    module = make_fx(function)(*(torch.randn(size, size) for _ in range(2)))
    assert keep_in_place(module) is module


def test_products_of_sizes_that_depend_on_data_stay() -> None:
    def function(total: Tensor, x: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]
        return total.clone().addmm_(rows.t(), rows)

    module = make_fx(function, tracing_mode="symbolic")(*(torch.randn(4, 4) for _ in range(2)))
    assert module.graph.find_nodes(op="call_function", target=aten.addmm_.default)
    assert keep_in_place(module) is module
