"""The cache of fused kernels: a program is fused once and read from disk later. Kernels here run on the CPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autostream import store as stores
from autostream.errors import FusionError
from autostream.fusion import cache as fusion
from autostream.fusion import inductor, kernel_graph
from autostream.fusion.cache import fused_here
from autostream.fusion.kernel_graph import extern_kernel
from autostream.ir import Program
from autostream.utils.kernels import Kernel
from autostream.utils.stopwatch import Stopwatch
from tests.runtime.programs import case_of

aten = torch.ops.aten

X, W = torch.randn(3, 4), torch.randn(4, 5)


def traced() -> Program:
    return replace(case_of(lambda x, w: x @ w, X, W).program, device="cuda:0")


def product_of(program: Program) -> fx.Node:
    (product,) = (node for node in program.module.graph.nodes if node.op == "call_function")
    return product


def fused_like_inductor(program: Program) -> Program:
    """A product that is written into a buffer."""
    graph = fx.Graph()
    x, w = (graph.placeholder(item.name) for item in program.placeholders)
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    buffer = graph.call_function(aten.empty_strided.default, ([3, 5], [5, 1]), options)
    call = graph.call_function(extern_kernel("mm", 2, {}), (x, w, buffer))
    buffer.stack_trace = call.stack_trace = product_of(program).stack_trace
    graph.output((buffer,))
    return inductor.restore_fused(program, fx.GraphModule(nn.Module(), graph))


class Inductor:
    """A stand-in for ``fuse`` that records the options of its calls."""

    def __init__(self) -> None:
        self.calls: list[Mapping[str, Any]] = []
        self.answer = fused_like_inductor

    def fuse(self, program: Program, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> Program:
        self.calls.append(options)
        return self.answer(program)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "fused"


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Inductor:
    """As if there were a GPU, with an empty cache, in a process that has logged no warning yet."""
    h200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(folder.parent))
    monkeypatch.setattr(fusion, "obstacle", lambda device: "")
    stores._warn_once.cache_clear()
    stub = Inductor()
    monkeypatch.setattr(fusion, "fuse", stub.fuse)
    return stub


def prepared(
    options: Mapping[str, Any] | None = None, program: Program | None = None
) -> tuple[Program, list[str], list[str]]:
    """A fused program, the stages that it took, and the notes for a report."""
    stopwatch = Stopwatch()
    fused, notes = fused_here(program or traced(), options or {}, [], stopwatch)
    return fused, list(stopwatch.seconds), [note.choice for note in notes]


def described(program: Program) -> object:
    nodes = [
        (node.name, str(node.target), node.args, node.kwargs, str(node.meta["val"]), node.stack_trace)
        for node in program.module.graph.nodes
        if node.op != "output"
    ]
    return repr(nodes), program.placeholders, program.outputs, program.level, program.device, program.frozen


def test_a_program_is_fused_once_for_each_setting_and_then_read(stub: Inductor, folder: Path) -> None:
    fused, stages, notes = prepared()
    assert (stages, notes) == (["load", "fuse"], [])
    assert prepared({"max_autotune": True})[1] == ["load", "fuse"]
    assert len(list(folder.glob("*.json"))) == 2
    again, stages, notes = prepared()
    assert (stages, notes) == (["load"], [])
    assert prepared({"max_autotune": True})[1] == ["load"]
    assert stub.calls == [{}, {"max_autotune": True}]
    assert described(again) == described(fused)
    for program in (fused, again):
        torch.testing.assert_close(program.module(X, W)[0], X @ W)


# Programs whose kernels are not cached


def _no_key(program: Program) -> str:
    raise RuntimeError("no key")


def _without_recipes(program: Program) -> Program:
    fused = fused_like_inductor(program)
    for node in fused.module.graph.nodes:
        if isinstance(node.target, Kernel):
            node.target.recipe = None
    return fused


@pytest.mark.parametrize("why", ["freezing", "force_disable_caches", "no key", "no recipes"])
def test_kernels_that_cannot_be_cached_are_fused_each_time_without_a_note(
    why: str, stub: Inductor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {why: True} if why in ("freezing", "force_disable_caches") else {}
    if why == "no key":
        monkeypatch.setattr(fusion, "fingerprint", _no_key)
    elif why == "no recipes":
        stub.answer = _without_recipes
    for count in (1, 2):
        _, stages, notes = prepared(options)
        assert (stages[-1], notes) == ("fuse", [])
        assert len(stub.calls) == count
    assert not folder.exists()


def test_a_program_that_cannot_be_fused_raises_the_error_of_fusing(
    stub: Inductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(program: Program) -> Program:
        raise FusionError("too odd")

    stub.answer = fails
    for obstacle in ("", "there is no Triton"):
        monkeypatch.setattr(fusion, "obstacle", lambda device, obstacle=obstacle: obstacle)
        with pytest.raises(FusionError, match="too odd"):
            prepared()


def test_a_program_is_fused_again_if_inductors_files_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str, recipe: object, device: object) -> Kernel:
        raise FileNotFoundError(name)

    prepared()
    with monkeypatch.context() as patch:
        patch.setattr(kernel_graph, "kernel_from_recipe", gone)
        assert prepared()[1:] == (["load", "fuse"], [])
    assert prepared()[1:] == (["load"], [])


def rewritten(**changed: Any) -> Callable[[str], str]:
    """A file with a valid checksum and other content."""
    return lambda text: stores._with_checksum(json.dumps({**json.loads(stores._checked(text)), **changed}))


DAMAGE: dict[str, Callable[[str], str]] = {
    "another checksum": lambda text: text.replace('"mm"', '"bmm"'),
    "no such recipe": rewritten(kernels=[{"name": "odd", "recipe": {}}]),
    "no such operator": rewritten(calls=[{"name": "a", "target": "aten.no.such"}]),
    "an argument as output": rewritten(outputs=[traced().placeholders[0].name]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_reported_and_its_program_fused_again(
    damage: Callable[[str], str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fused, *_ = prepared()
    (path,) = folder.glob("*.json")
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING):
        again, stages, notes = prepared()
    assert (stages, notes) == (["load", "fuse"], ["cache rebuilt"])
    assert described(again) == described(fused)
    (record,) = (record for record in caplog.records if record.name == "autostream.store")
    assert record.getMessage().endswith("); its program is fused again")
    assert prepared()[1:] == (["load"], [])


def test_a_cache_that_cannot_be_written_is_reported(stub: Inductor, folder: Path) -> None:
    folder.parent.write_text("a file in place of the folder")
    for count in (1, 2):
        fused, _, notes = prepared()
        assert notes == ["not cached"]
        assert len(stub.calls) == count
        torch.testing.assert_close(fused.module(X, W)[0], X @ W)
