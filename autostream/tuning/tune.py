"""Tune a program: choose its level of kernels and its schedule by measuring, or take an earlier process's choice.

several processes? ──yes──▶ all of them do the rest together (``agreement.py``), and take no earlier choice
│ no
chosen before? ──▶ still correct, and faster than one stream? ──▶ run it
│ no                            │ no
ATen ops ──▶ fuse ──▶ plan, measure ──▶ faster than the ATen ops one after another? ──▶ run fused kernels
│          └── fails                                │ no
└──────────────┴───────────────────────────────────┴──▶ plan and measure the ATen ops too: run the faster
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from autostream.errors import CaptureError, FusionError, GroupError, ScheduleError, first_line
from autostream.fusion.cache import fused_here
from autostream.ir import Candidate, Decision, Limit, OpGraph, Program
from autostream.options import Options
from autostream.runtime.restore import Restore, undone
from autostream.runtime.runs import without_autocast
from autostream.runtime.static_inputs import static_copies
from autostream.scheduling.communication import first_difference
from autostream.store import Notes
from autostream.tuning.agreement import ALONE, Peers, agree_on, peers_of
from autostream.tuning.candidates import best_of, candidates_again, candidates_for, check, variants_of
from autostream.tuning.choices import Choice, choice_key, now, read, write
from autostream.tuning.pricing import Priced, price_program
from autostream.tuning.select import MARGIN, Selection, build, select, written
from autostream.utils.logs import Log
from autostream.utils.stopwatch import Stopwatch

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """A program to tune, and with what.

    Attributes:
        program: of any level of kernels.
        arguments: its tensors.
        bound: which of them a captured graph may read in place.
        options: how to schedule.
        stopwatch: records the seconds of each stage.
    """

    program: Program
    arguments: Sequence[Tensor]
    bound: Sequence[bool]
    options: Options
    stopwatch: Stopwatch


@dataclass(frozen=True)
class Tuned:
    """A program with its fastest schedule.

    Attributes:
        program: at the chosen level of kernels.
        priced: its op graph and costs.
        selection: the schedule that runs, and the measured times.
        refusals: why it is nothing better, for reports.
        chosen_on: the date of the choice, if an earlier process has made it.
    """

    program: Program
    priced: Priced
    selection: Selection
    refusals: tuple[Decision, ...]
    chosen_on: str = ""

    @property
    def measured_us(self) -> float:
        """The time of one run, µs."""
        return self.selection.chosen.measured_us or 0.0


def tune(
    program: Program, arguments: Sequence[Tensor], bound: Sequence[bool], options: Options, stopwatch: Stopwatch
) -> Tuned:
    """Plan and measure a program, with the kernels that the options ask for.

    The choice of an earlier process is taken without a search, if it is correct and still faster than one stream. The
    processes that take part in its collectives search together, and take no earlier choice: some may not have it.

    Args:
        program: of ATen ops.
        arguments: its tensors. They and the random number generators are restored before this returns.
        bound: which of them a captured graph may read in place.
        options: how to schedule.
        stopwatch: records the seconds of each stage.

    Raises:
        GroupError: another process would run something else, or is gone.
    """
    task, peers = Task(program, arguments, bound, options, stopwatch), peers_of(program)
    if peers is None:
        tuned = _planned(replace(task, options=replace(options, costs="roofline")), None)
        return replace(tuned, refusals=(_NOT_MEASURED, *tuned.refusals))
    key = "" if peers.group else choice_key(program, options, stopwatch)
    if not key:
        return _search(task, peers, keep=lambda tuned: tuned)
    choice, notes = read(key)
    tuned = (choice and _retake(task, choice)) or _search(task, ALONE, keep=partial(_kept, key))
    return replace(tuned, refusals=(*notes, *tuned.refusals))


_NOT_MEASURED = Decision(
    "",
    "not measured",
    "its collectives are those of several process groups, none of which has all of the processes, which would have to "
    "run it equally often: its ops stay ATen's, and their schedule is the best by estimates",
)


def _retake(task: Task, choice: Choice) -> Tuned | None:
    """An earlier choice, if it is correct and still faster than ops one after another."""
    notes: Notes = ()
    try:
        if choice.level == "inductor":
            task, notes = _in_kernels(task)
        with _on_copies(task) as task:
            priced = price_program(task.program, task.options, task.stopwatch, tensors=task.arguments)
            candidates = candidates_again(priced, task.options, choice.schedule, task.stopwatch)
            with task.stopwatch("select"), _undone(task, priced) as restore:
                selection = select(task.program, priced.graph, candidates, task.arguments, task.bound, restore)
    except Exception as error:  # then search
        log.debug("what was chosen before is not chosen again: %s", first_line(error))
        return None
    if selection.chosen is not selection.candidates[-1]:
        return None
    return Tuned(task.program, priced, selection, (*notes, *choice.refusals), choice.date)


def _kept(key: str, tuned: Tuned) -> Tuned:
    """The tuned program; its choice is written for later processes if they would choose the same."""
    chosen = tuned.selection.chosen
    limits = {candidate.limit for candidate in tuned.selection.candidates}
    # A candidate that found too little free memory, or no time to be measured, may win in another process.
    if not chosen.captured or Limit.DEVICE in limits or (chosen.schedule.streams == 1 and Limit.TIME in limits):
        return tuned
    refusals = tuple(refusal for refusal in tuned.refusals if refusal.choice == "not fused")
    choice = Choice(tuned.program.level, chosen.schedule, tuned.measured_us, now(), refusals)
    return replace(tuned, refusals=(*tuned.refusals, *write(key, choice)))


def _search(task: Task, peers: Peers, keep: Callable[[Tuned], Tuned]) -> Tuned:
    """The fastest of all candidates. ``keep`` is called with it unless something failed on the way."""
    options = task.options
    if options.kernels == "eager" or (options.kernels == "auto" and task.program.device == "cpu"):
        unfused = keep(_planned(task, peers))
        return _not_fused(unfused, _SETTINGS_OF_NO_USE) if options.inductor_options else unfused
    fused, reason = _fused(task, peers)
    if fused is None:
        return _not_fused(_planned(task, peers), reason)
    if options.kernels == "inductor":
        return keep(fused)
    try:
        better = _better(task, fused, peers)
    except GroupError:
        raise
    except Exception as error:  # out of memory, above all: there are up to three graphs
        reason = f"ops as they are could not be measured beside it: {first_line(error)}"
        return replace(fused, refusals=(*fused.refusals, Decision("", "fused", reason)))
    return keep(better)


_SETTINGS_OF_NO_USE = (
    "inductor_options are not used: TorchInductor fuses ops into kernels of a GPU, and this program runs on the CPU: "
    "leave them out, or move the model to a GPU"
)


def _fused(task: Task, peers: Peers) -> tuple[Tuned | None, str]:
    """The program in fused kernels, or why not. Frozen weights are kept if they were measured to be faster."""
    fused, reason = _fused_once(task, peers)
    if fused is None or not fused.program.frozen:
        return fused, reason
    other, _ = _fused_once(_with_settings(task, {"freezing": False}), peers)
    if other is None or _beats(fused, other.measured_us):
        return fused, ""
    times = f"{fused.measured_us:.1f} µs, which is not {MARGIN:.0%} less than {other.measured_us:.1f} µs"
    refusal = Decision("", "not frozen", f"with weights as constants, it takes {times} with weights as they are")
    return replace(other, refusals=(refusal, *other.refusals)), ""


def _fused_once(task: Task, peers: Peers) -> tuple[Tuned | None, str]:
    """The program in kernels by its options, or why not. Errors are not kept, as their tracebacks hold memory."""
    try:
        fused_task, notes = _in_same_kernels(task, peers)
    except FusionError as error:
        return None, str(error)
    try:
        fused = _planned(fused_task, peers)
        return replace(fused, refusals=(*notes, *fused.refusals)), ""
    except GroupError:
        raise
    except Exception as error:
        return None, f"TorchInductor's kernels do not run: {first_line(error)}"


def _in_same_kernels(task: Task, peers: Peers) -> tuple[Task, Notes]:
    """The task with its program in fused kernels, the same in all processes.

    Raises:
        FusionError: it cannot be fused, or not in the same way.
    """
    for more in ({}, _SAME_EVERYWHERE):
        fuse = partial(_in_kernels, _with_settings(task, more))
        fused, notes = peers.together("fusing", fuse, failing=FusionError)
        listings = peers.each("the fused kernels", partial(_listing, fused.program) if peers.group else str)
        if len(set(listings)) == 1:
            return replace(task, program=fused.program), notes
    other = next(rank for rank, listing in enumerate(listings) if listing != listings[0])
    raise FusionError(f"TorchInductor makes other kernels on rank {other} than on rank 0, and all have to run the same")


def _in_kernels(task: Task) -> tuple[Task, Notes]:
    """The task with its program in fused kernels."""
    program, notes = fused_here(task.program, task.options.inductor_options, task.arguments, task.stopwatch)
    return replace(task, program=program), notes


def _with_settings(task: Task, more: Mapping[str, Any]) -> Task:
    """The task with more of Inductor's settings."""
    return replace(task, options=replace(task.options, inductor_options={**task.options.inductor_options, **more}))


