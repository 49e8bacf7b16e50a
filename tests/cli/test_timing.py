"""Commands that hold models against the clock, with and without one."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from math import isnan
from pathlib import Path

import pytest
import torch
from torch import nn

from autostream import cli
from autostream.bench.contest import Cell, Contest, Status
from autostream.bench.isolation import MakeContest, Outcome
from autostream.cli import timing
from autostream.scheduling.policies import POLICIES
from tests.cli.calls import error_of
from tests.reporting.reports import REPORT


class Doubling(nn.Module):
    """Stands for an optimized model, right or wrong by a factor."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor, self.reports = inner, factor, (REPORT,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the inner model and spoil its result."""
        return self.inner(x) * self.factor


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.00001, 0), (1.001, 1), (float("nan"), 1)])
def test_the_demo_checks_outputs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, factor: float, code: int
) -> None:
    monkeypatch.setattr(timing, "prepare", lambda target, *_: (nn.Linear(8, 8).eval(), (torch.ones(1, 8),)))
    monkeypatch.setattr(timing, "optimize", lambda model: Doubling(model, factor))
    assert cli.main(["demo", "--device", "cpu"]) == code
    out, err = capsys.readouterr()
    assert re.search("runs as +CUDA graph over 2 streams", out)
    assert "\nBeside the plain model, in turns\n  largest difference: " in out
    assert re.search(r"plain model [\d.]+ ms, optimized [\d.]+ ms: [\d.]+× the speed", out)
    assert err == ("autostream: the outputs differ\n" if code else "")
    assert cli.main(["demo", "--device", "cpu", "--json", "--out", f"{tmp_path / 'demo.json'}"]) == code
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["report"]["model"] == REPORT.model
    assert min(found["plain_us"], found["optimized_us"]) > 0
    assert (found["error"] is None) == isnan(factor), "JSON has no NaN"
    assert found["error"] is None or (found["error"] > found["allowed"]) == bool(code)


def test_the_demo_says_in_a_line_that_nothing_is_scheduled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    monkeypatch.setattr(timing, "prepare", lambda target, *_: (nn.Linear(8, 8).eval(), (torch.ones(1, 8),)))
    assert error_of(capsys, "demo", "--device", "cpu").startswith(
        "nothing is scheduled while AUTOSTREAM_DISABLE is set"
    )


CPU_MODES = ["eager", "compile_default", "autostream", *(f"autostream_eager_{policy}" for policy in POLICIES)]


class Contests:
    """In the place of measuring: notes what is asked for, and answers that each mode is fine or what it is told."""

    def __init__(self) -> None:
        self.others: dict[str, Status] = {}
        self.failure = ""
        self.modes: list[str] = []
        self.timeout_s = 0.0

    def __call__(
        self, make: MakeContest, modes: Sequence[str], timeout_s: float, note: Callable[[str], None]
    ) -> Outcome:
        self.make: Callable[[], Contest] = pickle.loads(pickle.dumps(make))
        self.modes, self.timeout_s = [*modes], timeout_s
        for mode in modes:
            note(mode)
        return Outcome({mode: self.cell(mode) for mode in modes}, self.failure)

    def cell(self, mode: str) -> Cell:
        if mode in self.others:
            return Cell(self.others[mode], "told so")
        quartiles = {"q1": 1.0, "median": 2.0, "q3": 3.0}
        us = [8.0, 8.0] if mode == "eager" else [4.0, 4.0]
        return Cell("ok", "", 1e-7, 0.1, None, None, us, us, quartiles, quartiles | {"p99": 4.0})


@pytest.fixture
def contests(monkeypatch: pytest.MonkeyPatch) -> Contests:
    contests = Contests()
    monkeypatch.setattr(timing, "hold_isolated", contests)
    return contests


def bench(*argv: str) -> int:
    return cli.main(["bench", *argv, "--device", "cpu"])


def test_bench_measures_a_users_model_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert bench(model, "--modes", "eager,autostream", "--json") == 0
    printed, said = capsys.readouterr()
    row = json.loads(printed)
    assert (row["workload"], row["versions"]["torch"]) == (model, str(torch.__version__))
    assert (row["device"], row["baseline"]) == ("cpu", "eager")
    assert {mode: cell["status"] for mode, cell in row["cells"].items()} == {"eager": "ok", "autostream": "ok"}
    assert row["cells"]["autostream"]["schedule"]["ops"] == 4
    assert len(row["cells"]["eager"]["call_us"]) == len(row["cells"]["autostream"]["call_us"])
    assert said == "", "progress is for terminals"


def test_bench_shows_a_line_for_each_mode(capsys: pytest.CaptureFixture[str], model: str, contests: Contests) -> None:
    assert bench(model) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["workload", "mode"]
    assert [line.split()[:2] for line in lines] == [[model, mode] for mode in CPU_MODES]
    assert ["1.00×" in line for line in lines] == [mode == "eager" for mode in CPU_MODES]
    assert ["2.00×" in line for line in lines] == [mode != "eager" for mode in CPU_MODES]


