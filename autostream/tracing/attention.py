"""Fused attention, which PyTorch's modules give up as soon as anything traces them.

In eval mode and without gradients, ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call one fused op each.
Under a tracer they take another way, with other roundings, and on a GPU with more copies: ViT-B/16 then runs 1.05 times
as long on an H200, and 1.37 times at batch 8. Here they choose as they do in eager mode.

Private to PyTorch (seen on 2.11 and 2.13): how these modules find out that they are traced. Where a version differs,
they are traced in the other way. (On 2.11 the encoder layer's op cannot say what it returns without running: a trace
runs it once, on zeros.)
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.modules import activation, transformer

_MODULES = {activation.__name__, transformer.__name__}


@contextmanager
def fused_attention() -> Iterator[None]:
    """Trace inside this, or watch: this thread's attention modules fuse where they would if nobody did.

    Several threads may be inside of it at a time: the first patches, and the last puts back.
    """
    if not _supported():
        yield
        return
    inside = threading.get_ident()
    with _changing:
        if not _inside:
            _patches.enter_context(_patched())
        _inside.append(inside)
    try:
        yield
    finally:
        with _changing:
            _inside.remove(inside)
            if not _inside:
                _patches.close()


@contextmanager
def _patched() -> Iterator[None]:
    overridden, traced = torch.overrides.has_torch_function, activation._is_make_fx_tracing

    def has_torch_function(tensors: Any) -> bool:
        # Export puts a mode around all calls; tensors with functions of their own are refused before any trace.
        asks = sys._getframe(1).f_globals.get("__name__")
        return not (asks in _MODULES and threading.get_ident() in _inside) and overridden(tensors)

    def is_make_fx_tracing() -> bool:
        return threading.get_ident() not in _inside and bool(traced())  # type: ignore[no-untyped-call]

    with (
        mock.patch.object(torch.overrides, "has_torch_function", has_torch_function),
        mock.patch.object(activation, "_is_make_fx_tracing", is_make_fx_tracing),
    ):
        yield


_inside: list[int] = []
"""Threads, as often as they are. A module that is first imported meanwhile keeps what it imports: it looks here."""

_patches = ExitStack()
_changing = threading.Lock()

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_changing.release)


def _supported() -> bool:
    return hasattr(activation, "_is_make_fx_tracing")
