"""Numbers that are taken from tensors are for ops of the graph; what goes to Python is refused, and taken out again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import BranchError
from autostream.tracing.export import trace
from autostream.tracing.gradients import trace_gradients
from autostream.tracing.numbers import unknown_in
from autostream.frontend.tree import flatten

X = torch.ones(3, 3)

total = 0.0


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.weight)


TRACERS: Any = pytest.mark.parametrize("tracer", [trace, trace_gradients])


def traced(tracer: Callable[..., Any], function: Callable[[Tensor], Any]) -> Any:
    tensors, structure = flatten(((X,), {}))
    return tracer(Function(function), tensors, structure)


def refusal(tracer: Callable[..., Any], function: Callable[[Tensor], Any]) -> str:
    with pytest.raises(BranchError) as caught:
        traced(tracer, function)
    return str(caught.value)


WORDS = "the number of a tensor goes to Python, which a graph would do only once: return the tensor instead (at "


@TRACERS
@pytest.mark.parametrize("function", [lambda x: x * (1 / (1 + x.abs().max().item())), lambda x: x * x.tolist()[0][0]])
def test_numbers_that_ops_use_are_values_like_any_other(
    tracer: Callable[..., Any], function: Callable[[Tensor], Any]
) -> None:
    traced(tracer, function)


@TRACERS
def test_one_that_is_kept_is_refused_with_the_line_also_where_ops_use_it_too(tracer: Callable[..., Any]) -> None:
    kept = [0.5]

    def model(x: Tensor) -> Tensor:
        y = x * 2
        number = y.sum().item()
        kept.append(number)
        return y * number

    reason = refusal(tracer, model)
    assert reason.startswith(WORDS)
    assert reason.endswith(": number = y.sum().item())")
    assert kept == [0.5]


@TRACERS
def test_one_that_is_kept_where_nobody_looked_is_taken_out(tracer: Callable[..., Any]) -> None:
    """No name leads from the model's code to the list."""
    kept = [0.5]
    keep = kept.append

    def model(x: Tensor) -> Tensor:
        number = x.sum().item()
        keep(number)
        return x * number

    assert "number = x.sum().item()" in refusal(tracer, model)
    assert kept == [0.5]


@TRACERS
def test_what_is_computed_from_one_is_refused_by_the_line_of_the_one(tracer: Callable[..., Any]) -> None:
    def model(x: Tensor) -> Tensor:
        global total
        lowest = x.min().item()
        highest = x.max().item()
        total += 2 * highest
        return x * lowest

    assert refusal(tracer, model).endswith(": highest = x.max().item())")
    assert type(total) is float


@TRACERS
def test_one_that_no_op_uses_has_gone_somewhere(tracer: Callable[..., Any]) -> None:
    """What is computed from it, and kept where no name leads, could not be found otherwise."""
    kept: list[float] = []
    keep = kept.append

    def model(x: Tensor) -> Tensor:
        keep(x.sum().item() > 3)
        return x + 1

    assert refusal(tracer, model).startswith(WORDS)


@TRACERS
@pytest.mark.parametrize("tell", [print, str, "{:.3f}".format, logging.getLogger("users").warning])
def test_nobody_is_told_one(
    tracer: Callable[..., Any], tell: Callable[[Any], object], capfd: pytest.CaptureFixture[str]
) -> None:
    def model(x: Tensor) -> Tensor:
        number = x.sum().item()
        tell(number)
        return x * number

    assert refusal(tracer, model).endswith(": number = x.sum().item())")
    assert capfd.readouterr() == ("", "")


@TRACERS
def test_a_log_that_would_tell_one_has_nothing_to_say(
    tracer: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    log = logging.Logger("users")
    log.addHandler(logging.StreamHandler())

    def model(x: Tensor) -> Tensor:
        number = x.sum().item()
        log.warning("%.3f", number)
        return x * number

    assert refusal(tracer, model).endswith(": number = x.sum().item())")
    assert capfd.readouterr() == ("", "")


@TRACERS
def test_who_catches_the_refusal_is_refused_all_the_same(tracer: Callable[..., Any]) -> None:
    def model(x: Tensor) -> Tensor:
        number = x.sum().item()
        try:
            float(number)
        except Exception:
            return x * number
        return x

    assert "number = x.sum().item()" in refusal(tracer, model)


@TRACERS
@pytest.mark.parametrize("wrap", [lambda x: (x, x.sum().item()), lambda x: {"x": x, "mean": x.sum().item() / 9}])
def test_one_that_is_returned_is_refused(tracer: Callable[..., Any], wrap: Callable[[Tensor], Any]) -> None:
    assert refusal(tracer, wrap).startswith(WORDS)


@TRACERS
def test_a_size_that_depends_on_data_may_be_looked_at_but_not_kept(tracer: Callable[..., Any]) -> None:
    kept: list[int] = []
    traced(tracer, lambda x: (x.nonzero().shape, x + 1)[1])
    assert "kept.append" in refusal(tracer, lambda x: (x + 1, kept.append(x.nonzero().shape[0]))[0])
    assert kept == []


def test_a_failing_trace_leaves_none_behind() -> None:
    kept: list[float] = []
    keep = kept.append

    def model(x: Tensor) -> Tensor:
        keep(x.sum().item())
        return x if x.sum() > 0 else -x

    assert "data-dependent" in refusal(trace, model)
    assert kept == []


def test_numbers_that_are_known_are_none() -> None:
    assert unknown_in([1, 2.0, X.shape, True]) == []
