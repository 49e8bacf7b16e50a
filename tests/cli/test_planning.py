"""Commands that plan a model, as their users meet them: what they print, where, and the exit code."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autostream import cli
from autostream.cli import planning, zoo
from autostream.cli.targets import Zoo
from autostream.costs.device import profile_named
from autostream.costs.measured import METHOD
from autostream.costs.records import Context, Measurements, to_json
from autostream.options import Options
from autostream.reporting import text, timeline
from autostream.reporting.ops import Selection
from autostream.reporting.page import assemble
from autostream.reporting.report import Report
from tests.cli.calls import MODEL, error_of
from tests.reporting.reports import REPORT

TEN = Selection(ops=10)


def test_inspect_finds_the_branches_of_googlenet(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "googlenet", "--device", "h200", "--policy", "path_cover", "--ops", "0"]) == 0
    # 57 times convolution, batch norm and ReLU; 4 poolings between and 9 within the 9 inception modules, which have
    # 4 branches each and end in a concatenation; at the end average pooling and a linear layer.
    ops = 57 * 3 + 4 + 9 + 9 + 2
    assert f"{ops} ops (ATen), width 4, 9 regions of up to 4 independent branches" in capsys.readouterr().out


def test_a_plan_without_a_gpu_runs_nothing(planned: SimpleNamespace) -> None:
    """A run would calibrate a zoo model's batch norms, of which a plan sees nothing."""
    assert cli.main(["inspect", "shufflenet_v2_x0_5", "--device", "h200"]) == 0
    seen = [values for name, values in planned.model.state_dict().items() if name.endswith("running_var")]
    assert seen
    assert all((values == 1.0).all() for values in seen)


def test_a_gpu_that_was_measured_is_planned_for_by_its_file(model: str, planned: SimpleNamespace) -> None:
    measured = replace(profile_named("h200"), name="NVIDIA H300", source="measured")
    context = Context("NVIDIA H300", 132, {"torch": "2.0.0", "method": str(METHOD)})
    Path("h300.json").write_text(to_json(Measurements(context, measured)), encoding="utf-8")
    assert cli.main(["schedule", model, "--device", "h300.json"]) == 0
    assert planned.profile == measured
    assert planned.args[0].device.type == "cpu"


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


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("--columns op", "abdce"),
        ("--columns op --ops 2", "bd"),
        ("--columns op --ops all", "abdce"),
        ("--columns op --stream 1", "d"),
        ("--columns op --critical --sort cost", "bcae"),
    ],
)
def test_inspect_shows_the_ops_that_are_chosen(
    capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace, flags: str, shown: str
) -> None:
    assert cli.main(["inspect", model, *flags.split()]) == 0
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert "".join(table[3:]) == shown


