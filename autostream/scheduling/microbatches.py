"""Schedules of microbatches over the stages of a pipeline: when each forward and backward runs, and what that holds.

    GPipe   device 0   F F F F · · · · · · B B B B      all forwards, then all backwards
            device 1   · F F F F B B B B ·
    1F1B    device 0   F F · · B F · B F · B · B         a backward as soon as there is one: fewer activations are held
            device 1   · F B F B F B F B ·

A backward of two halves (``I`` for the gradient of its input, ``W`` for those of its weights) lets the device before
go on after the first half, and the second half fill the time in which a device would wait.

GPipe is from Huang et al. 2019 ("GPipe: efficient training of giant neural networks using pipeline parallelism",
NeurIPS), 1F1B from Narayanan et al. 2019 (PipeDream, SOSP).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from autostream.errors import OptionError, ScheduleError
from autostream.ir import Slice, Timeline
from autostream.scheduling.partition import Stage


class Action(NamedTuple):
    """What a device does next: a forward, a backward, or one of the halves of a backward.

    Example:
        >>> str(Action(1, "F", 3)), action_of("1F3").microbatch
        ('1F3', 3)
    """

    stage: int
    kind: Literal["F", "B", "I", "W"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def action_of(text: str) -> Action:
    """The action that is written so, as in the slices of a timeline."""
    stage, kind, microbatch = re.split("([FBIW])", text)
    return Action(int(stage), cast(Any, kind), int(microbatch))


Orders = Sequence[Sequence[Action]]
"""The actions of each device, in order."""


@dataclass(frozen=True)
class Pipeline:
    """A model in stages, each on a device of its own.

    Attributes:
        model: its name.
        device: the name of the device of each stage.
        microbatches: of a step.
        stages: with their times, bytes and memory.
        submodules: those that lie in each stage with all their ops, outermost first.
        shared: weights that several stages read. Each has a copy, and nothing adds up their gradients.
        step_us: predicted time of a step: forward and backward of all microbatches, µs.
        memory_bytes: what the device of each stage holds at most: weights, gradients, two states of an optimizer for
            each weight, buffers for what it receives of each microbatch, the activations of the microbatches in flight,
            and the model's outputs, which PyTorch keeps for all microbatches of a step and then joins. The loss is not
            included.
        outputs_bytes: how much less that is with ``schedule.step(return_outputs=False)``.
        schedule: of this time and memory: 1F1B, or GPipe for fewer microbatches than 1F1B takes.
    """

    model: str
    device: str
    microbatches: int
    stages: tuple[Stage, ...]
    submodules: tuple[tuple[str, ...], ...]
    shared: tuple[str, ...]
    step_us: float
    memory_bytes: tuple[int, ...]
    outputs_bytes: tuple[int, ...] = ()
    schedule: str = "1F1B"


@dataclass(frozen=True, slots=True)
class Run:
    """A step of a pipeline by one schedule.

    Attributes:
        schedule: its name, as in ``torch.distributed.pipelining.schedules.get_schedule_class``.
        microbatches: of the step.
        timeline: when each action runs, on the stream of its device.
        step_us: how long forward and backward of all microbatches take, µs.
        bubble: the share of the devices' time in which they wait.
        memory_bytes: the most that each device holds.
        outputs_bytes: how much less that is if the model's outputs are not returned.
        refusal: why it cannot run, or ``""``.
    """

    schedule: str
    microbatches: int
    timeline: Timeline = field(default_factory=lambda: Timeline(()))
    step_us: float = 0.0
    bubble: float = 0.0
    memory_bytes: tuple[int, ...] = ()
    outputs_bytes: tuple[int, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Schedules of a pipeline, for several numbers of microbatches of the same rows.

    Attributes:
        pipeline: the model with a stage for each device.
        interconnect: what joins the devices.
        rows: of a microbatch, for ``pipeline.microbatches`` of them.
        runs: by number of microbatches, then by schedule.
    """

    pipeline: Pipeline
    interconnect: str
    rows: int
    runs: tuple[Run, ...]

    @property
    def best(self) -> Run:
        """The best of all that can run."""
        return best_of([run for run in self.runs if not run.refusal])

    def asked(self) -> tuple[Run, ...]:
        """The runs of the number of microbatches that was asked for."""
        return tuple(run for run in self.runs if run.microbatches == self.pipeline.microbatches)


_TIE = 0.01
"""No estimate of a time is as exact as this share."""


def best_of(runs: Sequence[Run]) -> Run:
    """The fastest; of runs that take as long, to a percent, the one of the least memory: on one device, then on all.

    Example:
        >>> fast = Run("GPipe", 4, step_us=100.0, memory_bytes=(8, 9))
        >>> small = Run("1F1B", 4, step_us=100.6, memory_bytes=(5, 9))
        >>> best_of([fast, small]).schedule
        '1F1B'
    """
    fastest_us = min(run.step_us for run in runs)
    fast = [run for run in runs if run.step_us <= fastest_us * (1 + _TIE)]
    return min(fast, key=lambda run: (max(run.memory_bytes), sum(run.memory_bytes), run.step_us))


def gpipe(stages: int, microbatches: int) -> Orders:
    """All forwards, then all backwards.

    Example:
        >>> " ".join(f"{kind}{microbatch}" for _, kind, microbatch in gpipe(2, 3)[0])
        'F0 F1 F2 B0 B1 B2'
    """
    return [[Action(at, kind, m) for kind in ("F", "B") for m in range(microbatches)] for at in range(stages)]


