"""Padding: which dimensions of arguments may be padded, to which sizes, and where outputs are cut back.

dynamic ──▶ dynamic dims ──and a call's arguments──▶ spans ──▶ padded arguments
└─ shapes of outputs, with and without padding ─▶ cuts
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from autostream.errors import OptionError, shown


@dataclass(frozen=True, init=False)
class Bucket:
    """A dimension whose length differs between calls, and the sizes that it may be padded to.

    Buckets with the same name are one dimension, with the same length wherever it occurs in a call.

    Args:
        name: of the dimension.
        sizes: in any order; a single number stands for itself and the powers of two below it.
        value: what arguments are padded with; their dtype has to have it.

    Attributes:
        name: as given.
        sizes: ascending.
        value: as given.

    Raises:
        OptionError: the name is empty, a size is not a positive integer, or there are no sizes.

    Example:
        >>> Bucket("length", 12)
        Bucket(name='length', sizes=(1, 2, 4, 8, 12), value=0)
        >>> Bucket("length", [256, 64], value=-1).sizes
        (64, 256)
    """

    name: str
    sizes: tuple[int, ...]
    value: float

    def __init__(self, name: str, sizes: int | Iterable[int], value: float = 0) -> None:
        if not isinstance(name, str) or not name:
            raise OptionError(f"name={name!r} is not allowed: use what the dimension is called, such as 'length'")
        listed = tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)
        if not listed or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in listed):
            allowed = "the largest size, such as 512, or all of them, such as (64, 256, 512)"
            raise OptionError(f"sizes={shown(sizes)} is not allowed: use {allowed}")
        if not isinstance(value, int | float):
            raise OptionError(f"value={shown(value)} is not allowed: use a number, True or False")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "sizes", _powers_of_two(listed[0]) if isinstance(sizes, int) else _ascending(listed))
        object.__setattr__(self, "value", value)


Dynamic = Mapping[str, Mapping[int, Bucket]]
"""By argument, the dimensions that may be padded."""


class DynamicDim(NamedTuple):
    """A dimension of an argument that may be padded."""

    argument: str
    position: int | None
    """Among the positional arguments; ``None`` for a keyword-only argument."""
    dim: int
    bucket: Bucket


class Span(NamedTuple):
    """The length of a dimension without padding, and with it."""

    length: int
    size: int


class Cut(NamedTuple):
    """How an output is cut back."""

    shape: tuple[int, ...]
    """With padding."""
    dims: tuple[tuple[int, str], ...]
    """The dimensions that are cut, each with the name of its bucket."""


Cuts = tuple[Cut, ...]
"""One for each output."""


class NotPaddable(Exception):  # noqa: N818 - control flow between modules, not an error
    """A call cannot be padded; the message says why."""


def dynamic_dims_of(dynamic: object, parameters: Mapping[str, Parameter]) -> tuple[DynamicDim, ...]:
    """The dimensions that the user declares safe to pad.

    Args:
        dynamic: by argument and dimension, the :class:`Bucket` of each.
        parameters: of the model's ``forward``.

    Raises:
        OptionError: ``dynamic`` has another type, names an unknown argument, or has two lists of sizes for one name.

    Example:
        >>> length = Bucket("length", 4)
        >>> parameters = {"tokens": Parameter("tokens", Parameter.POSITIONAL_OR_KEYWORD)}
        >>> [dynamic_dim] = dynamic_dims_of({"tokens": {1: length}}, parameters)
        >>> dynamic_dim.argument, dynamic_dim.position, dynamic_dim.dim, dynamic_dim.bucket is length
        ('tokens', 0, 1, True)
    """
    if not _is_dynamic(dynamic):
        allowed = 'None or what may be padded, such as {"tokens": {1: autostream.Bucket("length", 512)}}'
        raise OptionError(f"dynamic={shown(dynamic)} is not allowed: use {allowed}")
    named = [name for name, each in parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    by_position = [name for name in named if parameters[name].kind is not Parameter.KEYWORD_ONLY]
    positions = {name: position for position, name in enumerate(by_position)}
    sizes: dict[str, tuple[int, ...]] = {}
    for argument, dims in dynamic.items():
        if argument not in named and not any_name:
            near = difflib.get_close_matches(argument, named, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise OptionError(f"dynamic: there is no argument {argument!r}{hint}: use {', '.join(named) or 'none'}")
        for bucket in dims.values():
            if sizes.setdefault(bucket.name, bucket.sizes) != bucket.sizes:
                raise OptionError(f"dynamic: {bucket.name!r} has two lists of sizes: use one, or another name")
    return tuple(
        DynamicDim(argument, positions.get(argument), dim, bucket)
        for argument, dims in dynamic.items()
        for dim, bucket in dims.items()
    )


def spans_of(dynamic_dims: Sequence[DynamicDim], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Span]:
    """The spans of a call's dimensions by name, without those that have the size of a bucket.

    Raises:
        NotPaddable: the call cannot be padded.

    Example:
        >>> import torch
        >>> spans_of([DynamicDim("x", 0, 1, Bucket("length", 8))], [torch.ones(2, 5)], {})
        {'length': Span(length=5, size=8)}
    """
    spans: dict[str, Span] = {}
    seen: dict[tuple[str, int], int] = {}
    for argument, position, dim, bucket in dynamic_dims:
        tensor = _argument(argument, position, args, kwargs)
        if tensor is None:  # an optional argument
            continue
        if not isinstance(tensor, Tensor) or not -tensor.ndim <= dim < tensor.ndim:
            raise NotPaddable(f"{argument} has no dimension {dim}")
        if (other := seen.setdefault((argument, dim % tensor.ndim), dim)) != dim:
            raise NotPaddable(f"dimensions {other} and {dim} of {argument} are one: use one of them")
        if not _is_value(bucket.value, tensor.dtype):
            raise NotPaddable(f"{bucket.value} is no value of {argument}, which is {tensor.dtype}")
        length = tensor.shape[dim]
        size = next((size for size in bucket.sizes if size >= length), None)
        if size is None:
            raise NotPaddable(f"{bucket.name} is longer than its largest bucket, {bucket.sizes[-1]}")
        if spans.setdefault(bucket.name, Span(length, size)).length != length:
            raise NotPaddable(f"{bucket.name} has two lengths, one of them in {argument}")
    return {name: span for name, span in spans.items() if span.length < span.size}


def padded(
    dynamic_dims: Sequence[DynamicDim], spans: Mapping[str, Span], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, padded.

    Example:
        >>> import torch
        >>> dynamic_dim = DynamicDim("x", 0, 0, Bucket("length", 4, value=7))
        >>> padded([dynamic_dim], {"length": Span(3, 4)}, [torch.ones(3)], {})
        ((tensor([1., 1., 1., 7.]),), {})
    """

    def pad(tensor: Tensor, dim: int, span: Span, value: float) -> Tensor:
        behind = tensor.ndim - 1 - dim % tensor.ndim
        return F.pad(tensor, [0, 0] * behind + [0, span.size - span.length], value=value)

    return _changed(dynamic_dims, spans, args, kwargs, pad)


