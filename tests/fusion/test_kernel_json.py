"""Graphs of kernels as JSON: what is written down is read back, and what has no form is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from autostream.fusion.kernel_json import (
    NotSerializable,
    argument_from_json,
    argument_to_json,
    from_json,
    operator_from_json,
    operator_to_json,
    to_json,
)
from autostream.fusion.kernel_values import evaluate
from autostream.ir import Placeholder, Program, Role
from autostream.utils.kernels import Kernel
from tests.kernel_graphs.recordings import NAMES, program_of, read, recorded

aten = torch.ops.aten


def made(name: str, recipe: Any) -> Kernel:
    written, overwritten = (frozenset(recipe[key]) for key in ("written", "overwritten"))
    return Kernel(name, lambda *args: None, written, overwritten, recipe=recipe)


def with_recipes(program: Program) -> Program:
    for node in program.module.graph.nodes:
        if isinstance(node.target, Kernel):
            node.target.recipe = {
                "written": sorted(node.target.written),
                "overwritten": sorted(node.target.overwritten),
            }
    return program


@pytest.mark.parametrize("name", NAMES)
def test_what_inductor_wrote_is_read_back(name: str) -> None:
    program = with_recipes(program_of(read(name)))
    module = from_json(json.loads(json.dumps(to_json(program.module, program))), program, made)
    arguments = [node.meta["val"] for node in program.module.graph.find_nodes(op="placeholder")]
    with arguments[0].fake_mode:
        evaluate(program.module, arguments)
        evaluate(module, arguments)
    module.graph.lint()
    again = Program(module, program.placeholders, program.outputs, "inductor", program.device)
    assert recorded(again) == recorded(program)
    assert to_json(module, program) == to_json(program.module, program)


# Graphs


def graph_of(*targets: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target in targets:
        graph.call_function(target, (x,))
    graph.output((x,))
    return fx.GraphModule(nn.Module(), graph)


def program(module: fx.GraphModule) -> Program:
    return Program(module, (Placeholder("x", Role.INPUT, "0", "x"),), ("x",), "aten", "cuda:0")


def test_two_kernels_of_one_name_stay_two_and_one_that_is_called_twice_one() -> None:
    one, other = (made("same", {"written": [at], "overwritten": []}) for at in range(2))
    module = graph_of(one, other, one)
    again = from_json(to_json(module, program(module)), program(module), made)
    first, second, third = (node.target for node in again.graph.nodes if node.op == "call_function")
    assert first is third
    assert [first.written, second.written] == [{0}, {1}]  # type: ignore[union-attr]


def with_lines(module: fx.GraphModule, *lines: str) -> fx.GraphModule:
    calls = (node for node in module.graph.nodes if node.op == "call_function")
    for node, line in zip(calls, lines, strict=True):
        node.stack_trace = line or None
    return module


def test_lines_are_those_of_the_program_as_it_is_now() -> None:
    then = program(with_lines(graph_of(aten.relu.default, aten.sin.default, aten.cos.default), "a", "b", "b"))
    now = program(with_lines(graph_of(aten.relu.default, aten.sin.default, aten.cos.default), "c", "d", "e"))
    fused = with_lines(graph_of(*[aten.relu.default] * 4), "b", "a", "", "Inductor's own")
    again = from_json(to_json(fused, then), now, made)
    lines = [node.stack_trace for node in again.graph.nodes if node.op == "call_function"]
    assert lines == ["d", "c", None, None]


def test_a_program_that_holds_a_tensor_is_not_written() -> None:
    module = graph_of()
    module.register_buffer("constant", torch.ones(3))
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.get_attr("constant")
    with pytest.raises(NotSerializable, match="constant, a get_attr"):
        to_json(module, program(module))


@pytest.mark.parametrize("target", [torch.relu, aten.relu, len])
def test_what_is_no_operator_is_not_written(target: Any) -> None:
    module = graph_of(target)
    with pytest.raises(NotSerializable, match="a call of"):
        to_json(module, program(module))


@pytest.mark.parametrize("recipe", [None, {"kwargs": {"out_dtype": torch.float32}}, {"kwargs": {"sizes": (1, 2)}}])
def test_a_kernel_that_json_does_not_give_back_is_not_written(recipe: Any) -> None:
    module = graph_of(Kernel("odd", lambda *args: None, frozenset(), frozenset(), recipe=recipe))
    with pytest.raises(NotSerializable, match="odd, a kernel that nothing makes again"):
        to_json(module, program(module))


# Arguments

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([torch.float16, torch.int64, torch.strided, torch.channels_last, torch.device("cuda", 1)])
)
arguments = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(arguments)
def test_an_argument_is_read_back(argument: object) -> None:
    again = argument_from_json(json.loads(json.dumps(argument_to_json(argument))), {})
    assert repr(again) == repr(argument)


@given(arguments, arguments)
def test_different_arguments_are_written_differently(one: object, other: object) -> None:
    texts = [json.dumps(argument_to_json(argument)) for argument in (one, other)]
    assert (texts[0] == texts[1]) == (repr(one) == repr(other))


def test_an_argument_that_is_a_node_is_that_of_the_new_graph() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert argument_from_json(argument_to_json(([x], y)), {"x": y, "y": x}) == ([y], x)


@pytest.mark.parametrize("argument", [1j, {1}, slice(0, 1), object()])
def test_an_argument_without_a_form_is_refused(argument: object) -> None:
    with pytest.raises(NotSerializable):
        argument_to_json([argument])


def test_a_symbolic_size_is_refused() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        size = mode.from_tensor(torch.ones(4).bool()).nonzero().shape[0]
    with pytest.raises(NotSerializable):
        argument_to_json(size)


@pytest.mark.parametrize("name", ["aten.relu.default", "inductor._reinterpret_tensor.default", "getitem"])
def test_operators_are_found_by_name(name: str) -> None:
    assert operator_to_json(fx.Graph().call_function(operator_from_json(name))) == name


@pytest.mark.parametrize("name", ["load_library", "aten", "aten.relu", "__class__"])
def test_nothing_but_an_operator_is_found_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is no operator"):
        operator_from_json(name)


@pytest.mark.parametrize("name", ["load", "hub", "nothing_of_that_name"])
def test_nothing_but_a_constant_is_found_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"torch.{name} is no constant"):
        argument_from_json({"torch": name}, {})
