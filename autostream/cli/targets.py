"""Parsing of TARGET into a model, of ``--input`` into a tensor, and of ``--device``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autostream.cli import zoo
from autostream.dispatch.step_functions import StepFunction
from autostream.errors import TargetError, a_type, first_line
from autostream.training import TrainStep

_SHAPE = re.compile(r"\d+(x\d+)*", re.ASCII)

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
"""Dtypes of ``--input``, by name."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One ``--input``.

    Attributes:
        shape: sizes; ``()`` is a scalar.
        dtype: ``None`` means that of the model's parameters.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


_OF_PROCESSES = re.compile(r"default process group|\b(LOCAL_)?RANK\b|\b(LOCAL_)?WORLD_SIZE\b")
"""In what fails of a factory that is written for torchrun."""

_PROCESSES = "; --world makes the processes itself: call no init_process_group, and read no variables of torchrun"

Step = StepFunction | TrainStep

Zoo = Callable[[str], tuple[nn.Module, tuple[Any, ...]]]
"""Makes a model and its inputs from a name, as :func:`autostream.cli.zoo.build` does."""


def load(target: str, zoo_model: Zoo = zoo.build) -> tuple[nn.Module | Step, tuple[Any, ...] | None]:
    """Make the model of TARGET, and its example inputs if it has any. This runs the user's code.

    ``package.module:factory`` and ``file.py:factory`` name a function (or a module class) that is called without
    arguments and returns a module, or a module and a tuple or list of inputs, or a training step and its batch;
    anything else is a name for ``zoo_model``.
    The working directory, or the file's own, becomes importable as it is for ``python -m`` and ``python file.py``.

    Raises:
        TargetError: it cannot be imported or called, or returns neither.

    Example:
        >>> load("torch.nn:Flatten")
        (Flatten(start_dim=1, end_dim=-1), None)
    """
    where, colon, factory = target.rpartition(":")
    if not colon:
        if target.endswith(".py"):
            raise TargetError(f"{target} does not say what to take from the file: write {target}:factory")
        return zoo_model(target)
    if not where or not factory:
        raise TargetError(f"{target!r} names no factory: write package.module:factory or file.py:factory")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    return _call(module, factory, target)


def parse_input(text: str) -> InputSpec:
    """Read ``SHAPE[:DTYPE]``, for instance ``1x3x224x224:float16``, ``8x128:int64``, ``16`` or ``scalar``.

    Raises:
        TargetError: it has another form.

    Example:
        >>> parse_input("1x3x224x224:float16")
        InputSpec(shape=(1, 3, 224, 224), dtype=torch.float16)
        >>> parse_input("scalar")
        InputSpec(shape=(), dtype=None)
    """
    shape, colon, dtype = text.partition(":")
    if shape != "scalar" and not _SHAPE.fullmatch(shape):
        raise TargetError(
            f"--input {text}: the shape {shape!r} is not allowed: write whole numbers joined by x, "
            "as in 1x3x224x224, or scalar"
        )
    if colon and dtype not in DTYPES:
        raise TargetError(f"--input {text}: the dtype {dtype!r} is not allowed: use {', '.join(DTYPES)}")
    sizes = () if shape == "scalar" else tuple(int(size) for size in shape.split("x"))
    return InputSpec(sizes, DTYPES.get(dtype))


def parse_device(text: str | None) -> torch.device:
    """The device of this name; without one, the GPU if there is one, else the CPU.

    Raises:
        TargetError: this machine has no such device.

    Example:
        >>> parse_device("cpu")
        device(type='cpu')
    """
    gpus = torch.cuda.device_count()
    if text is None:
        return torch.device("cuda", 0) if gpus else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text, re.ASCII):
        raise TargetError(f"--device {text} is not allowed: use cpu, cuda or cuda:N")
    device = torch.device("cuda", 0) if text == "cuda" else torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= gpus:
        seen = f"PyTorch sees {gpus} GPU{'s' if gpus != 1 else ''} here"
        raise TargetError(f"--device {text}: {seen}; use --device cpu, or autostream schedule --device h200 to plan")
    return device


