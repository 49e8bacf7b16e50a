"""Settings of the process and the thread that change what kernels compute.

Read at every call, so by the functions in C that PyTorch's public properties read them by (the properties would take
three times as long), and, where a yes is enough, by the guard that TorchDynamo looks at them with. Private to PyTorch
(seen in 2.11 and 2.13); where a version lacks one, its public relative is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache, partial
from operator import call
from typing import Any

import torch


def _c(name: str, public: Callable[[], Any]) -> Callable[[], Any]:
    function: Callable[[], Any] = getattr(torch._C, name, public)
    return function


def _precision(operation: str) -> Callable[[], Any]:
    """What the ``fp32_precision`` properties of ``torch.backends`` are made of. The public fall-back raises where
    somebody used the newer settings as well as the older.
    """
    precision = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: torch.get_float32_matmul_precision())
    return partial(precision, "cuda", operation)


_priorities = _c("_get_sdp_priority_order", lambda: ())

_GUARDED = (
    torch.get_default_dtype,
    _precision("matmul"),
    _c("_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled),
    _c(
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    ),
    _c(
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    ),
    torch.is_deterministic_algorithms_warn_only_enabled,
)
"""What ``GlobalStateGuard`` sees too, as it does that autocast is off (but not which dtype it casts to)."""

_UNGUARDED = (
    _precision("conv"),
    _precision("rnn"),
    _c("_get_cudnn_enabled", lambda: torch.backends.cudnn.enabled),
    _c("_get_cudnn_deterministic", lambda: torch.backends.cudnn.deterministic),
    _c("_get_cudnn_benchmark", lambda: torch.backends.cudnn.benchmark),
    torch.backends.mha.get_fastpath_enabled,
    # What torch.nn.attention.sdpa_kernel chooses from; a captured graph has the choice that was made for it.
    _c("_get_flash_sdp_enabled", torch.backends.cuda.flash_sdp_enabled),
    _c("_get_mem_efficient_sdp_enabled", torch.backends.cuda.mem_efficient_sdp_enabled),
    _c("_get_cudnn_sdp_enabled", torch.backends.cuda.cudnn_sdp_enabled),
    _c("_get_math_sdp_enabled", torch.backends.cuda.math_sdp_enabled),
    lambda: tuple(_priorities()),
    _c("_get_math_sdp_allow_fp16_bf16_reduction", torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed),
    _c("_get_cublas_allow_fp16_accumulation", lambda: torch.backends.cuda.matmul.allow_fp16_accumulation),
)


def _order_attention() -> None:
    """Let PyTorch put its attention kernels in order now, as it does when somebody first attends on a GPU.

    On some GPUs cuDNN's comes first then: what was looked up before would not be found afterwards.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _order_attention_once()


@cache
def _order_attention_once() -> None:
    with suppress(RuntimeError, AttributeError):  # all kernels are switched off, or there is no such function
        query = torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(query, query, query)


def numerics() -> Hashable:
    """Autocast, default dtype and device, precisions, determinism and attention kernels, as they are now.

    Example:
        >>> before = numerics()
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     numerics() == before
        False
    """
    _order_attention()
    return (
        *_autocast(),
        torch.get_default_device() if torch._C._len_torch_function_stack() else None,
        *map(call, _GUARDED),
        *map(call, _UNGUARDED),
    )


def watch_numerics() -> Callable[[], bool]:
    """A quick look at whether :func:`numerics` are what they are now; it may say no where they are.

    Example:
        >>> same = watch_numerics()
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     same()
        False
    """
    guard = _guard()
    if guard is None:
        then = numerics()
        return lambda: numerics() == then
    unguarded = list(map(call, _UNGUARDED))
    return lambda: guard() and not torch._C._len_torch_function_stack() and list(map(call, _UNGUARDED)) == unguarded


def watch_unguarded() -> Callable[[], bool]:
    """Whether those settings that TorchDynamo does not guard are what they are now.

    Example:
        >>> same = watch_unguarded()
        >>> with torch.backends.cudnn.flags(enabled=False):
        ...     same()
        False
    """
    unguarded = list(map(call, _UNGUARDED))
    return lambda: list(map(call, _UNGUARDED)) == unguarded


def _guard() -> Callable[[], bool] | None:
    """TorchDynamo's look at modes, where it sees what numerics are made of."""
    guard: Any = getattr(getattr(torch._C._dynamo, "guards", None), "GlobalStateGuard", None)
    if guard is None or any(_autocast()) or torch._C._len_torch_function_stack():
        return None
    unchanged: Callable[[], bool] = guard().check
    return unchanged


def _autocast() -> list[Any]:
    return [torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in ("cuda", "cpu")]
