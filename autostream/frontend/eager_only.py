"""Which calls stay eager: those for which a captured graph would not do what the model does.

Modes that observe single ops, function transforms, unusual tensors, TorchScript, models of ``fully_shard``, and callers
that are tracing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from traceback import walk_stack

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad as _forward_ad
from torch.nn.modules import module as _modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from autostream.errors import a_type

_ORDINARY = {Tensor, nn.Parameter, nn.Buffer}
_DEVICES = {"cpu", "cuda"}

_FX_TRACE = inspect.unwrap(torch.fx.Tracer.trace).__code__
_fx_flag = getattr(torch.fx._symbolic_trace, "is_fx_symbolic_tracing", lambda: True)
"""Private to PyTorch; without it, the Python stack is searched in each call."""

_traced_by_jit = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]
"""Private to PyTorch: the public ``torch.jit.is_tracing`` is slower."""


def exporting() -> bool:
    """Whether ``torch.export`` is tracing this call, as part of another model."""
    # The flag is visible in all threads, dispatch modes are thread-local.
    return torch.compiler.is_exporting() and torch._C._len_torch_dispatch_stack() > 0


def traced_by_fx() -> bool:
    """Whether ``torch.fx`` is tracing this call, as part of another model."""
    # The flag is visible in all threads.
    return _fx_flag() and any(frame.f_code is _FX_TRACE for frame, _ in walk_stack(None))


def unusual_call() -> str:
    """Why this call has to run eagerly, whatever its arguments; or ``""``."""
    if _modules._global_forward_hooks or _modules._global_forward_pre_hooks:
        return "hooks of all modules are registered, which a graph would not call"
    if reason := watched_call():
        return reason
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return "the caller is capturing a CUDA graph of their own"
    return ""


def watched_call() -> str:
    """Which mode or tracer observes the single ops of this call; or ``""``."""
    if _traced_by_jit():
        return "torch.jit is tracing the call"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a TorchDispatchMode is active, which would not see the ops of a graph"
    if torch._C._len_torch_function_stack() > 0 and not _only_devices():
        return "a TorchFunctionMode is active, which would not see the calls behind a graph"
    if _forward_ad._current_level >= 0:
        return "forward-mode AD is active, whose tangents a graph would not carry on"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a function transform (vmap, grad, …) is active"
    return ""


def _only_devices() -> bool:
    """Whether all function modes are default devices: those are part of a signature."""
    modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(isinstance(mode, DeviceContext) for mode in modes)


def anomaly_detection() -> str:
    """Why anomaly detection makes a backward run eagerly; or ``""``.

    Without ``check_nan``, anomaly detection only reports the source line of a backward op that raises, and the ops of a
    graph do not raise. Tracers switch that on themselves, visibly for all threads.

    Example:
        >>> with torch.autograd.set_detect_anomaly(True):
        ...     anomaly_detection()
        'anomaly detection looks for NaN behind each op of a backward, and would not see those of a graph'
    """
    sought = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    return _ANOMALIES if sought else ""


_ANOMALIES = "anomaly detection looks for NaN behind each op of a backward, and would not see those of a graph"


def has_torchscript(model: nn.Module) -> bool:
    """Whether a module or one of its submodules is TorchScript."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())


def unusual_model(model: nn.Module) -> str:
    """Why no graph computes what a model does; or ``""``.

    Example:
        >>> unusual_model(nn.Linear(2, 2))
        ''
    """
    if has_torchscript(model):
        return "TorchScript cannot be captured: use the module that it was made from"
    if is_fully_sharded(model):
        return "fully_shard gathers its parameters by hooks, and what it communicates is in none of autostream's graphs"
    return ""


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a module or on one of its submodules.

    Its parameters are others after a forward than before: shards, or what was gathered from them.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return any(isinstance(module, kind) for module in model.modules())


def unusual_tensor(tensors: Sequence[Tensor]) -> str:
    """Which of these tensors is not an ordinary strided tensor, and why; or ``""``.

    Example:
        >>> unusual_tensor([torch.ones(2), torch.ones(2).to_sparse()])
        'input 1 has the layout torch.sparse_coo'
    """
    for index, tensor in enumerate(tensors):
        if reason := unusual(tensor):
            return f"input {index} {reason}"
    return ""


def growing_cache(values: Iterable[object]) -> str:
    """Which of these arguments is a cache that has another size in each call, and what to use instead; or ``""``.

    Caches of transformers say so themselves.

    Example:
        >>> growing_cache([torch.ones(2), None])
        ''
    """
    for value in values:
        if getattr(value, "is_compileable", True) is False:
            kind = type(value).__name__
            return f'{kind} grows from call to call: use a static cache (cache_implementation="static" of generate)'
    return ""


def has_static_cache(values: Iterable[object]) -> bool:
    """Whether one of these arguments is a cache of transformers that keeps its size."""
    return any(getattr(value, "is_compileable", False) is True for value in values)


def _is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is a wrapper of a function transform, or of batched gradients (``is_grads_batched=True``)."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or bool(_is_batched(tensor))


_is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)
"""Private to PyTorch; a version without it has no such tensors."""


def unusual(tensor: Tensor) -> str:
    """Why a tensor is not an ordinary strided tensor; or ``""``."""
    return unusual_memory(tensor) if type(tensor) in _ORDINARY else f"is {a_type(tensor)}"


def unusual_memory(tensor: Tensor) -> str:
    """Why a tensor's memory does not simply hold its elements; or ``""``.

    Example:
        >>> unusual_memory(torch.ones(2, dtype=torch.complex64).conj())
        'is quantized, conjugated or negated lazily'
    """
    if tensor.is_nested:
        return "is nested"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    if tensor.device.type not in _DEVICES:
        return f"is on {tensor.device}"
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return "is quantized, conjugated or negated lazily"
    if _is_transformed(tensor):
        return "belongs to a function transform (vmap, grad, …)"
    return ""
