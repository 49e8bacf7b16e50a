"""The command line as its users meet it: what it prints, where, and the exit code."""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autostream import cli, pipeline
from autostream.bench.contest import Cell, Contest, Status
from autostream.bench.isolation import MakeContest, Outcome
from autostream.costs.device import profile_named
from autostream.costs.measured import METHOD
from autostream.costs.records import Context, Measurements, to_json
from autostream.ir import Decision, DeviceProfile
from autostream.options import Options
from autostream.reporting import text, timeline
from autostream.reporting.page import assemble
from autostream.reporting.report import Report
from autostream.scheduling import POLICIES
from tests.reporting.reports import PLAIN, REPORT

MODEL = """
import torch
from torch import nn

class Diamond(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = x.relu()
        return self.left(x) + self.right(x)

class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x

def with_inputs():
    return Diamond().eval(), (torch.ones(4, 64),)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A TARGET that comes with its inputs."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    return "net.py:with_inputs"


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pipeline that notes what it is asked for and answers with a report made by hand."""
    asked = SimpleNamespace(report=REPORT)

    def plan(model: object, args: object, kwargs: object, options: object, profile: object = None) -> Report:
        vars(asked).update(model=model, args=args, options=options, profile=profile, grad=torch.is_grad_enabled())
        return asked.report  # type: ignore[no-any-return]

    monkeypatch.setattr(pipeline, "plan", plan)
    return asked


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a command which cannot run leaves on stderr."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("autostream: error: ")
    return err.removeprefix("autostream: error: ").rstrip("\n")


def test_inspect_plans_a_real_model_for_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert cli.main(["inspect", model, "--device", "h200", "--json"]) == 0
    dumped = json.loads(capsys.readouterr().out)
    assert dumped["model"] == "Diamond"
    assert dumped["profile"]["name"] == "NVIDIA H200"
    assert dumped["summary"]["width"] == 2
    targets = [op["target"].split(".")[1] for op in dumped["graph"]["ops"].values()]
    assert targets == ["relu", "linear", "linear", "add"]


def test_inspect_finds_the_branches_of_googlenet(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "googlenet", "--device", "h200", "--policy", "path_cover", "--ops", "0"]) == 0
    # 57 times convolution, batch norm and ReLU; 4 poolings between and 9 within the 9 inception modules, which have
    # 4 branches each and end in a concatenation; at the end average pooling and a linear layer.
    ops = 57 * 3 + 4 + 9 + 9 + 2
    assert f"{ops} ops (ATen), width 4, 9 regions of up to 4 independent branches" in capsys.readouterr().out


