"""Reasons why calls cannot be captured, on fake tensors of a device that need not exist."""

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
from tests.analysis.programs import aten
from tests.runtime.programs import case_of

CPU, CUDA, OTHER = torch.device("cpu"), torch.device("cuda"), torch.device("cuda:1")


def fake(*shape: int, device: str = "cuda:0", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with FakeTensorMode(shape_env=ShapeEnv()):
        return torch.empty(shape, device=device, dtype=dtype)


X, SQUARE, NUMBER_ON_DEVICE = fake(2), fake(2, 2), fake()
INDICES, MASK, BYTE_MASK = (fake(2, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.uint8))
HOST, HOST_INDICES, HOST_NUMBER = fake(2, device="cpu"), fake(2, device="cpu", dtype=torch.int64), fake(device="cpu")
HAS_PEER = torch.cuda.device_count() != 1
"""PyTorch makes a fake tensor of cuda:1 where there are two GPUs, or none."""
NEEDS_PEER = pytest.mark.skipif(not HAS_PEER, reason="there is one GPU")
PEER = fake(2, device="cuda:1" if HAS_PEER else "cuda:0")


def refusal(target: Callable[..., object], result: object, *args: object, **kwargs: object) -> str:
    """Why a call with these arguments cannot be captured."""
    graph = fx.Graph()

    def node(argument: object) -> object:
        if isinstance(argument, torch.Tensor):
            placeholder = graph.placeholder("x")
            placeholder.meta["val"] = argument.clone()  # another storage than the result
            return placeholder
        return [node(item) for item in argument] if isinstance(argument, list) else argument

    call = graph.call_function(target, tuple(map(node, args)), {name: node(value) for name, value in kwargs.items()})  # type: ignore[misc]
    call.meta["val"] = result
    return effects_of(call).uncapturable


@pytest.mark.parametrize(
    ("target", "result", "args"),
    [
        (aten.item.default, 1.0, [NUMBER_ON_DEVICE]),
        (aten.equal.default, True, [X, X]),
        (aten.nonzero.default, fake(2, 1), [X]),
        (aten.masked_select.default, X, [X, MASK]),
        (aten._unique2.default, (X, X, X), [X]),
        (aten.bincount.default, X, [INDICES]),
        (aten.linalg_inv.default, SQUARE, [SQUARE]),
        (aten.linalg_solve.default, SQUARE, [SQUARE, SQUARE]),
        (aten.linalg_svd.default, (SQUARE, X, SQUARE), [SQUARE]),
        (aten.one_hot.default, fake(2, 3), [INDICES]),
        (aten.repeat_interleave.Tensor, X, [INDICES]),
        (aten.repeat_interleave.self_Tensor, X, [X, INDICES]),
        (aten.index.Tensor, X, [X, [MASK]]),
        (aten.index_put_.default, X, [X, [BYTE_MASK], fake(1)]),
        (aten.masked_fill.Tensor, X, [X, MASK, NUMBER_ON_DEVICE]),
        (aten.linalg_matrix_norm.str_ord, NUMBER_ON_DEVICE, [SQUARE, "nuc"]),
        (aten.where.default, [X], [MASK]),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_calls_that_synchronize(target: torch._ops.OpOverload, result: object, args: list[object]) -> None:
    assert refusal(target, result, *args) == WAITS


@pytest.mark.parametrize(
    ("target", "result", "args", "kwargs"),
    [
        (aten.index.Tensor, X, [X, [INDICES]], {}),
        (aten.index_put_.default, X, [X, [INDICES], X], {}),
        (aten.repeat_interleave.Tensor, X, [INDICES], {"output_size": 4}),
        (aten.repeat_interleave.self_int, fake(4), [X, 2], {}),
        (aten.one_hot.default, fake(2, 3), [INDICES, 3], {}),
        (aten.masked_fill.Scalar, X, [X, MASK, 0.0], {}),
        (aten.linalg_matrix_norm.str_ord, NUMBER_ON_DEVICE, [SQUARE, "fro"], {}),
        (aten.where.self, X, [MASK, X, X], {}),
        (aten.linspace.default, fake(3), [0, 1, 3], {"device": "cuda"}),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_similar_calls_that_do_not(
    target: torch._ops.OpOverload, result: object, args: list[object], kwargs: dict[str, object]
) -> None:
    assert refusal(target, result, *args, **kwargs) == ""


@pytest.mark.parametrize(
    ("reason", "target", "result", "args"),
    [
        (WAITS, aten.to.device, HOST, [X, CPU, torch.float32]),
        (WAITS, aten.copy_.default, HOST, [HOST, X]),
        (TO_HOST, aten.to.device, HOST, [X, CPU, torch.float32, True]),
        (FROM_HOST, aten.to.device, X, [HOST, CUDA, torch.float32]),
        (FROM_HOST, aten.index.Tensor, X, [fake(4), [HOST_INDICES]]),
        pytest.param("copies from cuda:0 to cuda:1", aten.to.device, PEER, [X, OTHER, torch.float32], marks=NEEDS_PEER),
        pytest.param("copies from cuda:0 to cuda:1", aten.copy_.default, PEER, [PEER, X], marks=NEEDS_PEER),
        ("", aten.relu.default, PEER, [PEER]),
        ("", aten.to.dtype, fake(2, dtype=torch.float16), [X, torch.float16]),
        # A kernel takes a number on the CPU by value (see the tests of literals in test_dependencies.py).
        ("", aten.mul.Tensor, X, [X, HOST_NUMBER]),
        (FROM_HOST, aten.to.device, NUMBER_ON_DEVICE, [HOST_NUMBER, CUDA, torch.float32]),
        (FROM_HOST, aten.where.self, X, [MASK, X, HOST_NUMBER]),
        ("", aten.masked_fill.Tensor, X, [X, MASK, HOST_NUMBER]),
        ("", aten.index_put_.default, X, [X, [MASK], HOST_NUMBER]),  # runs as masked_fill
        (WAITS, aten.index_put_.default, X, [X, [MASK], HOST_NUMBER, True]),
        (FROM_HOST, aten.index_put_.default, X, [X, [INDICES], HOST_NUMBER]),
        pytest.param("uses tensors on cuda:0 and cuda:1", print, None, [X, PEER], marks=NEEDS_PEER),
        ("", print, X, [X, HOST]),
        (ON_CPU, aten.relu.default, HOST, [HOST]),
        (ON_CPU, aten.item.default, 1.0, [HOST]),
        (ON_CPU, print, HOST, [HOST]),
        (BRANCHES, torch.ops.higher_order.cond, (X,), [NUMBER_ON_DEVICE, None, None, [X]]),
        (BRANCHES, torch.ops.higher_order.while_loop, (X,), [None, None, [X], []]),
    ],
    ids=range(23),
)
def test_copies_between_devices_and_other_calls(
    reason: str, target: Callable[..., object], result: object, args: list[object]
) -> None:
    assert refusal(target, result, *args) == reason


def test_data_dependent_shapes() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        size = mode.shape_env.create_unbacked_symint()
        ragged, result = torch.empty((size, 2), device="cuda:0"), torch.empty((size, 2), device="cuda:0")
    assert refusal(aten.relu.default, result, ragged) == DATA_SHAPE
    assert refusal(print, ragged, ragged) == DATA_SHAPE


def test_calls_that_take_numbers_or_shapes_from_the_device() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return (x * x.max().item()).sin() + x[x.nonzero()[:, 0]].sum()

    nodes = case_of(model, torch.ones(4)).program.module.graph.nodes
    calls = [node for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
    found = {node.name: dependence_of(node) for node in calls if node.users and "sym" not in node.name}
    assert {name: reason for name, reason in found.items() if reason} == {
        "mul": NUMBER, "select": GIVEN_DATA_SHAPE, "index": GIVEN_DATA_SHAPE, "sum_1": GIVEN_DATA_SHAPE
    }  # fmt: skip
    assert {"max_1", "item", "sin", "nonzero", "add"} <= found.keys()
