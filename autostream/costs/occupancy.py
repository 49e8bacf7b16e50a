"""Which share of a GPU's multiprocessors one launch of a kernel fills.

    resident blocks = how often a block's warps, registers and shared memory fit on one multiprocessor
    share           = blocks of the grid / (resident blocks × multiprocessors)

As NVIDIA's occupancy calculator reckons it (CUDA C++ Programming Guide, "Multiprocessor Level" and "Technical
Specifications per Compute Capability").
"""

from __future__ import annotations

from typing import NamedTuple

from autostream.kernels import Footprint

_REGISTERS = 64 * 1024
"""Of every multiprocessor since 2014."""

# What is given out at once: registers to a warp, to how many warps, and bytes of shared memory to a block, of which
# the system keeps some for itself.
_THREADS_OF_A_WARP = 32
_REGISTER_UNIT = 256
_WARP_UNIT = 4
_SHARED_UNIT = 128
_SHARED_KEPT = 1024


class Multiprocessor(NamedTuple):
    """What one multiprocessor holds at a time; by default as in an H100 or H200.

    Attributes:
        blocks: thread blocks.
        warps: of all blocks.
        shared_bytes: of shared memory.
    """

    blocks: int = 32
    warps: int = 64
    shared_bytes: int = 228 * 1024


def share_filled(footprint: Footprint, multiprocessor: Multiprocessor, multiprocessors: int) -> float:
    """The share of a GPU that a launch fills while all of its blocks run, above 0 and at most 1.

    Args:
        footprint: of the launch.
        multiprocessor: what one holds.
        multiprocessors: how many there are.

    Example:
        >>> half = Footprint(blocks=4 * 132, warps=8, registers=32, shared_bytes=0)
        >>> share_filled(half, Multiprocessor(), 132)
        0.5
    """
    return min(1.0, max(1, footprint.blocks) / (resident_blocks(footprint, multiprocessor) * multiprocessors))


def resident_blocks(footprint: Footprint, multiprocessor: Multiprocessor) -> int:
    """How many blocks of a launch run on one multiprocessor at a time; 1 at least, for it does run.

    Example:
        >>> resident_blocks(Footprint(blocks=1, warps=4, registers=128, shared_bytes=0), Multiprocessor())
        4
    """
    by_registers = _REGISTERS // _rounded_up(max(1, footprint.registers) * _THREADS_OF_A_WARP, _REGISTER_UNIT)
    warps = min(multiprocessor.warps, by_registers // _WARP_UNIT * _WARP_UNIT)
    shared_bytes = _rounded_up(footprint.shared_bytes + _SHARED_KEPT, _SHARED_UNIT)
    fitting = min(multiprocessor.blocks, warps // footprint.warps, multiprocessor.shared_bytes // shared_bytes)
    return max(1, fitting)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
