"""Checks that tensors still have the addresses and the layouts that a captured graph was made for.

- :class:`Layouts` checks the same tensor objects again and again, in C where this machine has a C compiler.
- :class:`SameLayout` and :class:`SameMetadata` check tensors that are passed to them.
- :func:`metadata_check` is a fast check of the inputs of a call.

A call checks up to thousands of weights, so the common answer has to be fast. PyTorch's tensor guards compare dtype,
sizes and strides of many tensors in one call. They also compare what does not matter here (``requires_grad``, modes of
the thread), so where they fail, each tensor is compared. Guards do not see addresses; Inductor's CUDA graph trees have
a function that compares them.

From Python, one tensor takes about 90 ns, and its objects have to be in the processor's caches. ``layouts.c`` takes a
tenth of that, through libtorch's stable C interface. Where there is no compiler (Triton needs one as well), each tensor
is compared from Python.

Private to PyTorch (seen on 2.11 and 2.13): ``TensorGuards``; ``_tensors_data_ptrs_at_indices_equal``, which only
builds for CUDA have; how a tensor becomes a handle of the C interface (``torch._C._aoti``). Where a version lacks them,
each tensor is compared.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autostream.errors import first_line
from autostream.utils.logs import Log

log = Log(__name__)


class Layouts:
    """Checks whether tensor objects have moved or changed their layout. Keeps the tensors alive.

    Args:
        tensors: to check.
        whole: whether to check dtypes, sizes and strides too, and not addresses alone.

    Attributes:
        unchanged: whether nothing has changed since this was made. False for a tensor that has no address any more,
            such as a sparse one.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> layouts = Layouts([weight], whole=True)
        >>> bool(layouts.unchanged())
        True
        >>> weight.data = weight.data.t()
        >>> bool(layouts.unchanged())
        False
    """

    def __init__(self, tensors: Sequence[Tensor], *, whole: bool = False) -> None:
        held = list(tensors)
        # The C interface does not tell whether a complex tensor is lazily conjugated or negated.
        signed = whole and any(map(Tensor.is_complex, held))
        self.unchanged: Callable[[], Any] = (None if signed else _check_in_c(held, whole)) or _check(held, whole)


class SameLayout:
    """Checks whether tensors are at the addresses of these, with the same metadata. Keeps no tensor alive.

    Args:
        tensors: to compare with.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> same = SameLayout([weight])
        >>> same.unmoved([weight])
        True
        >>> weight.data = weight.data.t()
        >>> same.unmoved([weight])
        False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._addresses = list(map(Tensor.data_ptr, tensors))
        self._same_metadata = SameMetadata(tensors)

    def unmoved(self, tensors: Sequence[Tensor]) -> bool:
        """Whether as many tensors have the same addresses, dtypes, sizes, strides and lazy conjugate and sign bits."""
        return lie_at(list(tensors), self._addresses) and self._same_metadata(tensors)


class SameMetadata:
    """Checks whether tensors have the metadata of these, at any address. Keeps no tensor alive.

    Args:
        tensors: to compare with.
        gradients: whether to compare ``requires_grad`` too.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> same = SameMetadata([weight], gradients=True)
        >>> weight.data = torch.zeros(2, 3)
        >>> same([weight]), same([weight.requires_grad_(False)])
        (True, False)
    """

    def __init__(self, tensors: Sequence[Tensor], *, gradients: bool = False) -> None:
        self._columns = (*_COLUMNS, *((attrgetter("requires_grad"),) if gradients else ()))
        self._expected = self._metadata(tensors)
        self._guard = _guard(tensors)

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Whether as many tensors have the same dtypes, sizes, strides and lazy conjugate and sign bits."""
        if self._guard(*tensors):
            return True
        if self._metadata(tensors) != self._expected:
            return False
        self._guard = _guard(tensors)
        return True

    def _metadata(self, tensors: Sequence[Tensor]) -> list[list[object]]:
        """By column: a tuple for each of thousands of tensors would start the garbage collector at every call."""
        return [list(map(column, tensors)) for column in self._columns]


_COLUMNS: tuple[Callable[[Tensor], object], ...] = (
    Tensor.size, Tensor.stride, attrgetter("dtype"), Tensor.is_conj, Tensor.is_neg,
)  # fmt: skip


def metadata_check(tensors: Sequence[Tensor]) -> Callable[[Sequence[Any]], bool]:
    """A fast check whether values are tensors of the same types, dtypes, devices, sizes and strides as these.

    It may fail where they are, but does not pass where one is not. Keeps no tensor alive.

    Example:
        >>> check = metadata_check([torch.ones(2, 3)])
        >>> check((torch.zeros(2, 3),)), check((torch.zeros(3, 2),)), check((3,)), check(())
        (True, False, False, False)
    """
    check, types = _guard(tensors), list(map(type, tensors))
    # Reading the strides of a nested tensor would end the process.
    if len(types) == 1:  # many models have one input; this takes half the time
        (kind,) = types
        return lambda values: (
            len(values) == 1 and type(values[0]) is kind and not _IS_NESTED(values[0]) and check(values[0])
        )
    return lambda values: list(map(type, values)) == types and not any(map(_IS_NESTED, values)) and check(*values)


_IS_NESTED = attrgetter("is_nested")


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """PyTorch's guard on the metadata of tensors: it may fail where nothing has changed, but not pass where it has."""
    guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
    if guards is None or not tensors:
        return lambda *tensors: False
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def lie_at(tensors: list[Tensor], addresses: list[int]) -> bool:
    """Whether as many tensors are at these addresses."""
    try:
        return len(tensors) == len(addresses) and _all_at(tensors, addresses, list(range(len(tensors))))
    except (RuntimeError, TypeError):  # a sparse tensor has no address, nor has an object that is no tensor
        return False


