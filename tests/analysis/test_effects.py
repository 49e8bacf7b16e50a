"""Effects of single calls; expectations are from the operators' documentation or C++ sources."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from autostream.analysis.effects import Effects, argument_views, effects_of
from autostream.utils.kernels import Kernel
from tests.analysis.programs import Case, Tape, aten, exported
from tests.runtime.programs import case_of
from tests.semantics import Model


def names(nodes: tuple[fx.Node, ...]) -> list[str]:
    return [node.name for node in nodes]


def argument(case: Case) -> fx.Node:
    """The first argument of a program."""
    return case.nodes[case.program.placeholders[0].name]


def find(case: Case, target: str) -> fx.Node:
    (node,) = (node for node in case.nodes.values() if str(node.target) == target)
    return node


@pytest.fixture
def tape() -> Tape:
    return Tape()


# Reads, writes and aliases


def test_pointwise_calls(tape: Tape) -> None:
    x, y = tape.input(4), tape.input(4)
    assert effects_of(tape.call(aten.add.Tensor, x, y)) == Effects(reads=(x, y), uncapturable="runs on the CPU")
    in_place = effects_of(tape.call(aten.add_.Tensor, x, y))
    assert (in_place.reads, in_place.writes, in_place.launches) == ((x, y), (x,), True)


def test_overwritten_arguments_are_not_read(tape: Tape) -> None:
    x, y = tape.input(4), tape.input(4)
    for target, values in ((aten.zero_.default, ()), (aten.fill_.Scalar, (1.0,)), (aten.copy_.default, (y,))):
        effects = effects_of(tape.call(target, x, *values))
        assert (effects.reads, effects.writes) == ((y,) if y in values else (), (x,))
    assert effects_of(tape.call(aten.copy_.default, x, x)).reads == (x,)
    a, b, out = tape.input(2, 2), tape.input(2, 2), tape.input(2, 2)
    effects = effects_of(tape.call(aten.mm.out, a, b, out=out))
    assert (effects.reads, effects.writes, effects.aliases) == ((a, b), (out,), (out,))


def test_lists_are_written_element_by_element(tape: Tape) -> None:
    x, y, z = tape.input(4), tape.input(4), tape.input(4)
    effects = effects_of(tape.call(aten._foreach_add_.List, [x, y], [z, z]))
    assert (effects.reads, effects.writes) == ((x, y, z), (x, y))
    assert not effects.orders, "an op that writes is not called for its side effects alone"


def test_views_sizes_and_indices_launch_nothing(tape: Tape) -> None:
    x, y = tape.input(2, 3), tape.input(4)
    view = effects_of(tape.call(aten.t.default, x))
    assert (view.launches, view.aliases, view.uncapturable) == (False, (x,), "")
    parts = tape.call(aten.split.Tensor, y, 2)
    item = tape.number(aten.item.default, tape.input(1))
    for node in (
        parts,
        tape.call(operator.getitem, parts, 1),
        tape.number(aten.sym_size.int, y, 0, value=4),
        tape.number(operator.add, item, 1),
    ):
        assert not effects_of(node).launches
    assert effects_of(item).launches
    assert effects_of(tape.number(aten.equal.default, y, y, value=True)).launches
    in_place = effects_of(tape.call(aten.t_.default, x))
    assert (in_place.launches, in_place.writes) == (True, (x,))


@pytest.mark.parametrize(
    ("target", "args", "launches", "aliases"),
    [
        (aten.view.default, ([4],), False, True),
        (aten.to.dtype, (torch.float32,), False, True),
        (aten.to.dtype, (torch.float16,), True, False),
        (aten.view.dtype, (torch.int32,), False, True),
    ],
)
def test_conversions_are_views_or_copies(
    tape: Tape, target: torch._ops.OpOverload, args: tuple[object, ...], launches: bool, aliases: bool
) -> None:
    x = tape.input(4)
    effects = effects_of(tape.call(target, x, *args))
    assert (effects.launches, effects.aliases, effects.may_copy) == (launches, (x,) if aliases else (), False)


def test_results_that_alias_unlike_their_fake_values(tape: Tape) -> None:
    """A reshape that copies here may be a view elsewhere; a literal is a copy; an idle dropout returns its argument."""
    turned = tape.call(aten.t.default, tape.input(2, 3))
    reshape = effects_of(tape.call(aten.reshape.default, turned, [6]))
    assert (reshape.launches, reshape.aliases, reshape.may_copy) == (True, (turned,), True)
    x, noise = tape.input(4), tape.input(4)
    written = effects_of(tape.call(aten.rrelu_with_noise.default, x, noise, 0.1, 0.3, True))
    assert (written.writes, written.aliases) == ((noise,), ()), "it is not returned"
    case = exported(lambda x: x + torch.tensor([1.0, 2.0]), torch.ones(2))
    literal = effects_of(find(case, "aten.lift_fresh_copy.default"))
    assert (literal.copies, literal.launches) == (True, True)
    case = exported(nn.Dropout(0.5).eval(), torch.ones(3))
    dropout = effects_of(case.nodes["dropout"])
    assert (dropout.launches, dropout.aliases) == (False, (argument(case),))
    x = torch.ones(3)
    assert aten.dropout(x, 0.5, False).data_ptr() == x.data_ptr()


def test_only_uninitialized_memory_of_a_fixed_size_is_an_allocation(tape: Tape) -> None:
    assert effects_of(tape.call(aten.empty.memory_format, [4])).allocates
    assert not effects_of(tape.call(aten.empty_like.default, tape.input(4))).allocates
    assert not effects_of(tape.call(aten.zeros.default, [4])).allocates


# Running statistics


@pytest.mark.parametrize("training", [True, False])
def test_norms_write_their_running_statistics_in_training(training: bool) -> None:
    """Their schemas do not say so."""
    written = ["b_running_mean", "b_running_var"] if training else []
    x = torch.randn(2, 3, 4, 4)
    effects = effects_of(find(exported(nn.BatchNorm2d(3).train(training), x), "aten.batch_norm.default"))
    assert names(effects.writes) == written
    assert effects.aliases == ()
    instance_norm = nn.InstanceNorm2d(3, track_running_stats=True).train(training)
    effects = effects_of(find(exported(instance_norm, x), "aten.instance_norm.default"))
    assert names(effects.writes) == written
    without = exported(nn.BatchNorm2d(3, track_running_stats=False), x)
    assert effects_of(find(without, "aten.batch_norm.default")).writes == ()
    mean, var = torch.zeros(3), torch.ones(3)
    aten.batch_norm(x, None, None, mean, var, training, 0.1, 1e-5, False)
    assert bool((mean != 0).any()) == training, "as the kernel does"


# Order


@pytest.mark.parametrize(("training", "orders"), [(True, {"rng"}), (False, set())])
def test_random_ops_are_ordered(tape: Tape, training: bool, orders: set[str]) -> None:
    assert effects_of(tape.call(aten.dropout.default, tape.input(4), 0.5, training)).orders == orders


def test_side_effects_and_collectives_are_ordered(tape: Tape) -> None:
    check = effects_of(tape.call(aten._assert_async.msg, tape.input(1), "message"))
    assert (check.orders, check.launches) == ({"world"}, True)
    size = tape.number(aten.sym_size.int, tape.input(4), 0, value=4)
    on_host = effects_of(tape.number(aten._assert_scalar.default, size, "message", value=None))  # type: ignore[arg-type]
    assert (on_host.orders, on_host.launches) == (frozenset(), False)
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    importlib.import_module("torch.distributed._functional_collectives")  # defines the operators
    ops = torch.ops._c10d_functional
    reduced = tape.graph.call_function(ops.all_reduce.default, (tape.input(4), "sum", "group"))
    waited = tape.graph.call_function(ops.wait_tensor.default, (reduced,))
    reduced.meta["val"] = waited.meta["val"] = torch.ones(4)
    assert effects_of(reduced).orders == {"collective:group"}, "an order for each process group"
    assert effects_of(waited).orders == frozenset(), "it comes after what it waits for"
    assert effects_of(waited).writes == effects_of(waited).aliases == (reduced,)
    assert effects_of(waited).reads == (reduced, *reduced.all_input_nodes), "the collective may still read its input"


# Calls that are not operators


def test_a_call_without_a_schema_may_do_anything(tape: Tape) -> None:
    x = tape.input(4)
    node = tape.graph.call_function(print, (x, 3))
    node.meta["val"] = torch.ones(4)
    effects = effects_of(node)
    assert effects.reads == effects.writes == effects.aliases == (x,)
    assert effects.orders == {"world", "rng", "collective"}
    case = exported(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), torch.ones(3))
    assert effects_of(find(case, "cond")).writes == (find(case, "aten.gt.Scalar"), argument(case))


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_kernels_name_the_arguments_that_they_write(device: str) -> None:
    tape = Tape(device)
    a, b, c = (tape.input(4, device=device) for _ in range(3))
    uncapturable = "runs on the CPU" if device == "cpu" else ""
    node = tape.graph.call_function(Kernel("k", print, frozenset({1, 2}), frozenset({2})), (a, b, c, 16))
    assert effects_of(node) == Effects(reads=(a, b), writes=(b, c), uncapturable=uncapturable)
    twice = tape.graph.call_function(Kernel("k", print, frozenset({1}), frozenset({1})), (a, a))
    assert effects_of(twice) == Effects(reads=(a,), writes=(a,), uncapturable=uncapturable)


@pytest.mark.parametrize(
    ("body", "writes", "aliases", "orders", "launches"),
    [
        (lambda x, w: x @ w, 0, 0, set(), True),
        (lambda x, w: (x[0].mul_(2), w @ w)[1], 1, 0, set(), True),
        (lambda x, w: (torch.einsum("ij->ji", x).mul_(2), w @ w)[1], 1, 0, set(), True),
        (lambda x, w: nn.functional.dropout(x @ w, 0.5), 0, 0, {"rng"}, True),
        (lambda x, w: (x.t(), w @ w), 0, 1, set(), True),
        (lambda x, w: (x.t(), nn.functional.dropout(w, 0.5, False)), 0, 2, set(), False),
    ],
    ids=["pure", "writes a view by schema", "writes a view by value", "random", "returns a view", "only views"],
)
def test_an_autocast_region_has_the_effects_of_its_body(
    body: Callable[[Tensor, Tensor], object], writes: int, aliases: int, orders: set[str], launches: bool
) -> None:
    """The number of operands that are written, and of those that results may alias."""

    def model(x: Tensor, w: Tensor) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return body(x, w)

    case = exported(model, torch.ones(4, 4), torch.ones(4, 4))
    operands = tuple(case.nodes[item.name] for item in case.program.placeholders)
    effects = effects_of(find(case, "wrap_with_autocast"))
    assert (effects.writes, effects.aliases) == (operands[:writes], operands[:aliases])
    assert (effects.orders, effects.launches) == (orders, launches)


# Views of arguments


def test_views_of_views_and_of_several_results_are_views_of_arguments() -> None:
    model = Model(lambda s, x: (s.w.t()[1:], *x.unbind()), w=nn.Parameter(torch.randn(4, 4)))
    views = argument_views(case_of(model, torch.randn(2, 4)).program.module.graph)
    assert views == {"t", "slice_1", "unbind", "getitem", "getitem_1"}


def test_views_of_results_possible_copies_and_allocations_are_not() -> None:
    case = case_of(lambda x: (x.sin().t(), x.reshape(-1)[1:], x.t(), torch.empty(4) + x), torch.randn(4, 4))
    assert argument_views(case.program.module.graph) == {"t_1"}