_SAME_EVERYWHERE: Mapping[str, Any] = {"shape_padding": False}
"""TorchInductor pads a matrix if products then are faster, by the clock of each process."""


def _listing(program: Program) -> str:
    """A digest of a program's calls, in order, with kernels by name, and without the index of its device."""
    device = torch.device(program.device)
    calls = [f"{node.name} = {node.target}{node.args}{node.kwargs}" for node in program.module.graph.nodes]
    listing = "\n".join(calls).replace(str(device), device.type).replace(repr(device), device.type)
    return hashlib.sha256(listing.encode()).hexdigest()


def _better(task: Task, fused: Tuned, peers: Peers) -> Tuned:
    """The faster of fused kernels and ATen ops. The latter are scheduled only if they are fast one after another."""
    one_stream = replace(task, options=replace(task.options.on_one_stream, costs="roofline"))
    if _beats(fused, _planned(one_stream, peers).measured_us):
        return fused
    unfused = _planned(task, peers)
    if _beats(fused, unfused.measured_us):
        return fused
    times = f"{fused.measured_us:.1f} µs, which is not {MARGIN:.0%} less than {unfused.measured_us:.1f} µs"
    return _not_fused(unfused, f"fused, it takes {times} as it is")


def _beats(fused: Tuned, other_us: float) -> bool:
    return fused.measured_us < other_us * (1 - MARGIN)