def test_schedule_predicts_for_a_gpu_that_is_not_here_and_says_how_sure_that_is(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    assert cli.main(["schedule", model, "--device", "h100"]) == 0
    printed = capsys.readouterr().out
    assert re.search("^device +NVIDIA H100", printed, re.MULTILINE)
    assert re.search("^uncertain +.* if ops take 35% less or more time and room", printed, re.MULTILINE)
    assert "\nWhat to try\n" in printed
    assert "\nOps in launch order" not in printed, "that is for inspect"


def test_schedule_says_as_json_what_inspect_does(
    capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace
) -> None:
    assert cli.main(["schedule", model, "--json"]) == 0
    scheduled = capsys.readouterr().out
    assert cli.main(["inspect", model, "--json"]) == 0
    assert json.loads(scheduled)["explanation"]["reasons"]
    assert capsys.readouterr().out == scheduled


def test_a_gpu_that_was_measured_is_planned_for_by_its_file(model: str, planned: SimpleNamespace) -> None:
    measured = replace(profile_named("h200"), name="NVIDIA H300", source="measured")
    context = Context("NVIDIA H300", 132, {"torch": "2.0.0", "method": str(METHOD)})
    Path("h300.json").write_text(to_json(Measurements(context, measured)), encoding="utf-8")
    assert cli.main(["schedule", model, "--device", "h300.json"]) == 0
    assert planned.profile == measured
    assert planned.args[0].device.type == "cpu"


def test_a_file_without_a_device_is_one_line(
    capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace
) -> None:
    context = Context("NVIDIA H200", 132, {"method": str(METHOD)})
    Path("costs.json").write_text(to_json(Measurements(context)), encoding="utf-8")
    said = error_of(capsys, "schedule", model, "--device", "costs.json")
    assert said.startswith("--device costs.json: no device was measured in it: use one of h200, ")


def test_a_file_of_an_older_way_to_measure_is_refused_with_both_named(
    capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace
) -> None:
    context = Context("NVIDIA H200", 132, {"torch": "2.0.0", "method": "0"})
    Path("old.json").write_text(to_json(Measurements(context, profile_named("h200"))), encoding="utf-8")
    said = error_of(capsys, "schedule", model, "--device", "old.json")
    assert said == (
        "old.json was measured on NVIDIA H200 (132 multiprocessors, method 0), and this is NVIDIA H200 "
        f"(132 multiprocessors, method {METHOD}): measure again here"
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> DeviceProfile:
    """A machine with a GPU, to be measured."""
    measured = replace(profile_named("h200"), name="NVIDIA H300", source="measured")
    monkeypatch.setattr(cli, "parse_device", lambda text: torch.device("cuda", 0))
    monkeypatch.setattr(cli, "profile_of", lambda device: measured)
    monkeypatch.setattr(cli, "profile_anew", lambda device: (measured, (Decision("", "not kept", "the disk is full"),)))
    return measured


def test_a_gpu_is_measured_and_shown(capsys: pytest.CaptureFixture[str], gpu: DeviceProfile) -> None:
    assert cli.main(["profile"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{text.profile(gpu)}\n"
    assert err == "autostream: not kept: the disk is full\n"


def test_a_gpu_is_measured_for_others(
    monkeypatch: pytest.MonkeyPatch, model: str, planned: SimpleNamespace, gpu: DeviceProfile
) -> None:
    monkeypatch.setattr(
        cli, "context_of", lambda device, profile, method: Context(profile.name, 1, {"method": f"{method}"})
    )
    assert cli.main(["profile", "--out", "mine.json"]) == 0
    assert cli.main(["schedule", model, "--device", "mine.json"]) == 0
    assert planned.profile == gpu


@pytest.mark.usefixtures("gpu")
def test_what_cannot_be_measured_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: str) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nLong story.")

    assert error_of(capsys, "profile", "--out", "gpu.txt").startswith("--out gpu.txt: name a file that ends in .json")
    monkeypatch.setattr(cli, "profile_anew", fail)
    assert error_of(capsys, "profile") == (
        "--device cuda:0: it could not be measured: OutOfMemoryError: CUDA out of memory.; free it and try again"
    )


def test_a_processor_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "profile", "--device", "cpu").startswith("--device cpu: a processor is not measured")


def test_the_graph_that_runs_is_shown_as_code(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert cli.main(["inspect", model, "--device", "h200", "--code", "--memory-budget", "inf"]) == 0
    shown = capsys.readouterr().out
    assert "def forward(self" in shown
    assert "wait" in shown


@pytest.mark.parametrize(
    ("flags", "start"), [([], "model "), (["--json"], '{\n "schema": 2'), (["--dot"], "digraph {\n  node [")]
)
def test_three_faces_to_the_terminal_or_to_a_file(
    capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace, flags: list[str], start: str
) -> None:
    assert cli.main(["inspect", model, *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(start)
    assert cli.main(["inspect", model, *flags, "--out", "report"]) == 0
    assert capsys.readouterr().out == ""
    assert Path("report").read_text(encoding="utf-8") == printed


def test_inspect_asks_for_what_it_was_told(model: str, planned: SimpleNamespace) -> None:
    argv = "inspect net.py:Diamond --input 2x64:float16 --device h200 --policy path_cover --streams 3"
    more = "--costs roofline --kernels eager --tuning-seconds 0.5 --memory-budget 64MiB --seed 7"
    assert cli.main([*argv.split(), *more.split()]) == 0
    assert planned.profile.name == "NVIDIA H200"
    assert (planned.options.policy, planned.options.streams) == ("path_cover", 3)
    assert (planned.options.costs, planned.options.kernels) == ("roofline", "eager")
    assert (planned.options.tuning_seconds, planned.options.memory_budget, planned.options.seed) == (0.5, 2**26, 7)
    assert [(tuple(x.shape), x.dtype) for x in planned.args] == [((2, 64), torch.float16)]
    assert planned.model.left.weight.dtype == torch.float16
    assert not planned.grad


def test_what_is_not_told_is_as_for_optimize(model: str, planned: SimpleNamespace) -> None:
    assert cli.main(["schedule", model]) == 0
    assert planned.options == Options()


def test_ops_limits_the_table(capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace) -> None:
    assert cli.main(["inspect", model, "--ops", "2"]) == 0
    assert "the 2 costliest of 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "the following arguments are required: COMMAND (autostream --help says more)"),
        ("optimise x", "argument COMMAND: invalid choice: 'optimise'"),
        ("inspect", "the following arguments are required: TARGET (autostream inspect --help says more)"),
        ("inspect net.py:Diamond --colour", "unrecognized arguments: --colour"),
        ("inspect no_such:f", "cannot import 'no_such': ModuleNotFoundError: No module named 'no_such'"),
        ("inspect net.py:no_such", "net.py:no_such: module 'autostream_target_net' has no attribute 'no_such'"),
        ("inspect net.py:Diamond", "net.py:Diamond comes without example inputs: give each one as --input"),
        ("inspect net.py:Diamond --input 1,64", "--input 1,64: the shape '1,64' is not allowed: write whole numbers"),
        ("inspect net.py:Diamond --input 1x64:half", "--input 1x64:half: the dtype 'half' is not allowed: use float16"),
        (
            "inspect net.py:Diamond --input 1x64 --input 1",
            "net.py:Diamond: Diamond.forward does not take 2 inputs: ",
        ),
        ("inspect net.py:with_inputs --device gpu", "there is no profile named 'gpu': use one of h200"),
        ("schedule net.py:with_inputs --device h2000", "there is no profile named 'h2000': use one of h200"),
        ("schedule net.py:with_inputs --device missing.json", "missing.json cannot be read (FileNotFoundError: "),
        ("schedule", "the following arguments are required: TARGET (autostream schedule --help says more)"),
        ("schedule net.py:with_inputs --dot", "unrecognized arguments: --dot"),
        ("schedule net.py:with_inputs --kernels fused", 'kernels=\'fused\' is not allowed: use "auto" or "eager"'),
        ("inspect net.py:with_inputs --device cuda:99", "--device cuda:99: PyTorch sees "),
        ("inspect net.py:with_inputs --policy fast", 'policy=\'fast\' is not allowed: use "auto" or "sequential"'),
        ("inspect net.py:with_inputs --streams 0", 'streams=0 is not allowed: use "auto" or a whole number'),
        (
            "inspect net.py:with_inputs --tuning-seconds 0",
            "argument --tuning-seconds: '0' is not allowed: use a positive",
        ),
        (
            "inspect net.py:with_inputs --memory-budget 0",
            "memory_budget=0 is not allowed: use a ratio such as 1.1, or ",
        ),
        ("inspect net.py:with_inputs --memory-budget lots", "argument --memory-budget: 'lots' is not allowed: use a "),
        ("inspect net.py:with_inputs --seed one", "argument --seed: 'one' is not allowed: use a whole number"),
        ("inspect net.py:with_inputs --streams two", "streams='two' is not allowed: use \"auto\" or a whole number"),
        ("inspect net.py:with_inputs --costs free", 'costs=\'free\' is not allowed: use "auto" or "roofline"'),
        ("inspect net.py:with_inputs --ops -1", "argument --ops: "),
        ("inspect net.py:with_inputs --ops many", "argument --ops: 'many' is not allowed: use a whole number"),
        ("inspect net.py:with_inputs --json --dot", "argument --dot: not allowed with argument --json"),
        ("inspect net.py:with_inputs --out missing/file", "--out missing/file: No such file or directory: name a file"),
        ("demo --device gpu", "--device gpu is not allowed: use cpu, cuda or cuda:N"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace, argv: str, said: str
) -> None:
    assert error_of(capsys, *argv.split()).startswith(said)


@pytest.mark.parametrize(
    ("argv", "said"),
    [("net.py:Branching --input 4", "Branching.*data-dependent"), ("net.py:Diamond --input 4x63", "Diamond.*4, 63")],
)
def test_a_model_that_cannot_be_traced_is_one_line(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, model: str, argv: str, said: str
) -> None:
    assert re.search(said, error_of(capsys, "inspect", *argv.split(), "--device", "cpu"))
    logging.getLogger("torch").error("heard again")
    heard = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert heard == ["heard again"], "what torch logs goes to stderr too"


def test_trace_writes_a_file_for_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert cli.main(["trace", model, "--device", "h200", "--out", "trace.json"]) == 0
    trace = json.loads(Path("trace.json").read_text(encoding="utf-8"))
    slices = [event["args"]["target"].split(".")[1] for event in trace["traceEvents"] if event.get("cat") == "op"]
    assert sorted(slices) == ["add", "linear", "linear", "relu"]
    assert trace["otherData"]["model"] == "Diamond"
    said = "autostream: all times are predicted, for no run was watched: the device is not a GPU that is here"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["trace", "report"])
def test_on_a_gpu_that_is_here_a_run_is_watched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, command: str
) -> None:
    watched = replace(REPORT, measured=REPORT.timeline)
    asked: list[Options] = []

    class Watching:
        def __init__(self, model: nn.Module, options: Options) -> None:
            asked.append(options)

        def watched(self, *args: torch.Tensor) -> Report | None:
            return watched if len(asked) == 1 else None

    monkeypatch.setattr(cli, "Dispatcher", Watching)
    monkeypatch.setattr(cli, "parse_device", lambda text: torch.device("cuda", 0))
    monkeypatch.setattr(cli, "prepare", lambda target, inputs, device: (nn.ReLU(), (torch.ones(1),)))
    assert cli.main([command, model, "--seed", "7"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ((timeline.render(watched) if command == "trace" else assemble.render(watched)) + "\n", "")
    assert (asked[0].seed, asked[0].strict) == (7, True)
    assert error_of(capsys, command, model).startswith("nothing is scheduled while AUTOSTREAM_DISABLE is set")


def test_report_writes_a_page(model: str, planned: SimpleNamespace) -> None:
    assert cli.main(["report", model, "--out", "report.html"]) == 0
    assert Path("report.html").read_text(encoding="utf-8") == f"{assemble.render(REPORT)}\n"


def test_nothing_to_draw_is_told_with_the_reason(
    capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace
) -> None:
    planned.report = PLAIN
    said = error_of(capsys, "inspect", model, "--dot")
    assert said == f"{model} has no graph to draw: forward branches on the value of a tensor (net.py:7)"
    assert error_of(capsys, "trace", model).startswith(f"{model} has no timeline to show: forward branches on")


@pytest.mark.parametrize("command", ["", "schedule", "inspect", "trace", "report", "profile", "demo"])
def test_help_shows_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main([*command.split(), "--help"])
    assert raised.value.code == 0
    out = capsys.readouterr().out
    assert f"example: autostream {command or 'schedule'} " in out
    assert ("TARGET RUNS CODE" in out) == (command in {"schedule", "inspect", "trace", "report"})


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out.startswith("autostream 0.")


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
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, factor: float, code: int
) -> None:
    monkeypatch.setattr(cli, "prepare", lambda target, *_: (nn.Linear(8, 8).eval(), (torch.ones(1, 8),)))
    monkeypatch.setattr(cli, "optimize", lambda model: Doubling(model, factor))
    assert cli.main(["demo", "--device", "cpu"]) == code
    out, err = capsys.readouterr()
    assert re.search("runs as +CUDA graph over 2 streams", out)
    assert "largest difference from the plain model: " in out
    assert re.search(r"plain model [\d.]+ ms, optimized [\d.]+ ms, in turns: [\d.]+× the speed", out)
    assert err == ("autostream: the outputs differ\n" if code else "")


def test_a_terminal_that_lacks_characters_shows_others(
    monkeypatch: pytest.MonkeyPatch, model: str, planned: SimpleNamespace
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["inspect", model]) == 0
    assert b"14.0 ?s, 1.50? the speed" in terminal.buffer.getvalue()  # type: ignore[attr-defined]


def test_what_the_users_code_prints_is_no_part_of_the_answer(capsys: pytest.CaptureFixture[str], model: str) -> None:
    Path("loud.py").write_text("print('import')" + MODEL.replace("return self.left", "print(); return self.left"))
    assert cli.main(["inspect", "loud.py:with_inputs", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "Diamond"


def test_a_model_that_only_optimize_can_split_says_so(capsys: pytest.CaptureFixture[str], model: str) -> None:
    said = error_of(capsys, "inspect", "net.py:Branching", "--input", "3")
    assert "autostream.optimize splits such a model at graph breaks" in said


def test_an_input_beyond_all_memory_is_one_line(capsys: pytest.CaptureFixture[str], model: str) -> None:
    said = error_of(capsys, "inspect", "net.py:Diamond", "--input", "999999999x999999999x9")
    assert said.endswith("): use smaller sizes")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    program = "import sys; from autostream import cli; cli._plan = lambda _: print('x') or 0"
    command = [sys.executable, "-c", f"{program}; sys.exit(cli.main(['inspect', 'net']))"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


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
    monkeypatch.setattr(cli, "hold_isolated", contests)
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
    monkeypatch.setattr(cli, "SLOW", ("compile_default",))
    assert bench(model) == 0
    assert (contests.modes, contests.timeout_s) == ([mode for mode in CPU_MODES if mode != "compile_default"], 900.0)
    assert bench(model, "--modes", "compile_default") == 0
    assert contests.modes == ["eager", "compile_default"]


def test_bench_compares_with_one_stream_on_a_gpu(
    capsys: pytest.CaptureFixture[str], model: str, contests: Contests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "parse_device", lambda text: torch.device("cuda"))
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


def test_the_help_of_bench_warns_and_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["bench", "--help"])
    assert raised.value.code == 0
    out = capsys.readouterr().out
    assert "example: autostream bench " in out
    assert "TARGET RUNS CODE" in out
    assert "Exits with 1 if autostream has no time" in out
