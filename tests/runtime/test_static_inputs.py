"""Copies to static inputs and of outputs: a replay, emulated on the CPU, returns what the eager function does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autostream.runtime.static_inputs import copier, copier_out, copyable, output_makers, static_copies

Function = Callable[..., Sequence[Tensor]]


class Replayed:
    """A captured graph emulated on the CPU: the function runs on static inputs.

    The outputs of the recorded run are the graph's memory: a replay writes new values to the same storages.
    """

    def __init__(self, function: Function, tensors: Sequence[Tensor], bound: Sequence[int] = ()) -> None:
        self._function = function
        self._copied = [index for index in range(len(tensors)) if index not in bound]
        self.static = static_copies(tensors, self._copied)
        self._recorded = function(*self.static)
        self._copy_out = copier_out(self._recorded, output_makers(self._recorded, self.static))

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        for index in self._copied:
            copyable(self.static[index]).copy_(copyable(tensors[index]))
        for recorded, result in zip(self._recorded, self._function(*self.static), strict=True):
            bytes_of(recorded).copy_(bytes_of(result))
        for index in self._copied:
            copyable(tensors[index]).copy_(copyable(self.static[index]))
        return [output for output in self._copy_out(tensors) if output is not None]


def bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def cloned(tensors: Sequence[Tensor], ahead: int = 0) -> list[Tensor]:
    """Copies that alias each other alike, each ``ahead`` bytes further into its storage."""
    storages: dict[int, torch.UntypedStorage] = {}
    clones = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            copy = torch.zeros(storage.nbytes() + ahead, dtype=torch.uint8)
            copy[ahead:] = bytes_of(tensor)
            storages[storage._cdata] = copy.untyped_storage()
        offset = tensor.storage_offset() + ahead // tensor.element_size()
        empty = torch.empty(0, dtype=tensor.dtype)
        clones.append(empty.set_(storages[storage._cdata], offset, tensor.shape, tensor.stride()))
    return clones


def relations(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """For each tensor: the first that shares its storage, and the distance from that in bytes."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    offsets = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
    firsts = [storages.index(storage) for storage in storages]
    return [(first, offset - offsets[first]) for first, offset in zip(firsts, offsets, strict=True)]


def assert_same(function: Function, example: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Record the function at ``example``, replay it at ``tensors``, and compare with an eager call."""
    eager = cloned(tensors)
    expected = list(function(*eager))
    replayed = Replayed(function, example)
    outputs = replayed(*tensors)
    values = [output.clone() for output in outputs]
    for ours, theirs in zip([*tensors, *outputs], [*eager, *expected], strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(ours, theirs)
    assert relations([*tensors, *outputs]) == relations([*eager, *expected])
    assert first_same([*tensors, *outputs]) == first_same([*eager, *expected])
    replayed(*cloned(example))
    assert all(map(torch.equal, outputs, values)), "a later replay overwrote an output"


def first_same(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor, the first that is the same object."""
    return [next(at for at, other in enumerate(tensors) if other is tensor) for tensor in tensors]


# Functions are sequences of steps, from a tensor to a tensor.

NEW: dict[str, Callable[[Tensor], Tensor]] = {
    "a new tensor": lambda x: x * 2,
    "a new tensor with gaps": lambda x: (x * 2).repeat(2, *[1] * max(x.dim() - 1, 0))[::2],
    "a new tensor, expanded": lambda x: (x.sum() + 1).expand(3, 2),
    "a new tensor, transposed": lambda x: (x * 3).reshape(-1, 1).t(),
    "an empty tensor": lambda x: x.new_empty(0, 3),
    "a new tensor at an offset": lambda x: (x * 5).flatten()[1:],
    "a new tensor of another dtype": lambda x: x > 0,
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "an alias": lambda x: x.detach(),
    "its first half": lambda x: x[: (x.shape[0] + 1) // 2] if x.dim() else x.view(1),
    "its second half": lambda x: x[x.shape[0] // 2 :] if x.dim() else x.view(1),
    "every other element": lambda x: x[::2] if x.dim() else x.view(1),
    "its bytes": lambda x: x.view(torch.uint8) if x.dim() and x.stride(-1) == 1 else x.detach(),
    "transposed": lambda x: x.transpose(0, -1) if x.dim() else x.view(1),
}


@st.composite
def functions(draw: st.DrawFn) -> tuple[list[Tensor], Function]:
    """Up to three inputs in one or two storages, which may overlap, and a function of them."""
    storages = [torch.zeros(96, dtype=torch.uint8) for _ in range(draw(st.integers(1, 2)))]
    inputs = []
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.int32]))
        whole = draw(st.sampled_from(storages)).view(dtype)
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        stride = [draw(st.integers(0, 4)) for _ in shape]
        offset = draw(st.integers(0, 4))
        inputs.append(whole.as_strided(shape, stride, offset))
    steps = draw(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([*NEW, *VIEWS])), min_size=1, max_size=5))
    returned = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    written = draw(st.integers(0, 2))

    def function(*tensors: Tensor) -> list[Tensor]:
        values = list(tensors)
        target = values[written % len(values)]
        if target.is_contiguous():
            target.add_(1)
        for source, step in steps:
            values.append((NEW | VIEWS)[step](values[source % len(values)]))
        return [values[index % len(values)] for index in returned]

    return inputs, function


