"""Products that are added to sums of gradients as one op: which are, and that values stay as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autostream
from autostream.frontend.gradient_sums import add_products
from autostream.utils.storages import storage_of

aten = torch.ops.aten


def rewritten(function: Callable[..., Any], *tensors: Tensor) -> fx.GraphModule:
    """The graph of a function after the pass, which computes the same, and whose values say what shares memory."""
    module = make_fx(function, tracing_mode="fake")(*tensors)
    add_products(module)
    module.graph.lint()
    copies = [tensor.clone() for tensor in tensors]
    torch.testing.assert_close(module(*copies), function(*[tensor.clone() for tensor in tensors]))
    assert_shares_as_it_says(module, copies)
    return module


def assert_shares_as_it_says(module: fx.GraphModule, tensors: list[Tensor]) -> None:
    """Two values of the run have the same memory exactly where two fake values have."""
    values: dict[str, Tensor] = {}

    class Recording(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and n.op != "output":
                values[n.name] = result
            return result

    Recording(module).run(*tensors)
    fakes = {node.name: node.meta["val"] for node in module.graph.nodes if node.name in values}
    for one in values:
        assert (values[one].shape, values[one].stride()) == (fakes[one].shape, fakes[one].stride())
        for other in values:
            same = storage_of(values[one]) == storage_of(values[other])
            assert same == (storage_of(fakes[one]) == storage_of(fakes[other])), (one, other)


def count(module: fx.GraphModule, target: Any = aten.addmm_.default) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


X, Y = torch.randn(4, 4), torch.randn(4, 4)


def test_products_are_added_as_they_are_computed() -> None:
    """As autograd has them: each product is transposed twice."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = (x @ y).t().t()
        for factor in (2, 3, 4):
            total.add_((y @ (factor * x)).t().t())
        return total.relu()

    module = rewritten(step, X, Y)
    assert (count(module), count(module, aten.mm.default), count(module, aten.add_.Tensor)) == (3, 1, 0)


def reads_the_sum_before(x: Tensor, y: Tensor) -> Any:
    total = x @ y
    return total.norm(), total.add_(y @ x)


def reads_the_sum_later(x: Tensor, y: Tensor) -> Any:
    total = x @ y
    total.add_(y @ x)
    return total.sum(), total.t()[1:]


def views_the_sum(x: Tensor, y: Tensor) -> Any:
    both = torch.zeros(8, 4)
    both[4:].add_(y @ x)
    return both, both.chunk(2)


def adds_to_an_argument(x: Tensor, y: Tensor) -> Any:
    return x.add_(y @ y)


def overwrites_what_a_product_has_read(x: Tensor, y: Tensor) -> Any:
    total, hidden = x @ y, y + 1
    product = hidden @ x
    hidden.zero_()
    return total.add_(product)


@pytest.mark.parametrize(
    "function",
    [
        reads_the_sum_before,
        reads_the_sum_later,
        views_the_sum,
        adds_to_an_argument,
        overwrites_what_a_product_has_read,
    ],
)
def test_a_product_is_added_to_what_others_use_before_and_after(function: Callable[..., Any]) -> None:
    assert count(rewritten(function, X, Y)) == 1


def test_products_that_are_computed_first_are_added_one_after_the_other() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        total, one, other = x + 1, y @ x, y @ y
        return total.add_(one).add_(other)

    assert count(rewritten(step, X, Y)) == 2


def reads_the_sum_between(x: Tensor, y: Tensor) -> Any:
    total = x @ y
    product = y @ x
    norm = total.norm()
    return norm, total.add_(product)


def writes_the_sum_between(x: Tensor, y: Tensor) -> Any:
    total = x @ y
    product = y @ x
    total.t().mul_(2)
    return total.add_(product)


def computes_the_sum_later(x: Tensor, y: Tensor) -> Any:
    product = y @ x
    return (x @ y).add_(product)


def uses_the_product(x: Tensor, y: Tensor) -> Any:
    product = y @ x
    return (x @ y).add_(product), product


def uses_a_view_of_the_product(x: Tensor, y: Tensor) -> Any:
    product = y @ x
    return (x @ y).add_(product.t().t()), product.t()


def adds_a_product_of_the_sum(x: Tensor, y: Tensor) -> Any:
    total = x + 1
    return total.add_(total @ y)


def adds_twice_the_product(x: Tensor, y: Tensor) -> Any:
    return torch.mm(x, y).add_(y @ x, alpha=2)


