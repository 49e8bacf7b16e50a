"""TARGET and --input: what is accepted, and that every mistake is told in one line which says what to write."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from autostream.cli.targets import InputSpec, load, make_inputs, parse_device, parse_input, prepare
from autostream.errors import TargetError

CPU = torch.device("cpu")

MODELS = """
import sys
import torch
from torch import nn

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x, y):
        return self.linear(x + y)

class Factories:
    @staticmethod
    def pair():
        return Pair()

def with_inputs():
    return Pair(), (torch.ones(2, 8), torch.arange(8))

def number():
    return 3

def with_a_list():
    return Pair(), [torch.ones(2, 8), torch.arange(8)]

def no_tuple():
    return Pair(), torch.ones(2, 8)

def takes_one(x):
    return Pair()

def fails():
    raise RuntimeError("weights\\nare missing")

def leaves():
    sys.exit("usage: ...")

ready = Pair()
answer = 42
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of factories in an otherwise empty working directory."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_models.py"
    path.write_text(MODELS)
    yield path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("factory", ["Pair", "Factories.pair"])
@pytest.mark.parametrize("where", ["my_models.py", "my_models"])
def test_a_factory_is_found_by_file_and_by_module(models: Path, where: str, factory: str) -> None:
    model, args = load(f"{where}:{factory}")
    assert type(model).__name__ == "Pair"
    assert args is None


def test_inputs_may_be_a_list(models: Path) -> None:
    """As a batch of a ``DataLoader`` is."""
    _, args = load("my_models:with_a_list")
    assert isinstance(args, tuple)
    assert [tuple(x.shape) for x in args] == [(2, 8), (8,)]


def test_a_file_elsewhere_can_import_its_neighbours(models: Path, tmp_path: Path) -> None:
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "neighbour.py").write_text("from torch.nn import Flatten")
    (package / "main.py").write_text("from neighbour import Flatten")
    assert isinstance(load(f"{package / 'main.py'}:Flatten")[0], nn.Flatten)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("googlenett", "there is no zoo model 'googlenett' (did you mean 'googlenet'"),
        ("my_models.py", "my_models.py does not say what to take from the file: write my_models.py:factory"),
        (":Pair", "':Pair' names no factory: write package.module:factory or file.py:factory"),
        ("my_models:", "'my_models:' names no factory"),
        ("missing.py:f", "there is no file missing.py: write file.py:factory with a path that exists from "),
        ("no_such.module:f", "cannot import 'no_such.module': ModuleNotFoundError: No module named 'no_such'"),
        ("..relative:f", "cannot import '..relative': "),
        ("my_models:Missing", "my_models:Missing: module 'my_models' has no attribute 'Missing'; write the name of"),
        ("my_models:answer", "my_models:answer is an int, not a factory: name a function that returns a module"),
        ("my_models:ready", "my_models:ready is a Pair, not a factory"),
        (
            "my_models:number",
            "my_models:number returned an int: a factory returns a module, (module, args) or (step",
        ),
        ("my_models:no_tuple", "my_models:no_tuple returned a tuple: a factory returns"),
        ("my_models:takes_one", "my_models:takes_one does not take 0 inputs: missing a required argument: 'x'"),
        ("my_models:leaves", "my_models:leaves failed: SystemExit: usage: ... (my_models.py"),
    ],
)
def test_a_target_that_cannot_be_used_is_told_in_one_line(models: Path, target: str, said: str) -> None:
    with pytest.raises(TargetError, match=f"^{re.escape(said)}") as raised:
        load(target)
    assert "\n" not in str(raised.value)


def test_a_fault_of_the_factory_names_its_line(models: Path) -> None:
    line = MODELS.splitlines().index('    raise RuntimeError("weights\\nare missing")') + 1
    with pytest.raises(TargetError, match=rf"RuntimeError: weights are missing \(my_models.py:{line}\)$"):
        load("my_models.py:fails")


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("1x3x224x224:float16", InputSpec((1, 3, 224, 224), torch.float16)),
        ("8x128:int64", InputSpec((8, 128), torch.int64)),
        ("16", InputSpec((16,))),
        ("2x0x3", InputSpec((2, 0, 3))),
        ("scalar", InputSpec(())),
        ("scalar:bool", InputSpec((), torch.bool)),
    ],
)
def test_inputs_parse(text: str, spec: InputSpec) -> None:
    assert parse_input(text) == spec


def test_inputs_are_random_alike_each_time_and_valid_as_indices() -> None:
    specs = [InputSpec((2, 3)), InputSpec((64,), torch.int64), InputSpec((), torch.bool)]
    x, ids, flag = make_inputs(specs, CPU, torch.float16)
    assert (x.dtype, x.shape) == (torch.float16, (2, 3))
    assert set(ids.tolist()) == {0, 1}
    assert (flag.dtype, flag.shape) == (torch.bool, ())
    before = torch.get_rng_state()
    assert torch.equal(make_inputs(specs, CPU, torch.float16)[0], x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("text", "gpus", "device"),
    [(None, 0, "cpu"), (None, 2, "cuda:0"), ("cpu", 2, "cpu"), ("cuda", 1, "cuda:0"), ("cuda:1", 2, "cuda:1")],
)
def test_devices(text: str | None, gpus: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert parse_device(text) == torch.device(device)


def test_the_model_is_cast_to_the_first_floating_point_input(models: Path) -> None:
    specs = [InputSpec((8,), torch.int64), InputSpec((2, 8), torch.bfloat16)]
    model, (ids, x) = prepare("my_models:Pair", specs, CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.steps.dtype == torch.int64
    assert (ids.dtype, x.dtype) == (torch.int64, torch.bfloat16)


@pytest.mark.parametrize(
    ("text", "gpus", "said"),
    [("cuda", 0, "PyTorch sees 0 GPUs here"), ("cuda:0", 0, "0 GPUs here"), ("cuda:1", 1, "PyTorch sees 1 GPU here")],
)
def test_a_gpu_that_is_not_here_is_told(text: str, gpus: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(TargetError, match=f"^--device {text}: .*{said}; use --device cpu"):
        parse_device(text)
