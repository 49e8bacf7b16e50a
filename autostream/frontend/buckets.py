"""Dimensions that may be padded: in which arguments, to which sizes, and where outputs are cut back.

dynamic ──▶ places ──and a call's arguments──▶ spans ──▶ padded arguments
                                                 └── shapes of outputs, as they are and padded ──▶ cuts ──▶ cut outputs
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

    Buckets of one name are one dimension: whatever has it, has it in the same length.

    Args:
        name: of the dimension.
        sizes: in any order; a number stands for the powers of two below it and itself.
        value: what an argument is filled up with; it has to be one of its dtype.

    Attributes:
        name: as given.
        sizes: ascending.
        value: as given.

    Raises:
        OptionError: the name is empty, a size is no whole number from 1, or there is none.

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
        given = tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)
        if not given or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in given):
            allowed = "the largest size, such as 512, or all of them, such as (64, 256, 512)"
            raise OptionError(f"sizes={shown(sizes)} is not allowed: use {allowed}")
        if not isinstance(value, int | float):
            raise OptionError(f"value={shown(value)} is not allowed: use a number, True or False")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "sizes", _powers_of_two(given[0]) if isinstance(sizes, int) else _ascending(given))
        object.__setattr__(self, "value", value)


Dynamic = Mapping[str, Mapping[int, Bucket]]
"""By argument, the dimensions that may be padded."""


class Place(NamedTuple):
    """A dimension of an argument that may be padded."""

    argument: str
    position: int | None
    """Among the positional arguments; ``None`` where it can only be named."""
    dim: int
    bucket: Bucket


class Span(NamedTuple):
    """What a dimension is padded from, and to."""

    length: int
    size: int


class Cut(NamedTuple):
    """How an output is cut back."""

    shape: tuple[int, ...]
    """With padding."""
    dims: tuple[tuple[int, str], ...]
    """Those that are cut, and their names."""


Cuts = tuple[Cut, ...]
"""One for each output."""


class Unfit(Exception):  # noqa: N818 - a notice between modules, not an error
    """A call cannot be padded; the message says why."""


def places_of(dynamic: object, parameters: Mapping[str, Parameter]) -> tuple[Place, ...]:
    """The dimensions that a user declares to be safe to pad.

    Args:
        dynamic: by argument and dimension, the :class:`Bucket` of each.
        parameters: those of the model's ``forward``.

    Raises:
        OptionError: it is something else, names an argument that there is not, or gives a dimension two lists of sizes.

    Example:
        >>> length = Bucket("length", 4)
        >>> parameters = {"tokens": Parameter("tokens", Parameter.POSITIONAL_OR_KEYWORD)}
        >>> [place] = places_of({"tokens": {1: length}}, parameters)
        >>> place.argument, place.position, place.dim, place.bucket is length
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
        Place(argument, positions.get(argument), dim, bucket)
        for argument, dims in dynamic.items()
        for dim, bucket in dims.items()
    )


def spans_of(places: Sequence[Place], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Span]:
    """What a call's dimensions are padded from and to, by name; without those that fill a bucket.

    Raises:
        Unfit: it cannot be padded.

    Example:
        >>> import torch
        >>> spans_of([Place("x", 0, 1, Bucket("length", 8))], [torch.ones(2, 5)], {})
        {'length': Span(length=5, size=8)}
    """
    spans: dict[str, Span] = {}
    seen: dict[tuple[str, int], int] = {}
    for argument, position, dim, bucket in places:
        tensor = _argument(argument, position, args, kwargs)
        if tensor is None:  # an argument that may be left out
            continue
        if not isinstance(tensor, Tensor) or not -tensor.ndim <= dim < tensor.ndim:
            raise Unfit(f"{argument} has no dimension {dim}")
        if (other := seen.setdefault((argument, dim % tensor.ndim), dim)) != dim:
            raise Unfit(f"dimensions {other} and {dim} of {argument} are one: use one of them")
        if not _is_value(bucket.value, tensor.dtype):
            raise Unfit(f"{bucket.value} is no value of {argument}, which is {tensor.dtype}")
        length = tensor.shape[dim]
        size = next((size for size in bucket.sizes if size >= length), None)
        if size is None:
            raise Unfit(f"{bucket.name} is longer than its largest bucket, {bucket.sizes[-1]}")
        if spans.setdefault(bucket.name, Span(length, size)).length != length:
            raise Unfit(f"{bucket.name} has two lengths, one of them in {argument}")
    return {name: span for name, span in spans.items() if span.length < span.size}


