"""The options of ``optimize`` and ``train_step``, and all environment variables."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from autostream.errors import OptionError

if TYPE_CHECKING:
    import torch
    from torch import nn

PolicyName = Literal["auto", "sequential", "critical_path", "path_cover", "search"]
CostSource = Literal["auto", "roofline", "measured"]
KernelLevel = Literal["auto", "eager", "inductor"]
GuardSource = Literal["dynamo", "inputs"]
Kind = TypeVar("Kind", bound="Options")

_LARGEST_RATIO = 100.0
"""A float above this is rejected as ``memory_budget``, and so is an int up to this: bytes and ratio were confused."""

MAX_STREAMS = 16
"""No measured model gains from more streams; their workspaces and edges cost more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of ``optimize``, validated when the object is created.

    Numbers of other types, such as NumPy's and fractions, are converted to Python's.

    Attributes:
        streams: the number of streams, including the caller's; ``"auto"`` tries several numbers.
        policy: ``"auto"`` tries all policies; ``"sequential"``, ``"critical_path"``, ``"path_cover"`` or ``"search"``
            selects one. ``sequential`` is always a candidate, so that no call becomes slower; on a CPU and with
            ``"auto"``, so is the model itself.
        costs: ``"measured"`` times each op on the device, ``"roofline"`` estimates its time from FLOPs and bytes,
            ``"auto"`` measures on a GPU.
        cuda_graph: ``"auto"`` captures a CUDA graph on a GPU where possible; ``True`` does too, and is refused for a
            model on the CPU; ``False`` never captures.
        kernels: ``"eager"``: ATen ops; ``"inductor"``: kernels fused by TorchInductor; ``"auto"``: the faster of
            both on a GPU, ``"eager"`` on a CPU.
        inductor_options: for fused kernels, settings of ``torch._inductor.config`` by name, e.g.
            ``{"max_autotune": True}``. With ``{"freezing": True}`` weights are constants where that was measured to be
            faster: the next call recompiles if one has changed, but changes through ``tensor.data``, which PyTorch does
            not count, are not noticed.
        guards: what each call checks. ``"dynamo"``: all guards of TorchDynamo, and the addresses of weights.
            ``"inputs"``: the inputs only, as with ``torch.cuda.make_graphed_callables``: the model's tensors must keep
            their addresses (their values may change in place), and its Python code must do the same in each call. A
            training step checks the numbers of its optimizers too, such as learning rates.
        strict: raise an exception where autostream would otherwise run the model eagerly and report why.
        max_signatures: the number of compiled input signatures (shapes, dtypes, grad mode, …). The least recently used
            one is evicted first; training steps of further signatures run eagerly.
        tuning_seconds: the time for timing ops, searching, and timing schedules, for each signature. Tracing and
            compiling are not included; ``Report.seconds`` has all stages.
        memory_budget: the memory that a schedule may take. A float is a ratio to what the model takes on one stream,
            weights and inputs included, from 1.0 (at least 2 MiB more are allowed, and with collectives 1 % of the
            device's memory); an int is the bytes that the schedule itself allocates; ``math.inf`` is no limit.
            Schedules that need more are not tried, except the sequential one; the report says what the limit costs.
            Workspaces of libraries are not included.
        seed: of the random numbers of ``"search"``: the same costs and seed give the same schedules.

    Example:
        >>> Options(streams=4).streams
        4
        >>> Options(streams=0)
        Traceback (most recent call last):
        ...
        autostream.errors.OptionError: streams=0 is not allowed: use "auto" or a whole number from 1 to 16
    """

    streams: Literal["auto"] | int = "auto"
    policy: PolicyName = "auto"
    costs: CostSource = "auto"
    cuda_graph: Literal["auto"] | bool = "auto"
    kernels: KernelLevel = "auto"
    inductor_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    guards: GuardSource = "dynamo"
    strict: bool = False
    max_signatures: int = 8
    tuning_seconds: float = 10.0
    memory_budget: int | float = 1.1
    seed: int = 0

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(self, option.name, _as_python_number(getattr(self, option.name)))
        if self.streams != "auto" and not _whole_number(self.streams, 1, MAX_STREAMS):
            raise _refusal("streams", self.streams, f'"auto" or a whole number from 1 to {MAX_STREAMS}')
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in get_args(allowed):
                raise _refusal(name, getattr(self, name), " or ".join(f'"{value}"' for value in get_args(allowed)))
        if self.policy == "sequential" and self.streams not in ("auto", 1):
            raise OptionError(f'streams={self.streams} is of no use with policy="sequential": leave one of them out')
        if self.cuda_graph != "auto" and not isinstance(self.cuda_graph, bool):
            raise _refusal("cuda_graph", self.cuda_graph, '"auto", True or False')
        settings = self.inductor_options
        if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
            raise _refusal("inductor_options", settings, '{} or a dict such as {"max_autotune": True}')
        object.__setattr__(self, "inductor_options", dict(settings))  # the caller may change theirs
        if settings and self.kernels == "eager":
            raise OptionError('inductor_options are of no use with kernels="eager": use "auto" or "inductor" with them')
        if not isinstance(self.strict, bool):
            raise _refusal("strict", self.strict, "True or False")
        if not _whole_number(self.max_signatures, 1, None):
            raise _refusal("max_signatures", self.max_signatures, "a whole number from 1")
        if not _positive(self.tuning_seconds):
            raise _refusal("tuning_seconds", self.tuning_seconds, "a finite number above 0, such as 10.0")
        if self.memory_budget != math.inf and not _positive(self.memory_budget):
            raise _refusal("memory_budget", self.memory_budget, "a ratio such as 1.1, or bytes such as 64_000_000")
        if isinstance(self.memory_budget, float) and _LARGEST_RATIO < self.memory_budget < math.inf:
            advice = f"a ratio such as 1.1, math.inf for no limit, or int({self.memory_budget:g}) for bytes"
            raise _refusal("memory_budget", self.memory_budget, advice)
        if isinstance(self.memory_budget, float) and self.memory_budget < 1:
            raise _refusal("memory_budget", self.memory_budget, "a ratio from 1.0, such as 1.1: one stream takes 1.0")
        if isinstance(self.memory_budget, int) and self.memory_budget <= _LARGEST_RATIO:
            advice = f"a ratio as a float, such as 1.1 or {self.memory_budget}.0: whole numbers are bytes"
            raise _refusal("memory_budget", self.memory_budget, advice)
        if not _whole_number(self.seed, 0, None):
            raise _refusal("seed", self.seed, "a whole number from 0")

    @property
    def on_one_stream(self: Kind) -> Kind:
        """These options for a schedule on one stream.

        Example:
            >>> Options(streams=2, seed=3).on_one_stream == Options(policy="sequential", seed=3)
            True
        """
        return replace(self, policy="sequential", streams="auto")

    @classmethod
    def parse(cls: type[Kind], options: dict[str, Any]) -> Kind:
        """Create options from keyword arguments; the error for an unknown name suggests the most similar one.

        Example:
            >>> Options.parse({"polices": "auto"})  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ...
            autostream.errors.OptionError: there is no option 'polices' (did you mean 'policy'?): use streams, ...
        """
        known = [known.name for known in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise OptionError(f"there is no option {name!r}{hint}: use {', '.join(known[:-1])} or {known[-1]}")
        return cls(**options)


_CHOICES = {"policy": PolicyName, "costs": CostSource, "kernels": KernelLevel, "guards": GuardSource}

_DECAY = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(Options):
    """Options of ``train_step``: those of ``optimize``, and these.

    Attributes:
        microbatches: the number of equal parts of a batch that run one after another, or, of a model over several
            devices, as a pipeline. Their gradients are added, and the loss is the mean of their losses. The first
            tensor with a dimension has the number of rows of the batch; tensors with as many rows are split along their
            first dimension, and everything else goes to each part.
        max_norm: the L2 norm to which the gradients of all parameters together are clipped.
        average: a copy of the model (``copy.deepcopy(model)``) whose parameters become a moving average of the model's:
            after each step, ``decay`` times their value plus ``1 - decay`` times the model's. Its buffers are copied
            from the model.
        decay: of that average, from 0 to 1.
        scaler: a ``torch.amp.GradScaler`` that scales the loss, runs the optimizer if the gradients are finite, and
            updates itself. ``scaler.update()`` is called in each step: a scaler of two steps counts both.
        data_parallel: a process group of ``torch.distributed`` over which gradients are averaged; ``False`` averages
            nothing. ``None`` is what ``torch.distributed.group.WORLD`` is before ``init_process_group``: it averages
            nothing in a single process, and is refused in one of several.

    Example:
        >>> StepOptions.parse({"microbatch": 2})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        autostream.errors.OptionError: there is no option 'microbatch' (did you mean 'microbatches'?): use streams, ...
    """

    microbatches: int = 1
    max_norm: float | None = None
    average: nn.Module | None = None
    decay: float = _DECAY
    scaler: torch.amp.GradScaler | None = None
    data_parallel: torch.distributed.ProcessGroup | Literal[False] | None = False

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not _whole_number(self.microbatches, 1, None):
            raise _refusal("microbatches", self.microbatches, "a whole number from 1")
        if self.max_norm is not None and not _positive(self.max_norm):
            raise _refusal("max_norm", self.max_norm, "None or a finite number above 0, such as 1.0")
        if not (_positive(self.decay) or self.decay == 0) or isinstance(self.decay, bool) or self.decay > 1:
            raise _refusal("decay", self.decay, "a number from 0 to 1, such as 0.999")
        if self.average is None and self.decay != _DECAY:
            raise OptionError(f"decay={self.decay!r} is of an average: give average=copy.deepcopy(model), too")


def disabled() -> bool:
    """Whether ``AUTOSTREAM_DISABLE=1`` is set: every model runs eagerly, to find out whether autostream is at fault."""
    return os.environ.get("AUTOSTREAM_DISABLE", "") not in ("", "0")


def paranoid() -> bool:
    """Whether ``AUTOSTREAM_VERIFY=paranoid`` is set: every scheduled call is compared with an eager one.

    Raises:
        OptionError: it has another value.
    """
    asked = os.environ.get("AUTOSTREAM_VERIFY", "")
    if asked not in ("", "paranoid"):
        raise OptionError(f"AUTOSTREAM_VERIFY is {asked!r}: use 'paranoid', or leave it unset")
    return asked == "paranoid"


def processes_started() -> int:
    """How many processes this one was started with, by ``torchrun`` or what sets the same variable: 1 if not so."""
    asked = os.environ.get("WORLD_SIZE", "")
    return int(asked) if asked.isdecimal() else 1


def log_level() -> str:
    """The level in ``AUTOSTREAM_LOG``, by its name in :mod:`logging`; ``""`` if it is not set.

    Raises:
        OptionError: there is no such level.
    """
    asked = os.environ.get("AUTOSTREAM_LOG", "")
    if asked.upper() not in ("", *_LEVELS):
        raise OptionError(f"AUTOSTREAM_LOG is {asked!r}: use {', '.join(_LEVELS).lower()}, or leave it unset")
    return asked.upper()


_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def colours() -> bool:
    """Whether a terminal may be written to in colours: ``NO_COLOR`` is not set, and ``TERM`` is not ``dumb``."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def environment() -> dict[str, str]:
    """The environment variables that a measurement may depend on, in alphabetical order."""
    prefixes = (
        "AUTOSTREAM_",
        "CUBLAS_",
        "CUDA_",
        "CUDNN_",
        "NCCL_",
        "NVIDIA_TF32",
        "OMP_NUM_THREADS",
        "PYTORCH_",
        "TORCH",
    )
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def cache_folder() -> Path:
    """The folder for files that outlive the process, whether or not it exists.

    ``$AUTOSTREAM_CACHE_DIR``, else ``autostream`` in the user's cache folder: ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        FileNotFoundError: no variable names it, and there is no home directory.
    """
    asked = os.environ.get("AUTOSTREAM_CACHE_DIR", "")
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG Base Directory Specification says to ignore relative paths.
    folder = asked or os.path.join(shared if os.path.isabs(shared) else os.path.join("~", ".cache"), "autostream")
    # expanduser takes an empty HOME for the root of the file system.
    expanded = folder if os.environ.get("HOME") == "" else os.path.expanduser(folder)
    if expanded.startswith("~"):
        raise FileNotFoundError(f"there is no home directory for {folder}: set AUTOSTREAM_CACHE_DIR")
    return Path(expanded)


def _as_python_number(value: Any) -> Any:
    """A number as an ``int`` or a ``float``; other values, and fractions too large for a float, are unchanged."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except OverflowError:
        return value


def _whole_number(value: object, low: int, high: int | None) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and value >= low and (high is None or value <= high)  # type: ignore[operator]


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _refusal(name: str, value: object, allowed: str) -> OptionError:
    return OptionError(f"{name}={value!r} is not allowed: use {allowed}")
