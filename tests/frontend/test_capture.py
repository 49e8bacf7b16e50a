"""Capture of a call as one graph: its inputs, when it may be reused, its side effects, and why it fails."""

from __future__ import annotations

import logging
import random
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.errors import FastPathError, TraceError
from autostream.frontend.capture import capture
from autostream.frontend.dynamo import SETTINGS, compiling, errors_not_logged

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def prints(x: Tensor) -> Tensor:
    print(end="")
    return x + 1


@torch.no_grad()
def test_a_call_that_cannot_be_captured_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FastPathError, match="random numbers from a generator of Python's"):
        capture(lambda x: x * random.uniform(0, 1), (torch.ones(2),), {})
    with pytest.raises(TraceError, match=r'test_capture.py:\d+: print\(end=""\)') as raised:
        capture(prints, (torch.ones(2),), {})
    assert "\n" not in str(raised.value)
    assert capture(lambda x: len(x), ([1, 2],), {}) is None


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        "convert_frame.compile_frame",
        "guards.CheckFunctionManager",
        "symbolic_convert.InstructionTranslator",
        "utils.dynamo_timed",
    ],
)
def test_a_private_interface_that_pytorch_lacks_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from autostream.frontend import guards

    guards._manager_type.cache_clear()
    monkeypatch.delattr(f"torch._dynamo.{name}")
    with pytest.raises(TraceError, match=name.rpartition(".")[2]):
        capture(nn.ReLU(), (torch.ones(2),), {})


# How Dynamo is run


def test_settings_hold_inside_and_are_restored() -> None:
    config: Any = torch._dynamo.config
    before = {name: getattr(config, name) for name in SETTINGS if hasattr(config, name)}
    with pytest.raises(KeyError), compiling(recompile_limit=3, no_such_setting=1):
        assert config.recompile_limit == 3
        assert {name: getattr(config, name) for name in before} == {name: SETTINGS[name] for name in before}
        assert "ignore" in {action for action, *_ in warnings.filters}
        raise KeyError
    assert {name: getattr(config, name) for name in before} == before
    assert config.recompile_limit != 3


class Counter(nn.Module):
    """Changes a Python object."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 1


def test_changes_of_objects_are_described_only_if_a_log_takes_that(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.DEBUG, "torch._dynamo.side_effects.__side_effects"):
        capture(Counter(), (torch.ones(2),), {})
    assert "Mutating object of type Counter" in caplog.text
    monkeypatch.delattr("torch._dynamo.side_effects.SideEffects._format_side_effect_message")
    captured = capture(Counter(), (torch.ones(2),), {})
    assert captured is not None
    assert captured.stores


def test_a_captured_graph_is_written_as_code_when_it_runs() -> None:
    captured = capture(nn.Dropout(0.5).eval(), (torch.ones(2),), {})
    assert captured is not None
    assert not hasattr(captured.module, "_code")
    assert torch.equal(captured.module(torch.ones(2))[0], torch.ones(2))
    assert "def forward" in captured.module.code


def fail(name: str) -> None:
    try:
        raise ValueError("no way\nand so on")
    except ValueError:
        logging.getLogger(name).exception("it failed")


def test_errors_of_this_thread_are_not_logged_but_reported(caplog: pytest.LogCaptureFixture) -> None:
    reasons: list[str] = []
    with errors_not_logged(reasons.append):
        fail("torch._dynamo.convert_frame")
        fail("torch._subclasses.fake_tensor")
        logging.getLogger("torch._dynamo.convert_frame").warning("no error")
        other = threading.Thread(target=fail, args=("torch._dynamo.convert_frame",))
        other.start()
        other.join()
    assert reasons == ["ValueError: no way"]
    assert caplog.messages == ["no error", "it failed"]
    fail("torch._dynamo.convert_frame")
    assert caplog.messages == ["no error", "it failed", "it failed"]


def test_inputs_of_a_wrong_shape_raise_the_models_own_error_and_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch.no_grad():
        autostream.optimize(nn.Linear(3, 4))(torch.ones(2, 5))
    assert not [record for record in caplog.records if record.exc_info]


def test_a_constant_is_not_loaded_from_where_an_earlier_trace_read_it() -> None:
    """In torch 2.13 a ``None`` that was read as ``weight.grad`` was loaded from there by all later graphs."""
    weight, owner = nn.Parameter(torch.ones(2)), nn.Module()

    def reads(x: Tensor) -> Tensor:
        return x + 1 if weight.grad is None and weight.requires_grad else x

    def assigns(x: Tensor) -> Tensor:
        owner.nothing, owner.flag = None, True
        return x + 1

    x = torch.ones(2)
    capture(reads, (x,), {})
    captured = capture(assigns, (x,), {})
    weight.grad = torch.ones(2)
    weight.requires_grad_(False)
    captured.restored(lambda *_: [x])(assigns, (x,), {})
    assert (owner.nothing, owner.flag) == (None, True)
