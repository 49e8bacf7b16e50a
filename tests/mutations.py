"""Mutation testing of schedules: the verifier and the emulator must find every mistake, and nothing else.

    python -m tests.mutations --graphs 1000 --schedules 10 --seed 0 --out mutations.json

Each schedule is changed in one place, in all ways of each kind (``scheduling/mistakes.py``):

    schedule ─▶ one change ─┬─▶ oracle: is anything out of order, by brute force? ─╮
                            ├─▶ verify: is it refused? ────────────────────────────┼─▶ they must agree
                            ╰─▶ emulator: is a number wrong, in some order? ───────╯

In random graphs of kernels (``runtime/random_kernels.py``) every mistake changes a number. Models of the zoo run with
small images, on estimates for an H200, and a mistake may not change their numbers: such schedules are listed. Models
are traced to ATen ops, which have no arena, so changes of the arena are only verified, as if all their storages were
placeable.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from tabulate import tabulate
from torch import fx

from autostream.analysis.dependencies import analyze
from autostream.costs.device import profile_named
from autostream.costs.roofline import price
from autostream.errors import ScheduleError
from autostream.frontend.trace import trace
from autostream.ir import OpGraph, Schedule
from autostream.runtime.emulator import run_interleaved
from autostream.runtime.lower import lower
from autostream.scheduling.arena import place_storages
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from benchmarks import zoo
from benchmarks.stamp import stamp
from tests.runtime.programs import Case, random_assignment, same
from tests.runtime.random_kernels import random_kernels
from tests.scheduling.brute_force import Oracle
from tests.scheduling.mistakes import (
    with_a_release_advanced,
    with_a_release_at,
    with_a_storage_moved,
    with_neighbours_swapped,
    without_a_wait,
)

KINDS: Mapping[str, Callable[[OpGraph, Schedule], Iterator[Schedule]]] = {
    "wait deleted": lambda graph, plan: without_a_wait(plan),
    "release advanced": with_a_release_advanced,
    "neighbours swapped": lambda graph, plan: with_neighbours_swapped(plan),
    "storage moved": with_a_storage_moved,
}
"""The kinds of changes, by name."""

PLANS = (("critical_path", 3), ("path_cover", 4))
"""Policies and numbers of streams for models of the zoo."""

PIXELS = 96
"""Height and width of images, except for models that take one size only."""

ONE_SIZE = {"vit_b_16", "clip"}

AS_IS = "as is"
VERDICTS = ("accepted", "rejected")
SYMPTOMS = ("right", "harmless", "wrong numbers", "not lowered", "crash")
"""Results of the verifier, and of a run; lowering refuses some schedules as well."""

ALL = sys.maxsize

MORE_ORDERS = 200
"""Random orders for a wrong schedule that gives right numbers with each stream running ahead: some races need more
switches. Two streams that write and read the same bytes are right if either runs as a whole before the other."""

MOST_FAULTS = 20
"""Disagreements to print in full."""


@dataclass
class Findings:
    """The results of all changes so far.

    Attributes:
        counts: changes by kind and outcome; ``"as is"`` is the kind of unchanged schedules.
        faults: disagreements, with all that is needed to reproduce them.
        forgiven: mistakes that the verifier refuses, though the numbers of a model happen to be right.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    forgiven: list[str] = field(default_factory=list)


def refusal(graph: OpGraph, plan: Schedule, pinned: frozenset[str]) -> str:
    """Why the verifier rejects a schedule, or ``""``."""
    try:
        verify(graph, plan, pinned=pinned)
    except ScheduleError as error:
        return str(error)
    return ""


