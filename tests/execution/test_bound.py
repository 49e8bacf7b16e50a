"""Tensors that stay where they are, and all ways not to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autostream.execution import bound
from autostream.execution.bound import Bound, Frozen, looks_alike, versions_of


@pytest.fixture(params=["guards", "no guards"])
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's guards, and with a version that has none."""
    if request.param == "no guards":
        monkeypatch.setattr(torch._C._dynamo, "guards", object())


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 4)), torch.randn(4), nn.Parameter(torch.randn(2, 2), requires_grad=False)]


def transposed(w: Tensor) -> None:
    w.data = w.data.t()


def cast(w: Tensor) -> None:
    w.data = w.data.view(torch.int32)


def narrowed(w: Tensor) -> None:
    w.data = w.data[:2]


def flattened(w: Tensor) -> None:
    w.data = w.data.view(16)


def copied(w: Tensor) -> None:
    w.data = w.data.clone()


def shifted(w: Tensor) -> None:
    w.data = torch.randn(17)[1:].view(4, 4)


@pytest.mark.usefixtures("guards")
@pytest.mark.parametrize("move", [transposed, cast, narrowed, flattened, copied, shifted])
@pytest.mark.parametrize("calls", [0, 2])
def test_every_move_is_seen(move: Callable[[Tensor], None], calls: int) -> None:
    """Also in place, where the tensor is the same object, and most of them at the same address."""
    given = weights()
    if move is cast:
        given[0].requires_grad_(False)
    seen = Bound(given)
    for _ in range(calls):
        assert seen.unmoved(given)
    move(given[0])
    assert not seen.unmoved(given)
    assert not seen.unmoved(given), "asking does not make it right"


@pytest.mark.usefixtures("guards")
def test_other_tensors_and_other_numbers_of_them_are_seen() -> None:
    given = weights()
    seen = Bound(given)
    assert not seen.unmoved(given[:2])
    assert not seen.unmoved([*given, torch.ones(1)])
    assert not seen.unmoved([given[1], given[0], given[2]])
    assert seen.unmoved(given)


@pytest.mark.usefixtures("guards")
def test_what_is_no_move_is_none() -> None:
    """Other values, other objects for the same memory, and whether gradients are recorded."""
    given = weights()
    seen = Bound([tensor.detach() for tensor in given])
    assert seen.unmoved(given)
    with torch.no_grad():
        given[0].mul_(2)
        assert seen.unmoved(given)
    given[0].requires_grad_(False)
    assert seen.unmoved(given)
    with torch.inference_mode():
        assert seen.unmoved(given)
    assert seen.unmoved([tensor.detach() for tensor in given])
    assert seen.unmoved(given)


@pytest.mark.usefixtures("guards")
def test_nothing_bound_never_moves() -> None:
    assert Bound([]).unmoved([])


def test_the_quick_look_is_enough_when_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = weights()
    seen = Bound(given)
    monkeypatch.setattr(bound, "_layouts", None)  # whoever asks each tensor fails
    assert seen.unmoved(given)


def test_a_version_without_guards_asks_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._dynamo, "guards", object())
    given, asked = weights(), []
    seen = Bound(given)
    real = bound._layouts
    monkeypatch.setattr(bound, "_layouts", lambda tensors: asked.append(len(tensors)) or real(tensors))
    assert seen.unmoved(given)
    assert asked == [3]


def test_no_tensor_is_kept_alive() -> None:
    given = weights()
    seen = Bound(given)
    assert seen.unmoved(given)
    held = weakref.ref(given[0])
    del given
    gc.collect()
    assert held() is None


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
        (torch.ones(2, 2), None),
        (torch.ones(2, 2), [torch.ones(3)]),
        (torch.ones(2, 2, dtype=torch.complex64).conj().real, torch.ones(3)),
        (),
    ],
    ids=str,
)
def test_what_does_not_look_alike(values: tuple[object, ...]) -> None:
    alike = looks_alike([torch.ones(2, 2), torch.ones(3)])
    assert alike((torch.zeros(2, 2), torch.zeros(3)))
    assert not alike(values)


def test_without_guards_nothing_looks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._dynamo, "guards", object())
    assert not looks_alike([torch.ones(2)])((torch.ones(2),))


def test_transforms_and_modes_do_not_look_alike() -> None:
    """Inside of a transform a tensor stands for another."""
    alike = looks_alike([torch.ones(3)])
    seen: list[bool] = []
    torch.vmap(lambda x: (seen.append(alike((x,))), x)[1])(torch.ones(2, 3))
    torch.func.grad(lambda x: (seen.append(alike((x,))), x.sum())[1])(torch.ones(3))
    assert seen == [False, False]


# What a program holds on to


def frozen(tensors: list[Tensor], *positions: int) -> Frozen:
    return Frozen(positions, tensors, versions_of(tensors))


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.add_(0),
        lambda w: w[0].zero_(),
        lambda w: w.copy_(w.clone()),
        lambda w: setattr(w, "data", w.data.clone()),
        lambda w: setattr(w, "data", w.data.t()),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: torch.optim.SGD([w], lr=0.1).step(lambda: setattr(w, "grad", torch.ones_like(w))),
    ],
)
def test_a_change_of_what_is_held_is_seen_and_of_nothing_else(change: Callable[[Tensor], object]) -> None:
    tensors = weights()
    held, others, none = frozen(tensors, 0), frozen(tensors, 1, 2), frozen(tensors)
    assert all(each(tensors) for each in (held, others, none))
    change(tensors[0])
    assert (held(tensors), others(tensors), none(tensors)) == (False, True, True)


class Memory(bytearray):
    """Of which one can ask whether it is still there."""


def test_what_is_held_stays_where_it_is_so_that_nothing_else_can_lie_there() -> None:
    memory = Memory(16)
    there = weakref.ref(memory)
    tensors = [torch.frombuffer(memory, dtype=torch.float32)]
    held = frozen(tensors, 0)
    del memory
    tensors[0] = torch.zeros(4)
    assert not held(tensors)
    assert there() is not None
    del held
    assert there() is None


def test_what_was_written_before_is_told_by_the_versions_given() -> None:
    tensors = [torch.ones(2)]
    before = versions_of(tensors)
    tensors[0].add_(1)
    assert not Frozen([0], tensors, before)(tensors)


def test_a_tensor_that_is_not_counted_in_the_place_of_another_is_seen() -> None:
    tensors = weights()
    held = frozen(tensors, 1)
    with torch.inference_mode():
        tensors[1] = torch.randn(4)
    assert versions_of(tensors) == [0, None, 0]
    assert not held(tensors)
