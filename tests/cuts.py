"""Cuts programs on the CPU as on a GPU: a test says which ops count as uncapturable, or as copies between devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
"""Whether an op counts as uncapturable."""


def graph_with(program: Program, refused: Refused) -> OpGraph:
    """The ops of a program, these uncapturable, and those that depend on numbers computed on the device."""
    graph, nodes = analyze(program), {node.name: node for node in program.module.graph.nodes}

    def reason(op: Op) -> str:
        if refused(op) or any(_is_unknown(nodes[name]) for name in op.nodes):
            return REFUSED
        return next(filter(None, (dependence_of(nodes[name]) for name in op.nodes)), "")

    return replace(graph, ops={name: replace(op, uncapturable=reason(op)) for name, op in graph.ops.items()})


def _is_unknown(node: fx.Node) -> bool:
    """Whether a node's value is a number, or has a shape, that is known at run time only."""
    value = value_of(node)
    return is_unknown(value) or any(is_unknown(size) for tensor in tensors_in(value) for size in tensor.shape)


def over_devices(graph: OpGraph, devices: Callable[[Op], str], copies: Refused) -> OpGraph:
    """The same ops, on these devices, some of them copies between devices."""
    ops = {
        name: replace(op, device=devices(op), crosses="peer", uncapturable=REFUSED)
        if copies(op)
        else replace(op, device=devices(op))
        for name, op in graph.ops.items()
    }
    return replace(graph, ops=ops)


def cut_everything(graph: OpGraph) -> tuple[Part, ...]:
    """The parts of a graph, also small ones: one for each change between capturable ops and others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autostream.scheduling.cut._is_worth_a_graph", lambda graph, part, several: True)
        return cut(graph)


def let_be_cut(
    monkeypatch: pytest.MonkeyPatch, refused: Refused, change: Callable[[OpGraph], OpGraph] = lambda graph: graph
) -> None:
    """Cut programs on the CPU at these ops, and at those that depend on numbers computed on the device.

    Args:
        monkeypatch: undoes it.
        refused: says which ops.
        change: replaces the graph of ops before it is cut.
    """

    def sections_of(program: Program, bound: Any, options: Any, make_section: Any, stopwatch: Any) -> Sections | None:
        graph = change(graph_with(program, refused))
        parts = cut_everything(graph)
        return Sections(program, graph, parts, bound, options, make_section) if len(parts) > 1 else None

    monkeypatch.setattr("autostream.dispatch.scheduled_program.sections_of", sections_of)


DEVICES = ("cuda:0", "cuda:1")


def moved(x: Tensor) -> Tensor:
    """A copy to the other device, in a program that is :func:`placed`."""
    return x.to(x.dtype, copy=True)


def placed(program: Program) -> Program:
    """A program of the CPU as one on two devices, by the devices of its fake values.

    State whose name contains ``far`` is on the second device, everything else on the first, unless it was
    :func:`moved`, or computed from values on the second.
    """
    for node in program.module.graph.nodes:
        devices = [str(tensor.device) for tensor in input_tensors(node)]
        device = devices[0] if devices else DEVICES["far" in node.name]
        if node.target is torch.ops.aten.to.dtype:
            device = DEVICES[DEVICES.index(device) - 1]
        for value in tensors_in(value_of(node)):
            assert isinstance(value, FakeTensor)
            value.fake_device = torch.device(device)
    return replace(program, device=DEVICES[0], peers=DEVICES[1:])


def let_be_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut programs on the CPU as if they were on two devices; they run on the CPU."""

    def sections_of(program: Program, bound: Any, options: Any, make_section: Any, stopwatch: Any) -> Sections:
        graph = analyze(placed(program))
        return Sections(program, graph, cut_everything(graph), bound, options, make_section)

    monkeypatch.setattr("autostream.dispatch.scheduled_program.sections_of", sections_of)


def placed_by_dtype(program: Program) -> Program:
    """A program of the CPU as one on two devices: float64 is on the first, float32 on the second.

    So a cast is a copy between devices, in a forward as in a backward. Numbers are where they are used.
    """
    nodes, devices = [*program.module.graph.nodes], {torch.float64: DEVICES[0], torch.float32: DEVICES[1]}

    def place(node: fx.Node, neighbours: Iterable[fx.Node], places: Callable[[Tensor], bool]) -> None:
        near = [str(tensor.device) for each in neighbours for tensor in tensors_in(value_of(each)) if tensor.dim()]
        for value in tensors_in(value_of(node)):
            assert isinstance(value, FakeTensor)
            if places(value):
                value.fake_device = torch.device(next(iter(near), DEVICES[0]))

    def is_number(value: Tensor) -> bool:
        return value.dtype is torch.float64 and not value.dim()

    for node in nodes:
        place(node, node.all_input_nodes, lambda value: value.dtype not in devices)
        for value in tensors_in(value_of(node)):
            if value.dtype in devices:
                value.fake_device = torch.device(devices[value.dtype])  # type: ignore[attr-defined]
    for node in reversed(nodes):
        place(node, node.users, is_number)
    return replace(program, device=DEVICES[0], peers=DEVICES[1:])


def let_be_placed_by_dtype(monkeypatch: pytest.MonkeyPatch) -> list[Sections]:
    """Cut programs on the CPU as if they were on two devices, by dtype; returns what is made."""
    made: list[Sections] = []

    def sections_of(program: Program, bound: Any, options: Any, make_section: Any, stopwatch: Any) -> Sections:
        graph = analyze(placed_by_dtype(program))
        ops = {n: replace(o, uncapturable=o.uncapturable if o.crosses else "") for n, o in graph.ops.items()}
        graph = replace(graph, ops=ops)
        several = replace(program, peers=("cpu",))  # whose generators can be saved
        made.append(Sections(several, graph, cut_everything(graph), bound, options, make_section))
        return made[-1]

    monkeypatch.setattr("autostream.dispatch.scheduled_program.sections_of", sections_of)
    return made
