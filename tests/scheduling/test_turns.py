"""Turns of devices, drawn: f and b on the first device, m on the second, c and g copies to and fro."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import Dependency, Hazard, Op, OpGraph
from autostream.scheduling.turns import turns

NONE: frozenset[str] = frozenset()


def graph_of(devices: Mapping[str, str], edges: list[tuple[str, str]]) -> OpGraph:
    """Ops on devices, 0 or 1; those in capitals are copies, on the device that they copy to."""
    ops = {
        name: Op(name, "f", (name,), NONE, NONE, device=f"cuda:{device}", crosses="peer" if name[0].isupper() else "")
        for name, device in devices.items()
    }
    dependencies = tuple(Dependency(before, after, Hazard.RAW, before) for before, after in edges)
    return OpGraph(ops, dependencies, {}, (), "cuda:0")


def launched(graph: OpGraph, duration_us: Mapping[str, float]) -> str:
    names = [*graph.ops]
    found = turns(graph, range(len(names)), {name: duration_us.get(name[0], 0.01) for name in names})
    return " ".join("".join(names[at] for at in turn) for turn in found)


def step(count: int) -> OpGraph:
    """A step of so many microbatches over two devices."""
    names = [f"{kind}{at}" for at in range(count) for kind in "fCmGb"]
    devices = {name: "1" if name[0] in "Cm" else "0" for name in names}
    return graph_of(devices, [(f"{x}{at}", f"{y}{at}") for at in range(count) for x, y in ("fC", "Cm", "mG", "Gb")])


@pytest.mark.parametrize(
    ("count", "order"),
    [
        (1, "f0 C0 m0 G0 b0"),
        (2, "f0 C0 f1 m0 C1 G0 m1 b0 G1 b1"),
        # While m0 runs, the first device computes all forwards that fit; then b0 comes before f4.
        (6, "f0 C0 f1 m0 C1 f2 C2 f3 G0 m1 C3 b0f4 G1 m2 C4 b1f5 G2 m3 C5 b2 G3 m4 b3 G4 m5 b4 G5 b5"),
    ],
)
def test_a_backward_comes_before_forwards_that_could_start_too(count: int, order: str) -> None:
    assert launched(step(count), {"f": 1.0, "m": 2.9, "b": 1.9}) == order


def test_an_op_that_no_copy_needs_does_not_delay_one() -> None:
    """w, a gradient of a weight on the second device, fills the time after m; its copy G does not wait for w."""
    graph = graph_of({"m": "1", "w": "1", "G": "0", "b": "0"}, [("m", "w"), ("m", "G"), ("G", "b")])
    assert launched(graph, {"m": 1.0, "w": 1.0, "b": 1.0}) == "m G w b"


def test_a_skip_connection_is_copied_with_the_last_layer() -> None:
    r"""A ─ b ─ C ─ d ─ e, and a ─ S ─ e: S may wait for C, since e needs both.

    So a and b are one turn.
    """
    graph = graph_of(
        {"a": "0", "b": "0", "S": "1", "C": "1", "d": "1", "e": "1"},
        [("a", "b"), ("b", "C"), ("a", "S"), ("C", "d"), ("d", "e"), ("S", "e")],
    )
    assert launched(graph, {}) == "ab S C de"


def test_ops_that_take_no_time_are_waited_for_as_well() -> None:
    """The op p may not join a, though t and its copy C end when a starts."""
    graph = graph_of({"a": "0", "t": "1", "C": "0", "p": "0"}, [("t", "C"), ("C", "p")])
    assert launched(graph, {"a": 1.0, "t": 0.0, "C": 0.0}) == "a t C p"


@given(st.data())
def test_random_programs_run_in_an_order_that_they_allow(data: st.DataObject) -> None:
    """Each op runs once, on one device in a turn, after all that it waits for."""
    count = data.draw(st.integers(1, 12))
    devices = {f"x{at}": data.draw(st.sampled_from("012")) for at in range(count)}
    named, edges = dict[str, str](), list[tuple[str, str]]()
    for at in range(count):
        for before in data.draw(st.sets(st.integers(0, at - 1), max_size=3)) if at else ():
            source, target = f"x{before}", f"x{at}"
            if devices[source] == devices[target]:
                edges.append((source, target))
                continue
            copy = f"C{before}_{devices[target]}"
            named.setdefault(copy, devices[target])
            edges += [(source, copy), (copy, target)]
        named[f"x{at}"] = devices[f"x{at}"]
    graph, edges = graph_of(named, [*dict.fromkeys(edges)]), [*dict.fromkeys(edges)]
    names = [*graph.ops]
    duration_us = {name: data.draw(st.sampled_from([0.0, 1.0, 3.0])) for name in names}
    found = [[names[at] for at in turn] for turn in turns(graph, range(len(names)), duration_us)]
    order = [name for turn in found for name in turn]
    assert sorted(order) == sorted(names)
    place = {name: at for at, name in enumerate(order)}
    assert all(place[before] < place[after] for before, after in edges)
    for turn in found:
        assert len({graph.ops[name].device for name in turn}) == 1
        assert len(turn) == 1 or not any(graph.ops[name].crosses for name in turn)
