"""Fake tensors and numbers that a model keeps beyond its trace, in a cache or a list, and how to take them back.

Tracing runs the model's Python, and with it whatever remembers tensors by other means than attributes: a function under
``functools.lru_cache``, a dictionary of a module. Such a memory would go on to hand fake tensors to the plain model.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from contextlib import suppress
from functools import _lru_cache_wrapper
from typing import Any

from torch._subclasses import FakeTensor

Watched = list["weakref.ref[Any]"]
"""The tensors or numbers that were seen in a trace; each dies when nobody holds it any more."""


def recalled(watched: Watched) -> bool:
    """Take back those that are still held, and say whether there are any.

    They are removed from dictionaries, lists and sets; an ``lru_cache`` that has one is cleared. Call it where nothing
    of the trace is held any more but its graph.
    """
    for generation in (1, 2):  # cycles, such as that of an exception and its traceback: a trace's are mostly young
        if not _holders(_held(watched), []):
            return False
        gc.collect(generation)
    return taken_back(watched)


def taken_back(watched: Watched) -> bool:
    """Remove those that are still alive from whatever holds them, if only garbage, and say whether anything did.

    To be called where a trace has failed: the traceback of its error holds some anyway.
    """
    return _removed(_held(watched), [])


def _held(watched: Watched) -> list[Any]:
    """Those with more references than PyTorch's to the inputs, which it holds as long as a graph lives.

    To count references takes no time; to look for who holds them is to look at all objects that there are.
    """
    tensors = (reference() for reference in watched)
    alive: list[Any] = list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())
    alone = [object()]
    shapes = {fake.fake_mode.shape_env for fake in alive if isinstance(fake, FakeTensor)}
    inputs = Counter(id(entry.fake) for shape in shapes if shape for entry in shape.tracked_fakes or ())
    once = sys.getrefcount(alone[0])
    return [alive[i] for i in range(len(alive)) if sys.getrefcount(alive[i]) > once + inputs[id(alive[i])]]


def _removed(values: list[Any], own: list[Any]) -> bool:
    """Remove values from all that holds them but our own, and say whether anything did."""
    # No closure here: its cell would be one more holder. And to look for holders takes long: once for all the values.
    holders = _holders(values, own)
    for holder in holders:
        with suppress(Exception):  # a container of somebody's own making may have other ideas
            _remove(values, holder)
    tuples = [holder for holder in holders if isinstance(holder, tuple)]  # cannot be changed, so they go as a whole
    if tuples:
        _removed(tuples, [*own, values, holders])
    return bool(holders)


def _holders(values: list[Any], own: list[Any]) -> list[Any]:
    """What holds one of these values, but for our own and PyTorch, which holds the inputs as long as a graph lives."""
    from torch.fx.experimental.symbolic_shapes import TrackedFake

    arguments = tuple(values)  # one of our own: Python makes another one of a list, and finds that
    own = [*own, values, arguments]
    holders = gc.get_referrers(*arguments) if values else []
    return [h for h in holders if not isinstance(h, TrackedFake) and not _is_one_of(own, h)]


def _remove(values: list[Any], holder: Any) -> None:
    if isinstance(holder, dict):
        # Python looks attributes of classes up in a cache, which a change behind the class's back would leave dangling.
        classes = [owner for owner in gc.get_referrers(holder) if isinstance(owner, type)]
        for key in [key for key, held in holder.items() if _is_one_of(values, held)]:
            if classes:
                delattr(classes[0], key)
            else:
                del holder[key]
    elif isinstance(holder, list):
        holder[:] = [held for held in holder if not _is_one_of(values, held)]
    elif isinstance(holder, set):
        holder.difference_update([held for held in holder if _is_one_of(values, held)])
    elif isinstance(holder, _lru_cache_wrapper):
        holder.cache_clear()
    elif hasattr(holder, "__dict__"):
        _remove(values, vars(holder))


def _is_one_of(objects: list[Any], candidate: Any) -> bool:
    return any(candidate is one for one in objects)
