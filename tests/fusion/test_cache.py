"""Fused kernels on disk: a program is fused once and read later. Kernels are those of the CPU."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
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


def model(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


X, W = torch.randn(3, 4), torch.randn(4, 5)


def traced() -> Program:
    return replace(case_of(model, X, W).program, device="cuda:0")


def as_inductor_would(program: Program) -> Program:
    """A product into memory that is allocated before."""
    graph = fx.Graph()
    x, w = (graph.placeholder(item.name) for item in program.placeholders)
    kept = {"dtype": torch.float32, "device": torch.device("cpu")}
    memory = graph.call_function(aten.empty_strided.default, ([3, 5], [5, 1]), kept)
    call = graph.call_function(extern_kernel("mm", 2, {}), (x, w, memory))
    (product,) = (node for node in program.module.graph.nodes if node.op == "call_function")
    memory.stack_trace = call.stack_trace = product.stack_trace
    graph.output((memory,))
    return inductor.restore_fused(program, fx.GraphModule(nn.Module(), graph))


class Inductor:
    """A stand-in that records its calls."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.answer = as_inductor_would

    def fuse(self, program: Program, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> Program:
        self.asked.append(options)
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


def test_a_program_is_fused_once_and_then_read(stub: Inductor) -> None:
    fused, stages, notes = prepared()
    assert (stages, notes) == (["load", "fuse"], [])
    again, stages, notes = prepared()
    assert (stages, notes) == (["load"], [])
    assert len(stub.asked) == 1
    assert described(again) == described(fused)
    for program in (fused, again):
        torch.testing.assert_close(program.module(X, W)[0], X @ W)


def test_other_settings_have_another_file(stub: Inductor, folder: Path) -> None:
    for _ in range(2):
        prepared()
        prepared({"max_autotune": True})
    assert stub.asked == [{}, {"max_autotune": True}]
    assert len(list(folder.glob("*.json"))) == 2


def test_source_lines_are_those_of_the_program_that_is_given() -> None:
    prepared()
    moved = traced()
    (product,) = (node for node in moved.module.graph.nodes if node.op == "call_function")
    product.stack_trace = "elsewhere"
    again, stages, _ = prepared(program=moved)
    assert stages == ["load"]
    assert {node.stack_trace for node in again.module.graph.nodes if node.op == "call_function"} == {"elsewhere"}


# Programs whose kernels are not kept


def _no_key(program: Program) -> str:
    raise RuntimeError("no key")


def _of_other_kernels(program: Program) -> Program:
    """Fused, in kernels that cannot be made from a file."""
    fused = as_inductor_would(program)
    for node in fused.module.graph.nodes:
        if isinstance(node.target, Kernel):
            node.target.recipe = None
    return fused


@pytest.mark.parametrize("why", ["freezing", "force_disable_caches", "the program has no key", "the kernels have none"])
def test_kernels_that_depend_on_more_than_the_key_are_fused_each_time_without_a_report(
    why: str, stub: Inductor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {why: True} if why in ("freezing", "force_disable_caches") else {}
    if why == "the program has no key":
        monkeypatch.setattr(fusion, "fingerprint", _no_key)
    elif why == "the kernels have none":
        stub.answer = _of_other_kernels
    for count in (1, 2):
        _, stages, notes = prepared(options)
        assert (stages[-1], notes) == ("fuse", [])
        assert len(stub.asked) == count
    assert not folder.exists()


def test_a_program_that_cannot_be_fused_is_refused(stub: Inductor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: Program) -> Program:
        raise FusionError("too odd")

    stub.answer = refuse
    with pytest.raises(FusionError, match="too odd"):
        prepared()
    monkeypatch.setattr(fusion, "obstacle", lambda device: "there is no Triton")
    with pytest.raises(FusionError, match="too odd"):
        prepared()


def test_a_program_whose_inductor_files_are_gone_is_fused_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles its kernels in several processes then."""

    def gone(name: str, recipe: object, device: object) -> Kernel:
        raise FileNotFoundError(name)

    prepared()
    with monkeypatch.context() as patch:
        patch.setattr(kernel_graph, "kernel_from_recipe", gone)
        assert prepared()[1:] == (["load", "fuse"], [])
    assert prepared()[1:] == (["load"], [])


# Damage


def rewritten(**changed: Any) -> Callable[[str], str]:
    """A file that another version of autostream might have written."""
    return lambda text: stores._with_checksum(json.dumps({**json.loads(stores._checked(text)), **changed}))


DAMAGE: dict[str, Callable[[str], str]] = {
    "truncated": lambda text: text[:-20],
    "changed": lambda text: text.replace('"mm"', '"bmm"'),
    "of other kernels": rewritten(kernels=[{"name": "odd", "recipe": {}}]),
    "of fewer kernels": rewritten(kernels=[]),
    "of another operator": rewritten(calls=[{"name": "a", "target": "aten.no.such"}]),
    "of outputs that lie elsewhere": rewritten(outputs=[traced().placeholders[0].name]),
    "of nothing": rewritten(calls=[]),
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


@given(st.data())
@hypothesis_settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_with_any_bytes_changed_does_not_change_the_program(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSTREAM_CACHE_DIR", cache)
        fused, *_ = prepared()
        (path,) = Path(cache, "fused").glob("*.json")
        text = path.read_bytes()
        at = data.draw(st.integers(0, len(text) - 1))
        path.write_bytes(text[:at] + data.draw(st.binary(max_size=8)) + text[at + data.draw(st.integers(0, 8)) :])
        again, _, _ = prepared()
        assert described(again) == described(fused)
        torch.testing.assert_close(again.module(X, W)[0], X @ W)


def test_kernels_that_cannot_be_kept_are_reported_and_fused_each_time(stub: Inductor, folder: Path) -> None:
    folder.parent.write_text("in the way")
    for count in (1, 2):
        fused, _, notes = prepared()
        assert notes == ["not cached"]
        assert len(stub.asked) == count
        torch.testing.assert_close(fused.module(X, W)[0], X @ W)
