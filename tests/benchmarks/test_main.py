"""``python -m benchmarks`` as its users meet it: what it measures and keeps, what it prints, and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import result
from benchmarks.harness.comparison import Cell, Comparison
from benchmarks.harness.isolation import Outcome
from benchmarks.suites import SUITES, Row, comparison_of
from tests.benchmarks.results import LATER, OTHER_GPU, STAMP, cell, check, failed, row
from tests.benchmarks.results import result as made


class Lab:
    """In the place of measuring: notes what is asked for and answers at once, as told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.timeouts: list[float] = []
        self.others: dict[str, Outcome | BaseException] = {}
        self.now = 0.0
        self.stamp = STAMP

    def compare_modes(
        self, make: Callable[[], Comparison], modes: Sequence[str], timeout_s: float, note: Callable[[str], None]
    ) -> Outcome:
        """Answer in the place of ``compare_isolated``."""
        (wanted, device) = make.args  # type: ignore[attr-defined]
        assert make.func is comparison_of(wanted, device).func  # type: ignore[attr-defined]
        self.asked.append((wanted.workload, tuple(modes)))
        self.timeouts.append(timeout_s)
        for mode in modes:
            note(mode)
        self.now += 40.0
        other = self.others.get(wanted.workload, Outcome({mode: timed() for mode in modes}))
        if isinstance(other, BaseException):
            raise other
        return other

    @property
    def workloads(self) -> list[str]:
        return [workload for workload, _ in self.asked]


def timed() -> Cell:
    times = cell(3.0, 4.0, 5.0)
    return Cell("ok", "", *(times[name] for name in ("error", "first_s")), None, None, *list(times.values())[3:])


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    lab = Lab()
    monkeypatch.setattr(command, "compare_isolated", lab.compare_modes)
    monkeypatch.setattr(command, "stamp", lambda: lab.stamp)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: lab.now))
    return lab


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "cpu.json"


def run(out: Path, *argv: str) -> int:
    return command.main(["run", "cpu", "--out", str(out), *argv])


def names(path: Path) -> list[str]:
    found = result.load(path)
    check(found)
    return [row["workload"] for row in found["rows"]]


