"""Fused kernels on disk: a program is fused once, and read by later processes.

    Program of ATen ops ──▶ fingerprint ──▶ is there a file of that name?
                                              │ yes                    │ no, or it is damaged
                                   read the graph of kernels    fuse, write the graph
                                              ╰──────────┬─────────────╯
                                                 Program of kernels

Lowering and scheduling by Inductor take seconds. Its own cache of graphs keeps Python code that calls kernels one after
another; this one keeps the graph (``kernel_json.py``). Compiled kernels stay in the caches of Inductor and Triton.

Nothing is kept if Inductor's ``force_disable_caches`` is set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autostream.errors import first_line
from autostream.fusion.fingerprint import fingerprint
from autostream.fusion.inductor import fuse, obstacle, restore_fused, with_settings
from autostream.fusion.kernel_json import from_json, to_json
from autostream.ir import Program
from autostream.store import Notes, Store
from autostream.utils.logs import Log
from autostream.utils.stopwatch import Stopwatch

log = Log(__name__)

_STORE = Store("fused", "fused kernels", "its program is fused again", most=256)
"""A graph of GoogLeNet's size takes a third of a MB."""


def fused_here(
    program: Program, options: Mapping[str, Any], tensors: Sequence[Tensor], stopwatch: Stopwatch
) -> tuple[Program, Notes]:
    """Return what :func:`~autostream.fusion.inductor.fuse` makes of a program, from disk if it was fused before.

    Args:
        program: a program of ATen ops; it is not changed.
        options: of ``torch._inductor.config``.
        tensors: its arguments. With ``{"freezing": True}`` kernels depend on their values, and are not kept.
        stopwatch: records the seconds of the stages ``"load"`` and ``"fuse"``.

    Raises:
        FusionError: as ``fuse`` does.
    """
    key = ""
    notes: Notes = ()
    if not options.get("freezing") and not obstacle(program.device):
        with stopwatch("load"):
            key = _key(program, options)
            cached, notes = _STORE.read(key, partial(_parse, program, options)) if key else (None, ())
        if cached is not None:
            return cached, notes
    with stopwatch("fuse"):
        fused = fuse(program, options, tensors)
    return fused, (*notes, *(_write(key, fused, program) if key else ()))


def _key(program: Program, options: Mapping[str, Any]) -> str:
    """The name of a program's file, or ``""`` if its kernels cannot be kept."""
    from torch._inductor import config

    try:
        with with_settings(options):
            return "" if config.force_disable_caches else fingerprint(program)
    except Exception as error:  # fusing works without a cache
        log.debug("fused kernels are not kept: %s", first_line(error))
        return ""


def _parse(program: Program, options: Mapping[str, Any], text: str) -> Program:
    from autostream.fusion.kernel_graph import kernel_from_recipe

    with with_settings(options):
        kernels = from_json(json.loads(text), program, partial(kernel_from_recipe, device=torch.device(program.device)))
        return restore_fused(program, kernels)


def _write(key: str, fused: Program, program: Program) -> Notes:
    try:
        data = to_json(fused.module, program)
    except Exception as error:  # the next process fuses again
        log.debug("fused kernels are not kept: %s", first_line(error))
        return ()
    return _STORE.write(key, partial(json.dumps, data))
