"""``AUTOSTREAM_VERIFY=paranoid``: what is compared, and which differences raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.dispatch.paranoid import TOLERANCE, compared, difference
from autostream.dispatch.scheduled_program import ScheduledProgram
from autostream.errors import MismatchError
from tests.semantics import CONFIGURATIONS, Model, same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def paranoid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_VERIFY", "paranoid")


class Counts(nn.Module):
    """Counts its calls, has a dropout, writes to its input and returns a view of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        x.mul_(2)
        return torch.nn.functional.dropout(x, training=True) + self.calls, self.calls[1:]


# What is compared


@torch.no_grad()
@pytest.mark.usefixtures("paranoid")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_correct_calls_return_what_they_do_otherwise(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """State, inputs and random numbers are those of as many calls of the model, not of twice as many."""
    plain, fast = Counts(), autostream.optimize(Counts(), **CONFIGURATIONS[name](monkeypatch))
    for _ in range(3):
        (a, b), outputs = (torch.ones(3), torch.ones(3)), []
        for model, x in ((plain, a), (fast, b)):
            torch.manual_seed(0)
            outputs.append((model(x), torch.rand(1)))
        same(outputs[1], outputs[0])
        same(b, a)
    assert fast.calls.tolist() == [3.0, 3.0, 3.0]


@torch.no_grad()
@pytest.mark.usefixtures("paranoid")
def test_calls_with_objects_that_hold_tensors_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """An eager call more would write to the object, such as a cache, twice."""

    class Cache:
        def __init__(self) -> None:
            self.seen = torch.zeros(3)

    def model(x: Tensor, cache: Cache) -> Tensor:
        cache.seen.add_(x)
        return cache.seen * 2

    fast, ours, theirs = autostream.optimize(model, policy="sequential"), Cache(), Cache()
    for _ in range(3):
        same(fast(torch.ones(3), ours), model(torch.ones(3), theirs))
    assert caplog.text.count("calls are not compared with eager ones: a value of type") == 1


@torch.no_grad()
@pytest.mark.usefixtures("paranoid")
def test_a_schedule_with_wrong_outputs_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = autostream.optimize(nn.Linear(4, 4), torch.ones(2, 4))
    fast(torch.ones(2, 4))
    monkeypatch.setattr(
        "autostream.dispatch.scheduled_program.ScheduledProgram.__call__", lambda self, arguments: [torch.zeros(2, 4)]
    )
    with pytest.raises(MismatchError, match=r"Linear, scheduled: output 0 is off by 1 of its size, and 0.001 is"):
        fast(torch.ones(2, 4))


@pytest.mark.usefixtures("paranoid")
def test_calls_that_record_gradients_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their gradients are what they are otherwise."""
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), torch.randn(3, 4)
    fast = autostream.optimize(copy.deepcopy(plain), policy="critical_path")
    for _ in range(2):
        for model in (plain, fast):
            torch.manual_seed(0)
            model(x).square().sum().backward()
    for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    same(list(fast.buffers()), list(plain.buffers()))
    assert [report.mode for report in fast.reports] == ["forward and backward"]
    right = ScheduledProgram.__call__
    monkeypatch.setattr(ScheduledProgram, "__call__", lambda *args: [output + 1 for output in right(*args)])
    with pytest.raises(MismatchError, match="Sequential, scheduled: output 0 is off by"):
        fast(x)


def test_sparse_outputs_are_compared_too() -> None:
    model, x = Model(lambda s, x: (x * 2, (x > 0).float().to_sparse())), torch.tensor([1.0, -1.0])
    compared(model, lambda: model(x), [x], (x,), {})
    wrong = torch.tensor([1.0, 1.0])
    for sparse, reason in ((wrong.to_sparse(), "off by 1 of"), (wrong, "2:float32, and should be 2:float32, sparse")):
        with pytest.raises(MismatchError, match=f"output 1 is {reason}"):
            compared(model, lambda other=sparse: (x * 2, other), [x], (x,), {})


def wrong(change: Callable[[Counts, Tensor], None]) -> str:
    model, x = Counts(), torch.ones(3)

    def run() -> Any:
        outputs = model(x)
        change(model, x)
        return outputs

    with pytest.raises(MismatchError) as error:
        compared(model, run, [x], (x,), {})
    assert x.tolist() == [2.0, 2.0, 2.0], "the model's own call is what stays"
    assert model.calls.tolist() == [1.0, 1.0, 1.0]
    return str(error.value)


def test_state_inputs_and_outputs_are_compared() -> None:
    """Outputs as they were returned: one is a view of the state."""
    assert "input 0 afterwards is off by 1 of its size" in wrong(lambda model, x: x.zero_())
    assert "calls afterwards is off by" in wrong(lambda model, x: model.calls[0].add_(1))
    assert "output 1 is off by" in wrong(lambda model, x: model.calls.add_(1))


def test_a_call_that_fails_leaves_everything_as_it_was() -> None:
    model, x = Counts(), torch.ones(3)

    def run() -> Any:
        model(x)
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        compared(model, run, [x], (x,), {})
    assert (x.tolist(), model.calls.tolist()) == ([1.0] * 3, [0.0] * 3)


# Tolerances


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.complex64, torch.float8_e4m3fn])
def test_rounding_is_allowed_for_and_no_more(dtype: torch.dtype) -> None:
    allowed = TOLERANCE.get(torch.float32 if dtype.is_complex else dtype, 0.25)
    expected = torch.full((8,), 2.0, dtype=torch.float64)
    cast = torch.complex64 if dtype.is_complex else dtype
    for times, right in ((0.3, True), (4.0, False)):
        ours = (expected * (1 + times * allowed)).to(cast)
        assert (difference({"y": ours}, {"y": expected.to(cast)}) == "") is right


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ([1, 2], [1, 3], "y is off by inf"),
        ([True], [False], "y is off by inf"),
        ([1.0, float("nan")], [1.0, 2.0], "y is off by inf"),
        ([1.0, float("inf")], [1.0, float("nan")], "y is off by inf"),
        ([1.0, -float("inf")], [1.0, float("inf")], "y is off by inf"),
        ([1.0, float("nan")], [1.0, float("nan")], ""),
        ([1.0, float("inf")], [1.0, float("inf")], ""),
        ([1e-9], [0.0], ""),
        ([1.0], [0.0], "y is off by 1"),
        ([1.0], [1.0, 1.0], "y is 1:float32, and should be 2:float32"),
        ([1], [1.0], "y is 1:int64, and should be 1:float32"),
        ([], [], ""),
    ],
)
def test_non_finite_values_and_integers_must_be_equal(ours: list[Any], theirs: list[Any], reason: str) -> None:
    assert difference({"y": torch.tensor(ours)}, {"y": torch.tensor(theirs)}).startswith(reason)
    assert bool(difference({"y": torch.tensor(ours)}, {"y": torch.tensor(theirs)})) == bool(reason)


def test_one_wrong_element_of_many_is_found() -> None:
    ours, theirs = torch.ones(1_000_000), torch.ones(1_000_000)
    ours[7] = 0.5
    assert difference({"y": ours}, {"y": theirs}).startswith("y is off by 0.5")


def test_missing_and_additional_tensors_are_named() -> None:
    one = torch.ones(1)
    assert difference({}, {"output 1": one}) == "there is no output 1"
    assert difference({"output 1": one}, {}) == "output 1 is one too many"
