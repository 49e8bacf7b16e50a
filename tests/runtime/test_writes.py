"""Checks for tensors and dictionaries that have been written, replaced or freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autostream.runtime.writes import Frozen, SameEntries, Writes, storages_alive, versions_of


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 4)), torch.randn(4), nn.Parameter(torch.randn(2, 2), requires_grad=False)]


ENTRIES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "another value": lambda entries: entries.update(b=torch.ones(1)),
    "an equal value under another key": lambda entries: entries.update(c=entries.pop("b")),
    "one more": lambda entries: entries.update(c=torch.ones(1)),
    "one less": lambda entries: entries.pop("b"),
    "exchanged": lambda entries: entries.update(a=entries["b"], b=entries["a"]),
}


@pytest.mark.parametrize("guards", [False, True])
@pytest.mark.parametrize("name", ENTRIES)
def test_changed_entries_are_noticed(name: str, guards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not guards:
        monkeypatch.setattr(torch._C._dynamo, "guards", object())
    state = [{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}]
    entries = SameEntries(state)
    assert entries.same()
    state[1]["b"] = state[1]["b"].add_(1)  # the same object
    assert entries.same()
    ENTRIES[name](state[1])
    assert not entries.same()
    assert not entries.same(), "also the second time"


def step(tensors: list[Tensor], **options: bool) -> None:
    """An optimizer's step on these tensors."""
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    torch.optim.SGD(tensors, lr=0.1, **options).step()


def frozen(tensors: list[Tensor], *positions: int) -> Frozen:
    return Frozen(positions, tensors, Writes(tensors))


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.add_(0),
        lambda w: w[0].zero_(),
        lambda w: setattr(w, "data", w.data.clone()),
        lambda w: setattr(w, "data", w.data.t()),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: step([w]),
        lambda w: step([w], fused=True),
        lambda w: step([w.detach().view(16).requires_grad_()], fused=True),
    ],
)
def test_a_constant_that_changes_is_noticed_and_no_other_tensor(change: Callable[[Tensor], object]) -> None:
    """A fused optimizer does not count its writes as versions."""
    tensors = weights()
    constant, others, none = frozen(tensors, 0), frozen(tensors, 1, 2), frozen(tensors)
    assert all(check(tensors) for check in (constant, others, none))
    change(tensors[0])
    assert (constant(tensors), others(tensors), none(tensors)) == (False, True, True)


def test_writes_while_the_program_is_made_are_noticed_and_earlier_ones_are_not() -> None:
    tensors = weights()
    step(tensors[:1], fused=True)
    assert frozen(tensors, 0)(tensors)
    for write in (lambda: step(tensors[:1], fused=True), lambda: tensors[0].detach().add_(1)):
        before = Writes(tensors)
        write()
        assert not Frozen([0], tensors, before)(tensors)


def test_another_tensor_in_the_place_of_a_constant_is_noticed() -> None:
    """Also one over the same memory, whose version counter is another, and one without a version counter."""
    for make in (lambda w: nn.Parameter(w.data), lambda w: torch.inference_mode()(torch.randn)(4, 4)):
        tensors = weights()
        constant = frozen(tensors, 0)
        tensors[0] = make(tensors[0])
        assert versions_of(tensors) in ([0, 0, 0], [None, 0, 0])
        assert not constant(tensors)


class Memory(bytearray):
    """Memory that can be weakly referenced."""


def test_a_constant_keeps_its_memory_so_that_no_other_tensor_is_allocated_there() -> None:
    memory = Memory(16)
    alive = weakref.ref(memory)
    tensors = [torch.frombuffer(memory, dtype=torch.float32)]
    constant = frozen(tensors, 0)
    del memory
    tensors[0] = torch.zeros(4)
    assert not constant(tensors)
    assert alive() is not None
    del constant
    assert alive() is None


def test_storages_are_alive_as_long_as_any_tensor_has_them() -> None:
    """The same tensor, a view, or another tensor over the storage."""
    x, y = torch.ones(4), torch.ones(3)
    view, other = x.detach()[1:], torch.empty(0).set_(y.untyped_storage())
    alive = storages_alive([x, x[2:], y])
    del x, y
    assert alive()
    del view
    assert not alive()
    assert storages_alive([other])()


def test_observing_steps_keeps_nothing_alive_and_ignores_other_tensors() -> None:
    tensors = weights()
    writes = Writes(tensors)
    step([nn.Parameter(torch.ones(2))], fused=True)
    torch.optim.SGD([torch.ones(2, 2).to_sparse().requires_grad_(), nn.UninitializedParameter()]).step()
    assert writes.stepped == set()
    references = [weakref.ref(writes), weakref.ref(tensors[0])]
    del tensors, writes
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_observation_may_start_and_end_during_a_step() -> None:
    """As another thread may do, while PyTorch iterates over its hooks."""
    weight = nn.Parameter(torch.ones(2))
    observers = [Writes([weight])]
    handles = [
        register_optimizer_step_post_hook(lambda *args: observers.append(Writes([weight]))),
        register_optimizer_step_post_hook(lambda *args: observers.pop(0) and None),
    ]
    try:
        step([weight])
    finally:
        for handle in handles:
            handle.remove()
    assert len(observers) == 1