def one_forward_one_backward(stages: int, microbatches: int) -> Orders:
    """As many forwards as there are stages from here, then backwards and forwards by turns.

    Raises:
        OptionError: there are fewer microbatches than stages, which PyTorch refuses.

    Example:
        >>> " ".join(f"{kind}{microbatch}" for _, kind, microbatch in one_forward_one_backward(2, 3)[0])
        'F0 F1 B0 F2 B1 B2'
    """
    if microbatches < stages:
        raise OptionError(
            f"microbatches={microbatches} is not allowed: 1F1B takes at least one for each stage; use {stages} or more"
        )
    orders = []
    for at in range(stages):
        ahead = stages - at
        order = [Action(at, "F", m) for m in range(ahead)]
        for m in range(microbatches):
            order.append(Action(at, "B", m))
            order += [Action(at, "F", m + ahead)] * (m + ahead < microbatches)
        orders.append(order)
    return orders


def simulated(orders: Orders, stages: Sequence[Stage], transfers_us: Sequence[float]) -> Timeline:
    """When each action runs: in the order of its device, and once what it needs has arrived.

    A transfer takes its time, and no device waits for it but the one that needs it. A half of a backward takes half of
    its time.

    Args:
        orders: of each device.
        stages: all of them.
        transfers_us: how long what each stage gets from the stage before takes to arrive, and its gradient to return.

    Returns:
        A slice for each action, named like ``"1F0"`` (stage, kind, microbatch), on the stream of its device.

    Raises:
        ScheduleError: the devices wait for each other.

    Example:
        >>> pair = [Stage(name, (at, at + 1), 1.0, 0, 0, 0) for at, name in enumerate(("", "b"))]
        >>> timeline = simulated(one_forward_one_backward(2, 3), pair, [0.0, 0.0])
        >>> timeline.makespan_us  # of 3 µs for each microbatch, and as much to fill and drain
        12.0
    """
    device_of = {action.stage: device for device, order in enumerate(orders) for action in order}
    ends: dict[Action, float] = {}
    slices: list[Slice] = []
    done, free_us = [0] * len(orders), [0.0] * len(orders)

    def ready_us(action: Action) -> float | None:
        """When what an action needs is there; ``None`` if that has not run yet."""
        times_us = []
        for needed in _needs(action, len(stages), ends):
            if needed not in ends:
                return None
            moves = device_of[needed.stage] != device_of[action.stage]
            times_us.append(ends[needed] + moves * transfers_us[max(needed.stage, action.stage)])
        return max(times_us, default=0.0)

    progress = True
    while progress:
        progress = False
        for device, order in enumerate(orders):
            while done[device] < len(order) and (at_us := ready_us(action := order[done[device]])) is not None:
                start_us = max(at_us, free_us[device])
                ends[action] = free_us[device] = start_us + duration_us(action, stages)
                slices.append(Slice(str(action), device, start_us, ends[action]))
                done[device], progress = done[device] + 1, True
    if stuck := [order[at] for at, order in zip(done, orders, strict=True) if at < len(order)]:
        raise ScheduleError(f"the devices wait for each other: at {', '.join(map(str, stuck))}")
    return Timeline(tuple(slices))


def duration_us(action: Action, stages: Sequence[Stage]) -> float:
    """How long an action takes, µs."""
    stage = stages[action.stage]
    return {"F": stage.forward_us, "B": stage.backward_us}.get(action.kind, stage.backward_us / 2)


def _needs(action: Action, stages: int, ends: Mapping[Action, float]) -> Sequence[Action]:
    """What has to run before an action; the gradient from the next stage is of either kind of backward."""
    at, kind, microbatch = action
    if kind == "F":
        return [Action(at - 1, "F", microbatch)] if at else []
    if kind == "W":
        return [Action(at, "I", microbatch)]
    half, whole = Action(at + 1, "I", microbatch), Action(at + 1, "B", microbatch)
    after = [half if half in ends else whole] if at + 1 < stages else []
    return [Action(at, "F", microbatch), *after]


def bubble_share(timeline: Timeline) -> float:
    """The share of the devices' time in which they wait."""
    devices = len({piece.stream for piece in timeline.slices})
    busy_us = sum(piece.end_us - piece.start_us for piece in timeline.slices)
    return 1 - busy_us / (devices * timeline.makespan_us)


def memory_bytes(order: Sequence[Action], stages: Sequence[Stage], *, outputs: bool = True) -> int:
    """The most that a device holds: its stages, and the activations of forwards whose backward has not ended.

    Args:
        order: of its actions.
        stages: all of them.
        outputs: whether the model's outputs are returned: each is kept until the step ends, and then copied.

    Example:
        >>> pair = [Stage(name, (at, at + 1), 1.0, 0, 100, 10) for at, name in enumerate(("", "b"))]
        >>> [memory_bytes(order, pair) for order in gpipe(2, 3)]
        [130, 130]
        >>> [memory_bytes(order, pair) for order in one_forward_one_backward(2, 3)]
        [120, 110]
    """
    own = [stages[at] for at in {action.stage for action in order}]
    microbatches = 1 + max(action.microbatch for action in order)
    held = most = sum(stage.fixed_bytes(microbatches) for stage in own)
    returned = 0
    for at, kind, _ in order:
        held += {"F": 1, "I": 0}.get(kind, -1) * stages[at].saved_bytes
        returned += stages[at].output_bytes if outputs and kind == "F" else 0
        most = max(most, held + returned)
    return max(most, held + 2 * returned)