def error_of(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that a command which cannot run leaves on stderr."""
    assert command.main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("benchmarks: error: ")
    return err.removeprefix("benchmarks: error: ").rstrip("\n")


def test_the_cpu_suite_is_measured_end_to_end(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes = ("eager", "autostream")
    assert run(out, "--timeout", "120", "--modes", ",".join(modes), "--workloads", "mm_small") == 0
    found = result.load(out)
    check(found)
    assert [result.key(row) for row in found["rows"]] == [result.key(row) for row in SUITES["cpu"].rows[:1]]
    for measured in found["rows"]:
        assert measured["failure"] == ""
        assert measured["seconds"] > 0
        cells = measured["cells"]
        assert tuple(cells) == modes
        assert (cells["eager"]["status"], cells["autostream"]["status"]) == ("ok", "ok")
        assert cells["autostream"]["schedule"]["mode"] in ("one stream", "threads", "plain")
    printed, said = capsys.readouterr()
    assert printed.splitlines()[0].split() == ["workload", "eager", "µs", *modes[1:]]
    assert [line.split(":")[0] for line in said.splitlines()] == ["mm_small"]


def test_the_same_command_goes_on_without_measuring_again(lab: Lab, out: Path, capsys: Any) -> None:
    assert run(out, "--workloads", "towers8") == 0
    lab.stamp = LATER
    assert run(out) == 0
    assert lab.workloads == ["towers8", "mm_small"]
    assert names(out) == ["mm_small", "towers8"], "in the suite's order"
    assert [row["stamp"] for row in result.load(out)["rows"]] == [1, 0]
    capsys.readouterr()
    before = out.read_bytes()
    assert run(out) == 0
    assert (len(lab.asked), out.read_bytes()) == (2, before)
    assert "towers8" in capsys.readouterr().out, "the table is of the whole file"


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite of three rows in one mode."""
    rows = tuple(Row(name, 1, "float32") for name in ("a", "b", "c"))
    monkeypatch.setitem(SUITES, "cpu", command.Suite("cpu", rows, ("eager",), "eager"))  # type: ignore[arg-type]


def test_again_in_steps_comes_to_an_end(lab: Lab, out: Path, three: None, capsys: pytest.CaptureFixture[str]) -> None:
    """On a new commit, each command begins with what is still of the old one; when nothing is, all over again."""
    run(out)
    lab.asked.clear()
    lab.stamp = LATER | {"commit": "new"}
    said = []
    for _ in range(4):
        capsys.readouterr()
        assert run(out, "--again", "--minutes", "0.5") == 0
        said += [line for line in capsys.readouterr().err.splitlines() if "remain" in line]
    assert lab.workloads == ["a", "b", "c", "a"]
    assert [line.split(";")[0] for line in said] == ["2 rows remain", "1 row remains", "2 rows remain"]


BROKEN = [
    pytest.param(Outcome({"eager": Cell(status, "why")}), id=status) for status in ("failed", "crashed", "timed out")
] + [pytest.param(Outcome(failure="no room"), id="row")]


@pytest.mark.parametrize("broken", BROKEN)
def test_what_failed_is_tried_again_after_the_rest(lab: Lab, out: Path, three: None, broken: Outcome) -> None:
    lab.others["a"] = broken
    run(out, "--minutes", "0.5")
    run(out)
    assert lab.workloads == ["a", "b", "c", "a"]
    lab.others.clear()
    run(out)
    run(out)
    assert lab.workloads[4:] == ["a"]
    assert result.timed(result.load(out)["rows"][0]) == {"eager"}


def test_a_wrong_result_is_one_and_not_tried_again(lab: Lab, out: Path, three: None) -> None:
    lab.others["a"] = Outcome({"eager": Cell("wrong", "error 1.0e+00, 1.0e-01 allowed")})
    run(out)
    run(out)
    assert lab.workloads == ["a", "b", "c"]


def test_trying_again_does_not_lose_what_there_was(lab: Lab, out: Path) -> None:
    """As many modes as before are timed, but not the same ones."""
    modes, bad = ("--workloads", "towers8", "--modes", "eager,autostream"), Cell("crashed", "exit code 1")
    lab.others["towers8"] = Outcome({"eager": timed(), "autostream": bad})
    run(out, *modes)
    before = result.load(out)
    lab.others["towers8"] = Outcome({"eager": bad, "autostream": timed()})
    run(out, *modes)
    assert len(lab.asked) == 2
    assert result.load(out) == before
    lab.others.clear()
    run(out, *modes)
    assert result.timed(result.load(out)["rows"][0]) == {"eager", "autostream"}


def test_two_commands_may_add_to_one_file(lab: Lab, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second runs while the first one measures."""

    def compare_modes(*args: Any) -> Outcome:
        monkeypatch.setattr(command, "compare_isolated", lab.compare_modes)
        run(out, "--workloads", "towers8")
        return lab.compare_modes(*args)

    monkeypatch.setattr(command, "compare_isolated", compare_modes)
    run(out, "--workloads", "mm_small")
    assert names(out) == ["mm_small", "towers8"]


def test_pieces_merged_in_any_order_are_the_whole(lab: Lab, tmp_path: Path) -> None:
    whole, one, two, both = (tmp_path / f"{name}.json" for name in ("whole", "one", "two", "both"))
    run(whole)
    lab.asked.clear()
    for path, piece in ((one, "1/2"), (two, "2/2")):
        assert run(path, "--piece", piece) == 0
    assert lab.workloads == ["mm_small", "towers8"]
    assert (names(one), names(two)) == (["mm_small"], ["towers8"])
    for paths in ((one, two), (two, one)):
        assert command.main(["merge", *map(str, paths), "--out", str(both)]) == 0
        assert both.read_bytes() == whole.read_bytes()


def test_an_interrupted_run_keeps_what_is_done(lab: Lab, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab.others["towers8"] = KeyboardInterrupt()
    assert run(out) == 130
    printed, said = capsys.readouterr()
    assert printed == ""
    assert said.splitlines()[-1] == f"interrupted; {out} has what was done, and the same command goes on"
    assert names(out) == ["mm_small"]
    lab.others.clear()
    assert run(out) == 0
    assert lab.workloads == ["mm_small", "towers8", "towers8"]


def test_what_goes_wrong_is_stored_and_told_and_the_rest_goes_on(
    lab: Lab, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A time-out here; without a terminal each finished row has a line."""
    lab.others["mm_small"] = Outcome({"eager": timed(), "autostream": Cell("timed out", "no sign of life for 9 s")})
    lab.others["towers8"] = Outcome(failure="ImportError: no torchvision")
    assert run(out) == 0
    rows = result.load(out)["rows"]
    check(result.load(out))
    assert rows[0]["cells"]["autostream"] == {"status": "timed out", "reason": "no sign of life for 9 s"}
    assert (rows[1]["failure"], rows[1]["cells"]) == ("ImportError: no torchvision", {})
    printed, said = capsys.readouterr()
    assert said.splitlines() == [
        "mm_small: 40.0 s, autostream timed out",
        "towers8: 40.0 s, ImportError: no torchvision",
    ]
    assert "timed out" in printed
    assert "ImportError: no torchvision" in printed


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "the following arguments are required: COMMAND (python -m benchmarks --help says more)"),
        ("run", "the following arguments are required: suite, --out"),
        ("run cpu --out x --modes eager,cuda_graph", "--modes cuda_graph: use eager, compile_default, autostream, "),
        ("run cpu --out x --workloads mm_small,resnet", "--workloads resnet: use mm_small, towers8"),
        ("run cpu --out x --piece 3/2", "argument --piece: '3/2' is not allowed: write I/N, such as 2/4"),
        ("run cpu --out x --minutes soon", "argument --minutes: 'soon' is not allowed: use a positive number"),
        ("run quick --out x", "the suite quick needs a CUDA device; the suite cpu does not"),
        ("table missing", "missing is no result file (FileNotFoundError): write one with run --out"),
        ("table there.json --baseline fastest", "no row has the baseline fastest: there is eager"),
        ("table empty.json", "no row has the baseline eager: there is none yet"),
        ("plot there.json --out .", "there.json has nothing to plot: no mode and eager were timed in the same row"),
        ("plot there.json --out there.json", "--out there.json: File exists: name a folder that can be written"),
        ("compare there.json there.json", "there.json and there.json have no cell in common that could be compared"),
        ("compare there.json there.json --fail-over 3", "argument --fail-over: '3' is not allowed: write a share"),
    ],
)
def test_bad_input_is_one_line(
    lab: Lab, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result.save(made(row("a", eager=cell(1.0, 1.0)), suite="cpu"), Path("there.json"))
    result.save(result.empty("cpu"), Path("empty.json"))
    assert error_of(capsys, *argv.split()).startswith(said)
    assert lab.asked == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.json", "there.json"]


def test_a_file_of_another_suite_or_machine_is_refused_before_anything_is_measured(
    lab: Lab, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result.save(made(row("googlenet")), out)
    assert error_of(capsys, "run", "cpu", "--out", out) == f"{out} is a result of quick: write to another file"
    result.save(made(row("mm_small"), suite="cpu") | {"stamps": [OTHER_GPU]}, out)
    assert error_of(capsys, "run", "cpu", "--out", out).startswith("this result has gpu 'G2', the new row 'G1'")
    assert lab.asked == []


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A result in which autostream takes half the baseline's time, and a third on the device."""
    monkeypatch.chdir(tmp_path)
    fast = cell(5.0, 5.0) | {"device_us": [2.0, 2.0], "schedule": {"mode": "cuda graph", "predicted_us": 2.0}}
    cells = {"cuda_graph": cell(10.0, 10.0) | {"device_us": [6.0, 6.0]}, "autostream": fast, "eager": cell(20.0, 20.0)}
    result.save(made(row("googlenet", 8, **cells)), Path("shown.json"))
    return "shown.json"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("", "googlenet ×8 10.0 2.00× 0.50×"),
        ("--measure device", "googlenet ×8 6.0 3.00× 0.60×"),
        ("--baseline eager", "googlenet ×8 20.0 2.00× 4.00×"),
        ("--format github", "| googlenet ×8 | 10.0 | 2.00× | 0.50× |"),
    ],
)
def test_tables(shown: str, capsys: pytest.CaptureFixture[str], flags: str, line: str) -> None:
    assert command.main(["table", shown, *flags.split()]) == 0
    assert " ".join(capsys.readouterr().out.splitlines()[-1].split()) == line