def adds_a_product_to_itself(x: Tensor, y: Tensor) -> Any:
    product = x @ y
    return product.add_(product)


def adds_its_transpose(x: Tensor, y: Tensor) -> Any:
    return (x + 1).add_((x @ y).t())


def adds_to_a_transpose(x: Tensor, y: Tensor) -> Any:
    return (x + 1).t().add_(x @ y)


def adds_to_each_row(x: Tensor, y: Tensor) -> Any:
    return (x + 1).add_(x[:1] @ y)


def adds_another_type(x: Tensor, y: Tensor) -> Any:
    return (x.double() + 1).add_(y @ x)


def adds_no_product(x: Tensor, y: Tensor) -> Any:
    return (x @ y).add_(y).add_(1)


@pytest.mark.parametrize(
    "function",
    [
        reads_the_sum_between,
        writes_the_sum_between,
        computes_the_sum_later,
        uses_the_product,
        uses_a_view_of_the_product,
        adds_a_product_of_the_sum,
        adds_twice_the_product,
        adds_a_product_to_itself,
        adds_its_transpose,
        adds_to_a_transpose,
        adds_to_each_row,
        adds_another_type,
        adds_no_product,
    ],
)
def test_other_products_stay(function: Callable[..., Any]) -> None:
    assert count(rewritten(function, X, Y)) == 0


OPS = ("mm", "add_mm", "add_", "t", "mul_", "relu", "view")


@given(st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 7), st.integers(0, 7)), max_size=14))
def test_random_programs_compute_what_they_did(program: list[tuple[str, int, int]]) -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        values = [x, y, x @ y]
        for op, one, other in program:
            a, b = values[-1 - one % len(values)], values[-1 - other % len(values)]
            match op:
                case "mm":
                    values.append(a @ b)
                case "add_mm":
                    values[-1].add_((a @ b).t().t())
                case "add_":
                    a.add_(b.relu())  # of new memory: the two may overlap
                case "t":
                    values.append(a.t())
                case "mul_":
                    a.mul_(0.5)
                case "relu":
                    values.append(a.relu())
                case _:
                    values.append(a[:])
        return values[-2:]

    generator = torch.Generator().manual_seed(0)
    rewritten(run, *(torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(2)))


# Steps


def model_and_batch() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(12, 6), torch.randn(12, 4)


def adds_in_place(step: Any) -> int:
    (report,) = step.reports
    assert report.graph is not None
    return sum(op.target.startswith("aten.addmm_.") for op in report.graph.ops.values())


def test_microbatches_add_the_gradients_of_weights_in_place() -> None:
    model, x, y = model_and_batch()
    twin, _, _ = model_and_batch()
    adam = [torch.optim.Adam(each.parameters()) for each in (model, twin)]
    step = autostream.train_step(model, adam[0], lambda m, x, y: (m(x) - y).square().mean(), microbatches=4)
    for _ in range(4):
        ours = step(x, y)
        theirs = (twin(x) - y).square().mean()
        theirs.backward()
        adam[1].step()
        adam[1].zero_grad()
        torch.testing.assert_close(ours, theirs.detach())
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert adds_in_place(step) == 2 * 3


def test_gradients_that_a_user_adds_up_are_added_in_place() -> None:
    model, x, y = model_and_batch()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd])
    def step(x: Tensor, y: Tensor) -> Any:
        (model(x) - y).square().mean().backward()
        norm = model[0].weight.grad.norm()
        (model(x + 1) - y).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
        return norm

    for _ in range(3):
        step(x, y)
    assert adds_in_place(step) == 2


class Tied(nn.Module):
    """One weight, of which the embedding has a sparse gradient and the head a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 6))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight, sparse=True) @ self.weight.t()


def test_sparse_gradients_stay_in_the_graph() -> None:
    model = Tied()
    step = autostream.train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), microbatches=2
    )
    for _ in range(3):
        step(torch.arange(8), torch.arange(8))
    assert [report.mode for report in step.reports] == ["one stream"]


def test_products_of_sizes_that_depend_on_data_stay_in_the_graph() -> None:
    model = nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd])
    def step(x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]
        y = model(chosen)
        y += chosen @ model.weight
        loss = y.square().mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        return loss

    for _ in range(3):
        step(torch.randn(16, 4))
    assert [report.mode for report in step.reports] == ["one stream"]
