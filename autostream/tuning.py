"""From a traced program to what runs it: planned, built and measured, at one level of kernels or the better of two.

ATen ops ──▶ fuse ──▶ plan, measure ──▶ faster than ATen's ops one after another? ──▶ that
│          └── refused                              │ no
└──────────────┴───────────────────────────────────┴──▶ plan, measure ATen's ops too: the faster
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autostream.errors import CaptureError, FusionError, OptionError, first_line
from autostream.execution.static import copyable, static_copies
from autostream.ir import Decision, Program
from autostream.options import Options
from autostream.pipeline import Priced, Stopwatch, candidates_for, price_program
from autostream.select import MARGIN, Selection, select, written
from autostream.tracing.inductor import check_settings, fuse, obstacle
from autostream.tracing.state import versions_kept


@dataclass(frozen=True)
class Tuned:
    """A program that is ready to run.

    Attributes:
        program: in ops of the level that was chosen.
        priced: its graph and costs.
        selection: what runs, and what was measured.
        refusals: why it is not something better.
    """

    program: Program
    priced: Priced
    selection: Selection
    refusals: tuple[Decision, ...]

    @property
    def measured_us(self) -> float:
        """What one run takes, µs."""
        return self.selection.chosen.measured_us or 0.0


def tune(
    program: Program, arguments: Sequence[Tensor], bound: Sequence[bool], options: Options, stopwatch: Stopwatch
) -> Tuned:
    """Plan and measure a program in the kernels that the options ask for.

    Args:
        program: of ATen ops.
        arguments: its tensors. They, and the generators of random numbers, are as before when this returns.
        bound: which of them a captured graph may use where they are.
        options: how to schedule.
        stopwatch: is told what took how long.

    Raises:
        OptionError: fused kernels are asked for where they cannot be had, or with a setting that there is not.
    """

    def planned(program: Program, options: Options) -> Tuned:
        return _planned(program, arguments, bound, options, stopwatch)

    if options.kernels == "eager" or (options.kernels == "auto" and program.device == "cpu"):
        return planned(program, options)
    if options.kernels == "inductor" and (reason := obstacle(program.device)):
        raise OptionError(f'kernels="inductor" is not to be had: {reason}')
    check_settings(options.inductor_options)
    try:
        with stopwatch("fuse"):
            kernels = fuse(program, options.inductor_options)
        fused = _running(planned, kernels, options)
    except FusionError as error:
        return _because(planned(program, options), str(error))
    if options.kernels == "inductor":
        return fused
    plain = planned(program, replace(options, policy="sequential", costs="roofline"))
    if fused.measured_us < plain.measured_us * (1 - MARGIN):
        return fused
    unfused = planned(program, options)
    if fused.measured_us < unfused.measured_us * (1 - MARGIN):
        return fused
    return _because(unfused, f"fused, it takes {fused.measured_us:.1f} µs, as it is {unfused.measured_us:.1f} µs")


def _running(planned: Callable[[Program, Options], Tuned], kernels: Program, options: Options) -> Tuned:
    try:
        return planned(kernels, options)
    except Exception as error:
        raise FusionError(f"TorchInductor's kernels do not run: {first_line(error)}") from error


def _because(tuned: Tuned, reason: str) -> Tuned:
    return replace(tuned, refusals=(Decision("", "not fused", reason), *tuned.refusals))


def _planned(
    program: Program, arguments: Sequence[Tensor], bound: Sequence[bool], options: Options, stopwatch: Stopwatch
) -> Tuned:
    """Plan, build and measure, on copies of the inputs; the model's state and the generators are put back."""
    copied = [index for index, is_bound in enumerate(bound) if not is_bound]
    with torch.inference_mode(False), torch.no_grad():
        arguments = static_copies(arguments, copied)
        priced = price_program(program, options, stopwatch, tensors=arguments)
        graph = priced.graph

        def selected(capture: bool) -> Selection:
            candidates = candidates_for(priced, options, capture, stopwatch)
            with stopwatch("select"), undone(arguments, written(program, graph), program.device):
                return select(program, graph, candidates, arguments, bound)

        if options.cuda_graph is False or graph.device == "cpu":
            return Tuned(program, priced, selected(capture=False), ())
        if priced.refusals:
            return Tuned(program, priced, selected(capture=False), priced.refusals)
        try:
            return Tuned(program, priced, selected(capture=True), ())
        except CaptureError as error:
            refusal = Decision("", "not captured", str(error))
            return Tuned(program, priced, selected(capture=False), (refusal,))


@contextmanager
def undone(arguments: Sequence[Tensor], writes: Sequence[bool], device: str) -> Iterator[None]:
    """Put back afterwards what runs in between write into arguments, and the states of the random generators.

    Args:
        arguments: of a program.
        writes: which of them it writes.
        device: where its random numbers are drawn.
    """
    spans = [copyable(tensor) for tensor, is_written in zip(arguments, writes, strict=True) if is_written]
    saved = [(span, span.clone()) for span in spans]
    with versions_kept(spans), torch.random.fork_rng([] if device == "cpu" else [device]):
        try:
            yield
        finally:
            # Only in inference mode may both ordinary tensors and those made in inference mode be written.
            with torch.inference_mode():
                for span, before in saved:
                    span.copy_(before)