def prepare(
    target: str,
    inputs: Sequence[InputSpec],
    device: torch.device,
    dtype: torch.dtype | None = None,
    zoo_model: Zoo = zoo.build,
) -> tuple[nn.Module | Step, tuple[Any, ...]]:
    """Load TARGET, make its inputs and move both to the device.

    Floating-point parameters are cast to ``dtype``, by default the first floating-point dtype of ``inputs``; the
    model's own inputs are cast as well. A training step stays on the device where it was made.

    Raises:
        TargetError: TARGET cannot be loaded, has no inputs, or its ``forward`` takes another number of inputs.

    Example:
        >>> model, (x,) = prepare("torch.nn:Flatten", [InputSpec((2, 3, 4))], torch.device("cpu"))
        >>> tuple(model(x).shape)
        (2, 12)
    """
    model, example = load(target, zoo_model)
    if not isinstance(model, nn.Module):
        assert example is not None, "a step comes with its batch"
        return model, make_inputs(inputs, device, torch.float32) if inputs else example
    floating = [spec.dtype for spec in inputs if spec.dtype is not None and spec.dtype.is_floating_point]
    dtype = dtype or next(iter(floating), None)
    model = model.to(device, dtype)
    if inputs:
        usual = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        args: tuple[Any, ...] = make_inputs(inputs, device, usual)
    elif example is not None:
        args = pytree.tree_map_only(Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else None), example)
    else:
        raise TargetError(f"{target} comes without example inputs: give each one as --input SHAPE[:DTYPE]")
    _check_call(model, args, target)
    return model, args


def make_inputs(inputs: Sequence[InputSpec], device: torch.device, usual: torch.dtype) -> tuple[Tensor, ...]:
    """Random tensors, the same in every process; ``usual`` is the default dtype.

    Raises:
        TargetError: one is too large for this machine.

    Example:
        >>> make_inputs([InputSpec((2,), torch.int64)], torch.device("cpu"), torch.float32)[0].dtype
        torch.int64
    """
    generator = torch.Generator().manual_seed(zoo.SEED)
    return tuple(_made(spec.shape, spec.dtype or usual, device, generator) for spec in inputs)


def _made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    try:
        return _random(shape, dtype, generator).to(device)
    except (RuntimeError, TypeError) as error:  # too large for the memory, or for an integer
        said = "x".join(map(str, shape)) or "scalar"
        raise TargetError(
            f"--input {said}: cannot be made on {device} ({first_line(error)}): use smaller sizes"
        ) from error


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    # 0 and 1 are valid token ids, token types and mask values alike.
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _import_module(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    with _user_code(f"cannot import {name!r}"):
        return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path}: write file.py:factory with a path that exists from {Path.cwd()}")
    _make_importable(path.resolve().parent)
    # A unique name in sys.modules, since dataclasses and pickle look modules up by name.
    name = f"autostream_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a path that ends in .py has a loader"
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with _user_code(f"cannot import {path}"):
        spec.loader.exec_module(module)
    return module


def _make_importable(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _call(module: ModuleType, factory: str, target: str) -> tuple[nn.Module | Step, tuple[Any, ...] | None]:
    try:
        function = operator.attrgetter(factory)(module)
    except AttributeError as error:
        raise TargetError(f"{target}: {error}; write the name of a function that the module has") from None
    if isinstance(function, nn.Module) or not callable(function):
        raise TargetError(f"{target} is {a_type(function)}, not a factory: name a function that returns a module")
    _check_arguments(function, (), target)
    with _user_code(f"{target} failed"):
        made = function()
    match made:
        case nn.Module():
            return made, None
        case nn.Module() | StepFunction() | TrainStep() as model, tuple(args) | list(args):
            return model, tuple(args)
    raise TargetError(f"{target} returned {a_type(made)}: a factory returns a module, (module, args) or (step, batch)")


def _check_call(model: nn.Module, args: tuple[Any, ...], target: str) -> None:
    _check_arguments(model.forward, args, f"{target}: {type(model).__name__}.forward")


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        given = f"{len(args)} input{'s' if len(args) != 1 else ''}"
        raise TargetError(f"{name} does not take {given}: {error}") from None
    except ValueError:  # written in C, without a signature
        return


@contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Turn an exception of the user's code into one line with its location."""
    try:
        yield
    # A script without a main guard may well call sys.exit.
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        advice = _PROCESSES if _OF_PROCESSES.search(reason) else ""
        raise TargetError(f"{what}: {type(error).__name__}: {reason}{_where(error)}{advice}") from error


def _where(error: BaseException) -> str:
    """The innermost line of the user's code in a traceback, as ``" (model.py:12)"``."""
    ours = (__file__, importlib.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours and f.filename[0] != "<"]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
