"""What is optimized does as PyTorch's own samples have it, and whoever breaks it is told."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from tests.conformance import (
    EVERY,
    GROUPS,
    KNOWN,
    OUTCOMES,
    SAMPLES,
    Call,
    Difference,
    Findings,
    Known,
    OutOfTime,
    Variant,
    changes,
    check,
    check_all,
    gone,
    limited,
    main,
    sample_of,
    table,
    unexpected,
)

ROOT = Path(autostream.__file__).parent.parent

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("group", GROUPS)
def test_samples_are_as_eagers(group: str, tmp_path: Path) -> None:
    """In a process of its own: PyTorch's databases set flags for all who import them."""
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.conformance", "--group", group, "--samples", "1", "--out", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(out.read_text())
    total = {outcome: sum(count.get(outcome, 0) for count in found["counts"].values()) for outcome in OUTCOMES}
    assert total["eager's"] > 2 * total["refused"], "most of it must run as scheduled"


def variant(function: Callable[..., Any], gradients: bool = False, samples: int = 1) -> Variant:
    """A function of a tensor of 3x4 numbers."""

    def calls(seed: int) -> Iterator[Call]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(samples):
            x = torch.randn(3, 4, generator=generator).requires_grad_(gradients)
            yield Call(function, (x,), {}, [x] if gradients else [])

    return Variant("function", "function", "float32", gradients, calls)


def write(x: Tensor) -> Tensor:
    return x.add_(1)


def draw(x: Tensor) -> Tensor:
    return x + torch.rand(4)


def refuse(x: Tensor) -> Tensor:
    raise ValueError("no")


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Stands for ``optimize``: makes of a function another one, which is broken."""


def other_number(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: function(x) * 1.001


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    kept: list[Any] = []

    def call(x: Tensor) -> Any:
        kept.append(function(x))
        return kept[0]

    return call


def forgotten(function: Callable[..., Any]) -> Callable[..., Any]:
    function(torch.zeros(3, 4))
    return lambda x: function(x.clone())


def raising(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Tensor) -> Any:
        raise TypeError("broken")

    return call


BROKEN: dict[str, tuple[Callable[..., Any], bool, Wrapper, set[str]]] = {
    "another number": (torch.sin, False, other_number, {"output: numbers"}),
    "another dtype": (torch.sin, False, lambda f: lambda x: f(x).double(), {"output: dtype"}),
    "another shape": (torch.sin, False, lambda f: lambda x: f(x)[:1], {"output: shape"}),
    "another container": (torch.sin, False, lambda f: lambda x: [f(x)], {"output is a list, eager's a Tensor"}),
    "other strides": (torch.sin, False, lambda f: lambda x: f(x).t().contiguous().t(), {"output: strides"}),
    "what the first call returned": (torch.sin, False, constant, {"output: numbers"}),
    "a copy of a view": (
        lambda x: x[1:],
        False,
        lambda f: lambda x: f(x).clone(),
        {"output 0 is in memory of its own, eager's is in the memory of input 0, 16 bytes on"},
    ),
    "a view of something else": (
        lambda x: x[0].expand(2, 4),
        False,
        lambda f: lambda x: f(x.clone()),
        {"output 0 is in memory of its own, eager's is in the memory of input 0, 0 bytes on"},
    ),
    "a view for the input": (
        write,
        False,
        lambda f: lambda x: f(x).view_as(x),
        {"output 0 is in the memory of input 0, 0 bytes on, eager's is input 0 itself"},
    ),
    "no write": (
        write,
        False,
        forgotten,
        {"input 0 afterwards: numbers", "output 0 is in memory of its own, eager's is input 0 itself"},
    ),
    "one draw more": (torch.sin, False, lambda f: lambda x: (f(x), torch.rand(1))[0], {"torch's random state"}),
    "no draw": (draw, False, lambda f: lambda x: x + 0.5, {"output: numbers", "torch's random state"}),
    "no exception": (refuse, False, lambda f: torch.sin, {"returns, eager raises ValueError"}),
    "another exception": (refuse, False, raising, {"raises TypeError, eager raises ValueError"}),
    "an exception": (torch.sin, False, raising, {"raises TypeError, eager returns"}),
    "no gradients": (
        torch.sin,
        True,
        lambda f: lambda x: f(x).detach(),
        {"output: requires_grad", "output: leaf", "gradient 0 is a NoneType, eager's a Tensor"},
    ),
    "other gradients": (torch.sin, True, lambda f: lambda x: f(x.detach()) + (x - x.detach()), {"gradient 0: numbers"}),
}
"""What is optimized, whether it records gradients, how ``optimize`` is broken, and what must be told."""


class Reported:
    """What a broken ``optimize`` returns: it is called, and has no reports."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.reports: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


