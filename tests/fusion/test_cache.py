"""Fused once, read ever after; and whatever becomes of the file, the program is right. Kernels are those of the CPU."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
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

from autostream import store as keeping
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
    """A product into memory that is taken before."""
    graph = fx.Graph()
    x, w = (graph.placeholder(item.name) for item in program.placeholders)
    kept = {"dtype": torch.float32, "device": torch.device("cpu")}
    memory = graph.call_function(aten.empty_strided.default, ([3, 5], [5, 1]), kept)
    call = graph.call_function(extern_kernel("mm", 2, {}), (x, w, memory))
    (product,) = (node for node in program.module.graph.nodes if node.op == "call_function")
    memory.stack_trace = call.stack_trace = product.stack_trace
    graph.output((memory,))
    return inductor.fused_before(program, fx.GraphModule(nn.Module(), graph))


class Inductor:
    """What is asked of it, and what it answers."""

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
    """As if there were a GPU, with an empty cache, in a process that has warned of nothing yet."""
    h200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(folder.parent))
    monkeypatch.setattr(fusion, "obstacle", lambda device: "")
    keeping._warn_once.cache_clear()
    stub = Inductor()
    monkeypatch.setattr(fusion, "fuse", stub.fuse)
    return stub


def prepared(
    options: Mapping[str, Any] | None = None, program: Program | None = None
) -> tuple[Program, list[str], list[str]]:
    """A fused program, the stages that it took, and what was wrong."""
    stopwatch = Stopwatch()
    fused, remarks = fused_here(program or traced(), options or {}, [], stopwatch)
    return fused, list(stopwatch.seconds), [remark.choice for remark in remarks]


def described(program: Program) -> object:
    nodes = [
        (node.name, str(node.target), node.args, node.kwargs, str(node.meta["val"]), node.stack_trace)
        for node in program.module.graph.nodes
        if node.op != "output"
    ]
    return repr(nodes), program.placeholders, program.outputs, program.level, program.device, program.frozen


def test_what_was_fused_once_is_read(stub: Inductor) -> None:
    fused, stages, remarks = prepared()
    assert (stages, remarks) == (["load", "fuse"], [])
    again, stages, remarks = prepared()
    assert (stages, remarks) == (["load"], [])
    assert len(stub.asked) == 1
    assert described(again) == described(fused)
    for program in (fused, again):
        torch.testing.assert_close(program.module(X, W)[0], X @ W)


def test_settings_have_files_of_their_own(stub: Inductor, folder: Path) -> None:
    for _ in range(2):
        prepared()
        prepared({"max_autotune": True})
    assert stub.asked == [{}, {"max_autotune": True}]
    assert len(list(folder.glob("*.json"))) == 2


def test_lines_are_those_of_the_model_as_it_is_now() -> None:
    prepared()
    moved = traced()
    (product,) = (node for node in moved.module.graph.nodes if node.op == "call_function")
    product.stack_trace = "elsewhere"
    again, stages, _ = prepared(program=moved)
    assert stages == ["load"]
    assert {node.stack_trace for node in again.module.graph.nodes if node.op == "call_function"} == {"elsewhere"}


# What is not kept, without a word


def assert_not_kept(stub: Inductor, folder: Path, options: Mapping[str, Any] | None = None) -> None:
    for count in (1, 2):
        _, stages, remarks = prepared(options)
        assert (stages[-1], remarks) == ("fuse", [])
        assert len(stub.asked) == count
    assert not folder.exists() or not list(folder.glob("*.json"))


def test_kernels_that_depend_on_weights_are_not_kept(stub: Inductor, folder: Path) -> None:
    assert_not_kept(stub, folder, {"freezing": True})


def test_who_lets_inductor_keep_nothing_has_nothing_kept(stub: Inductor, folder: Path) -> None:
    assert_not_kept(stub, folder, {"force_disable_caches": True})


def test_a_program_without_a_key_is_not_kept(stub: Inductor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(program: Program) -> str:
        raise RuntimeError("no key")

    monkeypatch.setattr(fusion, "fingerprint", odd)
    assert_not_kept(stub, folder)


def test_kernels_that_nothing_makes_again_are_not_kept(stub: Inductor, folder: Path) -> None:
    def answer(program: Program) -> Program:
        fused = as_inductor_would(program)
        for node in fused.module.graph.nodes:
            if isinstance(node.target, Kernel):
                node.target.recipe = None
        return fused

    stub.answer = answer
    assert_not_kept(stub, folder)


def test_what_cannot_be_fused_is_told_as_ever(stub: Inductor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: Program) -> Program:
        raise FusionError("too odd")

    stub.answer = refuse
    with pytest.raises(FusionError, match="too odd"):
        prepared()
    monkeypatch.setattr(fusion, "obstacle", lambda device: "there is no Triton")
    with pytest.raises(FusionError, match="too odd"):
        prepared()


def test_where_inductors_files_are_gone_it_is_fused_again(
    stub: Inductor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For many processes compile its kernels then."""

    def gone(name: str, recipe: object, device: object) -> Kernel:
        raise FileNotFoundError(name)

    prepared()
    with monkeypatch.context() as patch:
        patch.setattr(kernel_graph, "made_again", gone)
        assert prepared()[1:] == (["load", "fuse"], [])
    assert prepared()[1:] == (["load"], [])


