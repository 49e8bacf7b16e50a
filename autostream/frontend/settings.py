"""Global settings that are guarded because they change what kernels compute: autocast, precisions, determinism.

They are read in every call, so with the C functions behind PyTorch's public properties, in a third of the time, or
with Dynamo's guard on global state. These are private to PyTorch; without one, the public property is read.
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
    """The getter behind ``fp32_precision`` of ``torch.backends``.

    Its public replacement raises if the process uses both the older and the newer settings of precision.
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
"""Settings that ``GlobalStateGuard`` checks too. Of autocast it checks whether it is on, but not its dtype."""

_UNGUARDED = (
    _precision("conv"),
    _precision("rnn"),
    _c("_get_cudnn_enabled", lambda: torch.backends.cudnn.enabled),
    _c("_get_cudnn_deterministic", lambda: torch.backends.cudnn.deterministic),
    _c("_get_cudnn_benchmark", lambda: torch.backends.cudnn.benchmark),
    torch.backends.mha.get_fastpath_enabled,
    # The settings of torch.nn.attention.sdpa_kernel: a captured graph contains the attention kernel chosen by them.
    _c("_get_flash_sdp_enabled", torch.backends.cuda.flash_sdp_enabled),
    _c("_get_mem_efficient_sdp_enabled", torch.backends.cuda.mem_efficient_sdp_enabled),
    _c("_get_cudnn_sdp_enabled", torch.backends.cuda.cudnn_sdp_enabled),
    _c("_get_math_sdp_enabled", torch.backends.cuda.math_sdp_enabled),
    lambda: tuple(_priorities()),
    _c("_get_math_sdp_allow_fp16_bf16_reduction", torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed),
    _c("_get_cublas_allow_fp16_accumulation", lambda: torch.backends.cuda.matmul.allow_fp16_accumulation),
)


def _order_attention() -> None:
    """Let PyTorch choose the order of attention kernels now, as it does in the first attention on a GPU.

    On some GPUs that changes the order, and with it the key under which schedules are cached.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _order_attention_once()


@cache
def _order_attention_once() -> None:
    with suppress(RuntimeError, AttributeError):  # all kernels are disabled, or PyTorch has no such function
        query = torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(query, query, query)


def numerics() -> Hashable:
    """All of these settings as they are now: part of the key under which schedules are cached.

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
    """A fast check whether :func:`numerics` is what it is now; it may return ``False`` although it is.

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
    unguarded = watch_unguarded()
    return lambda: guard() and not torch._C._len_torch_function_stack() and unguarded()


def watch_unguarded() -> Callable[[], bool]:
    """A check whether the settings that Dynamo does not guard are what they are now.

    Example:
        >>> same = watch_unguarded()
        >>> with torch.backends.cudnn.flags(enabled=False):
        ...     same()
        False
    """
    unguarded = list(map(call, _UNGUARDED))
    return lambda: list(map(call, _UNGUARDED)) == unguarded


def _guard() -> Callable[[], bool] | None:
    """Dynamo's guard on global state; ``None`` where it does not cover all settings that are on."""
    guard: Any = getattr(getattr(torch._C._dynamo, "guards", None), "GlobalStateGuard", None)
    if guard is None or any(_autocast()) or torch._C._len_torch_function_stack():
        return None
    unchanged: Callable[[], bool] = guard().check
    return unchanged


def _autocast() -> list[Any]:
    return [torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in ("cuda", "cpu")]
