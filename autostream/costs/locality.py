"""How much of what ops read comes from memory, because the program as a whole does not fit into the last-level cache.

    footprint      0 ........ half of the cache ........ 4/5 of it ........
    missed share   0 ................ 0 ....... rises to 1 ........... 1

A program that runs again and again goes round in its memory, and a cache that gives up what was used least recently
keeps nothing of a round that is larger than itself, so there is not much between all and nothing. The two ends are
where the times of 26 models on an H200, one op after the other, left those of their ops timed with warm caches and
came to those timed with cold ones.
"""

from __future__ import annotations

from autostream.ir import DeviceProfile, OpGraph
from autostream.scheduling.peak import given_bytes, peak_bytes
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.releases import place_releases

_FITS = 0.5
_EXCEEDS = 0.8


def missed_share(graph: OpGraph, profile: DeviceProfile) -> float:
    """The share of its reads that a program finds in memory alone, 0 to 1; 0 where the cache's size is not known.

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
    """The memory that a program goes through in a run on one stream: what is given to it, and its blocks in turn."""
    return given_bytes(graph) + peak_bytes(graph, place_releases(graph, one_stream(graph)))
