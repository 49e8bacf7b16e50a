"""Random actions of users on optimized models, for minutes: all results have to be right.

    python -m tests.soak --minutes 8 --seed 0 --out soak.json

A round is a dozen random actions: models of the zoo are optimized with some options and called with batches of several
sizes, from streams and threads, one after another or all at once. Their weights change and move, they run in training
mode, record gradients, and are dropped; other threads overwrite free memory meanwhile. Every call is compared with the
eager model (``agreement.py``). After a round all models are dropped, and memory must be as before.

A failure is printed with the command that repeats its round. To use several GPUs, run one process for each, with
different seeds: ``CUDA_VISIBLE_DEVICES=1 python -m tests.soak --seed 1``.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import json
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.cli.modes import relative_error, tensors_in
from autostream.runtime.capture import clear_cublas_workspaces
from autostream.scheduling.policies import POLICIES
from benchmarks.stamp import stamp
from benchmarks.zoo import INFERENCE, SEED, Workload, prepare
from tests.agreement import Example, check_calls, check_streams, check_threads, examples_of, lanes
from tests.planned import Cells
from tests.pressure import MIB, pressure
from tests.semantics import force_streams, scattered
from tests.threads import in_threads

T = TypeVar("T")


class Learners(nn.Module):
    """Branches with batch norms and dropout.

    x ─┬▶ linear ─▶ batch norm ─▶ relu ─▶ dropout ─╮
       ├▶ …                                        ├▶ cat
       ╰▶ …                                       ─╯
    """

    def __init__(self, width: int = 64, branches: int = 3) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout())
            for _ in range(branches)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], -1)


WORKLOADS: Mapping[str, Workload] = {
    **INFERENCE,
    "learners": Workload("learners", Learners, lambda batch: (torch.randn(16 * batch, 64),)),
    "cells": Workload("cells", Cells, lambda batch: (torch.randn(4 * batch, 8),)),
}
"""The benchmarks' models, and small ones."""

MODELS: Mapping[str, Sequence[str]] = {
    "cpu": ("learners", "cells", "towers8", "ensemble4", "deepfm", "bilstm"),
    "cuda": (
        *("googlenet", "squeezenet1_1", "mobilenet_v2", "efficientnet_b0", "resnet50", "vit_b_16", "bert_base"),
        *("t5_small", "clip", "dlrm", "deepfm", "moe8", "towers8", "ensemble4", "bilstm", "randwire", "learners"),
    ),
}
"""The models for each kind of device."""

LIVE = 3
"""Models at a time."""

ACTIONS = 12
"""Actions of a round. The first one optimizes a model."""

COMPILING_S = 90.0
"""The time that fusing may take: with less left, models are not fused."""

STUCK_S = 300.0
"""A process that runs so much longer than it should prints its stack traces and ends."""

MORE_BYTES, MORE_TENSORS = 64 * MIB, 200
"""Memory that libraries may keep: allowed growth since the first round, when all models are dropped."""

TRAINING_ERROR = 1e-2
"""Allowed error of training mode, with the eager model's kernels and random numbers."""


class Uncheckable(Exception):  # noqa: N818 - nothing is wrong
    """With its weights, the eager model is too inaccurate, or returns the same for all inputs."""


@dataclass
class Subject:
    name: str
    level: str
    workload: Workload
    model: nn.Module
    fast: autostream.OptimizedModule
    examples: dict[int, list[Example]] = field(default_factory=dict)

    def inputs(self, batch: int, seed: int) -> tuple[Tensor, ...]:
        parameter = next(self.model.parameters())
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(SEED + seed)
            inputs = self.workload.inputs(batch)
        return tuple(x.to(parameter.device, parameter.dtype if x.is_floating_point() else x.dtype) for x in inputs)

    def at(self, batch: int) -> list[Example]:
        """Two calls of this batch size, with the eager model's results."""
        if batch not in self.examples:
            inputs = [self.inputs(batch, seed) for seed in (0, 1)]
            try:
                self.examples[batch] = examples_of(self.model, inputs)
            except AssertionError as error:
                raise Uncheckable from error
        return self.examples[batch]


@dataclass(frozen=True)
class Failure:
    action: str
    models: Sequence[str]
    error: str
    repeat: str


