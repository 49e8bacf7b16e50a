"""What a user gets who installs autostream: names, an import that costs little, and commands that are as written."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import pytest

import autostream
from benchmarks import readme

ROOT = Path(autostream.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()

SLOW = ("torch._dynamo", "torch._inductor", "torch.export", "sympy", "transformers", "torchvision", "timm")


def test_importing_autostream_loads_nothing_slow_that_torch_does_not() -> None:
    program = "import sys, torch; before = {*sys.modules}; import autostream; print(*{*sys.modules} - before)"
    added = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert "autostream.api" in added
    assert [name for name in added if name.startswith(SLOW)] == []


def test_the_public_names_are_few_and_there() -> None:
    assert sorted(autostream.__all__) == [
        "AutostreamError", "Bucket", "CaptureError", "MismatchError", "OptimizedModule", "OptionError", "Parallel",
        "Report", "ScheduleError", "TargetError", "TraceError", "explain", "optimize", "optimize_", "prefetch",
        "restore", "split", "step", "train_step",
    ]  # fmt: skip
    assert len(autostream.__all__) <= 19
    assert all(hasattr(autostream, name) for name in autostream.__all__)


def test_the_readme_calls_nothing_that_is_not_public() -> None:
    called = set(re.findall(r"autostream\.(\w+)\(", README))
    assert {"optimize", "explain"} <= called <= set(autostream.__all__)


def commands() -> list[str]:
    """README's two commands, the first code blocks after its headline."""
    _, _, section = README.partition("## Two commands")
    return re.findall(r"```\n(.*?)\n```", section, re.DOTALL)[:2]


def test_the_readmes_test_command_is_what_ci_runs() -> None:
    install, test = commands()[1].split(" && ")
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert install.replace("pip install", "pip install --quiet --no-compile") in ci
    assert test in ci


def test_the_readmes_commands_name_extras_and_commands_that_exist() -> None:
    extras = [extra for command in commands() for extra in re.findall(r'-e "\.\[(\w+)\]"', command)]
    assert extras == ["zoo", "dev"]
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    assert commands()[0].endswith("autostream demo")
    assert PROJECT["project"]["scripts"] == {"autostream": "autostream.cli:main"}
    assert all("-c constraints.txt" in command for command in commands())


def test_constraints_pin_what_the_extras_ask_for() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = PROJECT["project"]["optional-dependencies"].values()
    asked = {re.split(r"[<>=\[]", name)[0] for names in [PROJECT["project"]["dependencies"], *extras] for name in names}
    assert asked - {"autostream"} <= pinned


def test_the_version_is_read_from_the_source() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    module, _, name = PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    (value,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
    assert ast.literal_eval(value) == autostream.__version__


def test_types_are_shipped() -> None:
    assert (ROOT / "autostream" / "py.typed").exists()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["autostream"]


def test_torch_compile_finds_the_backend() -> None:
    assert PROJECT["project"]["entry-points"]["torch_dynamo_backends"] == {
        "autostream": "autostream.backend:autostream"
    }
    try:
        version("autostream")
    except PackageNotFoundError:
        pytest.skip("autostream is not installed")
    (found,) = entry_points(group="torch_dynamo_backends", name="autostream")
    assert found.load().__module__ == "autostream.backend"


def test_the_readmes_results_are_those_committed() -> None:
    assert readme.main(["--check"]) == 0
