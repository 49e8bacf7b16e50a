"""Parts of storages: by hand, and checked byte by byte."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autostream.analysis.effects import effects_of
from autostream.analysis.parts import Division, divide, spans
from tests.analysis.programs import Tape, aten

BYTES = 96
DTYPES = (torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex64)


def divided(tape: Tape) -> tuple[Division, ...]:
    return divide({node: effects_of(node) for node in tape.graph.nodes})


def bytes_of(tensor: Tensor) -> set[int]:
    """The bytes of its storage that a tensor touches, one by one."""
    indices = itertools.product(*(range(size) for size in tensor.shape))
    starts = [
        (tensor.storage_offset() + sum(map(operator.mul, index, tensor.stride()))) * tensor.itemsize
        for index in indices
    ]
    return {start + at for start in starts for at in range(tensor.itemsize)}


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A view of ``BYTES`` bytes: of any dtype, perhaps empty, with strides of 0 and any order of dimensions."""
    dtype = draw(st.sampled_from(DTYPES))
    items = BYTES // dtype.itemsize
    offset = draw(st.integers(0, items - 1))
    room, shape, stride = items - 1 - offset, [], []
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.sampled_from([0, 1, 2, 3, 4, 6, 12, 24]))
        size = draw(st.integers(0, min(4, 1 + room // step if step else 4)))
        room -= max(0, size - 1) * step
        shape.append(size)
        stride.append(step)
    memory = torch.zeros(BYTES, dtype=torch.uint8).view(dtype)
    return memory.as_strided(shape, stride, offset)


@settings(max_examples=200, deadline=None)
@given(st.lists(views(), min_size=1, max_size=5))
def test_a_span_covers_a_tensor_and_disjoint_spans_have_no_byte_in_common(tensors: list[Tensor]) -> None:
    row, ranges = spans(tensors)
    touched = [(span, bytes_of(tensor)) for span, tensor in zip(ranges, tensors, strict=True) if span is not None]
    for span, touches in touched:
        assert touches
        assert 0 <= span[0] < span[1] <= row
        assert {byte % row for byte in touches} <= set(range(*span))
    for (one, these), (other, those) in itertools.combinations(touched, 2):
        disjoint = one[1] <= other[0] or other[1] <= one[0]
        assert not (disjoint and these & those)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_slices_of_a_concatenation_have_disjoint_spans(data: st.DataObject) -> None:
    """Along any dimension, with dimensions in any order in memory."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    whole = torch.empty(shape).permute(data.draw(st.permutations(range(len(shape)))))
    slices = whole.split(1, data.draw(st.integers(0, len(shape) - 1)))
    _, ranges = spans([whole, *slices])
    known = sorted(span for span in ranges[1:] if span is not None)
    assert len(known) == len(slices)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(known))


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        # Rows are contiguous.
        (lambda x: (x[:1], x[1:]), [["0"], ["1"]]),
        # Columns, some of which no tensor touches.
        (lambda x: (x[:, :2], x[:, 5:], x[:, 2:3]), [["0"], ["3"], ["1"]]),
        # A view of all, or of unknown bytes, touches all.
        (lambda x: (x[:, :4], x[:, 4:], x.t(), x[:0]), [["0"], ["1"], None, None]),
        # Ranges that overlap.
        (lambda x: (x[:, :3], x[:, 2:5], x[:, 5:]), [["0", "1"], ["1", "2"], ["3"]]),
        # Other dtypes, whose offsets count in their own elements.
        (lambda x: (x.view(torch.float16)[:, :8], x[:, 4:]), [["0"], ["1"]]),
        (lambda x: (torch.view_as_complex(x.view(4, 3, 2))[:, :1], x[:, 2:]), [["0"], ["1"]]),
        (lambda x: (x[0, :2].expand(3, 2), x[0, 2:]), [["0"], ["1"]]),
        (lambda x: (x[:, 0::2], x[:, 1::2]), [["0"], ["1"]]),
    ],
)
def test_parts_by_hand(make: Callable[[Tensor], tuple[Tensor, ...]], parts: list[list[str] | None]) -> None:
    """Each view of four rows of six numbers is written."""
    graph = fx.Graph()
    whole = graph.call_function(aten.empty.memory_format, ([4, 6],))
    whole.meta["val"] = torch.empty(4, 6)
    nodes = []
    for value in make(whole.meta["val"]):
        nodes.append(graph.call_function(aten.alias.default, (whole,)))
        filled = graph.call_function(aten.fill_.Scalar, (nodes[-1], 1.0))
        nodes[-1].meta["val"] = filled.meta["val"] = value
    (division,) = divide({node: effects_of(node) for node in graph.nodes})
    assert division.base is whole
    assert division.views == tuple(nodes)
    names = [division.touched.get(node) for node in nodes]
    assert names == [part and tuple(f"{whole.name}[{at}]" for at in part) for part in parts]


# Storages that are not divided


@pytest.fixture
def tape() -> Tape:
    return Tape()


def fill_halves(tape: Tape, whole: fx.Node, starts: tuple[int, ...] = (0, 2)) -> tuple[fx.Node, ...]:
    """Write slices of two columns each.

    whole ─┬▶ left ──▶ fill_
           ╰▶ right ─▶ fill_
    """
    halves = [tape.call(aten.slice.Tensor, whole, 1, at, at + 2) for at in starts]
    return tuple(tape.call(aten.fill_.Scalar, half, 1.0) for half in halves)


def test_only_results_of_calls_without_tensors_are_divided(tape: Tape) -> None:
    """A convolution, say, may have another layout on the device."""
    fill_halves(tape, tape.input(2, 4))
    fill_halves(tape, tape.call(aten.relu.default, tape.input(2, 4)))
    assert divided(tape) == ()
    fill_halves(tape, tape.call(aten.zeros.default, [2, 4]))
    assert len(divided(tape)) == 1


def test_a_bucket_that_a_collective_takes_is_divided(tape: Tape) -> None:
    """So kernels that write different gradients there do not wait for each other."""
    bucket = tape.call(aten.zeros.default, [2, 4])
    fill_halves(tape, bucket)
    tape.call(torch.ops._c10d_functional.all_reduce_.default, bucket, "avg", "0")
    assert len(divided(tape)) == 1


def test_slices_that_are_only_read_or_overlap_are_no_parts(tape: Tape) -> None:
    whole = tape.call(aten.zeros.default, [2, 4])
    tape.call(aten.fill_.Scalar, whole, 1.0)
    for at in (0, 2):
        tape.call(aten.exp.default, tape.call(aten.slice.Tensor, whole, 1, at, at + 2))
    fill_halves(tape, tape.call(aten.zeros.default, [2, 4]), starts=(0, 1))
    assert divided(tape) == ()


@pytest.mark.parametrize(
    "more",
    [
        lambda tape, whole, filled: tape.call(aten.reshape.default, whole, [8]),
        lambda tape, whole, filled: tape.call(aten.t_.default, whole),
        lambda tape, whole, filled: tape.call(aten.resize_.default, filled.args[0], [1]),
        lambda tape, whole, filled: tape.call(aten.as_strided_copy.default, filled.args[0], [4], [1], 0),
        lambda tape, whole, filled: tape.call(aten.view.dtype, filled, torch.int32),
        lambda tape, whole, filled: tape.call(aten.broadcast_tensors.default, [whole, tape.input(2, 4)]),
        lambda tape, whole, filled: tape.number(aten.sym_size.int, whole, 0, value=2),
        lambda tape, whole, filled: tape.call(torch.relu, filled.args[0]),
        lambda tape, whole, filled: tape.call(torch.ops.prims.exp.default, filled.args[0]),
        lambda tape, whole, filled: tape.call(aten.dropout.default, whole, 0.5, False).meta.update(
            val=torch.ones(2, 4)
        ),
    ],
    ids=["reshape", "t_", "resize_", "as_strided", "view of a result", "of two", "size", "opaque", "prims", "dropout"],
)
def test_a_storage_stays_whole_if_fake_values_do_not_tell_all_accesses(tape: Tape, more: Callable[..., object]) -> None:
    whole = tape.call(aten.zeros.default, [2, 4])
    filled, _ = fill_halves(tape, whole)
    more(tape, whole, filled)
    assert divided(tape) == ()


def test_symbolic_sizes_stay_whole_and_get_no_guards(tape: Tape) -> None:
    zeros = tape.call(aten.zeros.default, [6, 4])
    filled = fill_halves(tape, zeros)
    sizes = ShapeEnv()
    whole = FakeTensorMode(shape_env=sizes, static_shapes=False).from_tensor(torch.zeros(6, 4))
    assert isinstance(whole.shape[0], torch.SymInt)
    zeros.meta["val"] = whole
    for node, part in zip(filled, (whole[:2], whole[2:]), strict=True):
        node.meta["val"] = node.args[0].meta["val"] = part  # type: ignore[union-attr]
    guards = list(sizes.guards)
    assert divided(tape) == ()
    assert sizes.guards == guards
