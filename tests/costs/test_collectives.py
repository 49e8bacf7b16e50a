"""What collectives cost, by hand."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest

from autostream.costs.collectives import collective_us
from autostream.costs.device import profile_named
from autostream.costs.interconnects import LOOPBACK, Interconnect, Protocol, interconnect_of
from autostream.costs.roofline import price
from autostream.ir import Op, OpGraph

NONE = frozenset[str]()
LINK = Interconnect("link", hop_us=1.0, protocols=(Protocol(start_us=10.0, bandwidth=100.0),))


def _op(kind: str, given: int, got: int, processes: int) -> Op:
    target = f"_c10d_functional.{kind}.default"
    return Op(kind, target, (kind,), NONE, NONE, bytes_read=given, bytes_written=got, group="0", processes=processes)


@pytest.mark.parametrize(
    ("op", "microseconds"),
    [
        (_op("all_reduce", 4000, 4000, 1), 0.0),
        (_op("all_gather_into_tensor", 4000, 4000, 1), 10.0),
        (_op("all_reduce", 4000, 4000, 2), 10 + 2 * 1 + 4000 / 100),
        (_op("all_reduce_", 4000, 4000, 4), 10 + 2 * 3 + 2 * 0.75 * 4000 / 100),
        (_op("all_gather_into_tensor", 1000, 4000, 4), 10 + 3 + 0.75 * 4000 / 100),
        (_op("reduce_scatter_tensor", 4000, 1000, 4), 10 + 3 + 0.75 * 4000 / 100),
        (_op("all_to_all_single", 4000, 4000, 4), 10 + 3 + 0.75 * 4000 / 100),
        (_op("broadcast", 4000, 4000, 4), 10 + 3 + 4000 / 100),
    ],
    ids=lambda value: f"{value.name}-{value.processes}" if isinstance(value, Op) else "",
)
def test_duration_by_message_and_processes(op: Op, microseconds: float) -> None:
    assert collective_us(op, LINK) == pytest.approx(microseconds)


def test_a_gibibyte_over_named_interconnects() -> None:
    """Eight processes send 1.75 GiB each: at 286.9 GB/s that takes 6.6 ms, at 42.5 GB/s 44.2 ms."""
    op, h200 = _op("all_reduce", 1 << 30, 1 << 30, 8), profile_named("h200")
    nvlink, infiniband = (interconnect_of(h200, name) for name in ("nvlink", "infiniband"))
    assert collective_us(op, nvlink) == pytest.approx(24 + 14 * 0.6 + 1.75 * 1024**3 / (0.75 * 382.5e3))
    assert collective_us(op, infiniband) == pytest.approx(6.6 + 14 * 2.7 + 1.75 * 1024**3 / 42.5e3)


@pytest.mark.parametrize(("megabytes", "measured_us"), [(2.1, 32.5), (8.4, 52.5), (27.3, 119.5)])
def test_all_reduces_over_nvlink_take_what_was_measured(megabytes: float, measured_us: float) -> None:
    """On two H100s; small messages take another protocol, which begins sooner."""
    nvlink, given = interconnect_of(profile_named("h100")), round(megabytes * 1e6)
    assert collective_us(_op("all_reduce_", given, given, 2), nvlink) == pytest.approx(measured_us, rel=0.06)
    assert collective_us(_op("all_reduce_", 4096, 4096, 2), nvlink) == pytest.approx(6.6 + 2 * 0.6 + 4096 / 87.7e3)


@pytest.mark.parametrize(("device", "profile"), [("cuda:0", "h200"), ("cpu", "cpu")])
def test_a_program_is_priced_over_what_its_device_has(device: str, profile: str) -> None:
    """A wait takes no time of its own, and a collective what a kernel with 24 blocks takes of the device."""
    reduced = replace(_op("all_reduce", 1 << 20, 1 << 20, 2), device=device)
    waited = Op("wait", "_c10d_functional.wait_tensor.default", ("wait",), NONE, NONE, device=device)
    known = profile_named(profile)
    costs = price(OpGraph({op.name: op for op in (reduced, waited)}, (), {}, (), device), known)
    link = LOOPBACK if device == "cpu" else interconnect_of(known)
    assert costs["all_reduce"].duration_us == pytest.approx(collective_us(reduced, link))
    share = min(1.0, 24 / known.multiprocessors)
    assert costs["all_reduce"].sm_share == pytest.approx(sqrt(share) * (0.7 + 0.3 * share))
    assert costs["wait"].duration_us == 0.0
    slow = price(OpGraph({"all_reduce": reduced}, (), {}, (), device), known, LINK)
    assert slow["all_reduce"].duration_us == pytest.approx(10 + 2 + 1024**2 / 100)