# Damage


def damage(folder: Path, text: bytes) -> Path:
    (path,) = folder.glob("*.json")
    path.write_bytes(text)
    return path


def sound(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    entry: dict[str, Any] = json.loads(path.read_bytes())
    return entry


def rewritten(folder: Path, **changed: Any) -> bytes:
    """As if another autostream had written it."""
    program = {**sound(folder)["content"], **changed}
    return json.dumps({"sha256": keeping.key_of(program), "content": program}).encode()


DAMAGED = {
    "empty": lambda folder: b"",
    "truncated": lambda folder: json.dumps(sound(folder)).encode()[:-20],
    "not JSON": lambda folder: b"import os",
    "not text": lambda folder: b"\0\x80",
    "a list": lambda folder: b"[]",
    "deep": lambda folder: b"[" * 100_000,
    "changed": lambda folder: json.dumps(sound(folder)).replace('"mm"', '"bmm"').encode(),
    "of other kernels": lambda folder: rewritten(folder, kernels=[{"name": "odd", "recipe": {}}]),
    "of fewer kernels": lambda folder: rewritten(folder, kernels=[]),
    "of another operator": lambda folder: rewritten(folder, calls=[{"name": "a", "target": "aten.no.such"}]),
    "of outputs that lie elsewhere": lambda folder: rewritten(folder, outputs=[traced().placeholders[0].name]),
    "of nothing": lambda folder: rewritten(folder, calls=[]),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_told_of_once_and_written_anew(
    text: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fused, *_ = prepared()
    path = damage(folder, text(folder))
    with caplog.at_level(logging.WARNING):
        again, stages, remarks = prepared()
    assert (stages, remarks) == (["load", "fuse"], ["cache rebuilt"])
    assert described(again) == described(fused)
    (record,) = (record for record in caplog.records if record.name == "autostream.store")
    assert record.getMessage().startswith(f"{path} cannot be used (")
    assert record.getMessage().endswith("); its program is fused again")
    assert prepared()[1:] == (["load"], [])


@given(st.data())
@hypothesis_settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_written_over_it_the_program_is_the_same(data: st.DataObject) -> None:
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


# Places that cannot be written


def test_what_cannot_be_kept_is_told_and_stops_nobody(stub: Inductor, folder: Path) -> None:
    folder.parent.write_text("in the way")
    for count in (1, 2):
        fused, _, remarks = prepared()
        assert "not cached" in remarks
        assert len(stub.asked) == count
        torch.testing.assert_close(fused.module(X, W)[0], X @ W)


def test_without_a_home_nothing_is_kept(stub: Inductor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSTREAM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert prepared()[1:] == (["load", "fuse"], []), "keeping measurements is hindered by the same, and tells"


def test_of_too_many_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_MOST", 2)
    folder.mkdir(parents=True)
    for age in (3, 2, 1):
        path = folder / f"{age}.json"
        path.touch()
        os.utime(path, (10**9 - age, 10**9 - age))
    prepared()
    assert sum(path.suffix == ".json" for path in folder.iterdir()) == 2
    assert (folder / "1.json").exists()
    assert prepared()[1] == ["load"]
