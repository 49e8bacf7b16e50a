"""What single calls do, each expectation from the operator's documentation or its C++ source."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from autostream.analysis.effects import Effects, effects_of, wrapped_graph
from autostream.utils.kernels import Kernel
from tests.analysis.programs import Case, Tape, aten, exported


def names(nodes: tuple[fx.Node, ...]) -> list[str]:
    return [node.name for node in nodes]


def of(case: Case, name: str) -> Effects:
    return effects_of(case.nodes[name])


def operand(case: Case) -> fx.Node:
    """The first argument of a program."""
    return case.nodes[case.program.placeholders[0].name]


def find(case: Case, target: str) -> fx.Node:
    (node,) = (node for node in case.nodes.values() if str(node.target) == target)
    return node


@pytest.fixture
def tape() -> Tape:
    return Tape()


def test_a_pointwise_call_reads_and_writes_nothing_in_place(tape: Tape) -> None:
    x, y = tape.input(4), tape.input(4)
    effects = effects_of(tape.call(aten.add.Tensor, x, y))
    assert effects == Effects(reads=(x, y), uncapturable="runs on the CPU")


def test_a_view_launches_nothing_and_aliases(tape: Tape) -> None:
    x = tape.input(2, 3)
    effects = effects_of(tape.call(aten.t.default, x))
    assert not effects.launches
    assert effects.aliases == (x,)
    assert not effects.uncapturable, "looking costs nothing anywhere"


def test_in_place_calls_write(tape: Tape) -> None:
    x, y = tape.input(4), tape.input(4)
    effects = effects_of(tape.call(aten.add_.Tensor, x, y))
    assert (effects.reads, effects.writes, effects.launches) == ((x, y), (x,), True)


@pytest.mark.parametrize(
    ("target", "values"), [(aten.zero_.default, ()), (aten.fill_.Scalar, (1.0,)), (aten.copy_.default, ("y",))]
)
def test_overwritten_contents_are_not_read(
    tape: Tape, target: torch._ops.OpOverload, values: tuple[object, ...]
) -> None:
    x, y = tape.input(4), tape.input(4)
    effects = effects_of(tape.call(target, x, *(y if value == "y" else value for value in values)))
    assert effects.writes == (x,)
    assert effects.reads == ((y,) if "y" in values else ())


def test_what_is_overwritten_is_read_where_it_is_the_source_too(tape: Tape) -> None:
    x = tape.input(4)
    assert effects_of(tape.call(aten.copy_.default, x, x)).reads == (x,)


def test_out_is_written_and_not_read(tape: Tape) -> None:
    x, y, out = tape.input(2, 2), tape.input(2, 2), tape.input(2, 2)
    effects = effects_of(tape.call(aten.mm.out, x, y, out=out))
    assert (effects.reads, effects.writes, effects.aliases) == ((x, y), (out,), (out,))


def test_lists_are_written_element_by_element(tape: Tape) -> None:
    x, y, z = tape.input(4), tape.input(4), tape.input(4)
    effects = effects_of(tape.call(aten._foreach_add_.List, [x, y], [z, z]))
    assert effects.writes == (x, y)
    assert effects.reads == (x, y, z)
    assert not effects.orders, "an op that writes is not called for its side effects alone"


def test_views_in_place_are_writers(tape: Tape) -> None:
    x = tape.input(2, 3)
    effects = effects_of(tape.call(aten.t_.default, x))
    assert effects.launches
    assert effects.writes == (x,)


def test_sizes_and_getitem_launch_nothing(tape: Tape) -> None:
    x = tape.input(4)
    parts = tape.call(aten.split.Tensor, x, 2)
    assert not effects_of(parts).launches
    assert not effects_of(tape.call(operator.getitem, parts, 1)).launches
    assert not effects_of(tape.number(aten.sym_size.int, x, 0, value=4)).launches


def test_a_number_read_from_a_tensor_launches(tape: Tape) -> None:
    x = tape.input(1)
    assert effects_of(tape.number(aten.item.default, x)).launches
    assert effects_of(tape.number(aten.equal.default, x, x, value=True)).launches


class TestAliases:
    """A reshape that copies here may be a view elsewhere; a conversion is never a view."""

    def test_a_copying_reshape_may_alias(self, tape: Tape) -> None:
        turned = tape.call(aten.t.default, tape.input(2, 3))
        effects = effects_of(tape.call(aten.reshape.default, turned, [6]))
        assert effects.launches
        assert effects.aliases == (turned,)
        assert effects.may_copy

    def test_a_view_never_copies(self, tape: Tape) -> None:
        assert not effects_of(tape.call(aten.view.default, tape.input(2, 3), [6])).may_copy

    def test_a_conversion_to_the_same_type_is_a_view(self, tape: Tape) -> None:
        x = tape.input(4)
        effects = effects_of(tape.call(aten.to.dtype, x, torch.float32))
        assert (effects.launches, effects.aliases) == (False, (x,))

    def test_a_conversion_to_another_type_is_a_copy(self, tape: Tape) -> None:
        effects = effects_of(tape.call(aten.to.dtype, tape.input(4), torch.float16))
        assert (effects.launches, effects.aliases) == (True, ())

    def test_a_view_as_another_type_is_a_view(self, tape: Tape) -> None:
        x = tape.input(4)
        effects = effects_of(tape.call(aten.view.dtype, x, torch.int32))
        assert (effects.launches, effects.aliases) == (False, (x,))

    def test_written_arguments_that_are_not_returned_are_not_aliased(self, tape: Tape) -> None:
        x, noise = tape.input(4), tape.input(4)
        effects = effects_of(tape.call(aten.rrelu_with_noise.default, x, noise, 0.1, 0.3, True))
        assert (effects.writes, effects.aliases) == ((noise,), ())

    def test_a_lifted_literal_is_a_copy(self) -> None:
        case = exported(lambda x: x + torch.tensor([1.0, 2.0]), torch.ones(2))
        effects = effects_of(find(case, "aten.lift_fresh_copy.default"))
        assert effects.copies
        assert effects.launches


class TestRunningStatistics:
    """Schemas do not say that batch_norm and instance_norm write their running statistics; they do."""

    @pytest.mark.parametrize("training", [True, False])
    def test_batch_norm(self, training: bool) -> None:
        case = exported(nn.BatchNorm2d(3).train(training), torch.randn(2, 3, 4, 4))
        effects = effects_of(find(case, "aten.batch_norm.default"))
        assert names(effects.writes) == (["b_running_mean", "b_running_var"] if training else [])
        assert effects.renews == effects.writes
        assert effects.aliases == ()

    @pytest.mark.parametrize("training", [True, False])
    def test_instance_norm(self, training: bool) -> None:
        model = nn.InstanceNorm2d(3, track_running_stats=True).train(training)
        case = exported(model, torch.randn(2, 3, 4, 4))
        effects = effects_of(find(case, "aten.instance_norm.default"))
        assert names(effects.writes) == (["b_running_mean", "b_running_var"] if training else [])

    def test_without_statistics_nothing_is_written(self) -> None:
        case = exported(nn.BatchNorm2d(3, track_running_stats=False), torch.randn(2, 3, 4, 4))
        assert effects_of(find(case, "aten.batch_norm.default")).writes == ()

    @pytest.mark.parametrize("training", [True, False])
    def test_the_table_is_true_of_the_kernels(self, training: bool) -> None:
        mean, var = torch.zeros(3), torch.ones(3)
        aten.batch_norm(torch.randn(2, 3, 4, 4), None, None, mean, var, training, 0.1, 1e-5, False)
        assert bool((mean != 0).any()) == training


class TestRandomNumbers:
    """Users of the generator keep their order; those that draw nothing need not."""

    @pytest.mark.parametrize(
        ("target", "args", "draws"),
        [
            (aten.dropout.default, (0.5, True), True),
            (aten.dropout.default, (0.0, True), False),
            (aten.dropout.default, (0.5, False), False),
            (aten.native_dropout.default, (0.0, True), True),
            (aten.native_dropout.default, (0.5, False), False),
            (aten.bernoulli.p, (0.0,), True),
            (aten.rand_like.default, (), True),
            (aten.rrelu.default, (0.1, 0.3, False), False),
            (aten.rrelu.default, (0.1, 0.3, True), True),
            (aten.relu.default, (), False),
        ],
    )
    def test_unary(self, tape: Tape, target: torch._ops.OpOverload, args: tuple[object, ...], draws: bool) -> None:
        effects = effects_of(tape.call(target, tape.input(4), *args))
        assert effects.orders == (frozenset({"rng"}) if draws else frozenset())

    @pytest.mark.parametrize("p", [0.0, 0.1])
    def test_attention(self, tape: Tape, p: float) -> None:
        q = tape.input(1, 2, 4, 8)
        effects = effects_of(tape.call(aten.scaled_dot_product_attention.default, q, q, q, dropout_p=p))
        assert ("rng" in effects.orders) == (p > 0)

    @pytest.mark.parametrize(("dropout", "train"), [(0.0, True), (0.5, False), (0.5, True)])
    def test_lstm(self, dropout: float, train: bool) -> None:
        model = nn.LSTM(3, 4, num_layers=2, dropout=dropout).train(train)
        effects = effects_of(find(exported(model, torch.randn(5, 1, 3)), "aten.lstm.input"))
        assert ("rng" in effects.orders) == (train and dropout > 0)

    def test_an_idle_dropout_returns_its_argument(self) -> None:
        """Its fake value does not say so: exporting decomposes it into a clone."""
        case = exported(nn.Dropout(0.5).eval(), torch.ones(3))
        effects = of(case, "dropout")
        assert not effects.launches
        assert effects.aliases == (operand(case),)
        x = torch.ones(3)
        assert aten.dropout(x, 0.5, False).data_ptr() == x.data_ptr()


class TestOrders:
    def test_a_call_for_its_side_effect_alone(self, tape: Tape) -> None:
        effects = effects_of(tape.call(aten._assert_async.msg, tape.input(1), "message"))
        assert effects.orders == {"world"}
        assert effects.launches

    def test_checks_of_the_host_are_none(self, tape: Tape) -> None:
        size = tape.number(aten.sym_size.int, tape.input(4), 0, value=4)
        effects = effects_of(tape.number(aten._assert_scalar.default, size, "message", value=None))  # type: ignore[arg-type]
        assert not effects.launches
        assert not effects.orders

    def test_collectives_keep_their_order(self, tape: Tape) -> None:
        if not torch.distributed.is_available():
            pytest.skip("torch was built without torch.distributed")
        importlib.import_module("torch.distributed._functional_collectives")  # defines the operators
        x = tape.input(4)
        ops = torch.ops._c10d_functional
        reduced = tape.graph.call_function(ops.all_reduce.default, (x, "sum", "group"))
        waited = tape.graph.call_function(ops.wait_tensor.default, (reduced,))
        reduced.meta["val"] = waited.meta["val"] = torch.ones(4)
        assert effects_of(reduced).orders == effects_of(waited).orders == {"collective"}
        assert effects_of(waited).writes == effects_of(waited).aliases == (reduced,)


class TestOpaqueCalls:
    def test_without_a_schema_everything_may_happen(self, tape: Tape) -> None:
        x = tape.input(4)
        node = tape.graph.call_function(print, (x, 3))
        node.meta["val"] = torch.ones(4)
        effects = effects_of(node)
        assert effects.reads == effects.writes == effects.aliases == (x,)
        assert effects.orders == {"world", "rng", "collective"}

    def test_a_condition_on_data(self) -> None:
        def model(x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

        case = exported(model, torch.ones(3))
        effects = effects_of(find(case, "cond"))
        assert effects.writes == (find(case, "aten.gt.Scalar"), operand(case))

    def test_arithmetic_with_numbers_launches_nothing(self, tape: Tape) -> None:
        number = tape.number(aten.item.default, tape.input(1))
        assert not effects_of(tape.number(operator.add, number, 1)).launches


class TestKernels:
    """Compiled kernels say what they write; the rest they read."""

    @staticmethod
    def called(tape: Tape, written: set[int], overwritten: set[int], device: str = "cuda:0") -> tuple[fx.Node, ...]:
        a, b, c = (tape.input(4, device=device) for _ in range(3))
        kernel = Kernel("triton_0", lambda *args: None, frozenset(written), frozenset(overwritten))
        node = tape.graph.call_function(kernel, (a, b, c, 16))
        return a, b, c, node

    def test_what_is_only_written_is_not_read(self) -> None:
        a, b, c, node = self.called(Tape("cuda:0"), {1, 2}, {2})
        assert effects_of(node) == Effects(reads=(a, b), writes=(b, c))

    def test_what_is_given_twice_is_read_if_either_is(self) -> None:
        tape = Tape("cuda:0")
        a = tape.input(4)
        node = tape.graph.call_function(Kernel("k", lambda *args: None, frozenset({1}), frozenset({1})), (a, a))
        assert effects_of(node) == Effects(reads=(a,), writes=(a,))

    def test_a_kernel_of_the_cpu_is_in_no_cuda_graph(self) -> None:
        *_, node = self.called(Tape("cpu"), {2}, {2}, "cpu")
        assert effects_of(node).uncapturable == "runs on the CPU"


def test_memory_that_is_taken_holds_nothing(tape: Tape) -> None:
    assert effects_of(tape.call(aten.empty.memory_format, [4])).allocates
    assert not effects_of(tape.call(aten.empty_like.default, tape.input(4))).allocates
    assert not effects_of(tape.call(aten.zeros.default, [4])).allocates


class TestWrappers:
    """Export wraps autocast and gradient modes around a submodule: its effects are those of the calls in it."""

    @staticmethod
    def wrapped(body: Callable[[Tensor, Tensor], object]) -> tuple[Case, fx.Node]:
        def model(x: Tensor, w: Tensor) -> object:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return body(x, w)

        case = exported(model, torch.ones(4, 4), torch.ones(4, 4))
        return case, find(case, "wrap_with_autocast")

    def test_a_pure_body(self) -> None:
        _, node = self.wrapped(lambda x, w: x @ w)
        effects = effects_of(node)
        assert wrapped_graph(node) is not None
        assert effects.launches
        assert (effects.writes, effects.aliases, effects.orders) == ((), (), frozenset())

    @pytest.mark.parametrize(
        "view", [lambda x: x[0], lambda x: torch.einsum("ij->ji", x)], ids=["schema", "fake value"]
    )
    def test_a_body_that_writes_through_a_view(self, view: Callable[[Tensor], Tensor]) -> None:
        """Of the first, the schema tells that it is a view; of the second, only the fake values."""
        case, node = self.wrapped(lambda x, w: (view(x).mul_(2), w @ w)[1])
        assert effects_of(node).writes == (operand(case),)

    def test_a_body_that_draws(self) -> None:
        _, node = self.wrapped(lambda x, w: nn.functional.dropout(x @ w, 0.5))
        assert effects_of(node).orders == {"rng"}

    def test_a_body_that_returns_a_look_at_an_operand(self) -> None:
        case, node = self.wrapped(lambda x, w: (x.t(), w @ w))
        assert effects_of(node).aliases == (operand(case),)

    def test_a_body_of_views_launches_nothing(self) -> None:
        _, node = self.wrapped(lambda x, w: (x.t(), nn.functional.dropout(w, 0.5, False)))
        assert not effects_of(node).launches
        assert len(effects_of(node).aliases) == 2