def test_bench_compares_with_the_baseline_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], model: str, contests: Contests
) -> None:
    assert bench(model, "--modes", "eager", "--baseline", "autostream", "--timeout", "5") == 0
    assert (contests.modes, contests.timeout_s) == (["autostream", "eager"], 5.0), "what is compared with runs too"
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [re.findall(r"[\d.]+×", line) for line in lines] == [["1.00×"], ["0.50×"]]


def test_bench_leaves_out_what_is_slow_unless_it_is_named(
    model: str, contests: Contests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "SLOW", ("compile_default",))
    assert bench(model) == 0
    assert (contests.modes, contests.timeout_s) == ([mode for mode in CPU_MODES if mode != "compile_default"], 900.0)
    assert bench(model, "--modes", "compile_default") == 0
    assert contests.modes == ["eager", "compile_default"]


def test_bench_compares_with_one_stream_on_a_gpu(
    capsys: pytest.CaptureFixture[str], model: str, contests: Contests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "parse_device", lambda text: torch.device("cuda"))
    assert cli.main(["bench", model, "--modes", "cuda_graph,eager"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [re.findall(r"[\d.]+×", line) for line in lines] == [["1.00×"], ["0.50×"]]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the name of {device}")
    assert cli.main(["bench", model, "--modes", "cuda_graph,eager", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["device"], row["baseline"]) == ("the name of cuda", "cuda_graph")


def test_bench_prepares_the_model_with_the_inputs_that_are_given(model: str, contests: Contests) -> None:
    """In whatever process: what makes the contest is pickled."""
    assert bench("net.py:Diamond", "--input", "2x64:float16") == 0
    contest = contests.make()
    assert contest.device == torch.device("cpu")
    output = contest.contender("eager").call()
    assert isinstance(output, torch.Tensor)
    assert (tuple(output.shape), output.dtype) == ((2, 64), torch.float16)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_bench_writes_the_same_to_a_file(
    capsys: pytest.CaptureFixture[str], model: str, contests: Contests, flags: list[str]
) -> None:
    assert bench(model, *flags) == 0
    printed = capsys.readouterr().out
    assert bench(model, *flags, "--out", "times") == 0
    assert capsys.readouterr().out == ""
    assert Path("times").read_text(encoding="utf-8") == printed


@pytest.mark.parametrize("status", ["wrong", "failed", "crashed", "timed out"])
@pytest.mark.parametrize(
    ("mode", "code"), [("autostream", 1), ("autostream_eager_path_cover", 1), ("compile_default", 0), ("eager", 0)]
)
def test_bench_fails_where_autostream_has_no_time(
    capsys: pytest.CaptureFixture[str], model: str, contests: Contests, mode: str, code: int, status: Status
) -> None:
    contests.others[mode] = status
    assert bench(model) == code
    assert f"{status}: told so" in capsys.readouterr().out
    assert bench(model, "--json") == code
    assert json.loads(capsys.readouterr().out)["cells"][mode] == {"status": status, "reason": "told so"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("bench", "the following arguments are required: TARGET (autostream bench --help says more)"),
        (
            "bench net.py:with_inputs --modes fast",
            "there is no mode 'fast' on this device: use eager, compile_default,",
        ),
        ("bench net.py:with_inputs --modes eager,cuda_graph", "there is no mode 'cuda_graph' on this device: use"),
        ("bench net.py:with_inputs --baseline cuda_graph", "there is no mode 'cuda_graph' on this device: use eager"),
        ("bench net.py:with_inputs --input 1,64", "--input 1,64: the shape '1,64' is not allowed"),
        ("bench net.py:with_inputs --timeout long", "argument --timeout: 'long' is not allowed: use a positive number"),
        ("bench net.py:with_inputs --timeout 0", "argument --timeout: '0' is not allowed"),
        ("bench net.py:with_inputs --timeout nan", "argument --timeout: 'nan' is not allowed"),
        ("bench net.py:with_inputs --timeout=-3", "argument --timeout: '-3' is not allowed"),
        ("bench net.py:with_inputs --timeout 1e9", "argument --timeout: '1e9' is not allowed"),
        ("bench net.py:with_inputs --out missing/file", "--out missing/file: No such file or directory: name a file"),
    ],
)
def test_bad_input_to_bench_is_one_line_before_anything_is_timed(
    capsys: pytest.CaptureFixture[str], model: str, contests: Contests, argv: str, said: str
) -> None:
    assert error_of(capsys, *argv.split(), "--device", "cpu").startswith(said)
    assert contests.modes == []


def test_bench_tells_in_a_line_what_does_not_load_in_the_other_process(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    said = error_of(capsys, "bench", "net.py:no_such", "--device", "cpu")
    assert said.startswith("net.py:no_such: module 'autostream_target_net' has no attribute 'no_such'")


def test_bench_tells_in_a_line_that_the_other_process_died(
    capsys: pytest.CaptureFixture[str], model: str, contests: Contests
) -> None:
    contests.failure = "crashed: exit code -9: out\nof memory"
    assert error_of(capsys, "bench", model, "--device", "cpu") == "crashed: exit code -9: out of memory"


def test_bench_shows_what_is_under_way_on_a_terminal_and_clears_it(
    capsys: pytest.CaptureFixture[str], model: str, contests: Contests, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench(model, "--modes", "eager,autostream")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bench(model, "--modes", "eager,autostream")
    clear = "\r\033[K"
    assert capsys.readouterr().err == f"{clear}eager{clear}autostream{clear}"


def measured(us: float, **more: object) -> dict[str, object]:
    """What bench writes of a model that takes 8 µs plainly, and this when optimized."""
    cells = {"eager": {"status": "ok", "call_us": [8.0] * 9}, "autostream": {"status": "ok", "call_us": [us] * 9}}
    about = {"device": "cpu", "baseline": "eager", "versions": {"torch": "2.11.0"}, "workload": "net"}
    return {**about, "cells": cells, **more}


FOREIGN = "after.json is not what autostream bench --json writes ("


def compare(before: object, after: object, *flags: str) -> int:
    for name, row in (("before.json", before), ("after.json", after)):
        Path(name).write_text(json.dumps(row), encoding="utf-8")
    return cli.main(["compare", "before.json", "after.json", *flags])


@pytest.mark.parametrize(
    ("us", "flags", "code"),
    [(4.0, [], 0), (4.1, [], 0), (4.2, [], 1), (4.2, ["--fail-over", "6%"], 0), (4.2, ["--fail-over", "0.01"], 1)],
)
def test_compare_fails_if_more_was_lost_than_is_allowed(model: str, us: float, flags: list[str], code: int) -> None:
    """4 µs are twice the speed of 8, and 4.2 µs 4.8 % less than that."""
    assert compare(measured(4.0), measured(us), *flags) == code


def test_compare_shows_both_and_what_changed(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert compare(measured(4.0), measured(5.0)) == 1
    title, _, _, row = capsys.readouterr().out.splitlines()
    assert title == "net, as times the speed of eager: cpu with torch 2.11.0, then cpu with torch 2.11.0"
    assert row.split() == ["autostream", "2.000×", "1.600×", "-20.0%", "worse"]
    assert compare(measured(4.0), measured(5.0), "--json") == 1
    assert json.loads(capsys.readouterr().out)["changes"] == [
        {"mode": "autostream", "before": 2.0, "after": 1.6, "change": pytest.approx(-0.2), "status": "ok"}
        | {"noisy": False, "worse": True}
    ]


def test_a_mode_that_has_no_time_any_more_is_worse(capsys: pytest.CaptureFixture[str], model: str) -> None:
    broken = measured(4.0)
    broken["cells"]["autostream"] = {"status": "wrong", "reason": "told so"}  # type: ignore[index]
    assert compare(measured(4.0), broken) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["autostream", "2.000×", "–", "worse,", "wrong"]


def test_compare_reads_what_bench_writes(capsys: pytest.CaptureFixture[str], model: str, contests: Contests) -> None:
    for name in ("before.json", "after.json"):
        assert bench(model, "--json", "--out", name) == 0
    assert cli.main(["compare", "before.json", "after.json", "--modes", ""]) == 0
    rows = capsys.readouterr().out.splitlines()[3:]
    assert [row.split()[0] for row in rows] == CPU_MODES[1:]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (measured(4.0, workload="other"), "before.json and after.json have another workload, net and other: measure"),
        (measured(4.0, baseline="autostream"), "before.json and after.json have another baseline, eager and auto"),
        (measured(4.0, cells={}), f"{FOREIGN}ValueError: its names or times are none)"),
        (measured(4.0, cells=[1]), f"{FOREIGN}AttributeError: "),
        (measured(-4.0), f"{FOREIGN}ValueError: its names or times are none)"),
        (measured(float("inf")), f"{FOREIGN}ValueError: its names or times are none)"),
        (measured(float("nan")), f"{FOREIGN}ValueError: its names or times are none)"),
        (measured(True), f"{FOREIGN}ValueError: its names or times are none)"),
        (measured(10**400), f"{FOREIGN}ValueError: its names or times are none)"),
        (measured(1e308), f"{FOREIGN}ValueError: its names or times are none)"),
        (measured(4.0, versions=None), f"{FOREIGN}ValueError: its names or times are none)"),
        ([], f"{FOREIGN}TypeError: "),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    capsys: pytest.CaptureFixture[str], model: str, after: object, said: str
) -> None:
    assert compare(measured(4.0), after) == 2
    assert capsys.readouterr().err.startswith(f"autostream: error: {said}")
    assert error_of(capsys, "compare", "before.json", "missing.json").startswith("missing.json cannot be read (File")
    for text in ("{", "[" * 100_000):
        Path("after.json").write_text(text, encoding="utf-8")
        assert error_of(capsys, "compare", "before.json", "after.json").startswith(FOREIGN)
    Path("after.json").write_text(Path("before.json").read_text())
    said = error_of(capsys, "compare", "before.json", "after.json", "--modes", "fast")
    assert said == "before.json has no time of a mode that starts with 'fast': name others"
