"""Parts of storages: by hand, and against sets of bytes."""

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
from autostream.analysis.parts import MOST_PARTS, Division, divide, spans
from tests.analysis.programs import Tape, aten

BYTES = 96
DTYPES = (torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex64)


def divided(tape: Tape) -> tuple[Division, ...]:
    return divide({node: effects_of(node) for node in tape.graph.nodes})


def bytes_of(tensor: Tensor) -> set[int]:
    """The bytes of its storage that a tensor touches, one by one."""
    places = itertools.product(*(range(size) for size in tensor.shape))
    firsts = [
        (tensor.storage_offset() + sum(map(operator.mul, place, tensor.stride()))) * tensor.itemsize for place in places
    ]
    return {first + at for first in firsts for at in range(tensor.itemsize)}


@st.composite
def looks(draw: st.DrawFn) -> Tensor:
    """A look at ``BYTES`` bytes: of any type, of no elements too, with steps of 0 and in any order of dimensions."""
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


class TestAgainstBytes:
    @settings(max_examples=300, deadline=None)
    @given(st.lists(looks(), min_size=1, max_size=5))
    def test_tensors_told_apart_have_no_byte_in_common(self, tensors: list[Tensor]) -> None:
        _, ranges = spans(tensors)
        touched = [(span, bytes_of(tensor)) for span, tensor in zip(ranges, tensors, strict=True) if span is not None]
        for (one, these), (other, those) in itertools.combinations(touched, 2):
            apart = one[1] <= other[0] or other[1] <= one[0]
            assert not (apart and these & those)

    @settings(max_examples=300, deadline=None)
    @given(looks(), st.data())
    def test_a_range_holds_what_a_tensor_touches_in_each_row(self, tensor: Tensor, data: st.DataObject) -> None:
        row, (span, *_) = spans([tensor, *data.draw(st.lists(looks(), max_size=3))])
        if span is None:
            return
        assert {byte % row for byte in bytes_of(tensor)} <= set(range(*span))
        assert tensor.numel() > 0
        assert 0 <= span[0] < span[1] <= row

    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_the_slices_of_a_concatenation_are_told_apart(self, data: st.DataObject) -> None:
        """Along whichever dimension, in whichever order the dimensions lie in memory."""
        shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        order = data.draw(st.permutations(range(len(shape))))
        whole = torch.empty(shape).permute(order)
        dim = data.draw(st.integers(0, len(shape) - 1))
        slices = whole.split(1, dim)
        _, ranges = spans([whole, *slices])
        known = sorted(span for span in ranges[1:] if span is not None)
        assert len(known) == len(slices)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(known))


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        # Rows lie one behind the other.
        (lambda x: (x[:1], x[1:]), [["0"], ["1"]]),
        # Columns, of which the middle ones are nobody's.
        (lambda x: (x[:, :2], x[:, 5:], x[:, 2:3]), [["0"], ["3"], ["1"]]),
        # Who looks at all touches all; so does, to be safe, who touches nothing.
        (lambda x: (x[:, :4], x[:, 4:], x.t(), x[:0]), [["0"], ["1"], None, None]),
        # Parts that overlap, in part.
        (lambda x: (x[:, :3], x[:, 2:5], x[:, 5:]), [["0", "1"], ["1", "2"], ["3"]]),
        # Offsets count in elements of their own type.
        (lambda x: (x.view(torch.float16)[:, :8], x[:, 4:]), [["0"], ["1"]]),
        (lambda x: (x[0, :2].expand(3, 2), x[0, 2:]), [["0"], ["1"]]),
        # Real and imaginary parts alternate.
        (lambda x: (torch.view_as_complex(x.view(4, 3, 2))[:, :1], x[:, 2:]), [["0"], ["1"]]),
        (lambda x: (x[:, 0::2], x[:, 1::2]), [["0"], ["1"]]),
    ],
)
def test_parts_by_hand(make: Callable[[Tensor], tuple[Tensor, ...]], parts: list[list[str] | None]) -> None:
    """All is written, through looks at four rows of six numbers."""
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


class TestWhatStaysWhole:
    """
    whole ─┬▶ left ──▶ fill_
           ╰▶ right ─▶ fill_        and one node more
    """

    @pytest.fixture
    def tape(self) -> Tape:
        return Tape()

    @staticmethod
    def filled(tape: Tape, whole: fx.Node) -> tuple[fx.Node, ...]:
        halves = [tape.call(aten.slice.Tensor, whole, 1, at, at + 2) for at in (0, 2)]
        return tuple(tape.call(aten.fill_.Scalar, half, 1.0) for half in halves)

    def test_as_drawn_it_is_divided(self, tape: Tape) -> None:
        self.filled(tape, tape.call(aten.zeros.default, [2, 4]))
        assert len(divided(tape)) == 1

    def test_arguments(self, tape: Tape) -> None:
        self.filled(tape, tape.input(2, 4))
        assert divided(tape) == ()

    def test_results_of_computations(self, tape: Tape) -> None:
        """On the device, a convolution may lay out its result in another way."""
        self.filled(tape, tape.call(aten.relu.default, tape.input(2, 4)))
        assert divided(tape) == ()

    def test_slices_that_are_only_read(self, tape: Tape) -> None:
        whole = tape.call(aten.zeros.default, [2, 4])
        tape.call(aten.fill_.Scalar, whole, 1.0)
        for at in (0, 2):
            tape.call(aten.exp.default, tape.call(aten.slice.Tensor, whole, 1, at, at + 2))
        assert divided(tape) == ()

    def test_slices_that_overlap(self, tape: Tape) -> None:
        whole = tape.call(aten.zeros.default, [2, 4])
        for at in (0, 1):
            tape.call(aten.fill_.Scalar, tape.call(aten.slice.Tensor, whole, 1, at, at + 2), 1.0)
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
        ids=[
            "may copy",
            "turned",
            "resized",
            "outside of a look",
            "after",
            "of two",
            "number",
            "opaque",
            "not of ATen",
            "idle",
        ],
    )
    def test_where_fake_values_do_not_say_all(self, tape: Tape, more: Callable[..., fx.Node]) -> None:
        whole = tape.call(aten.zeros.default, [2, 4])
        filled, _ = self.filled(tape, whole)
        more(tape, whole, filled)
        assert divided(tape) == ()

    def test_sizes_that_vary(self, tape: Tape) -> None:
        """Nor is anything asked of them, which would be to fix them."""
        zeros = tape.call(aten.zeros.default, [6, 4])
        filled = self.filled(tape, zeros)
        sizes = ShapeEnv()
        whole = FakeTensorMode(shape_env=sizes, static_shapes=False).from_tensor(torch.zeros(6, 4))
        assert isinstance(whole.shape[0], torch.SymInt)
        zeros.meta["val"] = whole
        for node, part in zip(filled, (whole[:2], whole[2:]), strict=True):
            node.meta["val"] = node.args[0].meta["val"] = part  # type: ignore[union-attr]
        known = list(sizes.guards)
        assert divided(tape) == ()
        assert sizes.guards == known

    @pytest.mark.parametrize(("rows", "count"), [(MOST_PARTS, 1), (MOST_PARTS + 1, 0)])
    def test_very_many_parts(self, tape: Tape, rows: int, count: int) -> None:
        whole = tape.call(aten.zeros.default, [rows, 2])
        for row in range(rows):
            tape.call(aten.fill_.Scalar, tape.call(aten.select.int, whole, 0, row), 1.0)
        assert len(divided(tape)) == count
