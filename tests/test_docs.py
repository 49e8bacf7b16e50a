"""The README and docs/ do what they say: every block of code runs, every command is one, every link leads somewhere."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autostream
from autostream import cli, pipeline
from autostream.cli import planning
from autostream.cli.command import Parser, add
from autostream.cli.program import COMMANDS
from autostream.cli.zoo import import_without_compiled_ops
from autostream.ir import Limit
from autostream.scheduling.lost_time import Cause
from tests.reporting.reports import REPORT

ROOT = Path(autostream.__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, kind: str) -> list[str]:
    """What stands between fences of this kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Each use of the command line, up to where the shell takes over."""
    lines = [line for page in PAGES for block in blocks(page, "") for line in block.splitlines()]
    uses = [use for line in lines for use in re.findall(r"(?:^|&& )autostream (.*)", line)]
    return list(dict.fromkeys(re.split(r" \| | # ", use)[0].strip() for use in uses))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_give_what_they_show(page: Path) -> None:
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    assert doctest.testfile(str(page), module_relative=False, optionflags=flags).failed == 0


def test_other_code_runs() -> None:
    """In one namespace, with what its readers have, and on the CPU, which is here."""
    import_without_compiled_ops("torchvision")  # which transformers imports
    model, batches = nn.Linear(8, 4), [(torch.ones(2, 8), torch.zeros(2, dtype=torch.long))] * 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sys.modules["pages"] = module = ModuleType("pages")  # TorchDynamo looks globals up there
    given: dict[str, Any] = vars(module)
    given |= {"torch": torch, "nn": nn, "F": F, "autostream": autostream}
    given |= {"model": model.eval(), "loader": batches}
    given |= {name: nn.Linear(8, 8) for name in ("block1", "block2", "head")}
    given |= {"x": torch.ones(1, 8), "optimizer": optimizer, "tagger": lambda tokens, mask: tokens * mask}
    given["unet"] = lambda latents, time, text, return_dict: (latents * time[:, None, None, None] + text.mean(),)
    given["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    found = [block for page in PAGES for block in blocks(page, "python") if ">>>" not in block]
    assert len(found) >= 2
    for block in found:
        exec(block.replace('"cuda"', '"cpu"'), given)
    del sys.modules["pages"]
    assert isinstance(given["fast"], autostream.OptimizedModule)
    assert given["loss"].isfinite()


@pytest.mark.parametrize("command", commands())
def test_commands_are_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str) -> None:
    """Those that plan are run, with a model and a plan that are there."""
    parser = Parser(prog="autostream")
    add(COMMANDS, parser)
    arguments = parser.parse_args(shlex.split(command))
    if not hasattr(arguments, "policy") or str(arguments.device).endswith(".json"):
        return
    monkeypatch.chdir(tmp_path)
    layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(8)))
    made: Any = (layers, (torch.ones(1),))
    if getattr(arguments, "world", None):  # of a training step
        step = autostream.train_step(layers, torch.optim.SGD(layers.parameters()), nn.MSELoss())
        made = (step, (torch.ones(1), torch.ones(1)))
    monkeypatch.setattr(planning, "prepare", lambda *_, **__: made)
    for form in ("code", "before-after", "svg"):  # of what was traced, or by a program that need not be here
        monkeypatch.setitem(planning._TABLES, form, lambda *_: "")
    monkeypatch.setattr(pipeline, "plan", lambda *_: REPORT)
    assert cli.main(shlex.split(re.sub(r"--stream \d", "--stream 1", command))) == 0


def test_what_a_report_is_said_to_say_is_what_it_says() -> None:
    golden = (ROOT / "tests" / "cli" / "golden" / "inspect.txt").read_text(encoding="utf-8")
    quoted = blocks(ROOT / "docs" / "reading-a-report.md", "text")
    assert len(quoted) == 5
    assert [block for block in quoted if block not in golden] == []


def test_every_cause_has_its_advice() -> None:
    page = (ROOT / "docs" / "reading-a-report.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| Cause | ")
    causes = re.findall(r"^\| ([^|]+?) \| ", table, re.MULTILINE)
    assert {*causes} == {*(cause.value for cause in Cause), Limit.BUDGET.value, "not explained by the model"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_chapter_stands_twice(page: Path) -> None:
    chapters = re.findall(r"^## .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(chapters) == len(set(chapters))


def test_the_site_builds_with_every_page_and_link(tmp_path: Path) -> None:
    """Mkdocs warns of links without a target and pages without a place, and fails at any warning."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert [name for name in autostream.__all__ if f"autostream.{name}" not in api and "Error" not in name] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, target
