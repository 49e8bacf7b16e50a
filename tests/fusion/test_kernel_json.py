"""Graphs of kernels as JSON: a graph is read back as it was written, and whatever has no form is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from autostream.fusion.kernel_json import (
    NotSerializable,
    argument_from_json,
    argument_to_json,
    from_json,
    operator_from_json,
    to_json,
)
from autostream.fusion.kernel_values import evaluate
from autostream.ir import Placeholder, Program, Role
from autostream.utils.kernels import Kernel
from tests.kernel_graphs.recordings import NAMES, program_of, read, recorded

aten = torch.ops.aten


def make_kernel(name: str, recipe: Any) -> Kernel:
    written, overwritten = (frozenset(recipe[key]) for key in ("written", "overwritten"))
    return Kernel(name, lambda *args: None, written, overwritten, recipe=recipe)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_inductors_kernels_is_read_back(name: str) -> None:
    program = program_of(read(name))
    for node in program.module.graph.nodes:
        if isinstance(kernel := node.target, Kernel):
            kernel.recipe = {"written": sorted(kernel.written), "overwritten": sorted(kernel.overwritten)}
    module = from_json(json.loads(json.dumps(to_json(program.module, program))), program, make_kernel)
    arguments = [node.meta["val"] for node in program.module.graph.find_nodes(op="placeholder")]
    with arguments[0].fake_mode:
        evaluate(program.module, arguments)
        evaluate(module, arguments)
    module.graph.lint()
    again = Program(module, program.placeholders, program.outputs, "inductor", program.device)
    assert recorded(again) == recorded(program)
    assert to_json(module, program) == to_json(program.module, program)


# Graphs


def graph_of(*targets: Any, lines: str = "") -> fx.GraphModule:
    """Calls of one argument, with one source line for each letter of ``lines``."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target, line in zip(targets, lines or " " * len(targets), strict=True):
        graph.call_function(target, (x,)).stack_trace = line.strip() or None
    graph.output((x,))
    return fx.GraphModule(nn.Module(), graph)


def program(module: fx.GraphModule) -> Program:
    return Program(module, (Placeholder("x", Role.INPUT, "0", "x"),), ("x",), "aten", "cuda:0")


def test_kernels_of_the_same_name_stay_distinct() -> None:
    one, other = (make_kernel("same", {"written": [at], "overwritten": []}) for at in range(2))
    module = graph_of(one, other, one)
    again = from_json(to_json(module, program(module)), program(module), make_kernel)
    first, second, third = (node.target for node in again.graph.nodes if node.op == "call_function")
    assert first is third
    assert [first.written, second.written] == [{0}, {1}]  # type: ignore[union-attr]


def test_source_lines_are_those_of_the_program_when_it_is_loaded() -> None:
    ops = (aten.relu.default, aten.sin.default, aten.cos.default)
    saved, loaded = program(graph_of(*ops, lines="abb")), program(graph_of(*ops, lines="cde"))
    fused = graph_of(*[aten.relu.default] * 4, lines="ba x")
    again = from_json(to_json(fused, saved), loaded, make_kernel)
    lines = [node.stack_trace for node in again.graph.nodes if node.op == "call_function"]
    assert lines == ["d", "c", None, None]


def with_constant() -> fx.GraphModule:
    module = graph_of()
    module.register_buffer("constant", torch.ones(3))
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.get_attr("constant")
    return module


def odd(recipe: Any) -> fx.GraphModule:
    return graph_of(Kernel("odd", lambda *args: None, frozenset(), frozenset(), recipe=recipe))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (with_constant(), "constant, a get_attr"),
        (graph_of(torch.relu), "a call of"),
        (graph_of(aten.relu), "a call of"),
        (odd(None), "odd, a kernel that nothing makes again"),
        (odd({"kwargs": {"out_dtype": torch.float32}}), "odd, a kernel that nothing makes again"),
        (odd({"kwargs": {"sizes": (1, 2)}}), "odd, a kernel that nothing makes again"),
    ],
)
def test_a_graph_that_json_cannot_hold_is_refused(module: fx.GraphModule, reason: str) -> None:
    with pytest.raises(NotSerializable, match=reason):
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


@given(arguments, arguments)
@settings(max_examples=50)
def test_arguments_are_read_back_and_have_distinct_forms(one: object, other: object) -> None:
    texts = [json.dumps(argument_to_json(argument)) for argument in (one, other)]
    assert (texts[0] == texts[1]) == (repr(one) == repr(other))
    assert repr(argument_from_json(json.loads(texts[0]), {})) == repr(one)


def test_an_argument_that_is_a_node_becomes_that_of_the_new_graph() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert argument_from_json(argument_to_json(([x], y)), {"x": y, "y": x}) == ([y], x)


def symbolic_size() -> object:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        return mode.from_tensor(torch.ones(4).bool()).nonzero().shape[0]


@pytest.mark.parametrize("argument", [1j, {1}, slice(0, 1), object(), symbolic_size()])
def test_an_argument_without_a_form_is_refused(argument: object) -> None:
    with pytest.raises(NotSerializable):
        argument_to_json([argument])


@pytest.mark.parametrize("name", ["load_library", "aten", "aten.relu", "__class__"])
def test_only_operators_are_loaded_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is no operator"):
        operator_from_json(name)


@pytest.mark.parametrize("name", ["load", "hub", "nothing_of_that_name"])
def test_only_constants_are_loaded_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"torch.{name} is no constant"):
        argument_from_json({"torch": name}, {})
