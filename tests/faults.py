"""Faults to inject, models to inject them into, and checks of what has to be unchanged."""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.api import OptimizedModule, optimize
from autostream.runtime.cuda_graph import _capturing
from autostream.utils.locks import preparing
from tests.semantics import same


def out_of_memory() -> Exception:
    """A new error as PyTorch raises it. An exception keeps the objects of its frames alive, so none is reused."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand so on")


@torch.library.custom_op("tests_faults::risky", mutates_args=())
def risky(x: Tensor) -> Tensor:
    """The identity, unless a fault is due; so is its gradient."""
    Risk.runs += 1
    if Risk.runs in Risk.failing:
        raise Risk.make_fault()
    return x.clone()


@risky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


risky.register_autograd(lambda context, gradient: risky(gradient))


class Risk:
    """Which runs of :func:`risky` raise which error; runs are counted from 1."""

    runs = 0
    failing = range(0)
    make_fault: Callable[[], BaseException] = RuntimeError

    @classmethod
    def is_at(cls, run: int, make_fault: Callable[[], BaseException], times: int = 1) -> None:
        cls.runs, cls.failing, cls.make_fault = 0, range(run, run + times), make_fault

    @classmethod
    def is_over(cls) -> None:
        cls.failing = range(0)


class Noisy(nn.Module):
    """Two branches; it mutates buffers and generates random numbers, before and after the risky op.

    ::

        x ─▶ norm ─┬─▶ left ─▶ risky ─┬─▶ add
                   └─▶ right ─▶ drop ─┘
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return risky(self.left(x)) + torch.dropout(self.right(x), 0.5, True)


class Quiet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return risky(self.left(x)) + self.right(x).tanh()


class Surroundings:
    """The global state that a fault could change, and the model's."""

    place: object = None

    def __init__(self, model: nn.Module) -> None:
        self.state = {name: value.clone() for name, value in model.state_dict().items()}
        self.generators = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            self.generators += [torch.cuda.get_rng_state()]
            self.place = (
                torch.cuda.current_device(),
                torch.cuda.current_stream(),
                torch.cuda.is_current_stream_capturing(),
            )
        self.others = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.get_num_threads(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
            model.training,
            [vars(nn.Module)[name] for name in ("__call__", "__getattr__", "__setattr__", "forward")],
            gc.isenabled(),
            logging.root.manager.disable,
            list(warnings.filters),
        )

    def check(self, now: Surroundings) -> None:
        same(now.state, self.state)
        same(now.generators, self.generators)
        assert now.place == self.place
        assert now.others == self.others


def check_free(fast: OptimizedModule) -> None:
    """Assert that no lock is held: another thread can acquire each of them."""
    free: list[bool] = []

    def take() -> None:
        for lock in (preparing, fast._autostream._lock, _capturing):
            free.append(lock.acquire(blocking=False))
            if free[-1]:
                lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert free == [True] * 3


def check_works(fast: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Assert that both compute the same, with the same side effects."""
    Risk.is_over()
    outputs, states = [], []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for which in (model, fast, fast):
        model.load_state_dict(before)
        torch.manual_seed(3)
        outputs.append(which(x))
        states.append(Surroundings(model))
    for output, state in zip(outputs[1:], states[1:], strict=True):
        same(output, outputs[0])
        states[0].check(state)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of autostream's."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("autostream")]


def fail_once(monkeypatch: pytest.MonkeyPatch, stage: str, fault: BaseException) -> list[BaseException]:
    """Let the next call of a stage raise; returns a list with the error until it is raised."""
    due = [fault]
    module, _, name = f"autostream.{stage}".rpartition(".")
    real: Callable[..., Any] = vars(__import__(module, fromlist=[name]))[name]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if due:
            raise due.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(f"{module}.{name}", failing)
    return due


def strike(
    model: nn.Module,
    x: Tensor,
    options: Mapping[str, Any],
    make_fault: Callable[[], BaseException],
    runs: Iterable[int],
) -> int:
    """Let an op raise in one of its runs while a model is prepared, in another each time; count the errors."""
    struck = 0
    for run in runs:
        fast, before = optimize(model, **options), Surroundings(model)
        Risk.is_at(run, make_fault)
        try:
            fast.prepare(x)
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
            assert fast.reports == ()
        strikes = Risk.runs >= run
        assert interrupted == (strikes and make_fault is KeyboardInterrupt)
        before.check(Surroundings(model))
        check_free(fast)
        check_works(fast, model, x)
        if not strikes:
            break
        struck += 1
    return struck