@pytest.mark.parametrize("command", ["schedule", "explain"])
def test_answers_are_about_the_ops_that_are_chosen(
    capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace, command: str
) -> None:
    assert cli.main([command, model, "--stream", "1"]) == 0
    (table,) = [part for part in capsys.readouterr().out.split("\n\n") if part.startswith("Why on which stream")]
    assert [line.split()[0] for line in table.splitlines()[3:]] == ["2", "d"], "what is about the whole, and d"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "the following arguments are required: COMMAND (autostream --help says more)"),
        ("optimise x", "argument COMMAND: invalid choice: 'optimise'"),
        ("inspect net.py:Diamond --colour", "unrecognized arguments: --colour"),
        ("inspect no_such:f", "cannot import 'no_such': ModuleNotFoundError: No module named 'no_such'"),
        ("inspect net.py:Diamond", "net.py:Diamond comes without example inputs: give each one as --input"),
        ("inspect net.py:Diamond --input 1x64 --input 1", "net.py:Diamond: Diamond.forward does not take 2 inputs: "),
        ("inspect net.py:with_inputs --device gpu", "there is no profile named 'gpu': use one of h200"),
        ("schedule net.py:with_inputs --device missing.json", "missing.json cannot be read (FileNotFoundError: "),
        ("inspect net.py:with_inputs --policy fast", 'policy=\'fast\' is not allowed: use "auto" or "sequential"'),
        (
            "inspect net.py:with_inputs --tuning-seconds 0",
            "argument --tuning-seconds: '0' is not allowed: use a positive",
        ),
        (
            "inspect net.py:with_inputs --memory-budget 0",
            "memory_budget=0 is not allowed: use a ratio such as 1.1, or ",
        ),
        ("inspect net.py:with_inputs --streams two", "streams='two' is not allowed: use \"auto\" or a whole number"),
        ("inspect net.py:with_inputs --ops many", "argument --ops: 'many' is not allowed: use a whole number"),
        ("inspect net.py:with_inputs --json --dot", "argument --dot: not allowed with argument --json"),
        ("inspect net.py:with_inputs --out missing/file", "--out missing/file: No such file or directory: name a file"),
        ("inspect net.py:with_inputs --sort price", "there is no column 'price': use launch, op, target"),
        ("inspect net.py:with_inputs --columns op,costs", "there is no column 'costs' (did you mean 'cost'?): use"),
        ("inspect net.py:with_inputs --stream 2", "there is no stream 2: the schedule has 0 to 1"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace, argv: str, said: str
) -> None:
    assert error_of(capsys, *argv.split()).startswith(said)


@pytest.mark.parametrize("command", ["schedule", "trace"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace, command: str
) -> None:
    said = error_of(capsys, command, model, "--out", "missing/file")
    assert said.startswith("--out missing/file: No such file or directory: name a file")
    assert not hasattr(planned, "model")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("net.py:Branching --input 4", "Branching is no one graph: Python branches on .*net.py:"),
        ("net.py:Diamond --input 4x63", "Diamond itself fails at .*4x63"),
    ],
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


@pytest.mark.parametrize("command", ["trace", "report", "explain"])
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

    monkeypatch.setattr(planning, "Dispatcher", Watching)
    monkeypatch.setattr(planning, "parse_device", lambda text: torch.device("cuda", 0))
    models: list[Zoo] = []

    def prepared(target: str, inputs: object, device: object, zoo_model: Zoo) -> tuple[nn.Module, tuple[object, ...]]:
        models.append(zoo_model)
        return nn.ReLU(), (torch.ones(1),)

    monkeypatch.setattr(planning, "prepare", prepared)
    assert cli.main([command, model, "--seed", "7"]) == 0
    out, err = capsys.readouterr()
    faces = {"trace": timeline.render, "report": assemble.render, "explain": partial(text.answers, selection=TEN)}
    assert (out, err) == (f"{faces[command](watched)}\n", "")
    assert (asked[0].seed, asked[0].strict) == (7, True)
    assert models == [zoo.build], "what is run is calibrated"
    assert error_of(capsys, command, model).startswith("nothing is scheduled while AUTOSTREAM_DISABLE is set")


def test_the_graph_is_shown_before_and_after_each_stage(capsys: pytest.CaptureFixture[str], model: str) -> None:
    argv = ["inspect", model, "--device", "h200", "--policy", "path_cover", "--memory-budget", "inf", "--before-after"]
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    heads = [part.split(":")[0] for part in shown.split("\n\n") if part.startswith("After ")]
    assert heads == ["After trace", "After analyze", "After price", "After assign and synchronize", "After lower"]
    traced, _, lowered = (part for part in shown.split("\n\n") if "def forward(" in part or "analyze" in part)
    assert "autostream_runtime_streams" not in traced
    assert "autostream_runtime_streams_fork('cuda:0', 2)" in lowered


def test_what_the_users_code_prints_is_no_part_of_the_answer(capsys: pytest.CaptureFixture[str], model: str) -> None:
    Path("loud.py").write_text("print('import')" + MODEL.replace("return Diamond(), ", "print(); return Diamond(), "))
    assert cli.main(["inspect", "loud.py:with_inputs", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "Diamond"
