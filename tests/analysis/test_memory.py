"""Names, sizes and holders of storages."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autostream.analysis.dependencies import analyze
from autostream.ir import Placeholder, Role, Storage
from tests.analysis.programs import Tape, aten, exported


@pytest.fixture
def tape() -> Tape:
    return Tape()


def test_every_look_at_a_storage_holds_it(tape: Tape) -> None:
    x = tape.input(2, 8)
    sin = tape.call(aten.sin.default, x)
    parts = tape.call(aten.split.Tensor, sin, 4, 1)
    half = tape.call(operator.getitem, parts, 1)
    turned = tape.call(aten.t.default, half)
    mul_ = tape.call(aten.mul_.Tensor, turned, 2)
    storages = analyze(tape.case([mul_]).program).storages
    holders = (sin.name, parts.name, half.name, turned.name, mul_.name)
    assert storages == {
        "in0": Storage("in0", Role.INPUT, 64, ("in0",)),
        sin.name: Storage(sin.name, Role.INTERMEDIATE, 64, holders, escapes=True),
    }


def test_results_of_one_op_are_numbered(tape: Tape) -> None:
    x = tape.input(4)
    sort = tape.call(aten.sort.default, x)
    indices = tape.call(operator.getitem, sort, 1)
    storages = analyze(tape.case([indices]).program).storages
    assert storages[sort.name] == Storage(sort.name, Role.INTERMEDIATE, 16, (sort.name,))
    assert storages[f"{sort.name}.1"] == Storage(
        f"{sort.name}.1", Role.INTERMEDIATE, 32, (sort.name, indices.name), escapes=True
    )


def test_a_copy_that_may_be_a_view_occupies_both(tape: Tape) -> None:
    turned = tape.call(aten.t.default, tape.input(2, 3))
    flat = tape.call(aten.reshape.default, turned, [6])
    late = tape.call(aten.detach.default, flat)
    graph = analyze(tape.case([late]).program)
    assert graph.ops[flat.name].allocates == {flat.name}
    assert graph.ops[flat.name].writes == {flat.name}
    assert graph.storages["in0"].holders == ("in0", turned.name, flat.name, late.name)
    assert graph.storages[flat.name].holders == (flat.name, late.name)
    assert graph.storages["in0"].escapes
    assert graph.storages[flat.name].escapes


def test_a_lifted_literal_is_not_the_constant_that_it_is_copied_from() -> None:
    """Its fake value says that it is."""
    case = exported(lambda x: x + torch.tensor([1.0, 2.0]).mul_(3), torch.ones(2))
    graph = analyze(case.program)
    (constant,) = (p.name for p in case.program.placeholders if p.role is Role.CONSTANT)
    assert graph.storages["lift_fresh_copy"].bytes == 2 * 4
    assert graph.storages[constant].holders == (constant,)
    assert all(constant not in op.writes for op in graph.ops.values())


def test_two_results_may_share_what_they_bring_into_being(tape: Tape) -> None:
    x = tape.input(4)
    node = tape.graph.call_function(aten.sort.default, (x,))
    made = torch.empty(8)
    node.meta["val"] = (made[:4], made[4:])
    assert analyze(tape.case([]).program).ops[node.name].allocates == {node.name}


def test_roles_and_owners_are_those_of_the_placeholders(tape: Tape) -> None:
    x = tape.input(4, role=Role.PARAMETER)
    y = tape.input_like(x)
    assert tape.placeholders[1] == Placeholder("in1", Role.INPUT, "in1", "in0")
    storages = analyze(tape.case([y]).program).storages
    assert storages == {"in0": Storage("in0", Role.PARAMETER, 16, ("in0", "in1"), escapes=True)}


def test_attributes_are_constants(tape: Tape) -> None:
    tape.root.register_buffer("table", torch.ones(3))
    attribute = tape.graph.get_attr("table")
    attribute.meta["val"] = torch.ones(3)
    neg = tape.graph.call_function(aten.neg.default, (attribute,))
    neg.meta["val"] = torch.ones(3)
    graph = analyze(tape.case([neg]).program)
    assert graph.storages["table"].role is Role.CONSTANT
    assert graph.prelude == ("table",)
    assert graph.ops[neg.name].reads == {"table"}


@pytest.mark.parametrize(("level", "placeable"), [("aten", False), ("inductor", True)])
def test_memory_that_no_op_resizes_may_be_placed(tape: Tape, level: str, placeable: bool) -> None:
    taken = tape.call(aten.empty.memory_format, [4], device="cpu")
    relu = tape.call(aten.relu.default, tape.input(4))
    tape.call(aten.copy_.default, taken, relu)
    storages = analyze(replace(tape.case([relu]).program, level=level)).storages
    assert {name: storage.placeable for name, storage in storages.items()} == {
        taken.name: placeable,
        relu.name: False,
        "in0": False,
    }


def test_memory_of_a_size_that_varies_has_a_block_of_its_own(tape: Tape) -> None:
    taken = tape.call(aten.empty.memory_format, [6, 4], device="cpu")
    filled = tape.call(aten.fill_.Scalar, taken, 1.0)
    varying = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False).from_tensor(torch.zeros(6, 4))
    taken.meta["val"] = filled.meta["val"] = varying
    assert not analyze(replace(tape.case([filled]).program, level="inductor")).storages[taken.name].placeable


def test_memory_of_another_device_stays_where_it_is(tape: Tape) -> None:
    """The program is one of a GPU; what it takes on the CPU is no part of its arena."""
    taken = tape.call(aten.empty.memory_format, [4], device="cpu")
    filled = tape.call(aten.fill_.Scalar, taken, 1.0)
    program = replace(tape.case([filled]).program, level="inductor", device="cuda:0")
    assert not analyze(program).storages[taken.name].placeable


def test_what_a_collective_reads_keeps_a_block_of_its_own(tape: Tape) -> None:
    """It is only started: it reads on until somebody waits for its result, and nobody knows of that in an arena."""
    taken, other = (tape.call(aten.empty.memory_format, [4], device="cpu") for _ in range(2))
    for memory in (taken, other):
        tape.call(aten.fill_.Scalar, memory, 1.0)
    gathered = tape.call(torch.ops._c10d_functional.all_gather_into_tensor.default, taken, 2, "world")
    result = tape.call(torch.ops._c10d_functional.wait_tensor.default, gathered)
    storages = analyze(replace(tape.case([result]).program, level="inductor")).storages
    assert (storages[taken.name].placeable, storages[other.name].placeable) == (False, True)
