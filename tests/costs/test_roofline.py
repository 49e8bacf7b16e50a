"""The roofline: which roof limits an op, lower roofs for small kernels, and shares of the device."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.costs.roofline import cost_of, fill, price, traffic
from autostream.errors import CostError
from autostream.ir import DeviceProfile, Op, OpCost, OpGraph, Role, Storage

# 100 multiprocessors, 1e6 bytes per µs, 1e8 float16 operations per µs.
GPU = DeviceProfile("GPU", 100, 1e6, {"float32": 1e7, "float16": 1e8}, 2.0, 1.0, 1.75, 1.5, 1.5, "table")

sizes = st.integers(0, 10**10)


def _op(name: str = "op", target: str = "aten.relu.default", **changes: object) -> Op:
    return replace(Op(name, target, (name,), frozenset(), frozenset()), **changes)  # type: ignore[arg-type]


def _price(op: Op, profile: DeviceProfile = GPU, device: str = "cuda:0") -> OpCost:
    return price(OpGraph({op.name: op}, (), {}, (), device), profile)[op.name]


def _matmul(m: int, n: int, k: int) -> Op:
    return _op(
        target="aten.mm.default",
        flops=2 * m * n * k,
        elements=m * n,
        bytes_read=2 * (m * k + k * n),
        bytes_written=2 * m * n,
    )


def _busy(blocks: int) -> Any:
    """The share kept busy by so many blocks on 100 multiprocessors, each of which has room for four."""
    return pytest.approx(sqrt(blocks / 100) * (0.7 + 0.3 * blocks / 400))


def test_large_ops_reach_shares_of_the_bandwidth_and_of_the_peak() -> None:
    copy = _price(_op(elements=10**7, bytes_read=2 * 10**7, bytes_written=2 * 10**7))
    assert copy.duration_us == pytest.approx(4e7 / 0.8e6)
    assert (copy.sm_share, copy.bandwidth_share) == (1.0, pytest.approx(0.8))
    product = _price(_matmul(4096, 4096, 4096))
    assert product.duration_us == pytest.approx(1.5 + 2 * 4096**3 / 0.7e8)
    assert product.sm_share == 1.0
    assert product.bandwidth_share == pytest.approx(3 * 2 * 4096**2 / (product.duration_us * 1e6))


def test_small_ops_reach_the_rates_of_as_many_multiprocessors_as_they_fill() -> None:
    tiny = _price(_op(elements=10, bytes_read=20, bytes_written=20))
    assert tiny.duration_us == 2.0, "the shortest kernel"
    assert (tiny.sm_share, tiny.bandwidth_share) == (_busy(1), pytest.approx(40 / 2e6))
    # 512 × 512 results are 32 tiles of 64 × 128; its inputs are 16 blocks of 64 KiB.
    product = _price(_matmul(512, 512, 512))
    assert product.sm_share == _busy(32)
    assert product.duration_us == pytest.approx(1.5 + 2 * 512**3 / (0.7e8 * 0.32))
    # 10 × 8192 results fill ten multiprocessors.
    copy = _price(_op(elements=10 * 8192, bytes_written=10**6))
    assert (copy.duration_us, copy.bandwidth_share) == (pytest.approx(12.5), pytest.approx(0.08))


def test_ops_with_few_results_fill_the_device_by_what_they_read() -> None:
    # One row of 4096 results is one tile, but libraries split the 32 MiB of weights among all multiprocessors.
    product = _price(_matmul(1, 4096, 4096))
    assert product.sm_share == 1.0
    assert product.duration_us == pytest.approx(1.5 + traffic(_matmul(1, 4096, 4096)) / 0.8e6)
    total = _op(target="aten.sum.default", elements=1, bytes_read=400 * 32 * 1024, bytes_written=2)
    assert fill(total, GPU) == 1.0
    assert fill(replace(total, bytes_read=10 * 32 * 1024), GPU) == _busy(10)


def test_a_lookup_reads_as_much_as_it_returns() -> None:
    lookup = _op(target="aten.embedding.default", elements=1000, bytes_read=10**9, bytes_written=2000)
    assert traffic(lookup) == 4000
    assert _price(lookup).duration_us == 2.0
    assert _price(replace(lookup, target="aten.sum.default")).duration_us > 1000


@pytest.mark.parametrize(("footprint", "faster"), [(50 * 10**6, 1.5), (65 * 10**6, 1.25), (80 * 10**6, 1.0)])
def test_reads_from_the_cache_are_faster(footprint: int, faster: float) -> None:
    """A cache of 100 MB keeps a program of up to 50 MB, and nothing of one from 80 MB on."""
    copy = _op(elements=10**8, bytes_written=10**8)
    graph = OpGraph({"op": copy}, (), {"w": Storage("w", Role.PARAMETER, footprint, ("w",))}, (), "cuda:0")
    cost = price(graph, replace(GPU, cache_bytes=100 * 10**6))["op"]
    assert cost.duration_us == pytest.approx(1e8 / (0.8e6 * faster))
    assert cost.bandwidth_share == pytest.approx(min(1.0, 0.8 * faster)), "of the memory's bandwidth"
    assert _price(copy, replace(GPU, cache_bytes=10**12), "cpu") == _price(copy, device="cpu")


def test_a_dtype_that_the_profile_lacks_counts_as_float32() -> None:
    product = _matmul(4096, 4096, 4096)
    assert _price(replace(product, dtype="complex64")) == _price(replace(product, dtype="float32"))
    assert _price(replace(product, dtype="float32")).duration_us > 9 * _price(product).duration_us
    with pytest.raises(CostError, match="the profile of GPU has no throughput of float32: measure"):
        _price(replace(product, dtype="int64"), replace(GPU, flops={"float16": 1e8}))


def test_ops_on_the_cpu() -> None:
    product = replace(_matmul(4096, 4096, 4096), device="cpu")
    cost = _price(product)
    assert (cost.duration_us, cost.bandwidth_share) == (0.0, 0.0), "in the graph of a GPU it takes none of its time"
    assert 0 < cost.sm_share <= 0.01
    assert _price(product, device="cpu").duration_us == pytest.approx(2 * 4096**3 / 0.7e8), "no start on a CPU"
    small = _op(elements=4 * 8192)  # fills four multiprocessors; ATen gives one thread 32768 elements
    assert fill(small, GPU) == _busy(4)
    assert fill(replace(small, device="cpu"), GPU) == pytest.approx(1 / 100)


def test_the_shares_of_a_measured_op_follow_from_its_time() -> None:
    """32 of 100 multiprocessors by tiles, unless the op computes at a higher rate than these can."""
    product = _matmul(512, 512, 512)
    for known in (None, 0.03):
        fast = cost_of(product, GPU, 2 * 512**3 / 1e8, "measured", known)
        assert fast.sm_share == pytest.approx(1.0)
    slow = cost_of(product, GPU, 100.0, "measured")
    assert slow.sm_share == _busy(32)
    assert slow.bandwidth_share == pytest.approx(traffic(product) / 100e6)
    assert slow.source == "measured"
    copy = _op(elements=10 * 8192, bytes_written=10**6)
    assert cost_of(copy, GPU, 10.0, "measured").sm_share == _busy(10)
    assert cost_of(copy, GPU, 10.0, "measured", share_filled=0.03).sm_share == pytest.approx(0.03)


@given(flops=sizes, elements=sizes, read=sizes, written=sizes, device=st.sampled_from(["cuda:0", "cpu"]))
@settings(max_examples=50)
def test_costs_are_in_range_and_grow_with_work(flops: int, elements: int, read: int, written: int, device: str) -> None:
    op = _op(flops=flops, elements=elements, bytes_read=read, bytes_written=written, device=device)
    for profile in (GPU, replace(GPU, kernel_us=0.0)):
        cost = _price(op, profile)
        assert cost.duration_us >= (0 if device == "cpu" else profile.kernel_us)
        assert 0 < cost.sm_share <= 1
        assert 0 <= cost.bandwidth_share <= 1
    if (2 * flops > 64 * elements) == (flops > 64 * elements):
        more = replace(op, flops=2 * flops, bytes_written=2 * written)
        assert _price(more).duration_us >= _price(op).duration_us


@pytest.mark.parametrize(("direction", "duration_us"), [("upload", 1002.0), ("peer", 102.0)])
def test_a_copy_between_devices_has_the_bandwidth_of_its_link(direction: str, duration_us: float) -> None:
    """10 MB over a link of 10 kB per µs from the host, or 100 kB per µs from a peer, and 2 µs for any size."""
    copy = _op(target="aten.to.device", crosses=direction, elements=10**7, bytes_read=10**7, bytes_written=10**7)
    cost = _price(copy, replace(GPU, link_bandwidth=1e4, peer_bandwidth=1e5))
    assert (cost.duration_us, cost.sm_share) == (duration_us, 1 / 100)
    assert cost.bandwidth_share == pytest.approx(20 / duration_us, rel=0.01)
    assert _price(_op(crosses=direction)).duration_us == 2.0