@pytest.mark.parametrize("fault", BROKEN)
def test_faults_are_told(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, gradients, broken, expected = BROKEN[fault]
    assert check(variant(function, gradients), 1).differences == {}
    monkeypatch.setattr("autostream.optimize", lambda target, **_: Reported(broken(target)))
    findings = check(variant(function, gradients), 1)
    assert findings.outcomes == {0: "different"}
    assert {what for what, _ in findings.differences[0]} == expected


def test_rounding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(x: Tensor) -> Tensor:
        return torch.nextafter(x.sin(), torch.tensor(9.0))

    assert check(variant(torch.sin), 1).rounded == []
    monkeypatch.setattr("autostream.optimize", lambda target, **_: Reported(rounded))
    findings = check(variant(torch.sin), 1)
    assert (findings.outcomes, findings.rounded, findings.differences) == ({0: "eager's"}, [0], {})


def test_what_a_module_keeps_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(seed: int) -> Iterator[Call]:
        torch.manual_seed(seed)
        yield Call(nn.BatchNorm1d(4), (torch.randn(3, 4),), {})

    norm = Variant("nn.BatchNorm1d", "train", "float32", True, calls)
    assert check(norm, 1).outcomes == {0: "eager's"}
    broken = Reported(nn.BatchNorm1d(4))  # of another module
    monkeypatch.setattr("autostream.optimize", lambda target, **_: broken)
    told = {what for what, _ in check(norm, 1).differences[0]}
    means_and_counts = {f"input {at} afterwards: numbers" for at in (3, 4, 5)}  # after the input, weight and bias
    no_gradients = {f"gradient {at} is a NoneType, eager's a Tensor" for at in (0, 1)}
    assert told == means_and_counts | no_gradients


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        (torch.sin, "eager's"),
        (lambda x: torch.from_numpy(x.numpy() + 1), "refused"),
        (refuse, "both raise"),
    ],
)
def test_outcomes(function: Callable[..., Any], outcome: str) -> None:
    findings = check(variant(function), 1)
    assert findings.outcomes == {0: outcome}
    assert bool(findings.reasons) is (outcome == "refused")


def test_nothing_is_told_where_eager_differs_from_itself() -> None:
    calls = itertools.count()
    assert check(variant(lambda x: x + next(calls)), 1).differences == {}


def test_samples_are_spread_over_what_there_is() -> None:
    assert list(check(variant(torch.sin, samples=9), 3).outcomes) == [0, 4, 8]
    assert list(check(variant(torch.sin, samples=9), 1).outcomes) == [4]
    assert list(check(variant(torch.sin, samples=2), 3).outcomes) == [0, 1]
    assert list(check(variant(torch.sin, samples=2), 0).outcomes) == [0, 1]
    assert check(variant(torch.sin, samples=0), 3) == Findings(seconds=pytest.approx(0, abs=60))


def test_samples_that_cannot_be_made_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def calls(seed: int) -> Iterator[Call]:
        raise NotImplementedError("none here")
        yield

    (findings,) = check_all([Variant("sin", "out", "float32", False, calls)], 1, 60, {})
    assert not findings.outcomes
    assert capsys.readouterr().out == "sin, out, float32: there are no samples: NotImplementedError: none here\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised wherever the alarm strikes
def test_what_hangs_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    def wait(x: Tensor) -> Tensor:
        try:
            time.sleep(600)
        except Exception:  # OutOfTime is none
            return x
        return x

    hanging = variant(wait)
    (findings,) = check_all([hanging], 1, 0.2, {})
    assert findings.outcomes == {0: "error"}
    assert capsys.readouterr().out.startswith(f"{hanging}: OutOfTime")
    with pytest.raises(OutOfTime), limited(0.1):
        wait(torch.ones(1))


def test_differences_are_printed_and_known_ones_must_be_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sin, name = variant(torch.sin), "function, function, float32"
    same = check_all([sin], 1, 60, {})
    monkeypatch.setattr("autostream.optimize", lambda target, **_: Reported(lambda x: target(x).double()))
    different = check_all([sin], 1, 60, {name: Known("nobody minds")})
    line = f"{name}, sample 0: output: dtype: torch.float64, eager's torch.float32 (known: nobody minds)\n"
    assert capsys.readouterr().out == line
    assert different[0].differences == {0: [Difference("output: dtype", "torch.float64, eager's torch.float32")]}
    known, rare = {name: Known("nobody minds"), "not run": Known("")}, {name: Known("", rare=True)}
    assert (unexpected([sin], different, {}), unexpected([sin], different, known)) == ([name], [])
    assert (gone([sin], different, known, SAMPLES), gone([sin], different, known, 0)) == ([], [])
    assert [gone([sin], same, known, samples) for samples in (0, SAMPLES, 1)] == [[name], [name], []]
    assert [gone([sin], same, rare, samples) for samples in (0, SAMPLES, 1)] == [[name], [], []]
    assert (unexpected([sin], same, {}), gone([sin], same, {}, 0)) == ([], [])
    total = table([sin], different).splitlines()[-1]
    assert [cell.strip() for cell in total.split("|")[1:-1]] == ["all", "0", "0", "0", "1", "0"]


def test_other_outcomes_than_before_are_told() -> None:
    def run(outcomes: dict[str, dict[str, str]]) -> dict[str, Any]:
        return {"variants": {name: {"outcomes": each} for name, each in outcomes.items()}}

    before = run({"sin": {"0": "eager's", "4": "eager's"}, "cos": {"0": "eager's"}})
    now = run({"sin": {"0": "eager's", "4": "refused", "8": "eager's"}, "tan": {"0": "eager's"}})
    assert changes(before, now) == ["sin, sample 4: eager's before, refused now"]


def test_ci_looks_at_one_in_so_many_and_at_all_that_was_picked() -> None:
    def named(name: str, kind: str, count: int) -> list[Variant]:
        return [Variant(name, kind, "float32", False, lambda seed: iter(())) for _ in range(count)]

    variants = [*named("nn.GRU", "train", 3), *named("nn.ReLU", "eval", 2 * EVERY), *named("sin", "out", EVERY + 1)]
    variants += named("max (binary)", "function", 2)
    assert [len(sample_of(variants, group)) for group in GROUPS] == [3 + 2, 2 + 2]


@pytest.mark.parametrize("shard", ["3/2", "0/2", "1", "a/b"])
def test_a_shard_is_one_of_so_many(shard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--shard", shard, "--out", str(tmp_path / "found.json")])
    assert "use I/N, such as 2/4" in capsys.readouterr().err


def test_each_known_difference_has_its_reason() -> None:
    assert set(KNOWN) == {"cpu", "cuda"}
    assert all(each.why for known in KNOWN.values() for each in known.values())
