"""Whether tensors lie where they did, and as they did: thousands of them, in each call.

Asked from Python, each tensor takes about 90 ns, and its objects have to come into the processor's caches first. Where
this machine has a C compiler, which Triton needs as well, ``layouts.c`` asks them in a tenth of that time. It uses
libtorch's stable C interface; private to PyTorch (seen on 2.11 and 2.13) is only how a tensor becomes a handle of it.
Where that or a compiler is missing, each tensor is asked (``addresses.py``).
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autostream.errors import first_line
from autostream.runtime.addresses import Bound, lie_at

log = logging.getLogger(__name__)


class Layouts:
    """Where some tensors lie, and how. Holds them.

    Args:
        tensors: to look at.
        whole: whether to look at dtypes, sizes and strides, and not at addresses alone.

    Attributes:
        unchanged: whether they lie where they did. A tensor that has no address by now, such as a sparse one, does not.

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
        signed = whole and any(map(Tensor.is_complex, held))  # whose lazy signs the C interface does not tell
        self.unchanged: Callable[[], Any] = (None if signed else _quick(held, whole)) or _slow(held, whole)


def _quick(tensors: list[Tensor], whole: bool) -> Callable[[], int] | None:
    """The look in C, where there is one."""
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


def _slow(tensors: list[Tensor], whole: bool) -> Callable[[], bool]:
    if whole:
        return partial(Bound(tensors).unmoved, tensors)
    return partial(lie_at, tensors, list(map(Tensor.data_ptr, tensors)))


_GETTERS = ("data_ptr", "dtype", "dim", "sizes", "strides")
"""Of ``aoti_torch_get_…``, in the order in which ``layouts.c`` has them."""


@cache
def _library() -> tuple[Callable[..., int], Any, Callable[[int], int]] | None:
    """The function of ``layouts.c``, those of libtorch that it takes, and one that tells a handle's dtype."""
    if not hasattr(getattr(torch._C, "_aoti", None), "unsafe_alloc_void_ptrs_from_tensors"):
        return None
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        built = Path(folder) / "layouts.so"
        try:
            command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(built), str(source)]
            subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE_S)
            ours = ctypes.PyDLL(str(built))  # which keeps the interpreter's lock: another thread could move a tensor
            libtorch = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            functions = [getattr(libtorch, f"aoti_torch_get_{name}") for name in _GETTERS]
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            log.info("weights are looked at from Python, which takes longer: %s", first_line(error))
            return None
    getters = (ctypes.c_void_p * len(functions))(*(ctypes.cast(own, ctypes.c_void_p).value for own in functions))

    def dtype_of(pointer: int) -> int:
        dtype = ctypes.c_int32()
        libtorch.aoti_torch_get_dtype(ctypes.c_void_p(pointer), ctypes.byref(dtype))
        return dtype.value

    unchanged = ours.unchanged
    unchanged.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32]
    return unchanged, getters, dtype_of


_PATIENCE_S = 20.0
"""For a compiler that takes a tenth of a second."""

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
