"""Which share of a GPU a launch fills, held against NVIDIA's occupancy calculator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.costs.occupancy import Multiprocessor, resident_blocks, share_filled
from autostream.kernels import Footprint

H200 = Multiprocessor()
L4 = Multiprocessor(blocks=24, warps=48, shared_bytes=100 * 1024)

footprints = st.builds(
    Footprint,
    blocks=st.integers(0, 10**6),
    warps=st.sampled_from([1, 2, 4, 8, 16, 32]),
    registers=st.integers(0, 255),
    shared_bytes=st.integers(0, 227 * 1024),
)


@pytest.mark.parametrize(
    ("warps", "registers", "shared_bytes", "multiprocessor", "resident"),
    [
        (1, 16, 0, H200, 32),  # block slots
        (4, 16, 0, H200, 16),  # warps
        (2, 40, 0, H200, 24),  # registers: 1280 for a warp, so 51 warps, of which 48 in groups of four
        (8, 41, 0, H200, 5),  # registers: 1312 for a warp become 1536
        (4, 255, 0, H200, 2),
        (32, 64, 0, H200, 1),
        (4, 32, 57 * 1024, H200, 3),  # shared memory: 4 × 57 KiB would fit, but for 1 KiB each of the system's
        (4, 32, 56 * 1024, H200, 4),
        (4, 32, 227 * 1024, H200, 1),
        (1, 16, 0, L4, 24),
        (4, 16, 0, L4, 12),
        (4, 32, 24 * 1024, L4, 4),
        (32, 255, 300 * 1024, H200, 1),  # cannot be, but was launched
    ],
)
def test_as_many_blocks_reside_as_the_scarcest_resource_admits(
    warps: int, registers: int, shared_bytes: int, multiprocessor: Multiprocessor, resident: int
) -> None:
    assert resident_blocks(Footprint(1, warps, registers, shared_bytes), multiprocessor) == resident


def test_a_share_counts_blocks_not_multiprocessors() -> None:
    """One small block on each multiprocessor leaves most of the device to others."""
    small = Footprint(blocks=132, warps=4, registers=32, shared_bytes=0)
    assert share_filled(small, H200, 132) == pytest.approx(1 / 16)
    assert share_filled(replace(small, warps=32), H200, 132) == pytest.approx(1 / 2)
    assert share_filled(replace(small, blocks=16 * 132), H200, 132) == 1.0
    assert share_filled(replace(small, blocks=10**6), H200, 132) == 1.0


@given(footprints, st.sampled_from([H200, L4]), st.integers(1, 200))
def test_shares_stay_in_their_range(footprint: Footprint, multiprocessor: Multiprocessor, count: int) -> None:
    assert 0 < share_filled(footprint, multiprocessor, count) <= 1


@given(footprints, st.sampled_from(["blocks", "warps", "registers", "shared_bytes"]))
def test_whoever_takes_more_fills_no_less(footprint: Footprint, what: str) -> None:
    more = replace(footprint, **{what: 2 * getattr(footprint, what)})
    assert share_filled(more, H200, 132) >= share_filled(footprint, H200, 132)
