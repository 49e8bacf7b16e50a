"""Copies of inputs to a captured graph's static inputs, and of its outputs to the caller, with all aliases preserved.

A caller must not be able to tell a replayed graph from the eager model: two inputs that overlap still overlap inside
the graph, an output that is a view of an input is a view of *the caller's* input, outputs that share memory share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from autostream.utils.storages import byte_offset, is_dense, overlaps, span_of, storage_of

Output = Tensor | None
"""An output of a run. An op that leaves one undefined, as fused attention does its weights, returns ``None``."""

MakeOutput = Callable[[Sequence[Tensor], Sequence[Output], dict[int, torch.UntypedStorage]], Output]
"""Makes one of the caller's outputs from the call's arguments, earlier outputs, and copies of shared storages."""


def static_copies(tensors: Sequence[Tensor], copied: Sequence[int]) -> list[Tensor]:
    """The tensors, those at indices ``copied`` replaced by copies of the same strides that alias each other alike.

    Example:
        >>> base = torch.arange(4.0)
        >>> left, both = static_copies([base[:2], base], copied=[0, 1])
        >>> both[0] = 7
        >>> left[0].item(), base[0].item()
        (7.0, 0.0)
    """
    static = list(tensors)
    spans: dict[int, tuple[int, int]] = {}
    for index in copied:
        key = storage_of(tensors[index])
        start, end = span_of(tensors[index])
        low, high = spans.get(key, (start, end))
        spans[key] = min(low, start), max(high, end)
    blocks: dict[int, Tensor] = {}
    for index in copied:
        tensor = tensors[index]
        low, high = spans[storage_of(tensor)]
        low -= low % _ALIGNMENT
        block = blocks.setdefault(storage_of(tensor), torch.empty(high - low, dtype=torch.uint8, device=tensor.device))
        offset = tensor.storage_offset() - low // tensor.element_size()
        static[index] = _view(block.untyped_storage(), tensor, offset)
    for index in copied:
        copyable(static[index]).copy_(copyable(tensors[index]))
    return static


_ALIGNMENT = 512
"""Bytes, as in the caching allocator. Kernels choose vector widths by it, and every dtype's size divides it."""


