"""Estimates which share of its reads a program finds in memory and not in the last-level cache.

    footprint      0 ........ half of the cache ........ 4/5 of it ........
    missed share   0 ................ 0 ....... rises to 1 ........... 1

A program that is replayed goes through the same memory in a cycle. A cache that evicts the least recently used line
keeps nothing of a cycle larger than itself, so the missed share rises steeply. The two ends were fitted on an H200 to
26 models on one stream: where their times begin to exceed the sum of their ops timed with warm caches, and where they
reach the sum of those timed with cold caches.
"""

from __future__ import annotations

from autostream.ir import DeviceProfile, OpGraph
from autostream.scheduling.peak import given_bytes, peak_bytes
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.releases import place_releases

_FITS = 0.5
_EXCEEDS = 0.8


def missed_share(graph: OpGraph, profile: DeviceProfile) -> float:
    """The share of its reads that a program finds in memory only, 0 to 1; 0 if the size of the cache is unknown.

    Args:
        graph: the ops and storages.
        profile: the device.

    Example:
        >>> from autostream.costs.device import profile_named
        >>> from autostream.ir import Role, Storage
        >>> weights = {"w": Storage("w", Role.PARAMETER, 100 * 2**20, ("w",))}
        >>> missed_share(OpGraph({}, (), weights, (), "cuda:0"), profile_named("h200"))
        1.0
    """
    if not profile.cache_bytes:
        return 0.0
    filled = footprint_bytes(graph) / profile.cache_bytes
    return min(1.0, max(0.0, (filled - _FITS) / (_EXCEEDS - _FITS)))


def footprint_bytes(graph: OpGraph) -> int:
    """The memory that a program accesses in a run on one stream: its arguments, and the peak of its intermediates."""
    return given_bytes(graph) + peak_bytes(graph, place_releases(graph, one_stream(graph)))
