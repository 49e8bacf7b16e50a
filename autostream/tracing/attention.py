"""Fused attention, which PyTorch's modules give up as soon as anything traces them.

In eval mode and without gradients, ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call one fused op each.
Under a tracer they take another way, with other roundings, and on a GPU with more copies: ViT-B/16 then runs 1.05 times
as long on an H200, and 1.37 times at batch 8. Here they choose as they do in eager mode.

Private to PyTorch (seen on 2.11 and 2.13): how these modules find out that they are traced. Where a version differs,
they are traced in the other way. (On 2.11 the encoder layer's op cannot say what it returns without running: a trace
runs it once, on zeros.)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.modules import activation, transformer

_MODULES = {activation.__name__, transformer.__name__}


@contextmanager
def fused_attention() -> Iterator[None]:
    """Trace inside this: this thread's attention modules fuse where they would if nobody traced."""
    if not _supported():
        yield
        return
    tracing: int | None = threading.get_ident()
    overridden, traced = torch.overrides.has_torch_function, activation._is_make_fx_tracing

    def has_torch_function(tensors: Any) -> bool:
        # Export puts a mode around all calls; tensors with functions of their own are refused before any trace.
        asks = sys._getframe(1).f_globals.get("__name__")
        return not (asks in _MODULES and threading.get_ident() == tracing) and overridden(tensors)

    def is_make_fx_tracing() -> bool:
        return threading.get_ident() != tracing and bool(traced())  # type: ignore[no-untyped-call]

    try:
        with (
            mock.patch.object(torch.overrides, "has_torch_function", has_torch_function),
            mock.patch.object(activation, "_is_make_fx_tracing", is_make_fx_tracing),
        ):
            yield
    finally:
        tracing = None  # a module that is first imported in between keeps what it imports


def _supported() -> bool:
    return hasattr(activation, "_is_make_fx_tracing")
