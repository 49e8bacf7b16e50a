"""Programs on the CPU that are cut as those on a GPU are: what a graph could not hold is said by the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from autostream.analysis.capturability import dependence_of
from autostream.analysis.dependencies import analyze
from autostream.analysis.values import input_tensors, tensors_in, value_of
from autostream.dispatch.sections import Sections
from autostream.ir import Op, OpGraph, Program
from autostream.scheduling.cut import Part, cut
from autostream.utils.operators import is_unknown

REFUSED = "a graph cannot hold it"

Refused = Callable[[Op], bool]
"""Says of an op that a CUDA graph could not hold it."""


def graph_with(program: Program, refused: Refused) -> OpGraph:
    """The ops of a program, of which a graph cannot hold those, nor those that depend on numbers of the device."""
    graph, nodes = analyze(program), {node.name: node for node in program.module.graph.nodes}

    def reason(op: Op) -> str:
        if refused(op) or any(_is_unknown(nodes[name]) for name in op.nodes):
            return REFUSED
        return next(filter(None, (dependence_of(nodes[name]) for name in op.nodes)), "")

    return replace(graph, ops={name: replace(op, uncapturable=reason(op)) for name, op in graph.ops.items()})


def _is_unknown(node: fx.Node) -> bool:
    """Whether a node yields a number, or a shape, that only a run tells."""
    value = value_of(node)
    return is_unknown(value) or any(is_unknown(size) for tensor in tensors_in(value) for size in tensor.shape)


def over_devices(graph: OpGraph, devices: Callable[[Op], str], copies: Refused) -> OpGraph:
    """The same, with ops on devices that are told, and those that copy between them."""
    ops = {
        name: replace(op, device=devices(op), crosses="peer", uncapturable=REFUSED)
        if copies(op)
        else replace(op, device=devices(op))
        for name, op in graph.ops.items()
    }
    return replace(graph, ops=ops)


def cut_everything(graph: OpGraph) -> tuple[Part, ...]:
    """The parts of a graph, worth it or not: one for each change between ops that can be captured and others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autostream.scheduling.cut._is_worth_a_graph", lambda graph, part: True)
        return cut(graph)


def let_be_cut(
    monkeypatch: pytest.MonkeyPatch, refused: Refused, change: Callable[[OpGraph], OpGraph] = lambda graph: graph
) -> None:
    """Cut programs on the CPU wherever it can be, at these ops and those that depend on numbers of the device.

    Args:
        monkeypatch: undoes it.
        refused: those ops.
        change: makes of their graph the one that is cut.
    """

    def sections_of(program: Program, bound: Any, options: Any, make_section: Any, stopwatch: Any) -> Sections | None:
        graph = change(graph_with(program, refused))
        parts = cut_everything(graph)
        return Sections(program, graph, parts, bound, options, make_section) if len(parts) > 1 else None

    monkeypatch.setattr("autostream.dispatch.scheduled_program.sections_of", sections_of)


DEVICES = ("cuda:0", "cuda:1")


def moved(x: Tensor) -> Tensor:
    """A copy on the other device, in what :func:`placed` makes of a program."""
    return x.to(x.dtype, copy=True)


def placed(program: Program) -> Program:
    """A program of the CPU as one over two devices, by what its values are said to lie on.

    State whose name has ``far`` in it lies on the second; what else there is, on the first, unless it was
    :func:`moved`, or computed from what is on the second.
    """
    for node in program.module.graph.nodes:
        given = [str(tensor.device) for tensor in input_tensors(node)]
        device = given[0] if given else DEVICES["far" in node.name]
        if node.target is torch.ops.aten.to.dtype:
            device = DEVICES[DEVICES.index(device) - 1]
        for value in tensors_in(value_of(node)):
            assert isinstance(value, FakeTensor)
            value.fake_device = torch.device(device)
    return replace(program, device=DEVICES[0], peers=DEVICES[1:])


def let_be_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut programs on the CPU as if they were over two devices; what runs, runs on the CPU."""

    def sections_of(program: Program, bound: Any, options: Any, make_section: Any, stopwatch: Any) -> Sections:
        graph = analyze(placed(program))
        return Sections(program, graph, cut_everything(graph), bound, options, make_section)

    monkeypatch.setattr("autostream.dispatch.scheduled_program.sections_of", sections_of)
