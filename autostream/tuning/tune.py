"""From a traced program to what runs it: planned, built and measured, at one level of kernels or the better of two.

chosen before? ──▶ still right, and faster than one stream? ──▶ that
│ no                            │ no
ATen ops ──▶ fuse ──▶ plan, measure ──▶ faster than ATen's ops one after another? ──▶ that
│          └── refused                              │ no
└──────────────┴───────────────────────────────────┴──▶ plan, measure ATen's ops too: the faster
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from autostream.errors import CaptureError, FusionError, first_line
from autostream.fusion.cache import fused_here
from autostream.ir import Candidate, Decision, Limit, Program
from autostream.options import Options
from autostream.pipeline import price_program
from autostream.runtime.restore import undone
from autostream.runtime.runs import without_autocast
from autostream.runtime.static_inputs import static_copies
from autostream.tuning.candidates import Priced, candidates_again, candidates_for, variants_of
from autostream.tuning.choices import Choice, choice_key, now, read, write
from autostream.tuning.select import MARGIN, Selection, select, written
from autostream.utils.stopwatch import Stopwatch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuned:
    """A program that is ready to run.

    Attributes:
        program: in ops of the level that was chosen.
        priced: its graph and costs.
        selection: what runs, and what was measured.
        refusals: why it is not something better.
        chosen_on: when it was chosen among all that was considered, if that was earlier.
    """

    program: Program
    priced: Priced
    selection: Selection
    refusals: tuple[Decision, ...]
    chosen_on: str = ""

    @property
    def measured_us(self) -> float:
        """What one run takes, µs."""
        return self.selection.chosen.measured_us or 0.0


def tune(
    program: Program, arguments: Sequence[Tensor], bound: Sequence[bool], options: Options, stopwatch: Stopwatch
) -> Tuned:
    """Plan and measure a program in the kernels that the options ask for.

    What was chosen in an earlier process is chosen again, without a search, if it is right and still faster.

    Args:
        program: of ATen ops.
        arguments: its tensors. They, and the generators of random numbers, are as before when this returns.
        bound: which of them a captured graph may use where they are.
        options: how to schedule.
        stopwatch: is told what took how long.

    """
    given = (program, arguments, bound, options, stopwatch)
    key = choice_key(program, options, stopwatch)
    if not key:
        return _tuned(*given, keep=lambda tuned: tuned)
    before, notes = read(key)
    tuned = (before and _again(*given, before)) or _tuned(*given, keep=partial(_kept, key))
    return replace(tuned, refusals=(*notes, *tuned.refusals))


def _again(
    program: Program,
    arguments: Sequence[Tensor],
    bound: Sequence[bool],
    options: Options,
    stopwatch: Stopwatch,
    before: Choice,
) -> Tuned | None:
    """What was chosen before, if it is right and still faster than ops one after another."""
    remarks: tuple[Decision, ...] = ()
    try:
        if before.level == "inductor":
            program, remarks = fused_here(program, options.inductor_options, arguments, stopwatch)
        with on_copies(program, arguments, bound) as arguments:
            priced = price_program(program, options, stopwatch, tensors=arguments)
            candidates = candidates_again(priced, options, before.schedule, stopwatch)
            with stopwatch("select"), undone(arguments, written(program, priced.graph), program.devices) as restore:
                selection = select(program, priced.graph, candidates, arguments, bound, restore)
    except Exception as error:  # whatever it is, there is still all to choose from
        log.debug("what was chosen before is not chosen again: %s", first_line(error))
        return None
    if selection.chosen is not selection.candidates[-1]:
        return None
    return Tuned(program, priced, selection, (*remarks, *before.refusals), before.date)


def _kept(key: str, tuned: Tuned) -> Tuned:
    """What was chosen, kept for the next process if it was captured and nothing else might win there."""
    chosen = tuned.selection.chosen
    limits = {candidate.limit for candidate in tuned.selection.candidates}
    # One that found too little free memory, or no time while one stream was all there was, may do so this time only.
    if not chosen.captured or Limit.DEVICE in limits or (chosen.schedule.streams == 1 and Limit.TIME in limits):
        return tuned
    refusals = tuple(refusal for refusal in tuned.refusals if refusal.choice == "not fused")
    choice = Choice(tuned.program.level, chosen.schedule, tuned.measured_us, now(), refusals)
    return replace(tuned, refusals=(*tuned.refusals, *write(key, choice)))


def _tuned(
    program: Program,
    arguments: Sequence[Tensor],
    bound: Sequence[bool],
    options: Options,
    stopwatch: Stopwatch,
    keep: Callable[[Tuned], Tuned],
) -> Tuned:
    """What is chosen among all that there is to choose from; it is kept where nothing failed on the way."""

    def planned(program: Program, options: Options) -> Tuned:
        return _planned(program, arguments, bound, options, stopwatch)

    if options.kernels == "eager" or (options.kernels == "auto" and program.device == "cpu"):
        unfused = keep(planned(program, options))
        return _because(unfused, _SETTINGS_OF_NO_USE) if options.inductor_options else unfused
    fused, reason = _fused(planned, program, arguments, options, stopwatch)
    if fused is None:
        return _because(planned(program, options), reason)
    if options.kernels == "inductor":
        return keep(fused)
    try:
        better = _better(planned, program, fused, options)
    except Exception as error:  # out of memory, above all: there are up to three graphs
        alone = Decision("", "fused", f"ops as they are could not be measured beside it: {first_line(error)}")
        return replace(fused, refusals=(*fused.refusals, alone))
    return keep(better)


_SETTINGS_OF_NO_USE = (
    "inductor_options are not used: TorchInductor fuses ops into kernels of a GPU, and this program runs on the CPU: "
    "leave them out, or move the model to a GPU"
)

Planned = Callable[[Program, Options], Tuned]


def _fused(
    planned: Planned, program: Program, arguments: Sequence[Tensor], options: Options, stopwatch: Stopwatch
) -> tuple[Tuned | None, str]:
    """The program in fused kernels, or why not. Whatever failed is forgotten: what comes next may need its memory."""
    try:
        kernels, remarks = fused_here(program, options.inductor_options, arguments, stopwatch)
    except FusionError as error:
        return None, str(error)
    try:
        fused = planned(kernels, options)
        return replace(fused, refusals=(*remarks, *fused.refusals)), ""
    except Exception as error:
        return None, f"TorchInductor's kernels do not run: {first_line(error)}"


def _better(planned: Planned, program: Program, fused: Tuned, options: Options) -> Tuned:
    """Fused kernels or ops as they are. All schedules of the latter are tried only if one of their own comes close."""
    plain_us = planned(program, replace(options, policy="sequential", costs="roofline")).measured_us
    if _beats(fused, plain_us):
        return fused
    unfused = planned(program, options)
    if _beats(fused, unfused.measured_us):
        return fused
    times = f"{fused.measured_us:.1f} µs, which is not {MARGIN:.0%} less than {unfused.measured_us:.1f} µs"
    return _because(unfused, f"fused, it takes {times} as it is")


def _beats(fused: Tuned, other_us: float) -> bool:
    return fused.measured_us < other_us * (1 - MARGIN)


def _because(tuned: Tuned, reason: str) -> Tuned:
    return replace(tuned, refusals=(Decision("", "not fused", reason), *tuned.refusals))


def _planned(
    program: Program, arguments: Sequence[Tensor], bound: Sequence[bool], options: Options, stopwatch: Stopwatch
) -> Tuned:
    """Plan, build and measure, on copies of the inputs; the model's state and the generators are put back."""
    with on_copies(program, arguments, bound) as arguments:
        priced = price_program(program, options, stopwatch, tensors=arguments)
        graph = priced.graph

        def selected(capture: bool) -> Selection:
            candidates = candidates_for(priced, options, capture, stopwatch)
            with stopwatch("select"), undone(arguments, written(program, graph), program.devices) as restore:
                # What writes is put back before each run: variants of a step of training would take all of the time.
                varied = (
                    _no_variants
                    if any(written(program, graph))
                    else partial(variants_of, priced, options, candidates[0])
                )
                return select(program, graph, candidates, arguments, bound, restore, stopwatch.left(options), varied)

        if options.cuda_graph is False or graph.device == "cpu":
            asked = options.cuda_graph is True
            return Tuned(program, priced, selected(capture=False), (_NOTHING_TO_CAPTURE,) if asked else ())
        refusals = priced.refusals
        if not refusals:
            try:
                return Tuned(program, priced, selected(capture=True), ())
            except CaptureError as error:
                refusals = (Decision("", "not captured", str(error)),)
        return Tuned(program, priced, selected(capture=False), refusals)


@contextmanager
def on_copies(program: Program, arguments: Sequence[Tensor], bound: Sequence[bool]) -> Iterator[list[Tensor]]:
    """Copies of the inputs beside the model's own tensors, for runs without gradients, autocast as it was traced.

    Args:
        program: that is to run.
        arguments: of it.
        bound: which of them are the model's own.
    """
    copied = [index for index, is_bound in enumerate(bound) if not is_bound]
    with torch.inference_mode(False), torch.no_grad(), without_autocast(program.level):
        yield static_copies(arguments, copied)


def _no_variants(candidate: Candidate) -> Iterator[Candidate]:
    return iter(())


_NOTHING_TO_CAPTURE = Decision("", "not captured", "there is no CUDA graph on the CPU")