class Emulated:
    """A program with its arguments, to be run on emulated streams."""

    def __init__(self, case: Case) -> None:
        self._case = case
        parts = {part: storage.name for storage in case.graph.storages.values() for part in storage.parts}
        written = {parts.get(name, name) for op in case.graph.ops.values() for name in op.writes}
        self._written = [at for at, each in enumerate(case.program.placeholders) if each.storage in written]
        with rubbish_in_new_memory():
            self._results, self._after = case.expected()

    def symptom(self, graph: OpGraph, plan: Schedule, more: int = 0) -> str:
        """What goes wrong when each stream runs ahead once, then in so many more random orders, or ``""``."""
        try:
            lowered = lower(self._case.program, graph, plan)
        except ScheduleError:
            return "not lowered"
        with rubbish_in_new_memory():
            return next(filter(None, (self._outcome(lowered, seed) for seed in range(plan.streams + more))), "")

    def _outcome(self, lowered: fx.GraphModule, seed: int) -> str:
        args = list(self._case.tensors)
        for at in self._written:
            args[at] = args[at].clone()
        try:
            results = run_interleaved(lowered, args, seed)
        except (RuntimeError, IndexError):  # a poisoned index
            return "crash"
        right = same(results, self._results) and all(torch.equal(args[at], self._after[at]) for at in self._written)
        return "" if right else "wrong numbers"


