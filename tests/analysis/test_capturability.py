"""Refusals, on fake tensors of a device that need not exist."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autostream.analysis.capturability import (
    BRANCHES,
    DATA_SHAPE,
    FROM_HOST,
    GIVEN_DATA_SHAPE,
    NUMBER,
    ON_CPU,
    TO_HOST,
    WAITS,
    dependence_of,
)
from autostream.analysis.effects import effects_of
from tests.analysis.programs import Tape, aten
from tests.runtime.programs import case_of


def fake(*shape: int, device: str = "cuda:0", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with FakeTensorMode(shape_env=ShapeEnv()):
        return torch.empty(shape, device=device, dtype=dtype)


def refusal(target: Callable[..., object], result: object, *args: object, **kwargs: object) -> str:
    """Why a call with these arguments, tensors among them, is refused."""
    graph = fx.Graph()

    def node(argument: object) -> object:
        if isinstance(argument, torch.Tensor):
            placeholder = graph.placeholder("x")
            placeholder.meta["val"] = argument
            return placeholder
        return [node(item) for item in argument] if isinstance(argument, list) else argument

    call = graph.call_function(target, tuple(map(node, args)), {name: node(value) for name, value in kwargs.items()})  # type: ignore[misc]
    call.meta["val"] = result
    return effects_of(call).uncapturable


@pytest.mark.parametrize(
    ("target", "result", "args"),
    [
        (aten.item.default, 1.0, [fake()]),
        (aten._local_scalar_dense.default, 1.0, [fake()]),
        (aten.is_nonzero.default, True, [fake()]),
        (aten.equal.default, True, [fake(2), fake(2)]),
        (aten.nonzero.default, fake(2, 1), [fake(2)]),
        (aten.masked_select.default, fake(2), [fake(2), fake(2, dtype=torch.bool)]),
        (aten._unique2.default, (fake(2), fake(2), fake(2)), [fake(2)]),
        (aten.unique_dim.default, (fake(2), fake(2), fake(2)), [fake(2), 0]),
        (aten.bincount.default, fake(2), [fake(2, dtype=torch.int64)]),
        (aten.linalg_inv.default, fake(2, 2), [fake(2, 2)]),
        (aten.linalg_cholesky.default, fake(2, 2), [fake(2, 2)]),
        (aten.linalg_solve.default, fake(2, 2), [fake(2, 2), fake(2, 2)]),
        (aten.linalg_eigh.default, (fake(2), fake(2, 2)), [fake(2, 2)]),
        (aten.linalg_svd.default, (fake(2, 2), fake(2), fake(2, 2)), [fake(2, 2)]),
        (aten.one_hot.default, fake(2, 3), [fake(2, dtype=torch.int64)]),
        (aten.repeat_interleave.Tensor, fake(2), [fake(2, dtype=torch.int64)]),
        (aten.repeat_interleave.self_Tensor, fake(2), [fake(2), fake(2, dtype=torch.int64)]),
        (aten.index.Tensor, fake(2), [fake(2), [fake(2, dtype=torch.bool)]]),
        (aten.index_put_.default, fake(2), [fake(2), [fake(2, dtype=torch.uint8)], fake(1)]),
        (aten.masked_fill.Tensor, fake(2), [fake(2), fake(2, dtype=torch.bool), fake()]),
        (aten.linalg_matrix_norm.str_ord, fake(), [fake(2, 2), "nuc"]),
        (aten.where.default, [fake(2)], [fake(2, dtype=torch.bool)]),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_calls_that_wait_for_the_device(target: torch._ops.OpOverload, result: object, args: list[object]) -> None:
    assert refusal(target, result, *args) == WAITS


@pytest.mark.parametrize(
    ("target", "result", "args", "kwargs"),
    [
        (aten.index.Tensor, fake(2), [fake(2), [fake(2, dtype=torch.int64)]], {}),
        (aten.index_put_.default, fake(2), [fake(2), [fake(2, dtype=torch.int64)], fake(2)], {}),
        (aten.repeat_interleave.Tensor, fake(2), [fake(2, dtype=torch.int64)], {"output_size": 4}),
        (aten.repeat_interleave.self_int, fake(4), [fake(2), 2], {}),
        (aten.one_hot.default, fake(2, 3), [fake(2, dtype=torch.int64), 3], {}),
        (aten.masked_fill.Scalar, fake(2), [fake(2), fake(2, dtype=torch.bool), 0.0], {}),
        (aten.linalg_matrix_norm.str_ord, fake(), [fake(2, 2), "fro"], {}),
        (aten.where.self, fake(2), [fake(2, dtype=torch.bool), fake(2), fake(2)], {}),
        (aten.mm.default, fake(2, 2), [fake(2, 2), fake(2, 2)], {}),
        (aten.linspace.default, fake(3), [0, 1, 3], {"device": "cuda"}),
        (aten.dropout.default, fake(2), [fake(2), 0.5, True], {}),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_their_kin_that_do_not(
    target: torch._ops.OpOverload, result: object, args: list[object], kwargs: dict[str, object]
) -> None:
    assert refusal(target, result, *args, **kwargs) == ""


class TestCopies:
    def test_to_the_host(self) -> None:
        on_host = fake(2, device="cpu")
        assert refusal(aten.to.device, on_host, fake(2), torch.device("cpu"), torch.float32) == WAITS
        assert refusal(aten.copy_.default, on_host, on_host, fake(2)) == WAITS

    def test_to_the_host_without_waiting(self) -> None:
        call = refusal(aten.to.device, fake(2, device="cpu"), fake(2), torch.device("cpu"), torch.float32, True)
        assert call == TO_HOST, "the host would read what no event has made it wait for"

    def test_from_the_host(self) -> None:
        on_host = fake(2, device="cpu")
        assert refusal(aten.to.device, fake(2), on_host, torch.device("cuda"), torch.float32) == FROM_HOST
        assert refusal(aten.index.Tensor, fake(2), fake(4), [fake(2, device="cpu", dtype=torch.int64)]) == FROM_HOST

    def test_a_number_from_the_host(self) -> None:
        """A kernel takes it by value, so whether it may change decides (see TestLiterals); only a copy copies it."""
        number = fake(device="cpu")
        assert refusal(aten.mul.Tensor, fake(2), fake(2), number) == ""
        assert refusal(aten.to.device, fake(), number, torch.device("cuda"), torch.float32) == FROM_HOST
        assert refusal(aten.where.self, fake(2), fake(2, dtype=torch.bool), fake(2), number) == FROM_HOST

    def test_a_number_from_the_host_that_fills(self) -> None:
        mask, rows, number = fake(2, dtype=torch.bool), fake(2, dtype=torch.int64), fake(device="cpu")
        assert refusal(aten.masked_fill.Tensor, fake(2), fake(2), mask, number) == ""
        assert refusal(aten.index_put_.default, fake(2), fake(2), [mask], number) == "", "runs as masked_fill"
        assert refusal(aten.index_put_.default, fake(2), fake(2), [mask], number, True) == WAITS
        assert refusal(aten.index_put_.default, fake(2), fake(2), [rows], number) == FROM_HOST

    def test_to_another_device(self) -> None:
        there, device = fake(2, device="cuda:1"), torch.device("cuda:1")
        assert refusal(aten.to.device, there, fake(2), device, torch.float32) == "copies from cuda:0 to cuda:1"
        assert refusal(aten.copy_.default, there, there, fake(2)) == "copies from cuda:0 to cuda:1"
        assert refusal(aten.relu.default, there, there) == ""

    def test_between_dtypes_of_one_device(self) -> None:
        assert refusal(aten.to.dtype, fake(2, dtype=torch.float16), fake(2), torch.float16) == ""


def test_calls_that_use_two_devices() -> None:
    assert refusal(print, None, fake(2), fake(2, device="cuda:1")) == "uses tensors on cuda:0 and cuda:1"
    assert refusal(print, fake(2), fake(2), fake(2, device="cpu")) == ""


def test_calls_on_the_cpu() -> None:
    on_host = fake(2, device="cpu")
    assert refusal(aten.relu.default, fake(2, device="cpu"), on_host) == ON_CPU
    assert refusal(aten.item.default, 1.0, on_host) == ON_CPU
    assert refusal(print, on_host, on_host) == ON_CPU


def test_shapes_that_depend_on_data() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        size = mode.shape_env.create_unbacked_symint()
        ragged, result = torch.empty((size, 2), device="cuda:0"), torch.empty((size, 2), device="cuda:0")
    assert refusal(aten.relu.default, result, ragged) == DATA_SHAPE
    assert refusal(print, ragged, ragged) == DATA_SHAPE


def test_what_is_given_numbers_or_shapes_of_the_device_is_refused_whatever_it_is() -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        return (x * x.max().item()).sin() + x[x.nonzero()[:, 0]].sum()

    nodes = case_of(asks, torch.ones(4)).program.module.graph.nodes
    calls = [node for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
    found = {node.name: dependence_of(node) for node in calls if node.users and "sym" not in node.name}
    assert {name: reason for name, reason in found.items() if reason} == {
        "mul": NUMBER, "select": GIVEN_DATA_SHAPE, "index": GIVEN_DATA_SHAPE, "sum_1": GIVEN_DATA_SHAPE
    }  # fmt: skip
    assert {"max_1", "item", "sin", "nonzero", "add"} <= found.keys()


def test_branches_on_data() -> None:
    assert refusal(torch.ops.higher_order.cond, (fake(2),), fake(), None, None, [fake(2)]) == BRANCHES
    assert refusal(torch.ops.higher_order.while_loop, (fake(2),), None, None, [fake(2)], []) == BRANCHES


def test_views_are_never_refused() -> None:
    tape = Tape()
    assert effects_of(tape.call(aten.t.default, tape.input(2, 3))).uncapturable == ""
