"""Checks for tensors that have moved or changed their layout: in C, by PyTorch's guards, and without either."""

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
from autostream.runtime.layouts import Layouts, SameLayout, metadata_check

Check = Callable[[], object]


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 4), requires_grad=False), torch.randn(4), torch.randn(()), torch.zeros(0, 3)]


def without_guards(patch: pytest.MonkeyPatch) -> None:
    """As in a version of PyTorch that has none."""
    patch.setattr(torch._C._dynamo, "guards", object())
    patch.setattr(layouts, "_all_at", layouts._compare_addresses)


@pytest.fixture(params=["in C", "in Python", "by guards", "without guards"])
def check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Tensor]], Check]:
    """Makes a check of addresses and layouts; all implementations agree."""
    if request.param == "in C" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    if request.param == "in Python":
        monkeypatch.setattr(layouts, "_library", lambda: None)
    if request.param == "without guards":
        without_guards(monkeypatch)
    if request.param.startswith("in "):
        return lambda tensors: Layouts(tensors, whole=True).unchanged

    def same_layout(tensors: list[Tensor]) -> Check:
        same = SameLayout(tensors)
        return lambda: same.unmoved(tensors)

    return same_layout


MOVES: dict[str, Callable[[Tensor], object]] = {
    "copied": lambda w: setattr(w, "data", w.data.clone()),
    "shifted": lambda w: setattr(w, "data", w.data[1:]),
    "other memory": lambda w: w.set_(torch.randn(4, 4)),
}

CHANGES: dict[str, Callable[[Tensor], object]] = {
    "transposed": lambda w: setattr(w, "data", w.data.t()),
    "transposed in place": lambda w: w.t_(),
    "cast": lambda w: setattr(w, "data", w.data.view(torch.int32)),
    "narrowed": lambda w: setattr(w, "data", w.data[:2]),
    "flattened": lambda w: setattr(w, "data", w.data.view(16)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", [*MOVES, *CHANGES])
def test_a_move_or_another_layout_is_noticed(name: str, check: Callable[[list[Tensor]], Check]) -> None:
    """Most changes are in place: the same tensor object, at the same address."""
    tensors = weights()
    unchanged = check(tensors)
    assert unchanged()
    (MOVES | CHANGES)[name](tensors[0])
    assert not unchanged()
    assert not unchanged(), "also the second time"


@torch.no_grad()
@pytest.mark.parametrize("name", [*MOVES, *CHANGES])
def test_addresses_alone_can_be_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (layouts._library(), None):
        monkeypatch.setattr(layouts, "_library", lambda library=library: library)
        tensors = weights()
        addresses = Layouts(tensors)
        (MOVES | CHANGES)[name](tensors[0])
        assert bool(addresses.unchanged()) is (name in CHANGES)


def test_lazy_conjugate_and_sign_bits_are_noticed(check: Callable[[list[Tensor]], Check]) -> None:
    """Same address, dtype, size and strides, other values."""
    weight = nn.Parameter(torch.randn(2, dtype=torch.complex64))
    imaginary = [weight.data.imag]  # that of a conjugated tensor is negated
    unchanged, same = check([weight]), SameLayout(imaginary)
    weight.data = weight.data.conj()
    assert not unchanged()
    assert not same.unmoved([weight.data.imag])


def test_other_values_and_other_objects_for_the_same_memory_change_nothing(
    check: Callable[[list[Tensor]], Check],
) -> None:
    tensors = weights()
    unchanged = check(tensors)
    with torch.no_grad():
        tensors[0].mul_(2)
    tensors[0].data = tensors[0].data.view(4, 4)
    tensors[0].requires_grad_(True)
    assert unchanged()
    with torch.inference_mode():
        assert unchanged()
    assert check([])()


@pytest.mark.parametrize("guards", [False, True])
def test_other_tensors_are_compared_with_the_first(guards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any object may be in a module's dictionaries by now."""
    if not guards:
        without_guards(monkeypatch)
    tensors = weights()
    same = SameLayout(tensors)
    assert same.unmoved([tensor.detach() for tensor in tensors])
    for others in (
        *(tensors[:2], [*tensors, torch.ones(1)], [tensors[1], tensors[0], *tensors[2:]]),
        *([tensors[0].to_sparse(), *tensors[1:]], [None, *tensors[1:]]),
    ):
        assert not same.unmoved(others)  # type: ignore[arg-type]
    assert same.unmoved(tensors)
    first = weakref.ref(tensors[0])
    del tensors, others
    gc.collect()
    assert first() is None, "it keeps no tensor alive"


@pytest.mark.parametrize("library", [False, True])
def test_tensors_of_layouts_live_as_long_as_it(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        monkeypatch.setattr(layouts, "_library", lambda: None)
    tensors = weights()
    unchanged = Layouts(tensors).unchanged
    first = weakref.ref(tensors[0])
    tensors.clear()
    gc.collect()
    assert unchanged()
    gc.disable()
    try:
        del unchanged
        assert first() is None
    finally:
        gc.enable()


def test_without_a_working_compiler_tensors_are_compared_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise subprocess.CalledProcessError(1, "cc")

    monkeypatch.setattr(subprocess, "run", fails)
    layouts._library.cache_clear()
    try:
        weight = torch.ones(2)
        addresses = Layouts([weight])
        assert addresses.unchanged()
        weight.data = torch.ones(2)
        assert not addresses.unchanged()
    finally:
        layouts._library.cache_clear()


@pytest.mark.parametrize(
    "values",
    [
        (torch.ones(4, 4),),
        (torch.ones(2, 2).double(), torch.ones(3)),
        (torch.ones(2, 2), torch.ones(4)),
        (torch.ones(2, 2).t().contiguous().t(), torch.ones(6)[::2]),
        (torch.ones(2, 2, device="meta"), torch.ones(3)),
        (torch.ones(2, 2).to_sparse(), torch.ones(3)),
        (torch.ones(2, 2), nn.Parameter(torch.ones(3))),
        (torch.ones(2, 2), torch.ones(3), torch.ones(1)),
        (torch.ones(2, 2), 3),
        (torch.ones(2, 2), [torch.ones(3)]),
        (torch.ones(2, 2, dtype=torch.complex64).conj().real, torch.ones(3)),
        (),
    ],
    ids=str,
)
def test_inputs_with_other_metadata_fail_the_fast_check(
    values: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    like = [torch.ones(2, 2), torch.ones(3)]
    check = metadata_check(like)
    assert check((torch.zeros(2, 2), torch.zeros(3)))
    assert not check(values)
    without_guards(monkeypatch)
    assert not metadata_check(like)(like), "without guards there is no fast check"


def test_tensors_inside_of_a_transform_fail_the_fast_check() -> None:
    """There, a tensor stands for another."""
    check = metadata_check([torch.ones(3)])
    passed: list[bool] = []
    torch.vmap(lambda x: (passed.append(check((x,))), x)[1])(torch.ones(2, 3))
    torch.func.grad(lambda x: (passed.append(check((x,))), x.sum())[1])(torch.ones(3))
    assert passed == [False, False]
