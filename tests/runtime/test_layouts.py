"""Tensors that lie where they did, and as they did; in C and in Python."""

from __future__ import annotations

import gc
import shutil
import subprocess
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autostream.runtime import layouts
from autostream.runtime.layouts import Layouts


@pytest.fixture(params=["C", "Python"])
def look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a C compiler, and without."""
    if request.param == "Python":
        monkeypatch.setattr(layouts, "_library", lambda: None)
    elif shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    return str(request.param)


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 4)), torch.randn(4), torch.randn(()), torch.zeros(0, 3)]


ELSEWHERE: dict[str, Callable[[Tensor], object]] = {
    "copied": lambda w: setattr(w, "data", w.data.clone()),
    "shifted": lambda w: setattr(w, "data", w.data[1:]),
    "other memory": lambda w: w.set_(torch.randn(4, 4)),
}

OTHERWISE: dict[str, Callable[[Tensor], object]] = {
    "transposed": lambda w: setattr(w, "data", w.data.t()),
    "in place": lambda w: w.t_(),
    "cast": lambda w: setattr(w, "data", w.data.view(torch.int32)),
    "narrowed": lambda w: setattr(w, "data", w.data[:2]),
    "flattened": lambda w: setattr(w, "data", w.data.view(16)),
}


@pytest.mark.usefixtures("look")
@pytest.mark.parametrize("name", [*ELSEWHERE, *OTHERWISE])
@pytest.mark.parametrize("whole", [False, True])
@torch.no_grad()
def test_what_changed_is_seen(name: str, whole: bool) -> None:
    given = weights()
    given[0].requires_grad_(False)
    seen = Layouts(given, whole=whole)
    assert seen.unchanged()
    (ELSEWHERE | OTHERWISE)[name](given[0])
    unseen = name in OTHERWISE and not whole
    assert bool(seen.unchanged()) is unseen


@pytest.mark.usefixtures("look")
def test_signs_that_are_set_lazily_are_seen() -> None:
    weight = nn.Parameter(torch.randn(2, dtype=torch.complex64))
    seen = Layouts([weight], whole=True)
    weight.data = weight.data.conj()
    assert not seen.unchanged()


@pytest.mark.usefixtures("look")
@pytest.mark.parametrize("whole", [False, True])
def test_values_and_other_objects_for_the_same_memory_change_nothing(whole: bool) -> None:
    given = weights()
    seen = Layouts(given, whole=whole)
    with torch.no_grad():
        given[0].mul_(2)
    given[0].data = given[0].data.view(4, 4)
    assert seen.unchanged()
    assert Layouts([], whole=whole).unchanged()


@pytest.mark.usefixtures("look")
def test_tensors_are_let_go_with_it_and_not_before() -> None:
    given = weights()
    unchanged = Layouts(given).unchanged
    held = weakref.ref(given[0])
    given.clear()
    gc.collect()
    assert unchanged()
    gc.disable()
    try:
        del unchanged
        assert held() is None
    finally:
        gc.enable()


def test_a_compiler_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise subprocess.CalledProcessError(1, "cc")

    monkeypatch.setattr(subprocess, "run", fails)
    layouts._library.cache_clear()
    try:
        weight = torch.ones(2)
        seen = Layouts([weight])
        assert seen.unchanged()
        weight.data = torch.ones(2)
        assert not seen.unchanged()
    finally:
        layouts._library.cache_clear()