def _compare_addresses(tensors: list[Tensor], addresses: list[int], indices: list[int]) -> bool:
    return list(map(Tensor.data_ptr, tensors)) == addresses


_all_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _compare_addresses)
"""Whether the tensors at some indices are at the addresses there. Raises a RuntimeError for one without an address."""


def _check_in_c(tensors: list[Tensor], whole: bool) -> Callable[[], int] | None:
    """The check by ``layouts.c``, if it could be built."""
    library = _library()
    if library is None:
        return None
    unchanged, getters, dtype_of = library
    handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
    pointers = (ctypes.c_void_p * len(handles))(*(_pointer_of(handle, None) for handle in handles))
    weakref.finalize(pointers, torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs, handles).atexit = False
    numbers: list[int] = []
    for tensor, pointer in zip(tensors, pointers, strict=True):
        numbers.append(tensor.data_ptr())
        if whole:
            numbers += [dtype_of(pointer), tensor.dim(), *tensor.shape, *tensor.stride()]
    expected = (ctypes.c_int64 * len(numbers))(*numbers)
    return partial(
        unchanged, ctypes.byref(getters), ctypes.byref(pointers), len(handles), ctypes.byref(expected), whole
    )


def _check(tensors: list[Tensor], whole: bool) -> Callable[[], bool]:
    if whole:
        return partial(SameLayout(tensors).unmoved, tensors)
    return partial(lie_at, tensors, list(map(Tensor.data_ptr, tensors)))


_GETTERS = ("data_ptr", "dtype", "dim", "sizes", "strides")
"""Suffixes of ``aoti_torch_get_…``, in the order in which ``layouts.c`` takes these functions."""


@cache
def _library() -> tuple[Callable[..., int], Any, Callable[[int], int]] | None:
    """The function of ``layouts.c``, the functions of libtorch that it takes, and one that returns a handle's dtype."""
    if not hasattr(getattr(torch._C, "_aoti", None), "unsafe_alloc_void_ptrs_from_tensors"):
        return None
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        built = Path(folder) / "layouts.so"
        try:
            command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(built), str(source)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
            ours = ctypes.PyDLL(str(built))  # it keeps the interpreter's lock: another thread could move a tensor
            libtorch = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            functions = [getattr(libtorch, f"aoti_torch_get_{name}") for name in _GETTERS]
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            log.info("weights are looked at from Python, which takes longer: %s", first_line(error))
            return None
    getters = (ctypes.c_void_p * len(functions))(
        *(ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    )

    def dtype_of(pointer: int) -> int:
        dtype = ctypes.c_int32()
        libtorch.aoti_torch_get_dtype(ctypes.c_void_p(pointer), ctypes.byref(dtype))
        return dtype.value

    unchanged = ours.unchanged
    unchanged.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32]
    return unchanged, getters, dtype_of


_COMPILE_TIMEOUT_S = 20.0
"""Compiling takes a tenth of a second."""

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
