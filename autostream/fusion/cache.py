"""A program's ops in fused kernels: kept from an earlier process, or fused now and kept.

    Program of ATen ops ──▶ fingerprint ──▶ is there a file of that name?
                                              │ yes                    │ no, or it is damaged
                                   read the graph of kernels    fuse, write the graph
                                              ╰──────────┬─────────────╯
                                                 Program of kernels

Lowering and scheduling take Inductor seconds that a second process need not spend. Its own cache of graphs keeps Python
code, which calls kernels one after another; here it is the graph (``kernel_json.py``). Kernels go Inductor's own way,
by which Triton finds on disk what it has compiled.

Who asks Inductor to keep nothing (``force_disable_caches``) has nothing kept here either.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autostream.errors import first_line
from autostream.fusion.fingerprint import fingerprint
from autostream.fusion.inductor import fuse, fused_before, obstacle, with_settings
from autostream.fusion.kernel_json import from_json, to_json
from autostream.ir import Decision, Program
from autostream.options import cache_folder
from autostream.store import HINDRANCES, not_kept, read_json, reported, write_json
from autostream.utils.stopwatch import Stopwatch

log = logging.getLogger(__name__)

_MOST = 256
"""Files. One of GoogLeNet's size is a third of a MB."""

Remarks = tuple[Decision, ...]
"""What was wrong with keeping, for a report."""


def fused_here(
    program: Program, options: Mapping[str, Any], tensors: Sequence[Tensor], stopwatch: Stopwatch
) -> tuple[Program, Remarks]:
    """What :func:`~autostream.fusion.inductor.fuse` makes of a program, from the disk if it was made before.

    Args:
        program: of ATen ops. It stays as it is.
        options: of ``torch._inductor.config``.
        tensors: its arguments. With ``{"freezing": True}`` kernels depend on what they hold, and are not kept.
        stopwatch: is told what took how long: ``"load"`` alone if nothing was left to fuse.

    Raises:
        FusionError: as ``fuse`` does.
    """
    path: Path | None = None
    remarks: Remarks = ()
    if not options.get("freezing") and not obstacle(program.device):
        with stopwatch("load"):
            path = _place(program, options)
            kept, remarks = _kept(path, program, options) if path else (None, ())
        if kept is not None:
            return kept, remarks
    with stopwatch("fuse"):
        fused = fuse(program, options, tensors)
    return fused, (*remarks, *(_keep(path, fused, program) if path else ()))


def _place(program: Program, options: Mapping[str, Any]) -> Path | None:
    """The file of a program, whether or not it exists; ``None`` if there is to be none."""
    from torch._inductor import config

    try:
        with with_settings(options):
            if config.force_disable_caches:
                return None
            return cache_folder() / "fused" / f"{fingerprint(program)}.json"
    except Exception as error:  # whatever it is, fusing does without
        log.debug("fused kernels are not kept: %s", first_line(error))
        return None


def _kept(path: Path, program: Program, options: Mapping[str, Any]) -> tuple[Program | None, Remarks]:
    """What a file holds, and what was wrong with it."""
    from autostream.fusion.kernel_graph import made_again

    try:
        data = read_json(path)
        with with_settings(options):
            kernels = from_json(data, program, partial(made_again, device=torch.device(program.device)))
            return fused_before(program, kernels), ()
    except FileNotFoundError:
        return None, ()
    except Exception as error:
        reason = f"{path} cannot be used ({first_line(error)}); its program is fused again"
        return None, (reported("cache rebuilt", reason),)


def _keep(path: Path, fused: Program, program: Program) -> Remarks:
    """Write a program's file; what hindered that."""
    try:
        data = to_json(fused.module, program)
    except Exception as error:  # whatever it is, the next process fuses again
        log.debug("fused kernels are not kept: %s", first_line(error))
        return ()
    try:
        write_json(path, data, _MOST)
    except HINDRANCES as error:
        return (not_kept("fused kernels", error),)
    return ()
