"""Saves and restores tensors that trial runs write, so that the model's state does not change.

    save written tensors ─▶ restore ─▶ run ─▶ restore ─▶ run ─▶ … ─▶ restore

Schedules are timed, and captures warmed up, by runs on the model's own state. Each has to start from the same state:
the write position of a ring buffer or a cache, advanced by each run, would leave the buffer. On a GPU that is a
device-side assertion, after which the process cannot use the device any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from autostream.runtime.static_inputs import copy_together, copyable


class Restore:
    """Restores tensors to their contents at its construction, each time that it is called.

    It copies on the current streams, in few launches. The caller hides these writes from autograd (:func:`undone`
    does).

    Args:
        tensors: that runs write; they may share memory.

    Attributes:
        spans: the memory that is restored; empty if there is none.

    Example:
        >>> position = torch.tensor([7])
        >>> restore = Restore([position])
        >>> for _ in range(3):
        ...     restore()
        ...     _ = position.add_(1)
        >>> position
        tensor([8])
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.spans = tuple(map(copyable, tensors))
        # One launch copies several tensors only if they have the same device and dtype.
        groups = defaultdict[object, list[tuple[Tensor, Tensor]]](list)
        with torch.no_grad():
            for span in self.spans:
                groups[span.device, span.dtype].append((span, span.clone()))
        self._copies = [tuple(map(list, zip(*pairs, strict=True))) for pairs in groups.values()]

    def __call__(self) -> None:
        """Restore them."""
        # In inference mode, both ordinary tensors and inference tensors can be written.
        with torch.inference_mode():
            for spans, saved in self._copies:
                copy_together(spans, saved)


@contextmanager
def undone(arguments: Sequence[Tensor], writes: Sequence[bool], devices: Iterable[str]) -> Iterator[Restore]:
    """Restore a program's arguments and the states of the random generators after runs inside.

    Args:
        arguments: of the program.
        writes: which of them it writes.
        devices: whose generators are restored, beside the host's.

    Yields:
        A function that restores the arguments, to be called before each run.
    """
    restore = Restore(tensor for tensor, is_written in zip(arguments, writes, strict=True) if is_written)
    with versions_kept(restore.spans), torch.random.fork_rng([device for device in devices if device != "cpu"]):
        try:
            yield restore
        finally:
            restore()


def versions_kept(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Hide writes inside from autograd, as they will be undone: a pending backward must not fail because of them.

    Private to PyTorch (seen in 2.11 and 2.13); where a version lacks it, autograd sees the writes. Inference tensors
    have no version counter.
    """
    preserve = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    versioned = tuple(tensor for tensor in tensors if not tensor.is_inference())
    return preserve(versioned) if preserve and versioned else nullcontext()
