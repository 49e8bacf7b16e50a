"""Random straight-line tensor programs: views, in-place ops, ops with several results, random numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise

from hypothesis import strategies as st
from torch import fx

from autostream.ir import Role
from tests.analysis.programs import Case, Tape, aten

Move = Callable[["Player", fx.Node], None]


class Player:
    """Draws random moves, and keeps a pool of tensors for them."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.tape = draw, Tape()
        first = self.tape.input(4, 4)
        self.pool = [first, self.tape.input(4, 4), self.tape.input_like(first)]
        self.pool += [self.tape.call(aten.sigmoid.default, x) for x in self.pool]
        self.statistics = [self.tape.input(4, role=Role.BUFFER), self.tape.input(4, role=Role.BUFFER)]

    def play(self) -> Case:
        for _ in range(self.draw(st.integers(2, 14))):
            self.draw(st.sampled_from(MOVES))(self, self.draw(st.sampled_from(self.pool)))
        results = self.draw(st.lists(st.sampled_from(self.pool), min_size=1, max_size=3))
        return self.tape.case(results)

    def keep(self, target: Callable[..., object], *args: object, **kwargs: object) -> fx.Node:
        node = self.tape.call(target, *args, **kwargs)
        self.pool.append(node)
        return node

    def keep_parts(self, target: Callable[..., object], *args: object) -> None:
        parts = self.tape.call(target, *args)
        for index in range(len(parts.meta["val"])):
            self.keep(operator.getitem, parts, index)

    def like(self, node: fx.Node) -> fx.Node:
        """A tensor of the same shape; perhaps the same."""
        shape = node.meta["val"].shape
        return self.draw(st.sampled_from([other for other in self.pool if other.meta["val"].shape == shape]))

    def number(self) -> float:
        return self.draw(st.sampled_from([0.5, 2.0, 3.0]))


def _writable(node: fx.Node) -> bool:
    value = node.meta["val"]
    return all(stride > 0 or size < 2 for stride, size in zip(value.stride(), value.shape, strict=True))


def _view(play: Player, x: fx.Node) -> None:
    dims = x.meta["val"].dim()
    moves: list[tuple[object, ...]] = [(aten.detach.default,), (aten.unsqueeze.default, 0), (aten.alias.default,)]
    if dims:
        moves += [(aten.transpose.int, 0, dims - 1), (aten.slice.Tensor, 0, 0, 2), (aten.select.int, 0, 0)]
        moves += [(aten.expand.default, [2, *x.meta["val"].shape])]
    target, *args = play.draw(st.sampled_from(moves))
    play.keep(target, x, *args)  # type: ignore[arg-type]


def _may_copy(play: Player, x: fx.Node) -> None:
    moves = [(aten.reshape.default, [-1]), (aten.contiguous.default,), (aten.flatten.using_ints,)]
    target, *args = play.draw(st.sampled_from(moves))
    play.keep(target, x, *args)


def _views_of_two(play: Player, x: fx.Node) -> None:
    play.keep_parts(aten.broadcast_tensors.default, [x, play.like(x)])


def _split(play: Player, x: fx.Node) -> None:
    if x.meta["val"].dim():
        play.keep_parts(aten.split.Tensor, x, 2)


def _sort(play: Player, x: fx.Node) -> None:
    if x.meta["val"].dim():
        parts = play.tape.call(aten.sort.default, x)
        play.keep(operator.getitem, parts, 0)


def _compute(play: Player, x: fx.Node) -> None:
    kind = play.draw(st.integers(0, 3))
    if kind == 0:
        play.keep(aten.sigmoid.default, x)
    elif kind == 1:
        play.keep(aten.mul.Tensor, x, play.number())
    else:
        play.keep(aten.sub.Tensor, x, play.like(x))


def _write(play: Player, x: fx.Node) -> None:
    if not _writable(x):
        return
    kind = play.draw(st.integers(0, 4))
    if kind == 0:
        play.keep(aten.add_.Tensor, x, play.number())
    elif kind == 1:
        play.keep(aten.mul_.Tensor, x, play.number())
    elif kind == 2:
        play.keep(aten.zero_.default, x)
    elif kind == 3:
        play.keep(aten.copy_.default, x, play.tape.call(aten.sigmoid.default, play.like(x)))
    else:
        play.tape.call(aten._foreach_mul_.Scalar, [x], play.number())


def _transpose_in_place(play: Player, x: fx.Node) -> None:
    """Transposes a tensor in place, for all later nodes that use it."""
    if x.meta["val"].dim() == 2 and x.op != "placeholder":
        play.pool = [other for other in play.pool if not play.tape.same_tensor(x, other)]
        play.keep(aten.t_.default, x)


def _normalize(play: Player, x: fx.Node) -> None:
    value = x.meta["val"]
    if value.dim() == 2 and value.shape[1] == 4 and value.shape[0] > 1:
        training = play.draw(st.booleans())
        play.keep(aten.batch_norm.default, x, None, None, *play.statistics, training, 0.1, 1e-5, False)
        play.pool.append(play.statistics[0])


def _randomize(play: Player, x: fx.Node) -> None:
    kind = play.draw(st.integers(0, 2))
    if kind == 0:
        play.keep(aten.rand_like.default, x)
    else:
        play.keep(aten.dropout.default, x, 0.5, kind == 1)


def _through_a_number(play: Player, x: fx.Node) -> None:
    total = play.tape.call(aten.sum.default, x)
    number = play.tape.number(aten.item.default, total)
    doubled = play.tape.number(operator.add, number, 1)
    play.keep(aten.mul.Tensor, play.draw(st.sampled_from(play.pool)), play.draw(st.sampled_from([number, doubled])))


def _through_a_size(play: Player, x: fx.Node) -> None:
    if x.meta["val"].dim():
        size = play.tape.number(aten.sym_size.int, x, 0, value=int(x.meta["val"].shape[0]))
        play.keep(aten.mul.Tensor, play.draw(st.sampled_from(play.pool)), size)


def _fill_parts(play: Player, x: fx.Node) -> None:
    """Fills memory part by part, by rows or columns, with values that may depend on other parts."""
    dim = play.draw(st.integers(0, 1))
    maker = play.draw(st.sampled_from([aten.zeros.default, aten.empty.memory_format]))
    whole = play.tape.call(maker, [4, 4])
    cuts = [0, *sorted(play.draw(st.sets(st.integers(1, 3), max_size=2))), 4]
    parts = [play.tape.call(aten.slice.Tensor, whole, dim, start, end) for start, end in pairwise(cuts)]
    for part in play.draw(st.permutations(parts)):
        source = play.draw(st.sampled_from([node for node in play.pool if node.meta["val"].dim() == 2] or play.pool))
        scale = play.tape.call(aten.sum.default, source)
        play.tape.call(aten.copy_.default, part, scale)
        play.pool.append(part)
    play.pool.append(whole)


MOVES: list[Move] = [
    _view,
    _view,
    _may_copy,
    _views_of_two,
    _split,
    _sort,
    _compute,
    _compute,
    _write,
    _write,
    _write,
    _fill_parts,
    _fill_parts,
    _transpose_in_place,
    _normalize,
    _randomize,
    _through_a_number,
    _through_a_size,
]


@st.composite
def random_programs(draw: st.DrawFn) -> Case:
    """A program, and tensors for it."""
    return Player(draw).play()