@contextmanager
def rubbish_in_new_memory() -> Iterator[None]:
    """New memory holds NaN, or the largest integer, until it is written, and not the results of the run before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def is_harmless(graph: OpGraph, plan: Schedule) -> bool:
    """Whether the only mistake is that a storage in the arena is allocated while another one uses its bytes.

    To the verifier that is an access. But a storage that is allocated for later ops, like a matrix that is filled part
    by part, is not read or written yet.
    """
    divided = {name for name, storage in graph.storages.items() if storage.parts}
    ops = {
        op.name: replace(op, writes=op.writes - (op.allocates & divided), allocates=op.allocates - divided)
        for op in graph.ops.values()
    }
    launches = tuple(replace(launch, releases=()) for launch in plan.launches)
    return not Oracle(replace(graph, ops=ops)).fault(replace(plan, launches=launches))


def drawn(graph: OpGraph, plan: Schedule) -> str:
    """The ops of a graph and the launches of a schedule, as text."""
    ops = [
        f"  {op.name}: {_names(op.reads)} -> {_names(op.writes)}"
        + (f", allocates {_names(op.allocates)}" if op.allocates else "")
        for op in graph.ops.values()
    ]
    launches = [
        f"  {launch.stream}: {launch.op}"
        + (f", waits for {_names(launch.waits)}" if launch.waits else "")
        + (f", releases {_names(launch.releases)}" if launch.releases else "")
        for launch in plan.launches
    ]
    return "\n".join([*ops, *launches, f"  join waits for {_names(plan.join_waits)}", f"  {plan.arena}"])


def _names(names: Any) -> str:
    return " ".join(sorted(names)) or "nothing"


def changes_of(graph: OpGraph, plan: Schedule, most: int, choose: Random) -> Mapping[str, Sequence[Schedule]]:
    """Schedules with one change, by kind, in random order: all, or a random sample of ``most`` of each kind."""
    return {kind: _sample(changed(graph, plan), most, choose) for kind, changed in KINDS.items()}


def _sample(changes: Iterator[Schedule], most: int, choose: Random) -> Sequence[Schedule]:
    """A random sample of a stream that may be too long to store (Vitter 1985, algorithm R)."""
    sample: list[Schedule] = []
    for count, change in enumerate(changes, start=1):
        if count <= most:
            sample.append(change)
        elif (index := choose.randrange(count)) < most:
            sample[index] = change
    choose.shuffle(sample)
    return sample


def attack(
    findings: Findings,
    label: str,
    graph: OpGraph,
    pinned: frozenset[str],
    changes: Mapping[str, Sequence[Schedule]],
    run: Callable[[Schedule, int], str],
    runs: int,
    forgiving: bool = False,
) -> None:
    """Compare the oracle, the verifier and the emulator on schedules.

    Args:
        findings: the results to add to.
        label: how to reproduce these schedules.
        graph: the ops.
        pinned: ops on stream 0.
        changes: schedules by kind of change.
        run: what goes wrong with a schedule in the worst orders, and in so many more; ``""`` if nothing.
        runs: how many of each kind to run.
        forgiving: whether numbers may be right by chance.
    """
    oracle = Oracle(graph)
    for kind, plans in changes.items():
        for number, plan in enumerate(plans):
            fault, refused, outcome = oracle.fault(plan), refusal(graph, plan, pinned), None
            verdict = "rejected" if refused else "accepted"
            findings.counts[kind, verdict] += 1
            if number < runs:
                harmless = fault == "arena" and is_harmless(graph, plan)
                more = MORE_ORDERS if fault and not harmless and not forgiving else 0
                outcome = run(plan, more) or ("harmless" if harmless else "right")
                findings.counts[kind, f"{verdict}, {outcome}"] += 1
            shown = bool(fault) if outcome is None else outcome != "right"
            if bool(fault) == bool(refused) == shown and not (refused and kind == AS_IS):
                continue
            said = f"oracle: {fault or 'right'}, verify: {refused or 'right'}, run: {outcome}"
            if forgiving and fault and refused and kind != AS_IS:
                findings.forgiven.append(f"{label}, {kind} {number}: {said}")
            else:
                findings.faults.append(f"{label}, {kind} {number}: {said}\n{drawn(graph, plan)}")


def attack_random(findings: Findings, seed: int, schedules: int, emulated: int) -> None:
    """Attack random schedules of one random graph; all are run, and all changes of the first ``emulated`` ones."""
    case = random_kernels(seed)
    emulation = Emulated(case)
    for number in range(schedules):
        choose = Random(f"{seed} {number}")
        graph = _partly_placeable(case.graph, choose)
        pinned = graph.pinned if choose.random() < 0.5 else frozenset()
        plan, run = random_plan(graph, pinned, choose), partial(emulation.symptom, graph)
        label = f"graph {seed}, schedule {number}"
        attack(findings, label, graph, pinned, {AS_IS: [plan]}, run, 1)
        changes = changes_of(graph, plan, ALL, choose)
        attack(findings, label, graph, pinned, changes, run, ALL if number < emulated else 0)


def random_plan(graph: OpGraph, pinned: frozenset[str], choose: Random) -> Schedule:
    """A correct schedule with some redundant waits and late releases, so that not all changes are mistakes."""
    assignment = random_assignment(graph, pinned, choose.randint(2, 4), choose)
    waiting = _with_idle_waits(synchronize(graph, assignment), choose)
    plan = place_releases(graph, place_storages(graph, waiting))
    for index, launch in enumerate(plan.launches):
        later = [at for at, other in enumerate(plan.launches) if at > index and other.stream == launch.stream]
        for storage in launch.releases:
            if later and choose.random() < 0.5:
                plan = with_a_release_at(plan, storage, choose.choice(later))
    return plan


def _with_idle_waits(plan: Schedule, choose: Random) -> Schedule:
    launches = []
    for at, launch in enumerate(plan.launches):
        others = {other.op for other in plan.launches[:at] if other.stream != launch.stream} - {*launch.waits}
        idle = [op for op in sorted(others) if choose.random() < 0.5 / at]
        launches.append(replace(launch, waits=(*launch.waits, *idle)))
    return replace(plan, launches=tuple(launches))


def _partly_placeable(graph: OpGraph, choose: Random) -> OpGraph:
    """The same graph, where half of the storages are not placeable."""
    storages = {
        name: replace(storage, placeable=storage.placeable and choose.random() < 0.5)
        for name, storage in graph.storages.items()
    }
    return replace(graph, storages=storages)


def model_case(name: str) -> Case:
    """A model of the zoo with random weights and small images, traced and analyzed."""
    workload = zoo.INFERENCE[name]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(zoo.SEED)
        model, args = workload.model().eval(), workload.inputs(1)
    if name not in ONE_SIZE:
        args = tuple(x[..., :PIXELS, :PIXELS] if x.dim() == 4 else x for x in args)
    traced = trace(model, args)
    arguments = tuple(tensor.detach() for tensor in traced.arguments(model, args))
    return Case(traced.program, analyze(traced.program), arguments)


def attack_model(findings: Findings, name: str, case: Case, seed: int, most: int, runs: int) -> None:
    """Attack the schedules of a model: ``most`` changes of each kind, of which ``runs`` are run as well."""
    graph, profile, emulation = case.graph, profile_named("h200"), Emulated(case)
    free = replace(graph, storages={name: replace(s, placeable=True) for name, s in graph.storages.items()})
    for policy, streams in PLANS:
        label, choose = f"{name}, {policy}, seed {seed}", Random(f"{name} {policy} {seed}")
        assignment = POLICIES[policy](graph, price(graph, profile), profile, streams, graph.pinned)
        waiting = synchronize(graph, assignment)
        released, placed = place_releases(graph, waiting), place_storages(free, waiting)
        changes, run = dict(changes_of(graph, released, most, choose)), partial(emulation.symptom, graph)
        if released.streams == 1:
            del changes["release advanced"]  # lowered code of one stream has no releases
        attack(findings, label, graph, graph.pinned, {AS_IS: [released], **changes}, run, runs, forgiving=True)
        moved = {"storage moved": changes_of(free, placed, most, choose)["storage moved"]}
        attack(findings, label, free, graph.pinned, {AS_IS: [placed]} | moved, run, 0)


def main(argv: list[str] | None = None) -> int:
    """Attack random graphs and models, print the results, and fail on any disagreement."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=1000, help="random graphs (default: 1000)")
    parser.add_argument("--schedules", type=int, default=10, help="random schedules of each (default: 10)")
    parser.add_argument("--emulated", type=int, default=1, help="of these, how many have all changes run (default: 1)")
    parser.add_argument("--models", nargs="*", default=list(zoo.INFERENCE), help="models of the zoo (default: all)")
    parser.add_argument("--most", type=int, default=50, help="changes of a kind to a model's schedule (default: 50)")
    parser.add_argument("--runs", type=int, default=2, help="of these, how many are run (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the first graph; the others follow (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("mutations.json"), help="where to write the summary")
    options = parser.parse_args(argv)
    if unknown := set(options.models) - set(zoo.INFERENCE):
        parser.error(f"{min(unknown)}: use {', '.join(zoo.INFERENCE)}")
    torch.set_num_threads(1)
    now, graphs, models = stamp(), Findings(), Findings()
    start = time.perf_counter()
    for seed in range(options.seed, options.seed + options.graphs):
        attack_random(graphs, seed, options.schedules, options.emulated)
        if seed % 50 == 49:
            _print_progress(f"{seed - options.seed + 1} graphs", graphs, start)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "models")}
    summary = {"schema": 1, "stamp": now, **settings, "random": _summary(graphs, start), "ops": {}}
    start_of_models = time.perf_counter()
    for name in options.models:
        case = model_case(name)
        attack_model(models, name, case, options.seed, options.most, options.runs)
        _print_progress(f"{name}, {len(case.graph.ops)} ops", models, start_of_models)
        summary["ops"][name] = len(case.graph.ops)
        options.out.write_text(json.dumps({**summary, "models": _summary(models, start_of_models)}, indent=1) + "\n")
    options.out.write_text(json.dumps({**summary, "models": _summary(models, start_of_models)}, indent=1) + "\n")
    for title, findings in (("Random graphs", graphs), ("Models", models)):
        print(f"{title}\n\n{table(findings)}\n")
        print("\n\n".join([*findings.forgiven, *findings.faults[:MOST_FAULTS]]))
    return 1 if graphs.faults or models.faults else 0


def _print_progress(title: str, findings: Findings, start: float) -> None:
    seconds = time.perf_counter() - start
    changes = sum(count for (_, outcome), count in findings.counts.items() if outcome in VERDICTS)
    print(f"{title}: {changes} changes, {len(findings.faults)} faults, {seconds:.0f} s", file=sys.stderr)


def _summary(findings: Findings, start: float) -> dict[str, Any]:
    seconds = round(time.perf_counter() - start)
    counts = {f"{kind}: {outcome}": count for (kind, outcome), count in sorted(findings.counts.items())}
    return {"seconds": seconds, "counts": counts, "faults": findings.faults, "forgiven": findings.forgiven}


def table(findings: Findings) -> str:
    """The number of changes by kind and outcome, in Markdown."""
    heads = [*VERDICTS, *(f"{verdict}, {symptom}" for verdict in VERDICTS for symptom in SYMPTOMS)]
    heads = [head for head in heads if any(outcome == head for _, outcome in findings.counts)]
    rows = [[kind, *(findings.counts[kind, head] for head in heads)] for kind in (AS_IS, *KINDS)]
    return tabulate(rows, ["", *heads], tablefmt="github", intfmt=",")


if __name__ == "__main__":
    raise SystemExit(main())
