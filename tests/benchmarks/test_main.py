"""``python -m benchmarks`` as its users meet it: what it measures and keeps, what it prints, and the exit code."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tqdm.std

from benchmarks import __main__ as command
from benchmarks import result
from benchmarks.harness.comparison import Cell, Comparison
from benchmarks.harness.isolation import Outcome
from benchmarks.suites import SUITES, Row, comparison_of
from tests.benchmarks.results import LATER, OTHER_GPU, STAMP, cell, check, failed, row
from tests.benchmarks.results import result as made


class Lab:
    """In the place of measuring: notes what is asked for and answers at once, as told.

    Attributes:
        asked: workload and modes of each comparison.
        timeouts: of each comparison.
        others: outcomes by workload, where they are not that all modes are fine.
        now: the clock, on which a comparison takes 40 seconds.
        stamp: of all rows.
    """

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
        """What was measured, in order."""
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
    """For real."""
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
        assert cells["autostream"]["schedule"]["mode"] in ("one stream", "threads")
    printed, said = capsys.readouterr()
    assert printed.splitlines()[0].split() == ["workload", "eager", "µs", *modes[1:]]
    assert [line.split(":")[0] for line in said.splitlines()] == ["mm_small"]


def test_rows_are_stored_as_they_were_asked_for(lab: Lab, out: Path) -> None:
    assert run(out) == 0
    assert lab.asked == [("mm_small", SUITES["cpu"].modes), ("towers8", SUITES["cpu"].modes)]
    assert lab.timeouts == [900.0, 900.0]
    assert names(out) == ["mm_small", "towers8"]
    stored = result.load(out)["rows"][0]
    cells = dict.fromkeys(SUITES["cpu"].modes, cell(3.0, 4.0, 5.0))
    assert stored == row("mm_small") | {"dtype": "float32", "seconds": 40.0, "cells": cells, "stamp": 0}


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


def test_again_measures_also_what_is_there(lab: Lab, out: Path) -> None:
    run(out)
    lab.stamp = LATER
    assert run(out, "--again", "--workloads", "towers8") == 0
    assert lab.workloads == ["mm_small", "towers8", "towers8"]
    assert names(out) == ["mm_small", "towers8"]
    assert [row["stamp"] for row in result.load(out)["rows"]] == [0, 1]


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


def test_again_on_the_same_commit_goes_on_with_what_is_oldest(lab: Lab, out: Path, three: None) -> None:
    run(out)
    lab.asked.clear()
    lab.stamp = LATER
    for _ in range(4):
        run(out, "--again", "--minutes", "0.5")
    assert lab.workloads == ["a", "b", "c", "a"]


def test_again_puts_a_failure_in_the_place_of_a_time(lab: Lab, out: Path, three: None) -> None:
    run(out)
    lab.others["a"] = Outcome({"eager": Cell("failed", "no kernel")})
    run(out, "--again")
    assert result.load(out)["rows"][0]["cells"]["eager"]["status"] == "failed"


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


def test_a_row_that_lacks_a_mode_comes_before_one_that_failed(lab: Lab, out: Path, three: None) -> None:
    lab.others["a"] = Outcome(failure="no room")
    run(out, "--workloads", "a")
    lab.stamp = LATER
    run(out, "--workloads", "b")
    lab.asked.clear()
    run(out, "--workloads", "a,b", "--modes", "autostream")
    assert lab.workloads == ["b", "a"]


def test_what_fails_for_ever_does_not_remain(
    lab: Lab, out: Path, three: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for workload in "abc":
        lab.others[workload] = Outcome(failure="no room")
    run(out)
    capsys.readouterr()
    assert run(out, "--minutes", "0.5") == 0
    assert "remain" not in capsys.readouterr().err


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


def test_a_stamp_has_the_options_of_the_run(lab: Lab, out: Path) -> None:
    run(out, "--timeout", "7", "--modes", "eager,autostream")
    assert result.load(out)["stamps"] == [STAMP | {"timeout_s": 7.0, "modes": ["eager", "autostream"]}]


def test_an_empty_piece_is_told(lab: Lab, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(out, "--piece", "5/5") == 0
    assert capsys.readouterr().err == "--piece 5/5 is empty: there are fewer rows than pieces\n"
    assert lab.asked == []
    assert run(out, "--piece", "2/2") == 0
    assert "is empty" not in capsys.readouterr().err


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


def test_a_piece_is_every_nth_of_the_chosen_rows(lab: Lab, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece stays the same when some of its rows are done."""
    rows = tuple(Row(name, 1, "float32") for name in ("a", "b", "c", "d", "e", "f"))
    monkeypatch.setitem(SUITES, "cpu", command.Suite("cpu", rows, ("eager",), "eager"))  # type: ignore[arg-type]
    run(out, "--piece", "1/2", "--workloads", "a,b,c,d,e", "--minutes", "0.5")
    assert lab.workloads == ["a"]
    run(out, "--piece", "1/2", "--workloads", "a,b,c,d,e")
    assert lab.workloads == ["a", "c", "e"]
    run(out, "--piece", "2/2")
    assert lab.workloads == ["a", "c", "e", "b", "d", "f"]


