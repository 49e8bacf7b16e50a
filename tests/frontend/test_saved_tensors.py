"""Hooks on saved tensors: disabled while tracing, detected, and called with their errors."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from autostream.errors import TraceError
from autostream.frontend.saved_tensors import call_keeping_errors, hooks_are_set, hooks_set_aside


def saves() -> None:
    torch.ones(2, requires_grad=True).exp().sum().backward()


class Hooks(saved_tensors_hooks):
    """Records which pair of hooks packs and unpacks."""

    def __init__(self, name: str, seen: list[str]) -> None:
        def pack(tensor: Tensor) -> Tensor:
            seen.append(f"{name} packs")
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            seen.append(f"{name} unpacks")
            return tensor

        super().__init__(pack, unpack)


def test_hooks_are_disabled_inside_and_come_back_in_their_order() -> None:
    """Also after an error."""
    seen: list[str] = []
    with Hooks("outer", seen), Hooks("inner", seen):
        with hooks_set_aside():
            saves()
        assert not seen
        saves()
        assert seen == ["inner packs", "inner unpacks"]
    with Hooks("outer", seen):
        with pytest.raises(KeyError), hooks_set_aside(), Hooks("own", seen):
            saves()
            raise KeyError
        saves()
    assert seen[2:] == ["own packs", "own unpacks", "outer packs", "outer unpacks"]


def test_hooks_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with Hooks("outer", []):
        assert hooks_are_set()
        with hooks_set_aside():
            assert not hooks_are_set()
    assert not hooks_are_set()
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    assert hooks_are_set(), "this version of PyTorch does not tell"
    with (
        pytest.raises(TraceError, match=r"^torch .* has no _top_saved_tensors_default_hooks, which sets"),
        hooks_set_aside(),
    ):
        raise AssertionError("it began")


class Exp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * gradients[0]


class EndsEarlyError(Exception):
    pass


def refusing(tensor: Tensor) -> Tensor:
    raise EndsEarlyError


def loses_errors(*args: Any) -> Tensor:
    """``Exp.apply`` where PyTorch loses the error of a hook."""
    try:
        return Function.__dict__["apply"].__get__(None, Exp)(*args)  # type: ignore[no-any-return]
    except EndsEarlyError:
        raise SystemError("<built-in method apply> returned NULL without setting an exception") from None


@pytest.mark.parametrize("lost", [False, True])
def test_the_error_of_a_hook_is_raised(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no reference cycles to the garbage collector."""
    if lost:
        monkeypatch.setattr(Exp, "apply", loses_errors)
    x = torch.ones(2, requires_grad=True)
    raised = []
    gc.collect()
    gc.disable()
    try:
        with saved_tensors_hooks(refusing, refusing):
            try:
                call_keeping_errors(Exp.apply, x)
            except EndsEarlyError as error:
                raised.append(ref(error))
        assert [error() for error in raised] == [None]
    finally:
        gc.enable()


def test_hooks_are_called_and_stay_and_other_errors_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with Hooks("outer", seen):
        call_keeping_errors(Exp.apply, x).sum().backward()
        saves()
    assert seen == ["outer packs", "outer unpacks"] * 2
    torch.testing.assert_close(x.grad, torch.ones(2).exp())
    call_keeping_errors(Exp.apply, x)
    assert len(seen) == 4

    def fail(*args: Any) -> Tensor:
        raise SystemError("another")

    monkeypatch.setattr(Exp, "apply", fail)
    with Hooks("outer", []), pytest.raises(SystemError, match="another"):
        call_keeping_errors(Exp.apply, torch.ones(2, requires_grad=True))