def padded(
    places: Sequence[Place], spans: Mapping[str, Span], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, filled up.

    Example:
        >>> import torch
        >>> place = Place("x", 0, 0, Bucket("length", 4, value=7))
        >>> padded([place], {"length": Span(3, 4)}, [torch.ones(3)], {})
        ((tensor([1., 1., 1., 7.]),), {})
    """

    def filled(tensor: Tensor, dim: int, span: Span, value: float) -> Tensor:
        behind = tensor.ndim - 1 - dim % tensor.ndim
        return F.pad(tensor, [0, 0] * behind + [0, span.size - span.length], value=value)

    return _changed(places, spans, args, kwargs, filled)


def _changed(
    places: Sequence[Place],
    spans: Mapping[str, Span],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[Tensor, int, Span, float], Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional, named = list(args), dict(kwargs)
    for argument, position, dim, bucket in places:
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


def shorter(places: Sequence[Place], spans: Mapping[str, Span]) -> Iterator[dict[str, Span]]:
    """The same spans, with one of them in turn as short as its bucket gets, where that is shorter.

    Example:
        >>> place = Place("x", 0, 1, Bucket("length", (4, 8)))
        >>> list(shorter([place], {"length": Span(7, 8)}))
        [{'length': Span(length=5, size=8)}]
    """
    sizes = {bucket.name: bucket.sizes for *_, bucket in places}
    for name, (length, size) in spans.items():
        shortest = Span(1 + max([below for below in sizes[name] if below < size], default=0), size)
        if shortest.length < length and shortest not in spans.values():
            yield {**spans, name: shortest}


def narrowed(
    places: Sequence[Place], spans: Mapping[str, Span], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, no longer than these spans are without padding.

    Example:
        >>> import torch
        >>> narrowed([Place("x", 0, 0, Bucket("length", 4))], {"length": Span(3, 4)}, [torch.arange(4)], {})
        ((tensor([0, 1, 2]),), {})
    """
    return _changed(places, spans, args, kwargs, lambda tensor, dim, span, _: tensor.narrow(dim, 0, span.length))


def cuts_of(plain: Sequence[Tensor], filled: Sequence[Tensor], spans: Mapping[str, Span]) -> Cuts:
    """Where outputs have the dimensions that were padded, told from what they are without padding and with it.

    A size that grows up to some length only may have both this one and the bucket's: another length tells.

    Args:
        plain: the outputs without padding.
        filled: those with it.
        spans: of the call, no two the same.

    Raises:
        Unfit: an output's size depends on a length, and is another.

    Example:
        >>> import torch
        >>> cuts_of([torch.ones(3, 5)], [torch.ones(4, 5)], {"length": Span(3, 4)})
        (Cut(shape=(4, 5), dims=((0, 'length'),)),)
    """
    names = {span: name for name, span in spans.items()}
    cuts = []
    for at, (short, long) in enumerate(zip(plain, filled, strict=True)):
        if short.ndim != long.ndim:
            raise Unfit(f"output {at} has another number of dimensions with padding")
        changed = {dim: Span(*both) for dim, both in enumerate(zip(short.shape, long.shape, strict=True))}
        changed = {dim: both for dim, both in changed.items() if both.length != both.size}
        if odd := [dim for dim, both in changed.items() if both not in names]:
            raise Unfit(f"dimension {odd[0]} of output {at} depends on {' and '.join(spans)}, and is not as long")
        cuts.append(Cut(tuple(long.shape), tuple((dim, names[both]) for dim, both in changed.items())))
    return tuple(cuts)


def can_cut(tensors: Sequence[Tensor], cuts: Sequence[Cut]) -> bool:
    """Whether outputs are as many, and as long with padding, as those that the cuts were found for.

    Example:
        >>> import torch
        >>> [can_cut([torch.ones(size)], [Cut((4,), ((0, "length"),))]) for size in (4, 8)]
        [True, False]
    """
    return [tuple(tensor.shape) for tensor in tensors] == [own.shape for own in cuts]


def cut(tensors: Sequence[Tensor], cuts: Sequence[Cut], spans: Mapping[str, Span]) -> list[Tensor]:
    """Outputs as long as they are without padding, and as dense.

    Example:
        >>> import torch
        >>> cut([torch.arange(4)], [Cut((4,), ((0, "length"),))], {"length": Span(3, 4)})
        [tensor([0, 1, 2])]
    """
    return [
        _cut(tensor, [(dim, spans[name].length) for dim, name in own.dims])
        for tensor, own in zip(tensors, cuts, strict=True)
    ]


def _cut(tensor: Tensor, lengths: Iterable[tuple[int, int]]) -> Tensor:
    whole = tensor
    for dim, length in lengths:
        tensor = tensor.narrow(dim, 0, length)
    # Callers may take a view of an output that cannot be had of a part of one.
    return tensor if tensor is whole or tensor.is_contiguous() else tensor.clone()


def _argument(name: str, position: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[position] if position is not None and position < len(args) else None


@cache
def _is_value(number: float, dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype may be filled up with a number."""
    if number % 1 and not (dtype.is_floating_point or dtype.is_complex):  # for what is infinite, this is NaN
        return False
    try:
        F.pad(torch.zeros(1, dtype=dtype), [0, 1], value=number)
    except (RuntimeError, OverflowError):  # beyond what there is
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