def copyable(tensor: Tensor) -> Tensor:
    """The tensor, or all memory between its first and last element if several of its elements share an address.

    ``copy_`` cannot write an expanded tensor; a copy of the memory that it covers has the same effect.
    """
    if not overlaps(tensor):
        return tensor
    start, end = span_of(tensor)
    return tensor.as_strided(((end - start) // tensor.element_size(),), (1,), tensor.storage_offset())


def ordinary(tensor: Tensor) -> Tensor:
    """An inference tensor's memory as a tensor that can be written outside of inference mode; any other tensor itself.

    Example:
        >>> with torch.inference_mode():
        ...     x = torch.zeros(2)
        >>> _ = ordinary(x).add_(1)
        >>> x
        tensor([1., 1.])
    """
    if not tensor.is_inference() or tensor.layout is not torch.strided:
        return tensor
    with torch.inference_mode(False):
        return _view(tensor.untyped_storage(), tensor, tensor.storage_offset())


def copier(targets: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
    """A function that copies tensors of the same dtypes, sizes and strides to ``targets``, in few launches.

    A source that is its target is skipped. A source elsewhere in the targets' memory is read before that is written.

    Example:
        >>> values, indices = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
        >>> copier([values, indices])([torch.ones(2), torch.tensor([3, 4])])
        >>> values, indices
        (tensor([1., 1.]), tensor([3, 4]))
    """
    addresses = [target.data_ptr() for target in targets]
    storages = {storage_of(target) for target in targets}
    spans = list(map(copyable, targets))
    plain = all(span is target for span, target in zip(spans, targets, strict=True))
    integers = _as_integers(spans)
    if plain and len(targets) == 1:
        return _copier_of_one(targets[0])

    def copy(sources: Sequence[Tensor]) -> None:
        moving = [index for index, address in enumerate(addresses) if sources[index].data_ptr() != address]
        clashing = [index for index in moving if storage_of(sources[index]) in storages]
        if clashing:
            sources = static_copies(sources, clashing)
        ready = sources if plain else list(map(copyable, sources))
        together = [index for index in moving if index in integers] if integers else ()
        if len(together) > 1:
            targets = [integers[index] for index in together]
            copy_together(targets, [ready[i].view(integers[i].dtype) for i in together])
            moving = [index for index in moving if index not in integers]
        copy_together([spans[i] for i in moving], [ready[i] for i in moving])

    return copy


def copy_together(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors to others of the same dtypes, sizes and strides, in one launch if PyTorch has a kernel for that.

    Example:
        >>> targets = [torch.zeros(2), torch.zeros(3)]
        >>> copy_together(targets, [torch.ones(2), torch.ones(3)])
        >>> targets[1]
        tensor([1., 1., 1.])
    """
    if len(targets) > 1 and all(target.dtype is not torch.complex32 for target in targets):
        torch._foreach_copy_(targets, sources, non_blocking=True)
        return
    for target, source in zip(targets, sources, strict=True):  # for one tensor, copy_ is faster
        target.copy_(source, non_blocking=True)


def _copier_of_one(target: Tensor) -> Callable[[Sequence[Tensor]], None]:
    """As :func:`copier`, in half the time: many models have one input."""
    address, storage = target.data_ptr(), target.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    def copy(sources: Sequence[Tensor]) -> None:
        (source,) = sources
        source_address = source.data_ptr()
        if source_address != address:
            if start <= source_address < end:  # faster than comparing storages
                (source,) = static_copies(sources, [0])
            target.copy_(source, non_blocking=True)

    return copy


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes."""

_LARGE = 2**15
"""Bytes from which a tensor has a launch of its own: the kernel for many tensors has one block per 65536 elements."""


def _as_integers(targets: Sequence[Tensor]) -> dict[int, Tensor]:
    """Targets of several dtypes, viewed as one integer dtype, by index: one launch copies one dtype only.

    The integers are as wide as the smallest element, so that they divide all other elements, and all targets are
    aligned to them. Large targets, and those with gaps, are left out.
    """
    if len({target.dtype for target in targets}) < 2:
        return {}
    small = {
        index: target for index, target in enumerate(targets) if target.nbytes < _LARGE and _is_contiguous_rows(target)
    }
    integer = _INTEGERS[min([8, *(target.element_size() for target in small.values())])]
    with torch.inference_mode(False):  # inference tensors cannot be written outside of inference mode
        return {index: target.view(integer) for index, target in small.items()}


def _is_contiguous_rows(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps, and can be viewed as elements of another size."""
    return tensor.dim() > 0 and tensor.stride(-1) == 1 and is_dense(tensor)


def copier_out(
    outputs: Sequence[Output], makers: Sequence[MakeOutput], shared: frozenset[int] = frozenset()
) -> Callable[[Sequence[Tensor]], list[Output]]:
    """A function that makes the caller's outputs of a call, given its arguments.

    Args:
        outputs: of the captured run.
        makers: of these outputs.
        shared: indices of outputs that are returned without a copy, valid until the next replay (:func:`shareable`).

    Example:
        >>> result = torch.zeros(2)
        >>> (mine,) = copier_out([result], output_makers([result], []))([])
        >>> _ = result.fill_(1)  # the next replay
        >>> mine
        tensor([0., 0.])
    """
    copied = [make.output for make in makers if isinstance(make, _Copy)]
    if not shared and len(copied) == len(outputs):
        return lambda arguments: list(map(Tensor.clone, copied))  # fast path, for most models
    plan = [
        _shared(output) if at in shared else make for at, (output, make) in enumerate(zip(outputs, makers, strict=True))
    ]

    def copy_out(arguments: Sequence[Tensor]) -> list[Output]:
        made: list[Output] = []
        copies: dict[int, torch.UntypedStorage] = {}
        for make in plan:
            made.append(make(arguments, made, copies))
        return made

    return copy_out


def output_makers(outputs: Sequence[Output], static: Sequence[Tensor]) -> list[MakeOutput]:
    """For each output of a captured run, a function that makes the caller's. Keeps no argument or view of one alive.

    Args:
        outputs: of the captured run.
        static: its arguments.
    """
    owners = {storage_of(tensor): index for index, tensor in enumerate(static)}
    count = Counter(storage_of(tensor) for tensor in {id(each): each for each in outputs if each is not None}.values())
    first: dict[int, int] = {}
    plan: list[MakeOutput] = []
    for at, output in enumerate(outputs):
        if output is None:
            plan.append(_none)
            continue
        earlier = first.setdefault(id(output), at)
        owner = owners.get(storage_of(output))
        if earlier != at:
            plan.append(_repeat(earlier))
        elif owner is not None:
            exact = next((i for i, tensor in enumerate(static) if tensor is output), None)
            plan.append(_argument(exact) if exact is not None else _argument_view(owner, output, static[owner]))
        elif count[storage_of(output)] == 1 and is_dense(output) and not (output.is_conj() or output.is_neg()):
            plan.append(_Copy(output))
        else:
            plan.append(_shared_copy(output))
    return plan


def shareable(
    outputs: Sequence[Output], static: Sequence[Tensor], together: frozenset[int] = frozenset()
) -> frozenset[int]:
    """The indices of outputs that share memory with no argument and no other output, or, of some, only with these.

    Args:
        outputs: of a run.
        static: its arguments.
        together: the indices of outputs that may share memory with each other.

    Example:
        >>> x, alone, whole = torch.ones(2), torch.ones(2), torch.ones(2)
        >>> sorted(shareable([alone, x, whole, whole[:1], None], [x]))
        [0]
        >>> sorted(shareable([alone, x, whole, whole[:1], None], [x], frozenset({2, 3})))
        [0, 2, 3]
    """
    keys = [None if output is None else storage_of(output) for output in outputs]
    # Those of one storage that are returned together count as one.
    users = {(key, -1 if at in together else at) for at, key in enumerate(keys) if key is not None}
    owners = Counter(chain((key for key, _ in users), map(storage_of, static)))
    return frozenset(at for at, key in enumerate(keys) if key is not None and owners[key] == 1)


def _shared(output: Output) -> MakeOutput:
    return lambda arguments, outputs, copies: output


def _none(arguments: Sequence[Tensor], outputs: Sequence[Output], copies: dict[int, torch.UntypedStorage]) -> None:
    return None


def _repeat(index: int) -> MakeOutput:
    return lambda arguments, outputs, copies: outputs[index]


def _argument(index: int) -> MakeOutput:
    return lambda arguments, outputs, copies: arguments[index]


def _argument_view(owner: int, output: Tensor, static: Tensor) -> MakeOutput:
    ahead = byte_offset(output) - byte_offset(static)
    detached = (
        static.requires_grad and not output.requires_grad
    )  # a view of a weight requires gradients as the weight does
    bare = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device="meta")
    layout = _lazy_as(output, bare)  # without its memory

    def view(arguments: Sequence[Tensor], outputs: Sequence[Output], copies: dict[int, torch.UntypedStorage]) -> Tensor:
        argument = arguments[owner].detach() if detached else arguments[owner]
        if argument.dtype == layout.dtype:
            offset = argument.storage_offset() + ahead // layout.element_size()
            return _lazy_as(layout, argument.as_strided(layout.shape, layout.stride(), offset))
        offset = (byte_offset(argument) + ahead) // layout.element_size()
        return _view(argument.untyped_storage(), layout, offset)

    return view


@dataclass(frozen=True, eq=False)
class _Copy:
    """Copies an output that fills its storage and shares it with no other tensor."""

    output: Tensor

    def __call__(
        self, arguments: Sequence[Tensor], outputs: Sequence[Output], copies: dict[int, torch.UntypedStorage]
    ) -> Tensor:
        return self.output.clone()


def _shared_copy(output: Tensor) -> MakeOutput:
    key = storage_of(output)

    def copy(arguments: Sequence[Tensor], outputs: Sequence[Output], copies: dict[int, torch.UntypedStorage]) -> Tensor:
        if key not in copies:
            storage = output.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=output.device).set_(storage, 0, (storage.nbytes(),), (1,))
            copies[key] = whole.clone().untyped_storage()
        return _view(copies[key], output, output.storage_offset())

    return copy


def _view(storage: torch.UntypedStorage, like: Tensor, offset: int | torch.SymInt) -> Tensor:
    """A tensor over ``storage`` with the dtype, shape and strides of ``like``."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return _lazy_as(like, empty.set_(storage, offset, like.shape, like.stride()))


def _lazy_as(like: Tensor, tensor: Tensor) -> Tensor:
    """The tensor with the lazy conjugate and sign bits of ``like``."""
    tensor = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(tensor) if like.is_neg() else tensor