@settings(max_examples=150, deadline=None)
@given(functions(), st.integers(0, 2**31), st.sampled_from([0, 4, 64]))
def test_a_replay_returns_and_writes_what_an_eager_call_does_with_all_aliases(
    case: tuple[list[Tensor], Function], seed: int, ahead: int
) -> None:
    inputs, function = case
    numbers = torch.Generator().manual_seed(seed)
    tensors = cloned(inputs, ahead)
    for tensor in tensors:
        # Small whole numbers, whatever the dtype: no NaN, which equals nothing.
        copyable(tensor).copy_(torch.randint(0, 9, copyable(tensor).shape, generator=numbers))
    assume(all(torch.isfinite(tensor).all() for tensor in tensors))  # the bytes of a number can be another dtype's NaN
    assert_same(function, inputs, tensors)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_copy_spans_all_inputs_that_share_memory_in_any_order(order: list[int]) -> None:
    """The second input is 4000 bytes behind the first: of all 8192, a copy has 8 + 4000, and 2000 % 512 in front."""
    base = torch.arange(2048.0)
    inputs = [base[500:502], base[1500:1502]]
    copies = static_copies([inputs[index] for index in order], copied=[0, 1])
    assert [copy[0] for copy in copies] == [[500, 1500][index] for index in order]
    assert copies[0].untyped_storage().nbytes() == 4000 + 8 + 2000 % 512


@pytest.mark.parametrize("offset", [0, 4, 12, 130])
def test_a_copy_is_aligned_as_its_input_is(offset: int) -> None:
    (copy,) = static_copies([torch.zeros(256)[offset:]], copied=[0])
    assert (copy.storage_offset() - offset) * 4 % 512 == 0


def test_a_copier_reads_the_targets_memory_before_it_writes_it() -> None:
    """Targets in another order, and a source shifted within a target's block."""
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    copier([one, other])([other, one])
    assert (one.tolist(), other.tolist()) == ([3, 4], [1, 2])
    block = torch.arange(6.0)
    copier([block[1:5]])([block[:4]])
    assert block.tolist() == [0, 0, 1, 2, 3, 5]


