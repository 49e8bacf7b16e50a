"""Tensors that stay where they are, and all ways not to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autostream.runtime import layouts as bound
from autostream.runtime.layouts import SameLayout, metadata_check
from autostream.runtime.writes import Frozen, SameEntries, Writes, storages_alive, versions_of


@pytest.fixture(params=["guards", "no guards"])
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's guards, and with a version that has none."""
    if request.param == "no guards":
        monkeypatch.setattr(torch._C._dynamo, "guards", object())
        monkeypatch.setattr(bound, "_all_at", bound._compare_addresses)


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
    seen = SameLayout(given)
    for _ in range(calls):
        assert seen.unmoved(given)
    move(given[0])
    assert not seen.unmoved(given)
    assert not seen.unmoved(given), "asking does not make it right"


@pytest.mark.usefixtures("guards")
def test_a_sign_that_is_set_lazily_is_seen() -> None:
    """Same address, dtype, size and strides, other values."""
    weight = nn.Parameter(torch.randn(2, dtype=torch.complex64))
    imaginary = weight.data.imag  # what is conjugated has it negated
    seen, seen_imaginary = SameLayout([weight]), SameLayout([imaginary])
    weight.data = weight.data.conj()
    assert not seen.unmoved([weight])
    assert not seen_imaginary.unmoved([weight.data.imag])


@pytest.mark.usefixtures("guards")
def test_other_tensors_and_other_numbers_of_them_are_seen() -> None:
    given = weights()
    seen = SameLayout(given)
    assert not seen.unmoved(given[:2])
    assert not seen.unmoved([*given, torch.ones(1)])
    assert not seen.unmoved([given[1], given[0], given[2]])
    assert seen.unmoved(given)


@pytest.mark.usefixtures("guards")
def test_what_has_no_address_or_is_no_tensor_has_moved() -> None:
    """Somebody may put anything into a module's dictionaries."""
    given = weights()
    seen = SameLayout(given)
    assert not seen.unmoved([given[0].to_sparse(), *given[1:]])
    assert not seen.unmoved([None, *given[1:]])  # type: ignore[list-item]


@pytest.mark.usefixtures("guards")
def test_what_is_no_move_is_none() -> None:
    """Other values, other objects for the same memory, and whether gradients are recorded."""
    given = weights()
    seen = SameLayout([tensor.detach() for tensor in given])
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
    assert SameLayout([]).unmoved([])


def test_the_quick_look_is_enough_when_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = weights()
    seen = SameLayout(given)
    monkeypatch.setattr(bound.SameMetadata, "_metadata", None)  # whoever asks each tensor fails
    assert seen.unmoved(given)


def test_a_version_without_guards_asks_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._dynamo, "guards", object())
    given, asked = weights(), []
    seen = SameLayout(given)
    real = bound.SameMetadata._metadata
    monkeypatch.setattr(bound.SameMetadata, "_metadata", lambda self, own: asked.append(len(own)) or real(self, own))
    assert seen.unmoved(given)
    assert asked == [3]


def test_no_tensor_is_kept_alive() -> None:
    given = weights()
    seen = SameLayout(given)
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
    alike = metadata_check([torch.ones(2, 2), torch.ones(3)])
    assert alike((torch.zeros(2, 2), torch.zeros(3)))
    assert not alike(values)


def test_without_guards_nothing_looks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._dynamo, "guards", object())
    assert not metadata_check([torch.ones(2)])((torch.ones(2),))


def test_transforms_and_modes_do_not_look_alike() -> None:
    """Inside of a transform a tensor stands for another."""
    alike = metadata_check([torch.ones(3)])
    seen: list[bool] = []
    torch.vmap(lambda x: (seen.append(alike((x,))), x)[1])(torch.ones(2, 3))
    torch.func.grad(lambda x: (seen.append(alike((x,))), x.sum())[1])(torch.ones(3))
    assert seen == [False, False]


ENTRIES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "another value": lambda own: own.update(b=torch.ones(1)),
    "an equal key": lambda own: own.update(c=own.pop("b")),
    "one more": lambda own: own.update(c=torch.ones(1)),
    "one less": lambda own: own.pop("b"),
    "none": lambda own: own.clear(),
    "exchanged": lambda own: own.update(a=own["b"], b=own["a"]),
}