ORIGINS = [f"{name}: G1, torch 2.11.0, commit 0123456789ab-dirty" for name in ("A a.json", "B b.json")]


def against(us: float) -> dict[str, Any]:
    return {"cuda_graph": cell(12.0, 12.0, 12.0), "autostream": cell(us, us, us)}


def compared(before: dict[str, Any], after: dict[str, Any], *flags: str) -> int:
    result.save(before, Path("a.json"))
    result.save(after, Path("b.json"))
    return command.main(["compare", "a.json", "b.json", *flags])


def test_a_comparison_with_regressions(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = made(row("a", **against(6.0)), row("b", **against(6.0)), row("c", **against(6.0)))
    after = made(
        row("a", **against(6.0)), row("b", **against(8.0)), row("c", **against(6.0) | {"autostream": failed()})
    )
    assert compared(before, after) == 1
    assert capsys.readouterr().out.splitlines() == [
        *ORIGINS,
        "a, autostream: 2.000× to 2.000× +0.0%",
        "b, autostream: 2.000× to 1.500× -25.0%, WORSE",
        "c, autostream: 2.000× to - failed, WORSE",
        "2 of 3 cells lost more than 3.0%, chance aside, against cuda_graph",
    ]


def test_plots_are_written_and_named(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["plot", shown, "--out", "plots"]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert paths == [Path("plots") / f"quick-{name}.svg" for name in ("workloads", "predictions")]
    assert all(path.exists() for path in paths)


@pytest.mark.gpu
def test_a_row_of_the_quick_suite_is_measured_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, modes = tmp_path / "quick.json", ("eager", "cuda_graph", "autostream")
    argv = ["run", "quick", "--workloads", "mm_medium", "--modes", ",".join(modes), "--out", str(path)]
    assert command.main(argv) == 0
    (measured,) = result.load(path)["rows"]
    check(result.load(path))
    assert {mode: cell["status"] for mode, cell in measured["cells"].items()} == dict.fromkeys(modes, "ok")
    assert all(cell["allocated_bytes"] > 0 for cell in measured["cells"].values())
    assert command.main(["compare", str(path), str(path)]) == 0
    assert "autostream: " in capsys.readouterr().out


def test_a_row_without_a_mode_that_is_asked_for_is_measured_again_in_all(lab: Lab, out: Path) -> None:
    """Its modes have to take turns, and none that was asked for once is lost."""
    modes = "eager", "compile_default", "autostream"
    one = ("--workloads", "towers8", "--modes")
    for asked in ("eager,compile_default", "eager", "compile_default,eager", "autostream", "eager,autostream"):
        assert run(out, *one, asked) == 0
    assert lab.asked == [("towers8", modes[:2]), ("towers8", modes)]
    (measured,) = result.load(out)["rows"]
    assert tuple(measured["cells"]) == modes
    assert run(out, *one, "eager", "--again") == 0
    assert lab.asked[2:] == [("towers8", modes)]
