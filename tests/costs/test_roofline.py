"""The roofline: which roof holds, how small kernels lower it, and what each op takes of the device."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.costs.roofline import cost_of, fill, price, traffic
from autostream.errors import CostError
from autostream.ir import DeviceProfile, Op, OpCost, OpGraph, Role, Storage

# 100 SMs; 1e6 bytes per µs; 1e8 float16 operations per µs: numbers to reckon with by hand.
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
    """On so many of the 100 multiprocessors one block runs, and there is room for three more."""
    return pytest.approx(sqrt(blocks / 100) * (0.7 + 0.3 * blocks / 400))


def test_a_large_copy_costs_its_bytes_over_four_fifths_of_the_bandwidth() -> None:
    cost = _price(_op(elements=10**7, bytes_read=2 * 10**7, bytes_written=2 * 10**7))
    assert cost.duration_us == pytest.approx(4e7 / 0.8e6)
    assert cost.sm_share == 1.0
    assert cost.bandwidth_share == pytest.approx(0.8)


def test_a_large_product_costs_its_flops_over_seven_tenths_of_the_peak_and_a_start() -> None:
    cost = _price(_matmul(4096, 4096, 4096))
    assert cost.duration_us == pytest.approx(1.5 + 2 * 4096**3 / 0.7e8)
    assert cost.sm_share == 1.0
    assert cost.bandwidth_share == pytest.approx(3 * 2 * 4096**2 / (cost.duration_us * 1e6))


def test_nothing_is_shorter_than_the_shortest_kernel() -> None:
    cost = _price(_op(elements=10, bytes_read=20, bytes_written=20))
    assert cost.duration_us == 2.0
    assert cost.sm_share == _busy(1)
    assert cost.bandwidth_share == pytest.approx(40 / 2e6)


def test_a_product_of_few_tiles_gets_the_peak_of_as_many_multiprocessors() -> None:
    # 512 × 512 results are 32 tiles of 64 × 128; it reads 512 KiB × 2 = 16 blocks of 64 KiB, fewer than the tiles.
    cost = _price(_matmul(512, 512, 512))
    assert cost.sm_share == _busy(32)
    assert cost.duration_us == pytest.approx(1.5 + 2 * 512**3 / (0.7e8 * 0.32))


def test_a_small_kernel_gets_the_bandwidth_of_as_many_multiprocessors() -> None:
    # 10 × 8192 results keep ten multiprocessors busy, which draw a tenth of 0.8e6 bytes per µs.
    cost = _price(_op(elements=10 * 8192, bytes_written=10**6))
    assert cost.duration_us == pytest.approx(12.5)
    assert cost.bandwidth_share == pytest.approx(0.08)


def test_a_product_with_a_vector_fills_the_device_by_what_it_reads() -> None:
    # One row of 4096 results is one tile, but libraries split the 32 MiB of weights among all multiprocessors.
    cost = _price(_matmul(1, 4096, 4096))
    assert cost.sm_share == 1.0
    assert cost.duration_us == pytest.approx(1.5 + traffic(_matmul(1, 4096, 4096)) / 0.8e6)


def test_a_reduction_to_one_number_is_as_parallel_as_its_input() -> None:
    total = _op(target="aten.sum.default", elements=1, bytes_read=400 * 32 * 1024, bytes_written=2)
    assert fill(total, GPU) == 1.0
    assert fill(replace(total, bytes_read=10 * 32 * 1024), GPU) == _busy(10)


def test_a_lookup_reads_what_it_returns_not_the_table() -> None:
    lookup = _op(target="aten.embedding.default", elements=1000, bytes_read=10**9, bytes_written=2000)
    assert traffic(lookup) == 4000
    assert _price(lookup).duration_us == 2.0
    assert _price(replace(lookup, target="aten.sum.default")).duration_us > 1000


@pytest.mark.parametrize(
    ("footprint", "faster"), [(10**6, 1.5), (50 * 10**6, 1.5), (65 * 10**6, 1.25), (80 * 10**6, 1.0), (10**9, 1.0)]
)
def test_bytes_come_faster_as_far_as_the_program_fits_into_the_cache(footprint: int, faster: float) -> None:
    """A cache of 100 MB keeps programs of up to half of it, and of those from four fifths of it on nothing."""
    copy = _op(elements=10**8, bytes_written=10**8)
    graph = OpGraph({"op": copy}, (), {"w": Storage("w", Role.PARAMETER, footprint, ("w",))}, (), "cuda:0")
    cost = price(graph, replace(GPU, cache_bytes=100 * 10**6))["op"]
    assert cost.duration_us == pytest.approx(1e8 / (0.8e6 * faster))
    assert cost.bandwidth_share == pytest.approx(min(1.0, 0.8 * faster)), "of the memory's"


def test_the_cache_of_a_cpu_is_in_what_its_bandwidth_is_taken_for() -> None:
    copy = _op(elements=10**8, bytes_written=10**8)
    assert _price(copy, replace(GPU, cache_bytes=10**12), "cpu") == _price(copy, device="cpu")


def test_a_dtype_that_the_device_does_not_list_counts_as_float32() -> None:
    product = _matmul(4096, 4096, 4096)
    assert _price(replace(product, dtype="complex64")) == _price(replace(product, dtype="float32"))
    assert _price(replace(product, dtype="float32")).duration_us > 9 * _price(product).duration_us
    with pytest.raises(CostError, match="the profile of GPU has no throughput of float32: measure"):
        _price(replace(product, dtype="int64"), replace(GPU, flops={"float16": 1e8}))


def test_an_op_of_the_host_takes_no_time_of_the_gpu() -> None:
    product = replace(_matmul(4096, 4096, 4096), device="cpu")
    assert _price(product).duration_us == 0.0
    assert _price(product).bandwidth_share == 0.0
    assert 0 < _price(product).sm_share <= 0.01
    assert _price(product, device="cpu").duration_us == pytest.approx(2 * 4096**3 / 0.7e8), "and no start on a CPU"


def test_a_core_takes_more_results_than_a_multiprocessor_before_the_next_one_helps() -> None:
    # 4 × 8192 results fill four multiprocessors; ATen gives one thread 32768.
    small = _op(elements=4 * 8192)
    assert fill(small, GPU) == _busy(4)
    assert fill(replace(small, device="cpu"), GPU) == pytest.approx(1 / 100)


def test_a_measured_time_decides_the_shares() -> None:
    # 32 of 100 multiprocessors by tiles; but whoever computes at the full rate must have all.
    product = _matmul(512, 512, 512)
    fast = cost_of(product, GPU, 2 * 512**3 / 1e8, "measured")
    slow = cost_of(product, GPU, 100.0, "measured")
    assert fast.sm_share == pytest.approx(1.0)
    assert slow.sm_share == _busy(32)
    assert slow.bandwidth_share == pytest.approx(traffic(product) / 100e6)
    assert slow.source == "measured"


def test_a_share_that_is_known_counts_but_not_below_what_arithmetic_proves() -> None:
    copy = _op(elements=10 * 8192, bytes_written=10**6)
    assert cost_of(copy, GPU, 10.0, "measured").sm_share == _busy(10)
    assert cost_of(copy, GPU, 10.0, "measured", share_filled=0.03).sm_share == pytest.approx(0.03)
    product = _matmul(512, 512, 512)
    assert cost_of(product, GPU, 2 * 512**3 / 1e8, "measured", share_filled=0.03).sm_share == pytest.approx(1.0)


def test_every_op_is_priced_in_program_order() -> None:
    ops = {name: _op(name) for name in ("b", "a", "c")}
    assert list(price(OpGraph(ops, (), {}, (), "cuda:0"), GPU)) == ["b", "a", "c"]


@given(flops=sizes, elements=sizes, read=sizes, written=sizes, device=st.sampled_from(["cuda:0", "cpu"]))
def test_shares_stay_in_their_ranges(flops: int, elements: int, read: int, written: int, device: str) -> None:
    op = _op(flops=flops, elements=elements, bytes_read=read, bytes_written=written, device=device)
    for profile in (GPU, replace(GPU, kernel_us=0.0)):
        cost = _price(op, profile)
        assert cost.duration_us >= (0 if device == "cpu" else profile.kernel_us)
        assert 0 < cost.sm_share <= 1
        assert 0 <= cost.bandwidth_share <= 1


@given(flops=sizes, elements=sizes, read=sizes, written=sizes)
def test_more_work_of_the_same_shape_never_costs_less(flops: int, elements: int, read: int, written: int) -> None:
    op = _op(flops=flops, elements=elements, bytes_read=read, bytes_written=written)
    more = replace(op, flops=2 * flops, bytes_written=2 * written)
    if (2 * flops > 64 * elements) == (flops > 64 * elements):
        assert _price(more).duration_us >= _price(op).duration_us


def test_a_copy_from_the_host_takes_as_long_as_the_link_does_and_leaves_the_multiprocessors_alone() -> None:
    """10 MB over a link of 10 kB per µs, with 2 µs however small it is."""
    copy = _op(target="aten.to.device", crosses="upload", elements=10**7, bytes_read=10**7, bytes_written=10**7)
    cost = _price(copy, replace(GPU, link_bandwidth=1e4))
    assert cost.duration_us == 1002.0
    assert cost.sm_share == 1 / 100
    assert cost.bandwidth_share == pytest.approx(0.02, rel=0.01)
    assert _price(_op(crosses="upload")).duration_us == 2.0


def test_a_copy_from_another_device_takes_as_long_as_the_link_between_the_two() -> None:
    copy = _op(target="aten.to.device", crosses="peer", bytes_written=10**7)
    assert _price(copy, replace(GPU, link_bandwidth=1e4, peer_bandwidth=1e5)).duration_us == 102.0