@pytest.mark.parametrize(("minutes", "done"), [("0.5", 1), ("0.7", 2), ("99", 2)])
def test_no_row_begins_when_time_is_up(
    lab: Lab, out: Path, monkeypatch: pytest.MonkeyPatch, minutes: str, done: int
) -> None:
    """A row takes 40 seconds here, and telling the machine's stamp one."""

    def stamp() -> dict[str, Any]:
        lab.now += 1.0
        return STAMP

    monkeypatch.setattr(command, "stamp", stamp)
    assert run(out, "--minutes", minutes) == 0
    assert lab.workloads == ["mm_small", "towers8"][:done]
    assert len(result.load(out)["rows"]) == done


def test_modes_and_the_timeout_can_be_chosen(lab: Lab, out: Path) -> None:
    run(out, "--modes", "autostream_eager_path_cover,eager", "--workloads", "towers8", "--timeout", "7")
    assert lab.asked == [("towers8", ("autostream_eager_path_cover", "eager"))]
    assert lab.timeouts == [7.0]


def test_rows_that_time_did_not_suffice_for_are_told(
    lab: Lab, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tuple(Row(name, 1, "float32") for name in ("a", "b", "c"))
    monkeypatch.setitem(SUITES, "cpu", command.Suite("cpu", rows, ("eager",), "eager"))  # type: ignore[arg-type]
    said = []
    for _ in range(3):
        assert run(out, "--minutes", "0.5") == 0
        said.append(capsys.readouterr().err.splitlines()[1:])
    assert said == [
        ["2 rows remain; the same command goes on"],
        ["1 row remains; the same command goes on"],
        [],
    ]


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


def test_an_interrupt_before_anything_is_measured_is_one_line(
    lab: Lab, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stamp() -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "stamp", stamp)
    assert run(out) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


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


def test_a_terminal_shows_a_bar_with_the_mode_under_way(lab: Lab, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, seconds = Terminal(), iter(range(1000))
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(tqdm.std, "time", lambda: float(next(seconds)))
    assert run(out) == 0
    shown = re.split(r"[\r\n]", terminal.getvalue())
    for workload in ("mm_small", "towers8"):
        for mode in SUITES["cpu"].modes:
            assert any(line.startswith(f"{workload}: ") and line.rstrip().endswith(f"{mode}]") for line in shown)
    assert any("2/2" in line for line in shown)
    assert "40.0 s" not in terminal.getvalue(), "the bar says it"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "the following arguments are required: COMMAND (python -m benchmarks --help says more)"),
        ("measure cpu", "argument COMMAND: invalid choice: 'measure'"),
        ("run", "the following arguments are required: suite, --out"),
        ("run cpu", "the following arguments are required: --out (python -m benchmarks run --help says more)"),
        ("run slow --out x", "argument suite: invalid choice: 'slow' (choose from"),
        ("run cpu --out x --modes eager,cuda_graph", "--modes cuda_graph: use eager, compile_default, autostream, "),
        ("run cpu --out x --workloads mm_small,resnet", "--workloads resnet: use mm_small, towers8"),
        ("run cpu --out x --piece 3/2", "argument --piece: '3/2' is not allowed: write I/N, such as 2/4"),
        ("run cpu --out x --piece 0/2", "argument --piece: '0/2' is not allowed"),
        ("run cpu --out x --piece 1", "argument --piece: '1' is not allowed"),
        ("run cpu --out x --minutes soon", "argument --minutes: 'soon' is not allowed: use a positive number"),
        ("run cpu --out x --minutes 0", "argument --minutes: '0' is not allowed"),
        ("run cpu --out x --timeout nan", "argument --timeout: 'nan' is not allowed"),
        ("run cpu --out x --timeout=-1", "argument --timeout: '-1' is not allowed"),
        ("run cpu --out x --timeout inf", "argument --timeout: 'inf' is not allowed"),
        ("run quick --out x", "the suite quick needs a CUDA device; the suite cpu does not"),
        ("merge --out x", "the following arguments are required: FILE"),
        ("merge missing --out x", "missing is no result file (FileNotFoundError)"),
        ("table missing", "missing is no result file (FileNotFoundError): write one with run --out"),
        ("table there.json --baseline fastest", "no row has the baseline fastest: there is eager"),
        ("table there.json --format html", "argument --format: invalid choice: 'html'"),
        ("table there.json --measure host", "argument --measure: invalid choice: 'host'"),
        ("table empty.json", "no row has the baseline eager: there is none yet"),
        ("plot missing", "missing is no result file"),
        ("plot there.json --out .", "there.json has nothing to plot: no mode and eager were timed in the same row"),
        ("plot there.json --out there.json", "--out there.json: File exists: name a folder that can be written"),
        ("compare there.json missing", "missing is no result file"),
        ("compare there.json there.json", "there.json and there.json have no cell in common that could be compared"),
        ("compare there.json there.json --fail-over 3", "argument --fail-over: '3' is not allowed: write a share"),
        ("compare there.json there.json --fail-over nan%", "argument --fail-over: 'nan%' is not allowed"),
        ("compare there.json there.json --fail-over -1%", "argument --fail-over: expected one argument"),
        ("compare there.json there.json --fail-over=-1%", "argument --fail-over: '-1%' is not allowed"),
        ("compare there.json there.json --fail-over little", "argument --fail-over: 'little' is not allowed"),
    ],
)
def test_bad_input_is_one_line(
    lab: Lab,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: str,
    said: str,
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


def test_a_file_that_cannot_be_written_is_one_line(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file" / "x.json") == 2
    assert capsys.readouterr().err.endswith(": name a file that can be written\n")


def test_pieces_of_two_suites_do_not_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    result.save(made(), one)
    result.save(made(suite="cpu"), two)
    said = error_of(capsys, "merge", one, two, "--out", tmp_path / "both")
    assert said == "results of quick and cpu do not merge: they are two suites"
    assert not (tmp_path / "both").exists()


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


def test_a_table_of_cells_has_a_line_for_each_mode(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["table", shown, "--cells", "--format", "csv", "--baseline", "eager"]) == 0
    lines = csv.DictReader(io.StringIO(capsys.readouterr().out))
    faster = {line["mode"]: float(line["faster"]) for line in lines}
    assert faster == {"cuda_graph": 2.0, "autostream": 4.0, "eager": 1.0}


def test_faster_is_by_the_time_that_was_asked_for(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["table", shown, "--cells", "--format", "csv", "--measure", "device"]) == 0
    lines = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [(line["mode"], float(line["faster"])) for line in lines][:2] == [("cuda_graph", 1.0), ("autostream", 3.0)]


@pytest.mark.parametrize("rows", [1, 3000])
def test_a_reader_that_leaves_early_is_no_error(shown: str, rows: int) -> None:
    """Whether the table is longer than a pipe or not."""
    result.save(made(*(row("a", number + 1, **against(6.0)) for number in range(rows))), Path(shown))
    argv = [sys.executable, "-m", "benchmarks", "table", str(Path(shown).absolute()), "--cells"]
    place = Path(command.__file__).parent.parent
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=place) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


ORIGINS = [f"{name}: G1, torch 2.11.0, commit 0123456789ab-dirty" for name in ("A a.json", "B b.json")]


def against(us: float) -> dict[str, Any]:
    return {"cuda_graph": cell(12.0, 12.0, 12.0), "autostream": cell(us, us, us)}


def compared(before: dict[str, Any], after: dict[str, Any], *flags: str) -> int:
    result.save(before, Path("a.json"))
    result.save(after, Path("b.json"))
    return command.main(["compare", "a.json", "b.json", *flags])


def test_a_comparison_without_regressions(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of cells that neither could time there is nothing to say."""
    scattered = cell(5.0, 6.0, 7.0)
    broken = against(6.0) | {"autostream": failed()}
    before = made(row("a", **against(6.0)), row("b", **against(6.0)), row("c", **broken), row("d", **broken))
    after = made(
        row("a", **against(6.1)),
        row("b", **against(6.0) | {"autostream": scattered}),
        row("c", **against(6.0)),
        row("d", **broken),
    )
    assert compared(before, after) == 0
    assert capsys.readouterr().out.splitlines() == [
        *ORIGINS,
        "a, autostream: 2.000× to 1.967× -1.6%",
        "b, autostream: 2.000× to 2.000× +0.0%, noisy",
        "c, autostream: - to 2.000× ok",
        "0 of 3 cells lost more than 3.0%, chance aside, against cuda_graph",
    ]


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


def test_a_comparison_says_what_both_were_measured_on(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = made(row("a", **against(6.0))), made(row("a", **against(6.0)), row("b", **against(6.0)))
    before["stamps"] = [OTHER_GPU | {"torch": "2.13.0", "commit": None}]
    after["stamps"] = [STAMP | {"gpu": None}, LATER | {"gpu": None}, LATER | {"gpu": None, "commit": "abc"}]
    compared(before, after)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "A a.json: G2, torch 2.13.0, commit unknown",
        "B b.json: cpu, torch 2.11.0, commit 0123456789ab-dirty and abc",
    ]


def test_a_row_that_the_second_lacks_is_worse(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(made(row("a", **against(6.0)), row("b", **against(6.0))), made(row("a", **against(6.0)))) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "b, autostream: 2.000× to - missing, WORSE",
        "1 of 2 cells lost more than 3.0%, chance aside, against cuda_graph",
    ]


def test_a_second_result_of_nothing_but_failed_rows_is_worse(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(made(row("a", **against(6.0))), made(row("a", failure="no room"))) == 1
    assert "a, autostream: 2.000× to - no room, WORSE" in capsys.readouterr().out
    assert command.main(["table", "b.json"]) == 0
    assert "no room" in capsys.readouterr().out


def test_a_loss_in_a_part_of_the_rounds_does_not_excuse_itself(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Five times as slow in 18 of 25 rounds: their quartiles are four times the median apart."""
    slow = against(6.0)
    cells = {mode: cell(*measured["call_us"][:1] * 25) for mode, measured in slow.items()}
    part = cells | {"autostream": cell(*[30.0] * 18, *[6.0] * 7)}
    assert compared(made(row("a", **cells)), made(row("a", **part))) == 1
    assert "a, autostream: 2.000× to 0.400× -80.0%, noisy, WORSE" in capsys.readouterr().out


def test_results_of_two_suites_are_not_compared(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells = against(6.0)
    assert compared(made(row("a", **cells)), made(row("a", **cells), suite="inference")) == 2
    printed, said = capsys.readouterr()
    assert printed == ""
    assert said == "benchmarks: error: results of quick and inference do not compare: they are two suites\n"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--fail-over 24%", 1),
        ("--fail-over 0.26", 0),
        ("--fail-over 26%", 0),
        ("--baseline eager --modes cuda_graph", 0),
    ],
)
def test_a_comparison_by_other_rules(shown: str, flags: str, code: int) -> None:
    before, after = (made(row("a", **against(us), eager=cell(24.0, 24.0, 24.0))) for us in (6.0, 8.0))
    assert compared(before, after, *flags.split()) == code


def test_a_comparison_of_device_times(shown: str) -> None:
    before, after = against(6.0), against(6.0)
    after["autostream"]["device_us"] = [4.0, 4.0, 4.0]
    assert compared(made(row("a", **before)), made(row("a", **after))) == 0
    assert compared(made(row("a", **before)), made(row("a", **after)), "--measure", "device") == 1


def test_a_comparison_with_nothing_but_failures_is_none(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = made(row("a", **against(6.0) | {"autostream": failed()}))
    assert compared(before, made(row("a", **against(6.0)))) == 2
    assert "have no cell in common that could be compared" in capsys.readouterr().err


def test_all_modes_are_compared_where_asked_for(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    both = made(row("a", **against(6.0), eager=cell(24.0, 24.0, 24.0)))
    assert compared(both, both, "--modes", "") == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[2:-1]] == ["a, autostream", "a, eager"]


def test_a_comparison_needs_the_baseline_on_both_sides(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Or nothing could be worse, and a check that compares nothing would pass."""
    whole, part = made(row("a", **against(6.0))), made(row("a", autostream=cell(6.0, 6.0, 6.0)))
    for pair in ((whole, part), (part, whole)):
        assert compared(*pair) == 2
        assert "no row has the baseline cuda_graph: there is autostream" in capsys.readouterr().err


def test_plots_are_written_and_named(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["plot", shown, "--out", "plots"]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert paths == [Path("plots") / f"quick-{name}.svg" for name in ("workloads", "predictions")]
    assert all(path.exists() for path in paths)


def test_a_plot_is_of_what_was_asked_for(shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(command, "plots", lambda *args: asked.append(args[1:]) or [Path()])  # type: ignore[func-returns-value]
    command.main(["plot", shown])
    command.main(["plot", shown, "--baseline", "eager", "--measure", "device", "--out", "x"])
    assert asked == [("cuda_graph", "call", Path()), ("eager", "device", Path("x"))]


@pytest.mark.parametrize("name", ["", "run", "merge", "table", "compare", "plot"])
def test_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as raised:
        command.main([*name.split(), "--help"])
    assert raised.value.code == 0
    assert f"usage: python -m benchmarks {name}".rstrip() in capsys.readouterr().out


def test_the_package_is_a_command() -> None:
    """The exit code reaches the shell."""
    done = subprocess.run([sys.executable, "-m", "benchmarks", "table", "missing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("benchmarks: error: missing is no result file")


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


def test_a_mode_that_is_no_more_is_not_dropped(lab: Lab, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = made(row("towers8", eager=cell(1.0, 1.0), old=cell(1.0, 1.0)) | {"dtype": "float32"}, suite="cpu")
    result.save(old, out)
    said = error_of(capsys, "run", "cpu", "--out", out)
    assert said == f"{out} has the mode old, which there is no more: write to another file"
    assert (lab.asked, result.load(out)) == ([], old)
    assert run(out, "--workloads", "mm_small") == 0, "rows that are not measured again may have it"


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file" / "x.json") == 2
    assert lab.workloads == []
