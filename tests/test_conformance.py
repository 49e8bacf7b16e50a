"""PyTorch's own samples are equal with and without ``optimize``, and each kind of difference is found."""

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
    KNOWN,
    OUTCOMES,
    SAMPLES,
    Call,
    Difference,
    Known,
    OutOfTime,
    Variant,
    changes,
    check,
    check_all,
    gone,
    limited,
    markdown,
    representative,
    table,
    unexpected,
)

ROOT = Path(autostream.__file__).parent.parent

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_representative_sample_is_equal_to_eager(tmp_path: Path) -> None:
    """In a process of its own, as PyTorch's databases set global flags."""
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.conformance", "--representative", "--samples", "1", "--out", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = json.loads(out.read_text())["counts"]
    total = {outcome: sum(count.get(outcome, 0) for count in counts.values()) for outcome in OUTCOMES}
    assert total["eager's"] > 2 * total["refused"], "most of it must run as scheduled"
    page = out.with_suffix(".md").read_text()
    assert "`python -m tests.conformance --representative --samples 1 --out " in page
    assert table(counts) in page


def variant(function: Callable[..., Any], gradients: bool = False, samples: int = 1) -> Variant:
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
"""Replaces ``optimize``: makes a broken function of a function."""


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


OWN, LIES = "output 0 is in memory of its own, eager's", "is in the memory of input 0"
IS = "eager's is input 0 itself"
BROKEN: dict[str, tuple[Callable[..., Any], bool, Wrapper, set[str]]] = {
    "another number": (torch.sin, False, other_number, {"output: numbers"}),
    "another dtype": (torch.sin, False, lambda f: lambda x: f(x).double(), {"output: dtype"}),
    "another shape": (torch.sin, False, lambda f: lambda x: f(x)[:1], {"output: shape"}),
    "another container": (torch.sin, False, lambda f: lambda x: [f(x)], {"output is a list, eager's a Tensor"}),
    "other strides": (torch.sin, False, lambda f: lambda x: f(x).t().contiguous().t(), {"output: strides"}),
    "what the first call returned": (torch.sin, False, constant, {"output: numbers"}),
    "a copy of a view": (lambda x: x[1:], False, lambda f: lambda x: f(x).clone(), {f"{OWN} {LIES}, 16 bytes on"}),
    "a view of a copy": (lambda x: x[:2], False, lambda f: lambda x: f(x.clone()), {f"{OWN} {LIES}, 0 bytes on"}),
    "a view for the input": (write, False, lambda f: lambda x: f(x).view_as(x), {f"output 0 {LIES}, 0 bytes on, {IS}"}),
    "no write": (write, False, forgotten, {"input 0 afterwards: numbers", f"output 0 is in memory of its own, {IS}"}),
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
"""The function, whether gradients are recorded, how ``optimize`` is broken, and the differences."""


class Reported:
    """The return value of a broken ``optimize``, without reports."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.reports: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


@pytest.mark.parametrize("fault", BROKEN)
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_state_of_a_module_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_outcomes() -> None:
    calls = itertools.count()
    eager_only = check(variant(lambda x: torch.from_numpy(x.numpy() + 1)), 1)
    assert (eager_only.outcomes, bool(eager_only.reasons)) == ({0: "refused"}, True)
    assert check(variant(refuse), 1).outcomes == {0: "both raise"}
    unsteady = check(variant(lambda x: x + next(calls)), 1)
    assert unsteady.differences == {}, "eager differs from itself"


def test_samples_are_spread_evenly() -> None:
    for samples, of, expected in ((3, 9, [0, 4, 8]), (1, 9, [4]), (3, 2, [0, 1]), (0, 2, [0, 1])):
        assert list(check(variant(torch.sin, samples=of), samples).outcomes) == expected


def test_variants_without_samples_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def calls(seed: int) -> Iterator[Call]:
        raise NotImplementedError("none here")
        yield

    (findings,) = check_all([Variant("sin", "out", "float32", False, calls)], 1, 60, {})
    assert not findings.outcomes
    assert capsys.readouterr().out == "sin, out, float32: there are no samples: NotImplementedError: none here\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised wherever the alarm strikes
def test_a_variant_that_hangs_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
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
    different = check_all([sin], 1, 60, {name: Known("it does no harm")})
    line = f"{name}, sample 0: output: dtype: torch.float64, eager's torch.float32 (known: it does no harm)\n"
    assert capsys.readouterr().out == line
    assert different[0].differences == {0: [Difference("output: dtype", "torch.float64, eager's torch.float32")]}
    known, rare = {name: Known("it does no harm"), "not run": Known("")}, {name: Known("", rare=True)}
    assert (unexpected([sin], different, {}), unexpected([sin], different, known)) == ([name], [])
    assert (gone([sin], different, known, SAMPLES), gone([sin], different, known, 0)) == ([], [])
    assert [gone([sin], same, known, samples) for samples in (0, SAMPLES, 1)] == [[name], [name], []]
    assert [gone([sin], same, rare, samples) for samples in (0, SAMPLES, 1)] == [[name], [], []]
    assert (unexpected([sin], same, {}), gone([sin], same, {}, 0)) == ([], [])


def test_results_are_written_as_a_page_with_a_table_and_all_differences() -> None:
    variants = {
        "tan, function, float32": {"differences": {"0": [["output: dtype", "torch.float64, eager's torch.float32"]]}},
        "norm, function, float32, gradients": {"differences": {"2": [["output: requires_grad", ""]]}},
    }
    counts = {"function": {"eager's": 1234, "different": 1}, "function, gradients": {"different": 1}}
    stamp = {"date": "2026-11-26 00:09 UTC", "commit": "c8b810b", "torch": "2.11.0", "cpu": "Xeon", "gpu": None}
    written = {"stamp": stamp, "device": "cpu", "samples": 3, "counts": counts, "variants": variants}
    page = markdown(written, "python -m tests.conformance --out found.json")
    assert page.startswith("# PyTorch's own test databases on a CPU\n")
    assert "3 samples of each variant" in page
    assert "`python -m tests.conformance --out found.json` on Xeon with torch 2.11.0 (2026-11-26 00:09 UTC" in page
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    assert rows[2:] == [
        ["function", "1,234", "0", "0", "1", "0"],
        ["function, gradients", "0", "0", "0", "1", "0"],
        ["all", "1,234", "0", "0", "2", "0"],
    ]
    why = KNOWN["cpu"]["norm, function, float32, gradients"].why
    assert page.endswith(
        f"- norm, function, float32, gradients, sample 2: output: requires_grad (known: {why})\n"
        "- tan, function, float32, sample 0: output: dtype: torch.float64, eager's torch.float32\n"
    )


def test_changed_outcomes_are_found() -> None:
    def run(outcomes: dict[str, dict[str, str]]) -> dict[str, Any]:
        return {"variants": {name: {"outcomes": each} for name, each in outcomes.items()}}

    before = run({"sin": {"0": "eager's", "4": "eager's"}, "cos": {"0": "eager's"}})
    now = run({"sin": {"0": "eager's", "4": "refused", "8": "eager's"}, "tan": {"0": "eager's"}})
    assert changes(before, now) == ["sin, sample 4: eager's before, refused now"]


def test_ci_checks_all_picked_variants_and_a_few_others() -> None:
    def named(name: str, kind: str, count: int) -> list[Variant]:
        return [Variant(name, kind, "float32", False, lambda seed: iter(())) for _ in range(count)]

    variants = [
        *named("nn.Embedding", "train", 3),
        *named("sin", "out", EVERY + 1),
        *named("max (binary)", "function", 2),
    ]
    assert len(representative(variants)) == 3 + 2 + 2
