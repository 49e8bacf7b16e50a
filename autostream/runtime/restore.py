"""What runs write, put back: before each run that nobody asked for, and after the last.

    what is written, saved ─▶ put back ─▶ run ─▶ put back ─▶ run ─▶ … ─▶ put back

Schedules are timed, and captures warmed up, by runs on the model's own state. A run that finds what another one has
left there is no run of the model: a place in a ring buffer or a cache that each run counts up leaves the buffer. On a
GPU that is an assertion of the device, after which the process can use the device no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from autostream.runtime.static_inputs import copy_together, copyable


class Restore:
    """Puts tensors back to what they hold when this is made, as often as it is called.

    On the current streams, in few launches. Whoever calls it keeps autograd from seeing that (:func:`undone` does).

    Args:
        tensors: what runs write; they may share memory.

    Attributes:
        spans: the memory that is put back; none where there is nothing to do.

    Example:
        >>> place = torch.tensor([7])
        >>> restore = Restore([place])
        >>> for _ in range(3):
        ...     restore()
        ...     _ = place.add_(1)
        >>> place
        tensor([8])
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.spans = tuple(map(copyable, tensors))
        # One launch copies tensors of one kind only, and each of the others in one of its own.
        alike = defaultdict[object, list[tuple[Tensor, Tensor]]](list)
        with torch.no_grad():
            for span in self.spans:
                alike[span.device, span.dtype].append((span, span.clone()))
        self._copies = [tuple(map(list, zip(*pairs, strict=True))) for pairs in alike.values()]

    def __call__(self) -> None:
        """Put them back."""
        # Only in inference mode may both ordinary tensors and those made in inference mode be written.
        with torch.inference_mode():
            for spans, saved in self._copies:
                copy_together(spans, saved)


@contextmanager
def undone(arguments: Sequence[Tensor], writes: Sequence[bool], devices: Iterable[str]) -> Iterator[Restore]:
    """Put back afterwards what runs in between write into arguments, and the states of the random generators.

    Args:
        arguments: of a program.
        writes: which of them it writes.
        devices: where random numbers are drawn, beside the host.

    Yields:
        What puts the arguments back in between too: to be called before each run.
    """
    restore = Restore(tensor for tensor, is_written in zip(arguments, writes, strict=True) if is_written)
    with versions_kept(restore.spans), torch.random.fork_rng([device for device in devices if device != "cpu"]):
        try:
            yield restore
        finally:
            restore()


def versions_kept(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Let autograd not see what is written to tensors inside, for it will be undone: a pending backward must not fail.

    Private to PyTorch (seen in 2.11 and 2.13); where a version lacks it, autograd sees the writes. Tensors made in
    inference mode have no version.
    """
    preserve = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    versioned = tuple(tensor for tensor in tensors if not tensor.is_inference())
    return preserve(versioned) if preserve and versioned else nullcontext()
