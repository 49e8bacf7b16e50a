"""Ops keep the innermost line of the user's, wherever that is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.fx.traceback import get_current_meta, preserve_node_meta

import autostream
from autostream.tracing.export import trace
from autostream.frontend.lines import at_line, error_line, keep_lines, note_line, users_frame, users_line
from autostream.frontend.tree import flatten


def lines_of(model: nn.Module) -> list[str]:
    """The last line of each op's stack trace."""
    tensors, structure = flatten(((torch.ones(2, 2),), {}))
    graph = trace(model, tensors, structure).program.module.graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return [node.meta["stack_trace"].splitlines()[-1].strip() for node in nodes]


class Helpers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x.neg())

    def helper(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return nn.functional.gelu(x)


def test_it_is_that_of_the_helper_not_of_forward_nor_of_torch() -> None:
    assert lines_of(Helpers()) == ["return self.helper(x.neg())", "x = self.layer(x)", "return nn.functional.gelu(x)"]


def test_a_graph_keeps_the_lines_that_it_has() -> None:
    """What calls a graph's ops is fx: the lines are in the nodes, and who called the graph does not matter."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.neg, (x,))
    y.meta["stack_trace"] = 'File "net.py", line 7, in forward\n    y = -x'
    graph.output(y)
    assert lines_of(torch.fx.GraphModule(nn.Module(), graph)) == ["y = -x"]


def test_outside_of_a_trace_nothing_is_noted() -> None:
    note_line(sys._getframe(), note_line.__code__)
    assert "stack_trace" not in get_current_meta()


def test_code_that_is_in_no_file_has_a_place_but_no_text() -> None:
    scope: dict[str, Callable[[], None]] = {}
    exec(
        compile("def f():\n    note_line(sys._getframe(), note_line.__code__)", "nowhere.py", "exec"),
        {**globals()},
        scope,
    )
    with preserve_node_meta():
        scope["f"]()
        assert get_current_meta()["stack_trace"] == 'File "nowhere.py", line 2, in f\n    \n'


def test_what_calls_the_model_is_not_the_models_line() -> None:
    def calls_the_model() -> None:
        note_line(sys._getframe(), calls_the_model.__code__)

    with preserve_node_meta():
        calls_the_model()
        assert "stack_trace" not in get_current_meta()


def test_gradients_have_the_lines_of_what_they_are_gradients_of() -> None:
    weight = torch.ones(2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # it notes lines
        loss = weight.exp().sum()
    seen: list[str] = []
    with preserve_node_meta():
        keep_lines(loss)
        weight.register_hook(lambda gradient: seen.append("".join(get_current_meta()["stack_trace"])))
        loss.backward()
    assert "loss = weight.exp().sum()" in seen[0]


def test_a_line_is_told_with_its_path_from_here() -> None:
    frame = users_frame(sys._getframe(), keep_lines.__code__)
    said = users_line(frame)
    assert __file__.removeprefix(os.getcwd() + os.sep) in said
    assert said.endswith(": said = users_line(frame))")
    assert at_line(os.path.join(os.getcwd(), "net.py"), 3, "y = x") == " (at net.py:3: y = x)"
    assert users_line(users_frame(sys._getframe(), sys._getframe().f_code)) == ""


def raised_in(path: str) -> str:
    """The line of an error that code of a file raises."""
    try:
        exec(compile("raise ValueError", path, "exec"))
    except ValueError as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        return error_line(error)
    return "nothing was raised"


@pytest.mark.parametrize("package", [torch, autostream])
def test_only_what_lies_within_a_package_is_the_packages(package: ModuleType) -> None:
    """As torchvision lies beside torch, and the models of somebody in a folder of a similar name."""
    folder = os.path.dirname(str(package.__file__))
    assert raised_in(os.path.join(folder, "within.py")) == ""
    assert "-models/net.py:1" in raised_in(os.path.join(f"{folder}-models", "net.py"))