class Launches(TorchDispatchMode):
    """Logs the dtypes that each op copies; several of one dtype, without gaps, are one launch on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[list[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy" in func._schema.name:
            targets, sources = (arg if isinstance(arg, list) else [arg] for arg in args[:2])
            dtypes = [tensor.dtype for tensor in targets]
            assert dtypes == [tensor.dtype for tensor in sources]
            self.log.append(dtypes)
        return func(*args, **(kwargs or {}))


def launches(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[list[torch.dtype]]:
    """Copy, and return the dtypes of each op."""
    copy = copier(targets)
    with Launches() as mode:
        copy(sources)
    assert all(map(torch.equal, targets, sources))
    return mode.log


HALVES, INDICES, MASK = torch.arange(3.0).half(), torch.tensor([[1, -2], [3, 4]]), torch.tensor([True, False])
BIG, GAPS = torch.arange(2.0**13), torch.arange(8.0).view(2, 4)[:, :2]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([HALVES, HALVES + 1], [[torch.float16] * 2]),
        ([INDICES, MASK, HALVES], [[torch.uint8] * 3]),
        ([torch.ones(2, dtype=torch.complex128), INDICES], [[torch.int64] * 2]),
        ([HALVES, BIG, INDICES], [[torch.int16] * 2, [torch.float32]]),
        ([HALVES, GAPS, INDICES], [[torch.int16] * 2, [torch.float32]]),
        ([HALVES, BIG], [[torch.float16, torch.float32]]),
    ],
    ids=["one dtype", "three", "wider than integers", "a large one", "gaps", "only one is small"],
)
def test_small_tensors_of_several_dtypes_are_copied_in_one_launch(
    sources: Sequence[Tensor], expected: Sequence[Sequence[torch.dtype]]
) -> None:
    targets = [source.clone() if source is not GAPS else torch.zeros(2, 4)[:, :2] for source in sources]
    for target in targets:
        target.zero_()
    assert launches(targets, sources) == expected


def test_sources_in_place_are_skipped() -> None:
    targets = [torch.zeros_like(HALVES), INDICES, torch.zeros_like(MASK)]
    assert launches(targets, [HALVES, INDICES, MASK]) == [[torch.uint8] * 2]
    assert launches(targets, [HALVES + 1, *targets[1:]]) == [[torch.float16]]
    assert launches(targets, targets) == []


@pytest.mark.parametrize("called", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_copier_made_in_inference_mode_copies_outside(called: Callable[[], Any]) -> None:
    """From odd addresses too, which integers as wide as the widest element would not be aligned to."""
    targets = [torch.zeros_like(HALVES), torch.zeros_like(INDICES)]
    with torch.inference_mode():
        sources = [torch.arange(9.0).half()[1:4], torch.arange(9)[3:7].view(2, 2)]
        copy = copier(targets)
    with called():
        copy(sources)
    assert all(map(torch.equal, targets, sources))


DTYPES = [torch.bool, torch.uint8, torch.float16, torch.int32, torch.int64, torch.complex64, torch.complex128]


@st.composite
def layouts(draw: st.DrawFn) -> Callable[[int], list[Tensor]]:
    """Makes tensors of random dtypes and layouts, whose values depend on a number."""
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        drawn.append((draw(st.sampled_from(DTYPES)), shape, [draw(st.integers(0, 4)) for _ in shape]))

    def make(seed: int) -> list[Tensor]:
        numbers = (torch.arange(seed, seed + 20) * 7 % 5 for _ in drawn)
        return [
            whole.to(dtype).as_strided(shape, stride)
            for whole, (dtype, shape, stride) in zip(numbers, drawn, strict=True)
        ]

    return make


@settings(max_examples=80)
@given(layouts())
def test_a_copier_copies_tensors_of_any_layout(make: Callable[[int], list[Tensor]]) -> None:
    targets, sources = make(0), make(3)
    copier(targets)(sources)
    assert all(map(torch.equal, targets, sources))
    copier(targets)(make(1))
    assert all(map(torch.equal, targets, make(1)))
    assert all(map(torch.equal, sources, make(3)))


def test_undefined_and_shared_outputs_are_returned_without_a_copy() -> None:
    """A schema may say tensor where an op returns none, as fused attention does for weights that are not needed."""
    outputs = [None, torch.ones(2), torch.ones(2)]
    none, copied, shared = copier_out(outputs, output_makers(outputs, []), frozenset({2}))([])
    assert none is None
    assert shared is outputs[2]
    assert copied is not None
    assert copied is not outputs[1]
    assert copied.tolist() == [1, 1]


@torch.no_grad()
def test_weights_are_returned_as_they_are_and_their_views_require_gradients_as_in_eager() -> None:
    weight = torch.nn.Parameter(torch.arange(4.0))

    def views(weight: Tensor, x: Tensor) -> list[Tensor]:
        return [weight, weight[1:], weight.detach(), weight.detach()[1:], x[:1]]

    x = torch.ones(2)
    ours, theirs = Replayed(views, [weight, x], bound=[0])(weight, x), views(weight, x)
    assert ours[0] is weight
    assert [t.requires_grad for t in ours] == [t.requires_grad for t in theirs] == [True, True, False, False, False]
    assert relations([weight, x, *ours]) == relations([weight, x, *theirs])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x.conj()],
        lambda x: [x[1:].conj()],
        lambda x: [(x * 2).conj()],
        lambda x: [y := x * 2, y.conj(), y.conj().imag],
        lambda x: [x.conj().imag],
        lambda x: [torch.view_as_real(x), x.real],
    ],
)
def test_lazily_conjugated_and_negated_outputs_stay_so(function: Function) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    outputs = Replayed(function, [torch.zeros(2, dtype=torch.complex64)])(x)
    for ours, theirs in zip(outputs, function(x), strict=True):
        assert torch.equal(ours.resolve_conj().resolve_neg(), theirs.resolve_conj().resolve_neg())
        assert (ours.is_conj(), ours.is_neg()) == (theirs.is_conj(), theirs.is_neg())
    assert relations([x, *outputs]) == relations([x, *function(x)])


def test_an_output_may_have_as_many_elements_as_its_memory_and_yet_overlap() -> None:
    r"""Four elements in memory for four, two of which are used twice: ``0 . . 3``."""

    def function(x: Tensor) -> list[Tensor]:
        return [(x * 2).as_strided((2, 2), (3, 0))]

    (output,) = Replayed(function, [torch.zeros(4)])(torch.arange(4.0))
    assert output.tolist() == [[0, 0], [6, 6]]
    assert output.stride() == (3, 0)