class Round:
    """A dozen random actions on models."""

    def __init__(
        self,
        choose: random.Random,
        device: torch.device,
        seconds_left: Callable[[], float],
        calls: Iterator[int],
        names: Sequence[str],
    ) -> None:
        self.subjects: list[Subject] = []
        self._choose, self._device, self._seconds_left, self._calls = choose, device, seconds_left, calls
        self._names = names

    def actions(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "optimize", self.optimize
        for name in self._choose.choices(list(KINDS), list(KINDS.values()), k=ACTIONS - 1):
            yield name, getattr(self, name)

    def fates(self) -> Iterator[str]:
        """The mode and the refusals of each signature that is still cached."""
        for subject in self.subjects:
            for report in subject.fast.reports:
                reasons = [refusal.reason for refusal in report.refusals]
                assert not any("it cannot be scheduled" in reason for reason in reasons), reasons
                yield from (report.mode, *(refusal.choice for refusal in report.refusals))

    # Actions

    def optimize(self) -> None:
        if len(self.subjects) >= LIVE:
            self.drop()
        choose, name, cuda = self._choose, self._choose.choice(self._names), self._device.type == "cuda"
        dtype = choose.choice([torch.float16, torch.float32]) if cuda else torch.float32
        level = choose.choice(["eager", "eager", "inductor"]) if cuda else "eager"
        options = {
            "kernels": "eager" if self._seconds_left() < COMPILING_S else level,
            "policy": choose.choice(["auto", "critical_path", "path_cover"]),
            "streams": choose.choice([2, 3, 4]),
            "cuda_graph": choose.choice(["auto", True, False]) if cuda else "auto",
            "costs": choose.choice(["roofline", "roofline", "auto"]),
            "memory_budget": choose.choice([1.1, math.inf]),
            "max_signatures": choose.choice([2, 8]),
            "tuning_seconds": 2.0,
            "seed": choose.randrange(100),
        }
        workload = WORKLOADS[name]
        model = prepare(workload, 1, self._device, dtype).model
        fast = autostream.optimize(model, **options)
        self.subjects.append(Subject(name, str(options["kernels"]), workload, model, fast))
        self._check(self.subjects[-1], batch=1)

    def call(self) -> None:
        subject = self._any()
        examples = subject.at(self._batch(subject))  # outside of inference mode, whose tensors no backward may save
        with self._choose.choice([torch.no_grad, torch.inference_mode])():
            check_calls(self._counted(subject.fast), examples)

    def streams(self) -> None:
        subject, count = self._any(), self._choose.randint(2, 4)
        check_streams(self._counted(subject.fast), subject.at(self._batch(subject)), lanes(self._device, count))

    def threads(self) -> None:
        subject, count = self._any(), self._choose.randint(2, 8)
        check_threads(self._counted(subject.fast), subject.at(self._batch(subject)), lanes(self._device, count))

    def crowd(self) -> None:
        """Call all models at once, each from another thread."""
        examples = [subject.at(1) for subject in self.subjects]
        mine = lanes(self._device, len(self.subjects))

        @torch.no_grad()
        def work(at: int) -> list[Any]:
            call = self._counted(self.subjects[at].fast)
            with mine[at]():
                return [(example, call(*example.args)) for example in examples[at] * 5]

        self._synchronize()
        answers = in_threads(len(self.subjects), work)
        self._synchronize()
        for example, outputs in itertools.chain.from_iterable(answers):
            example.check(outputs)

    def spoil(self) -> None:
        """Call a model while another thread fills free memory with NaN, on the caller's stream and on others."""
        subject, mine = self._any(), lanes(self._device, 3)
        examples = subject.at(1)
        with pressure(self._device, mine, 128 * MIB, self._choose.randrange(1000)):
            check_streams(self._counted(subject.fast), examples, mine[:2])

    def change_weights(self) -> None:
        subject = self._any()
        with torch.no_grad():
            for parameter in self._some(list(subject.model.parameters())):
                parameter.mul_(self._choose.uniform(0.8, 1.2))
        self._changed(subject)

    def move_weights(self) -> None:
        subject = self._any()
        for parameter in self._some(list(subject.model.parameters())):
            parameter.data = parameter.data * self._choose.uniform(0.8, 1.2)
        self._changed(subject)

    def load_weights(self) -> None:
        subject = self._any()
        state, factor = _state(subject.model), self._choose.uniform(0.8, 1.2)
        for name, _ in self._some(list(subject.model.named_parameters())):
            state[name] *= factor
        subject.fast.load_state_dict(state, assign=self._choose.random() < 0.5)
        self._changed(subject)

    def train(self) -> None:
        """Run in training mode: outputs, buffers and random numbers are as in eager."""
        subject = self._any()
        if subject.level != "eager":  # fused kernels round differently, which batch norms of a few examples amplify
            return
        args, seed, before = subject.inputs(4, seed=2), self._choose.randrange(100), _state(subject.model)
        ours = self._trained(subject.fast, subject.model, args, seed, before)
        theirs = self._trained(subject.model, subject.model, args, seed, before)
        error = relative_error(ours, theirs) if all(bool(tensor.isfinite().all()) for tensor in theirs) else 0.0
        assert error <= TRAINING_ERROR, f"a training step is off by {error:.1e}"
        self._check(subject, 1)

    def record_gradients(self) -> None:
        """Call with gradients, and run the backward; if that fails in eager, the error is the same."""
        subject = self._any()
        example = subject.at(self._batch(subject))[0]

        def refusal(call: Callable[..., Any]) -> str:
            with torch.enable_grad():
                outputs = call(*example.args)
                example.check(outputs)
                try:
                    sum(output.float().sum() for output in tensors_in(outputs) if output.requires_grad).backward()
                except RuntimeError as error:  # cuDNN has a backward of LSTMs in training mode only
                    return str(error)
            return ""

        assert refusal(self._counted(subject.fast)) == refusal(subject.model)
        subject.model.zero_grad()
        self._check(subject, 1)

    def churn(self) -> None:
        """Call with more batch sizes than are cached, up and down."""
        subject = self._any()
        sizes = [1, 2, 3] if subject.level == "eager" else [1]
        for batch in [*sizes, *reversed(sizes)]:
            self._check(subject, batch)

    def drop(self) -> None:
        """Drop a model while its last call may still run, unless it is the only one."""
        if len(self.subjects) < 2:
            return
        subject = self.subjects.pop(self._choose.randrange(len(self.subjects)))
        with torch.no_grad():
            self._counted(subject.fast)(*subject.at(1)[0].args)
        del subject
        gc.collect()

    # Helpers

    def _any(self) -> Subject:
        return self._choose.choice(self.subjects)

    def _batch(self, subject: Subject) -> int:
        size = self._choose.choice([1, 1, 2])
        compiles = subject.level == "inductor" and size not in subject.examples
        return 1 if compiles and self._seconds_left() < COMPILING_S else size

    def _some(self, parameters: Sequence[T]) -> Sequence[T]:
        return self._choose.sample(parameters, min(3, len(parameters)))

    def _check(self, subject: Subject, batch: int) -> None:
        check_calls(self._counted(subject.fast), subject.at(batch))

    def _changed(self, subject: Subject) -> None:
        subject.examples.clear()
        self._check(subject, 1)

    def _counted(self, fast: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Tensor) -> Any:
            next(self._calls)
            return fast(*args)

        return call

    @torch.no_grad()
    def _trained(
        self, call: nn.Module, model: nn.Module, args: Sequence[Tensor], seed: int, before: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """Outputs of two calls in training mode, and the model's state after them, which is then as before."""
        call.train()
        try:
            torch.manual_seed(seed)
            outputs = [tensor.clone() for _ in range(2) for tensor in tensors_in(call(*args))]
            return [*outputs, *_state(model).values()]
        finally:
            call.eval()
            model.load_state_dict(before)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


KINDS: Mapping[str, int] = {
    "optimize": 4,
    "call": 3,
    "streams": 3,
    "threads": 3,
    "crowd": 3,
    "spoil": 2,
    "churn": 2,
    "drop": 1,
    "change_weights": 2,
    "move_weights": 2,
    "load_weights": 1,
    "train": 2,
    "record_gradients": 1,
}
"""Actions, with the weights of their random choice."""


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@dataclass(frozen=True)
class Memory:
    """Memory in use when all models are dropped: bytes of the device in whole segments, and tensors by class.

    Fake tensors are reported but not judged: PyTorch keeps the last graph that it traced, with its fake values.
    """

    reserved_bytes: int
    tensors: Counter[str]

    def grown(self, first: Memory) -> str:
        """The growth since the first round that is not allowed, or ``""``."""
        bytes_more = self.reserved_bytes - first.reserved_bytes
        tensors_more = self._tensors_with_memory() - first._tensors_with_memory()
        if bytes_more <= MORE_BYTES and tensors_more <= MORE_TENSORS:
            return ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in (self.tensors - first.tensors).most_common())
        tensors = f"{tensors_more} tensors" + (f" ({kinds})" if kinds else "")
        return f"{bytes_more / MIB:.0f} MiB and {tensors} more than after the first round"

    def _tensors_with_memory(self) -> int:
        return self.tensors.total() - self.tensors["FakeTensor"]


def memory(device: torch.device) -> Memory:
    """The memory in use now, without cuBLAS's workspaces and cached blocks of the allocator."""
    torch._dynamo.reset()
    for _ in range(2):
        gc.collect()
    reserved = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(device)
    kinds = map(type, gc.get_objects())
    return Memory(reserved, Counter(kind.__name__ for kind in kinds if issubclass(kind, Tensor)))


@dataclass
class Soak:
    device: torch.device
    seed: int
    names: Sequence[str]
    actions: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    calls: Iterator[int] = field(default_factory=itertools.count)

    def round(self, number: int, seconds_left: Callable[[], float]) -> None:
        """Run a round. It ends early at a failure, if results cannot be checked, or if the time is up."""
        self._act(number, seconds_left)
        self.memories.append(memory(self.device))
        if grown := self.memories[-1].grown(self.memories[0]):
            self._failed(number, "memory", [], AssertionError(grown))

    def _act(self, number: int, seconds_left: Callable[[], float]) -> None:
        """Run the actions of a round. All its models are dropped when this returns."""
        choose = random.Random(f"{self.seed} {number}")
        now = Round(choose, self.device, seconds_left, self.calls, self.names)
        with ExitStack() as stack:
            if choose.random() < 0.7:  # otherwise measured times choose the schedule
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                force_streams(patch, choose.choice([POLICIES["critical_path"], scattered]))
            for name, action in now.actions():
                if seconds_left() <= 0:
                    break
                try:
                    action()
                    self.actions[name] += 1
                except Uncheckable:
                    self.actions["given up"] += 1
                    break
                except Exception as error:
                    self._failed(number, name, now.subjects, error)
                    break
            try:
                self.fates.update(now.fates())
            except AssertionError as error:
                self._failed(number, "fates", now.subjects, error)

    def _failed(self, number: int, action: str, subjects: Sequence[Subject], error: Exception) -> None:
        which = f"--device {self.device} --seed {self.seed} --first {number} --rounds 1"
        repeat = f"python -m tests.soak {which} --models {' '.join(self.names)}"
        models = [f"{subject.name} ({subject.level})" for subject in subjects]
        self.failures.append(Failure(action, models, f"{type(error).__name__}: {error}", repeat))
        traceback.print_exception(error)
        print(f"again: {repeat}", file=sys.stderr, flush=True)

    def summary(self) -> dict[str, Any]:
        peak = torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0
        return {
            "rounds": len(self.memories),
            "calls": next(self.calls),
            "actions": dict(self.actions),
            "fates": dict(self.fates),
            "failures": [vars(failure) for failure in self.failures],
            "memory": {"peak_bytes": peak, "first": vars(self.memories[0]), "last": vars(self.memories[-1])},
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run random actions on optimized models, print the results, and fail if any result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="how long (default: 8)")
    parser.add_argument("--rounds", type=int, default=sys.maxsize, help="how many rounds at most (default: any)")
    parser.add_argument("--seed", type=int, default=0, help="of all choices (default: 0)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first round (default: 0)")
    parser.add_argument("--device", default="cuda:0", choices=("cpu", "cuda:0"), help="where to run (default: cuda:0)")
    parser.add_argument("--models", nargs="*", choices=WORKLOADS, help="default: those that suit the device")
    parser.add_argument("--out", type=Path, help="where to write the summary as well")
    asked = parser.parse_args(argv)
    device = (
        torch.device("cuda", torch.device(asked.device).index or 0) if "cuda" in asked.device else torch.device("cpu")
    )
    start = time.monotonic()
    end = start + 60 * asked.minutes
    soak = Soak(device, asked.seed, asked.models or MODELS[device.type])
    faulthandler.dump_traceback_later(60 * asked.minutes + STUCK_S, exit=True, file=sys.__stderr__)
    try:
        for number in itertools.islice(itertools.count(asked.first), asked.rounds):
            soak.round(number, lambda: end - time.monotonic())
            print(f"round {number}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            if end <= time.monotonic():
                break
    finally:
        faulthandler.cancel_dump_traceback_later()
    settings = {"seed": asked.seed, "device": str(device), "seconds": round(time.monotonic() - start)}
    text = json.dumps({"schema": 1, "stamp": stamp(), **settings, **soak.summary()}, indent=1)
    if asked.out:
        asked.out.write_text(text + "\n")
    print(text)
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
