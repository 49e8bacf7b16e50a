"""Names, sizes and holders of storages."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autostream.analysis.dependencies import analyze
from autostream.ir import Role, Storage
from tests.analysis.programs import Tape, aten, exported


@pytest.fixture
def tape() -> Tape:
    return Tape()


def test_every_view_of_a_storage_holds_it(tape: Tape) -> None:
    x = tape.input(2, 8)
    sin = tape.call(aten.sin.default, x)
    parts = tape.call(aten.split.Tensor, sin, 4, 1)
    half = tape.call(operator.getitem, parts, 1)
    turned = tape.call(aten.t.default, half)
    mul_ = tape.call(aten.mul_.Tensor, turned, 2)
    holders = (sin.name, parts.name, half.name, turned.name, mul_.name)
    assert analyze(tape.case([mul_]).program).storages == {
        "in0": Storage("in0", Role.INPUT, 64, ("in0",)),
        sin.name: Storage(sin.name, Role.INTERMEDIATE, 64, holders, escapes=True),
    }


def test_a_copy_that_may_be_a_view_occupies_both_storages(tape: Tape) -> None:
    turned = tape.call(aten.t.default, tape.input(2, 3))
    flat = tape.call(aten.reshape.default, turned, [6])
    late = tape.call(aten.detach.default, flat)
    graph = analyze(tape.case([late]).program)
    assert graph.ops[flat.name].allocates == graph.ops[flat.name].writes == {flat.name}
    assert graph.storages["in0"].holders == ("in0", turned.name, flat.name, late.name)
    assert graph.storages[flat.name].holders == (flat.name, late.name)
    assert graph.storages["in0"].escapes
    assert graph.storages[flat.name].escapes


def test_a_lifted_literal_has_a_storage_of_its_own_unlike_its_fake_value() -> None:
    case = exported(lambda x: x + torch.tensor([1.0, 2.0]).mul_(3), torch.ones(2))
    graph = analyze(case.program)
    (constant,) = (p.name for p in case.program.placeholders if p.role is Role.CONSTANT)
    assert graph.storages["lift_fresh_copy"].bytes == 2 * 4
    assert graph.storages[constant].holders == (constant,)
    assert all(constant not in op.writes for op in graph.ops.values())


def test_placeholders_and_attributes_have_roles(tape: Tape) -> None:
    alias = tape.input_like(tape.input(4, role=Role.PARAMETER))
    tape.root.register_buffer("table", torch.ones(3))
    attribute = tape.graph.get_attr("table")
    attribute.meta["val"] = torch.ones(3)
    neg = tape.graph.call_function(aten.neg.default, (attribute,))
    neg.meta["val"] = torch.ones(3)
    graph = analyze(tape.case([alias, neg]).program)
    assert graph.storages["in0"] == Storage("in0", Role.PARAMETER, 16, ("in0", "in1"), escapes=True)
    assert graph.storages["table"].role is Role.CONSTANT
    assert graph.prelude == ("table",)
    assert graph.ops[neg.name].reads == {"table"}


@pytest.mark.parametrize(
    ("level", "device", "placeable"),
    [("inductor", "cpu", True), ("aten", "cpu", False), ("inductor", "cuda:0", False)],
    ids=["kernels", "ops that may resize", "memory of another device"],
)
def test_allocations_can_be_placed_in_the_arena(tape: Tape, level: str, device: str, placeable: bool) -> None:
    memory, varying = (tape.call(aten.empty.memory_format, [6, 4], device="cpu") for _ in range(2))
    relu = tape.call(aten.relu.default, tape.input(6, 4))
    tape.call(aten.copy_.default, memory, relu)
    filled = tape.call(aten.fill_.Scalar, varying, 1.0)
    symbolic = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False).from_tensor(torch.zeros(6, 4))
    varying.meta["val"] = filled.meta["val"] = symbolic
    storages = analyze(replace(tape.case([relu]).program, level=level, device=device)).storages
    assert {name for name, storage in storages.items() if storage.placeable} == ({memory.name} if placeable else set())


def test_memory_that_a_collective_reads_is_not_in_the_arena(tape: Tape) -> None:
    """The collective runs until its result is waited for."""
    memory, other = (tape.call(aten.empty.memory_format, [4], device="cpu") for _ in range(2))
    for each in (memory, other):
        tape.call(aten.fill_.Scalar, each, 1.0)
    gathered = tape.call(torch.ops._c10d_functional.all_gather_into_tensor.default, memory, 2, "world")
    result = tape.call(torch.ops._c10d_functional.wait_tensor.default, gathered)
    storages = analyze(replace(tape.case([result]).program, level="inductor")).storages
    assert (storages[memory.name].placeable, storages[other.name].placeable) == (False, True)