@pytest.mark.usefixtures("guards")
@pytest.mark.parametrize("name", ENTRIES)
def test_entries_that_change_are_seen(name: str) -> None:
    state = [{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}]
    entries = SameEntries(state)
    assert entries.same()
    state[1]["b"] = state[1]["b"].add_(1)  # what was there
    assert entries.same()
    ENTRIES[name](state[1])
    assert not entries.same()
    assert not entries.same(), "asking does not make it right"


# What a program holds on to


def stepped(tensors: list[Tensor], **options: bool) -> None:
    """An optimizer takes a step on these."""
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
        lambda w: w.copy_(w.clone()),
        lambda w: setattr(w, "data", w.data.clone()),
        lambda w: setattr(w, "data", w.data.t()),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: stepped([w]),
        lambda w: stepped([w], fused=True),
        lambda w: stepped([w.detach().view(16).requires_grad_()], fused=True),
    ],
)
def test_a_change_of_what_is_held_is_seen_and_of_nothing_else(change: Callable[[Tensor], object]) -> None:
    tensors = weights()
    held, others, none = frozen(tensors, 0), frozen(tensors, 1, 2), frozen(tensors)
    assert all(each(tensors) for each in (held, others, none))
    change(tensors[0])
    assert (held(tensors), others(tensors), none(tensors)) == (False, True, True)


def test_memory_is_there_as_long_as_somebody_has_all_of_it() -> None:
    """Whatever has it: the same tensor, a view, or another tensor over it."""
    x, y = torch.ones(4), torch.ones(3)
    view, other = x.detach()[1:], torch.empty(0).set_(y.untyped_storage())
    are_there = storages_alive([x, x[2:], y])
    del x, y
    assert are_there()
    del view
    assert not are_there()
    assert storages_alive([other])()


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
    before = Writes(tensors)
    tensors[0].add_(1)
    assert not Frozen([0], tensors, before)(tensors)


def test_a_tensor_that_is_not_counted_in_the_place_of_another_is_seen() -> None:
    tensors = weights()
    held = frozen(tensors, 1)
    with torch.inference_mode():
        tensors[1] = torch.randn(4)
    assert versions_of(tensors) == [0, None, 0]
    assert not held(tensors)


@torch.no_grad()
def test_another_parameter_for_the_same_memory_is_seen_though_it_was_written_as_often() -> None:
    """It counts for itself: what is written to it, to the versions of the first, may be what was not seen."""
    tensors = weights()
    held = frozen(tensors, 0)
    tensors[0] = nn.Parameter(tensors[0].data)
    assert tensors[0].data_ptr() == held._memory[0].data_ptr()
    assert versions_of(tensors) == [*held._versions, 0, 0]
    assert not held(tensors)


def test_a_step_is_seen_from_when_somebody_looks() -> None:
    """Also one that is taken while the program is made."""
    tensors = weights()
    stepped(tensors[:1], fused=True)
    assert frozen(tensors, 0)(tensors)
    before = Writes(tensors)
    stepped(tensors[:1], fused=True)
    assert not Frozen([0], tensors, before)(tensors)


def test_an_optimizer_of_other_tensors_is_none_of_our_business() -> None:
    tensors = weights()
    writes = Writes(tensors)
    stepped([nn.Parameter(torch.ones(2))], fused=True)
    torch.optim.SGD([torch.ones(2, 2).to_sparse().requires_grad_(), nn.UninitializedParameter()]).step()
    assert writes.stepped == set()


def test_nobody_is_kept_alive_to_see_steps() -> None:
    tensors = weights()
    writes = Writes(tensors)
    gone = [weakref.ref(writes), weakref.ref(tensors[0])]
    del tensors, writes
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_one_may_begin_and_cease_to_look_in_the_middle_of_a_step() -> None:
    """As another thread may, while PyTorch goes through its hooks."""
    weight = nn.Parameter(torch.ones(2))
    looking = [Writes([weight])]
    handles = [
        register_optimizer_step_post_hook(lambda *args: looking.append(Writes([weight]))),
        register_optimizer_step_post_hook(lambda *args: looking.pop(0) and None),
    ]
    try:
        stepped([weight])
    finally:
        for handle in handles:
            handle.remove()
    assert len(looking) == 1
