"""``autostream bench``: which modes are timed, and what the table and the JSON say of the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream import cli
from autostream.cli import bench
from autostream.cli.modes import CUDA, eager, optimized
from tests.cli.calls import error_of

TIMES = {"call_us", "device_us", "host_us", "latency_us"}

MODELS = """
import torch
from torch import nn

class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def forward(self, *args):
        return self.function(self, *args)

def draws():
    return Of(lambda model, x: torch.rand_like(x)), (torch.ones(2),)

def returns_text():
    return Of(lambda model, x: "text"), (torch.ones(2),)

def raises():
    return Of(lambda model, x: x.no_such), (torch.ones(2),)

def advances():
    def write(model, x):
        model.position += 1
        return x[model.position - 1] + x.sum()
    return Of(write), (torch.arange(3.0),)
"""


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autostream.runtime.clock.ROUNDS", 9)
    monkeypatch.setattr("autostream.runtime.clock.ROUND_US", 1.0)


def run(*argv: str) -> int:
    return cli.main(["bench", *argv, "--device", "cpu"])


def measured(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = run(*argv, "--json")
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("fresh_dynamo")
def test_every_mode_of_a_users_model_is_timed_in_the_same_rounds(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    code, row = measured(capsys, model)
    assert code == 0
    assert (row["workload"], row["device"], row["baseline"]) == (model, "cpu", "eager")
    assert row["versions"]["torch"] == str(torch.__version__)
    assert list(row["cells"]) == ["eager", "compile_default", "autostream"]
    for cell in row["cells"].values():
        assert cell.keys() == {"status", "error", "first_s", *TIMES}
        assert (cell["status"], len(cell["call_us"])) == ("ok", 9)
        assert cell["latency_us"].keys() == {"q1", "median", "q3", "p99"}


def test_the_table_has_a_line_for_each_mode_and_goes_to_a_file(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert run(model, "--modes", "autostream", "--input", "2x64:float64", "--out", "times") == 0
    assert capsys.readouterr() == ("", "")
    title, head, _, first, second = Path("times").read_text(encoding="utf-8").splitlines()
    assert title == f"{model}, faster than eager"
    assert head.split("  ")[0] == "mode"
    assert (first.split()[0], first.split()[2], second.split()[0]) == ("eager", "1.00×", "autostream")


def constant(model: nn.Module, args: Any) -> Callable[..., Any]:
    """Ignores new inputs."""
    output = model(*args)
    return lambda *args: output


def sticky(model: nn.Module, args: Any) -> Callable[..., Any]:
    """Notices new inputs, but not that the first ones are back."""
    held = list(args)

    def call(x: Tensor) -> Any:
        if not torch.equal(x, args[0]):
            held[:] = [x]
        return model(*held)

    return call


def rounded(model: nn.Module, args: Any) -> Callable[..., Any]:
    return lambda x: model(x).half().float()


def not_finite(model: nn.Module, args: Any) -> Callable[..., Any]:
    return lambda x: model(x) * float("nan")


def not_prepared(model: nn.Module, args: Any) -> Callable[..., Any]:
    raise ValueError("\nno kernel\nlong story")


def not_run(model: nn.Module, args: Any) -> Callable[..., Any]:
    return lambda x: x.no_such


def later_wrong(model: nn.Module, args: Any) -> Callable[..., Any]:
    """Right when it is checked, and wrong after it was timed."""
    calls = iter(range(1000))
    return lambda x: model(x) + (next(calls) > 10)


@pytest.mark.parametrize(
    ("name", "mode", "status", "reason"),
    [
        ("autostream_inputs", constant, "wrong", "error "),
        ("autostream_inputs", sticky, "wrong", "error "),
        ("autostream_inputs", rounded, "wrong", "error "),
        ("compile_default", later_wrong, "wrong", "error "),
        ("autostream_inputs", not_finite, "wrong", "error inf, 1.0e-04 allowed"),
        ("autostream_inputs", not_prepared, "failed", "ValueError: no kernel"),
        ("compile_default", not_run, "failed", "AttributeError: 'Tensor' object has no attribute 'no_such'"),
    ],
)
def test_a_mode_that_fails_or_is_wrong_has_no_time_and_the_others_do(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    name: str,
    mode: Any,
    status: str,
    reason: str,
) -> None:
    """The exit code is 1 where it is one of autostream's."""
    code = int(name.startswith("autostream"))
    monkeypatch.setattr(bench, "modes_of", lambda device: {"eager": eager, name: mode, "last": eager})
    found, row = measured(capsys, model)
    assert found == code
    cell = row["cells"][name]
    assert cell["status"] == status
    assert cell["reason"].startswith(reason)
    assert not cell.keys() & TIMES
    assert all(row["cells"][other].keys() > TIMES for other in ("eager", "last"))
    assert run(model) == code
    assert f"{status}: {cell['reason'][:6]}" in capsys.readouterr().out


def test_modes_are_prepared_in_their_order_and_the_baseline_always(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(bench, "modes_of", lambda device: {"eager": eager, "autostream": optimized, "last": eager})
    _, row = measured(capsys, model, "--modes", "last", "--baseline", "eager")
    assert list(row["cells"]) == ["eager", "last"]
    _, row = measured(capsys, model, "--modes", "eager", "--baseline", "last")
    assert (row["baseline"], list(row["cells"])) == ("last", ["eager", "last"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "the following arguments are required: TARGET (autostream bench --help says more)"),
        ("net.py:with_inputs --modes fast", "there is no mode 'fast' on this device: use eager, compile_default,"),
        ("net.py:with_inputs --baseline cuda_graph", "there is no mode 'cuda_graph' on this device: use eager"),
        ("net.py:with_inputs --input 1,64", "--input 1,64: the shape '1,64' is not allowed"),
        ("net.py:with_inputs --out missing/file", "--out missing/file: No such file or directory: name a file"),
        ("net.py:no_such", "net.py:no_such: module 'autostream_target_net' has no attribute 'no_such'"),
        ("models.py:draws", "results cannot be checked: two runs of the model differ by "),
        ("models.py:returns_text", "Of returns no tensors that could be checked: return them in a container"),
        ("models.py:raises", "the model failed: AttributeError: 'Tensor' object has no attribute 'no_such'"),
    ],
)
def test_what_cannot_be_timed_is_one_line(capsys: pytest.CaptureFixture[str], model: str, argv: str, said: str) -> None:
    Path("models.py").write_text(MODELS)
    assert error_of(capsys, "bench", *argv.split(), "--device", "cpu").startswith(said)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_that_changes_its_state_is_timed_from_the_same_state(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """Its position would leave the input after three calls."""
    Path("models.py").write_text(MODELS)
    code, row = measured(capsys, "models.py:advances", "--modes", "eager,autostream")
    assert (code, {cell["status"] for cell in row["cells"].values()}) == (0, {"ok"})


def test_progress_is_for_terminals(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(model, "--modes", "eager")
    clear = "\r\033[K"
    said = capsys.readouterr().err
    assert said.startswith(f"{clear}eager{clear}eager")
    assert said.endswith(clear)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty")  # Inductor's own
def test_a_gpu_has_graphs_besides_and_compares_with_one_stream(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code = cli.main(["bench", model, "--json"])
    row = json.loads(capsys.readouterr().out)
    assert (code, row["baseline"], row["device"]) == (0, "cuda_graph", torch.cuda.get_device_name())
    assert {mode: cell.get("reason", cell["status"]) for mode, cell in row["cells"].items()} == dict.fromkeys(
        CUDA, "ok"
    )
