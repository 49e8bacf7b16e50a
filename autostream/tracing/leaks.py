"""Fake tensors that a model keeps beyond its trace, in a cache or a list, and how to take them back.

Tracing runs the model's Python, and with it whatever remembers tensors by other means than attributes: a function under
``functools.lru_cache``, a dictionary of a module. Such a memory would go on to hand fake tensors to the plain model.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from functools import _lru_cache_wrapper
from typing import Any

from torch import Tensor

Watched = list["weakref.ref[Tensor]"]
"""The tensors that were seen in a trace; each dies when nobody holds it any more."""


def recalled(watched: Watched) -> bool:
    """Take back those that are still held, and say whether there are any.

    They are removed from dictionaries, lists and sets; an ``lru_cache`` that has one is cleared. Call it where nothing
    of the trace is held any more but its graph.
    """
    kept = _alive(watched)
    if not _holders(kept, [kept]):
        return False
    del kept
    gc.collect()  # in cycles, such as that of an exception and its traceback
    kept = _alive(watched)
    found = [_taken_back(tensor, [kept]) for tensor in kept]
    return any(found)


def _alive(watched: Watched) -> list[Tensor]:
    alive = (reference() for reference in watched)
    return [tensor for tensor in alive if tensor is not None]


def _taken_back(value: Any, own: list[Any]) -> bool:
    """Remove a value from all that holds it but our own, and say whether anything did."""
    # No closure here: its cell would be one more holder.
    holders = _holders([value], own)
    for holder in holders:
        with suppress(Exception):  # a container of somebody's own making may have other ideas
            _remove(value, holder, [*own, holders])
    return bool(holders)


def _holders(values: list[Any], own: list[Any]) -> list[Any]:
    """What holds one of these values, but for our own and PyTorch, which holds the inputs as long as a graph lives."""
    from torch.fx.experimental.symbolic_shapes import TrackedFake

    own = [*own, values]
    return [h for h in gc.get_referrers(*values) if not isinstance(h, TrackedFake) and not _is_one_of(own, h)]


def _remove(value: Any, holder: Any, own: list[Any]) -> None:
    if isinstance(holder, dict):
        # Python looks attributes of classes up in a cache, which a change behind the class's back would leave dangling.
        classes = [owner for owner in gc.get_referrers(holder) if isinstance(owner, type)]
        for key in [key for key, held in holder.items() if held is value]:
            if classes:
                delattr(classes[0], key)
            else:
                del holder[key]
    elif isinstance(holder, list):
        holder[:] = [held for held in holder if held is not value]
    elif isinstance(holder, set):
        holder.discard(value)
    elif isinstance(holder, _lru_cache_wrapper):
        holder.cache_clear()
    elif isinstance(holder, tuple):  # cannot be changed, so it goes as a whole
        _taken_back(holder, own)
    elif hasattr(holder, "__dict__"):
        _remove(value, vars(holder), own)


def _is_one_of(objects: list[Any], candidate: Any) -> bool:
    return any(candidate is one for one in objects)