def _not_fused(tuned: Tuned, reason: str) -> Tuned:
    return replace(tuned, refusals=(Decision("", "not fused", reason), *tuned.refusals))


def _planned(task: Task, peers: Peers | None) -> Tuned:
    """Plan and measure on copies of the inputs; the model's state and the random number generators are restored.

    Args:
        task: a program of any level, and how to schedule it.
        peers: the processes that plan and measure the same together; ``None`` to plan by estimates alone.
    """
    with _on_copies(task) as task:
        program, options = task.program, task.options
        priced = price_program(program, options, task.stopwatch, tensors=task.arguments, peers=peers or ALONE)
        selected = (
            partial(_best_as_measured, task, priced, peers) if peers else partial(_best_by_estimates, task, priced)
        )

        if options.cuda_graph is False or priced.graph.device == "cpu":
            asked = options.cuda_graph is True
            return Tuned(program, priced, selected(capture=False), (_NOTHING_TO_CAPTURE,) if asked else ())
        refusals = priced.refusals
        if not refusals:
            try:
                return Tuned(program, priced, selected(capture=True), ())
            except CaptureError as error:
                refusals = (Decision("", "not captured", str(error)),)
        return Tuned(program, priced, selected(capture=False), refusals)


def _best_as_measured(task: Task, priced: Priced, peers: Peers, *, capture: bool) -> Selection:
    """The fastest of all schedules. The first of several processes makes them, and each verifies them."""
    options, stopwatch = task.options, task.stopwatch

    def made() -> tuple[Candidate, ...]:
        return candidates_for(priced, options, capture, stopwatch)

    def verified(found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        if peers.group:  # else they have been, where they were made
            peers.together("the schedules", lambda: check(priced, found, capture), failing=ScheduleError)
        return found

    def varied(candidate: Candidate) -> Iterator[Candidate]:
        variants = variants_of(priced, options, candidates[0], candidate)
        while found := peers.first("a variant", lambda: tuple(islice(variants, 1)), tuple[Candidate, ...]):
            yield from verified(found)

    _check_alike(priced.graph, peers)
    candidates = peers.first("its schedules", made, tuple[Candidate, ...])
    with stopwatch("verify"):
        verified(candidates)
    with stopwatch("select"), _undone(task, priced) as restore:
        left_s, program, arguments = stopwatch.left(options), task.program, task.arguments
        return select(program, priced.graph, candidates, arguments, task.bound, restore, left_s, varied, peers)


def _check_alike(graph: OpGraph, peers: Peers) -> None:
    """Check that all processes have the same ops, as they run the schedules of the first.

    Raises:
        ScheduleError: a process has others, as that of a smaller shard may.
    """
    first, *others = peers.each("its ops", lambda: [*graph.ops])
    for rank, ops in enumerate(others, 1):
        if difference := first_difference(first, ops, "rank 0", f"rank {rank}"):
            raise ScheduleError(f"its processes would run other ops: {difference}")


def _best_by_estimates(task: Task, priced: Priced, *, capture: bool) -> Selection:
    """The schedule that is fastest as predicted, which is the same in all processes."""
    graph, candidates = priced.graph, candidates_for(priced, task.options, capture, task.stopwatch)
    # Whether threads of a CPU pay is told by measuring alone.
    chosen = candidates[0] if graph.device == "cpu" and task.options.policy == "auto" else best_of(candidates)
    agree_on(graph, [launch.op for launch in chosen.schedule.launches])
    with _undone(task, priced) as restore:
        return Selection(build(task.program, graph, chosen, task.arguments, task.bound, restore), chosen, candidates)


def _undone(task: Task, priced: Priced) -> AbstractContextManager[Restore]:
    """What a run writes is restored before each run, and afterwards."""
    return undone(task.arguments, written(task.program, priced.graph), task.program.devices)


@contextmanager
def on_copies(program: Program, arguments: Sequence[Tensor], bound: Sequence[bool]) -> Iterator[list[Tensor]]:
    """Yield the arguments with copies of the inputs, without gradients, and in the autocast mode of the trace.

    Args:
        program: to run.
        arguments: of it.
        bound: which of them are the model's tensors, which are not copied.
    """
    copied = [index for index, is_bound in enumerate(bound) if not is_bound]
    with torch.inference_mode(False), torch.no_grad(), without_autocast(program.level):
        yield static_copies(arguments, copied)


@contextmanager
def _on_copies(task: Task) -> Iterator[Task]:
    """Yield the task with copies of the inputs."""
    with on_copies(task.program, task.arguments, task.bound) as arguments:
        yield replace(task, arguments=arguments)


_NOTHING_TO_CAPTURE = Decision("", "not captured", "there is no CUDA graph on the CPU")
