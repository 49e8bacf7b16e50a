"""Ways through a model: what is noted in a call, and what is assumed in a trace."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import BranchError, ChoiceError, TraceError
from autostream.tracing.branches import Way, noted
from autostream.tracing.expecting import expect
from autostream.tracing.export import Traced, along, trace
from autostream.frontend.tree import flatten
from tests.semantics import Model


def traced(function: Callable[..., Any], way: Way, *args: Tensor, **attributes: Any) -> Traced:
    tensors, structure = flatten((args or (torch.ones(2),), {}))
    with torch.no_grad():
        return along(way).trace(Model(function, **attributes), tensors, structure)


def expected(found: Traced) -> list[tuple[Any, ...]]:
    """What the program expects, in order."""
    return [node.args[1:] for node in found.program.module.graph.find_nodes(op="call_function", target=expect)]


QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "if": lambda x: 1 if x.sum() > 2 else 0,
    "not": lambda x: not x.sum() > 2,
    "bool": lambda x: bool(x.sum() > 2),
    "method": lambda x: (x.sum() > 2).is_nonzero(),
    "function": lambda x: torch.is_nonzero(x.sum() > 2),
    "by name": lambda x: torch.is_nonzero(input=x.sum() > 2),
}


@pytest.mark.parametrize("asking", QUESTIONS)
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_noted_in_a_call_is_what_a_trace_asks_for(asking: str, size: int) -> None:
    def function(s: Model, x: Tensor) -> Tensor:
        return x.sin() if QUESTIONS[asking](x) else x.cos()

    x = torch.full((2,), float(size))
    with noted() as outcomes:
        y = function(Model(function), x)
    assert outcomes == [size == 2]
    found = traced(function, tuple(outcomes), x)
    assert expected(found) == [(0, size == 2)]
    assert torch.equal(found.program.module(x)[0], y)


def test_outcomes_are_noted_in_order_and_those_of_this_thread_only() -> None:
    def ask() -> None:
        bool(torch.ones(1))

    with noted() as outcomes:
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        while torch.tensor(len(outcomes)) < 3:
            pass
    assert outcomes == [True, True, True, False]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_fuses_in_a_call_that_is_watched_as_in_others() -> None:
    """Padding packs the input of an encoder there: what is padded comes out as zeros."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 5, 8), torch.arange(5).expand(2, 5) >= torch.tensor([[3], [5]])
    with torch.no_grad():
        plain = encoder(x, src_key_padding_mask=padding)
        with noted():
            watched = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(watched, plain, rtol=0, atol=0)


def loop(s: Model, x: Tensor) -> Tensor:
    while x.sum() < 10:
        x = x * 2
    return x


def test_a_loop_is_as_long_as_its_way() -> None:
    found = traced(loop, (True, True, False), torch.ones(2))
    assert expected(found) == [(0, True), (1, True), (2, False)]
    assert torch.equal(found.program.module(torch.full((2,), 2.0))[0], torch.full((2,), 8.0))


@pytest.mark.parametrize("way", [(), (True,), (True, False, False)])
def test_a_way_of_another_length_is_none(way: Way) -> None:
    def twice(s: Model, x: Tensor) -> Tensor:
        x = x * 2 if x.sum() > 0 else x
        return x.sin() if x.max() > 1 else x.cos()

    with pytest.raises(BranchError, match="asks for other values to branch by than when it is called"):
        traced(twice, way)


def test_it_is_the_users_line_that_is_named_and_noted() -> None:
    def function(s: Model, x: Tensor) -> Tensor:
        return x.sin() if x.sum() > 0 else x.cos()

    (node,) = traced(function, (False,)).program.module.graph.find_nodes(op="call_function", target=expect)
    assert "return x.sin() if x.sum() > 0 else x.cos()" in node.stack_trace
    with pytest.raises(BranchError, match=re.escape("return x.sin() if x.sum() > 0 else x.cos()")):
        traced(function, ())


def number(s: Model, x: Tensor) -> Tensor:
    return x.sin() if x.sum().item() > 0 else x.cos()


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (number, BranchError),
        *((lambda s, x, ask=ask: x.sin() if ask(x) else x.cos(), ChoiceError) for ask in QUESTIONS.values()),
    ],
)
def test_a_trace_without_a_way_says_whether_ways_would_help(
    function: Callable[..., Any], kind: type[BranchError]
) -> None:
    tensors, structure = flatten(((torch.ones(2),), {}))
    with pytest.raises(BranchError, match="GuardOnDataDependentSymNode") as caught, torch.no_grad():
        trace(Model(function), tensors, structure)
    assert type(caught.value) is kind


def test_a_branch_on_a_number_is_refused_along_a_way() -> None:
    with pytest.raises(BranchError, match="GuardOnDataDependentSymNode"):
        traced(number, ())


def test_a_tensor_of_several_elements_is_neither_true_nor_false() -> None:
    with pytest.raises(TraceError, match="ambiguous"):
        traced(lambda s, x: x.sin() if x > 0 else x.cos(), (True,))