def _changed(
    dynamic_dims: Sequence[DynamicDim],
    spans: Mapping[str, Span],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[Tensor, int, Span, float], Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional, named = list(args), dict(kwargs)
    for argument, position, dim, bucket in dynamic_dims:
        tensor = _argument(argument, position, positional, named)
        if tensor is None or bucket.name not in spans:
            continue
        changed = change(tensor, dim, spans[bucket.name], bucket.value)
        if argument in named:
            named[argument] = changed
        else:
            assert position is not None
            positional[position] = changed
    return tuple(positional), named


def shorter(dynamic_dims: Sequence[DynamicDim], spans: Mapping[str, Span]) -> Iterator[dict[str, Span]]:
    """The same spans, but one of them with the shortest length that is padded to its size; for each span in turn.

    Example:
        >>> dynamic_dim = DynamicDim("x", 0, 1, Bucket("length", (4, 8)))
        >>> list(shorter([dynamic_dim], {"length": Span(7, 8)}))
        [{'length': Span(length=5, size=8)}]
    """
    sizes = {bucket.name: bucket.sizes for *_, bucket in dynamic_dims}
    for name, (length, size) in spans.items():
        shortest = Span(1 + max([below for below in sizes[name] if below < size], default=0), size)
        if shortest.length < length and shortest not in spans.values():
            yield {**spans, name: shortest}


def narrowed(
    dynamic_dims: Sequence[DynamicDim], spans: Mapping[str, Span], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, cut to the lengths of these spans.

    Example:
        >>> import torch
        >>> narrowed([DynamicDim("x", 0, 0, Bucket("length", 4))], {"length": Span(3, 4)}, [torch.arange(4)], {})
        ((tensor([0, 1, 2]),), {})
    """
    return _changed(dynamic_dims, spans, args, kwargs, lambda tensor, dim, span, _: tensor.narrow(dim, 0, span.length))


def cuts_of(plain: Sequence[Tensor], filled: Sequence[Tensor], spans: Mapping[str, Span]) -> Cuts:
    """Which dimensions of outputs were padded, from the outputs without padding and with it.

    That may be wrong for a size that stops growing at some length; calls of other lengths (:func:`shorter`) show it.

    Args:
        plain: the outputs without padding.
        filled: the outputs with padding.
        spans: of the call, no two of them equal.

    Raises:
        NotPaddable: a size of an output depends on a length, but is not equal to it.

    Example:
        >>> import torch
        >>> cuts_of([torch.ones(3, 5)], [torch.ones(4, 5)], {"length": Span(3, 4)})
        (Cut(shape=(4, 5), dims=((0, 'length'),)),)
    """
    names = {span: name for name, span in spans.items()}
    cuts = []
    for at, (short, long) in enumerate(zip(plain, filled, strict=True)):
        if short.ndim != long.ndim:
            raise NotPaddable(f"output {at} has another number of dimensions with padding")
        changed = {dim: Span(*both) for dim, both in enumerate(zip(short.shape, long.shape, strict=True))}
        changed = {dim: both for dim, both in changed.items() if both.length != both.size}
        if odd := [dim for dim, both in changed.items() if both not in names]:
            raise NotPaddable(f"dimension {odd[0]} of output {at} depends on {' and '.join(spans)}, and is not as long")
        cuts.append(Cut(tuple(long.shape), tuple((dim, names[both]) for dim, both in changed.items())))
    return tuple(cuts)


def can_cut(tensors: Sequence[Tensor], cuts: Sequence[Cut]) -> bool:
    """Whether padded outputs have the shapes for which the cuts were made.

    Example:
        >>> import torch
        >>> [can_cut([torch.ones(size)], [Cut((4,), ((0, "length"),))]) for size in (4, 8)]
        [True, False]
    """
    return [tuple(tensor.shape) for tensor in tensors] == [expected.shape for expected in cuts]


def cut(tensors: Sequence[Tensor], cuts: Sequence[Cut], spans: Mapping[str, Span]) -> list[Tensor]:
    """Padded outputs, cut to the lengths without padding, and contiguous as without padding.

    Example:
        >>> import torch
        >>> cut([torch.arange(4)], [Cut((4,), ((0, "length"),))], {"length": Span(3, 4)})
        [tensor([0, 1, 2])]
    """
    return [
        _cut(tensor, [(dim, spans[name].length) for dim, name in each.dims])
        for tensor, each in zip(tensors, cuts, strict=True)
    ]


def _cut(tensor: Tensor, lengths: Iterable[tuple[int, int]]) -> Tensor:
    whole = tensor
    for dim, length in lengths:
        tensor = tensor.narrow(dim, 0, length)
    # A caller may view an output in a way that needs contiguous memory.
    return tensor if tensor is whole or tensor.is_contiguous() else tensor.clone()


def _argument(name: str, position: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[position] if position is not None and position < len(args) else None


@cache
def _is_value(number: float, dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype can be padded with a number."""
    if number % 1 and not (dtype.is_floating_point or dtype.is_complex):  # infinity % 1 is NaN, and so true
        return False
    try:
        F.pad(torch.zeros(1, dtype=dtype), [0, 1], value=number)
    except (RuntimeError, OverflowError):  # out of the dtype's range
        return False
    return True


def _is_dynamic(dynamic: object) -> TypeGuard[Dynamic]:
    return isinstance(dynamic, Mapping) and all(
        isinstance(argument, str)
        and isinstance(dims, Mapping)
        and all(type(dim) is int and isinstance(bucket, Bucket) for dim, bucket in dims.items())
        for argument, dims in dynamic.items()
    )


def _powers_of_two(largest: int) -> tuple[int, ...]:
    return *(2**power for power in range((largest - 1).bit_length())), largest


def _ascending(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))
