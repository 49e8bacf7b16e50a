"""Models on emulated streams: every order computes the same, and whatever breaks a schedule is refused and shows.

model ─▶ trace ─▶ analyze ─▶ random streams ─▶ synchronize ─▶ arena, releases ─▶ lower ─▶ emulated streams
                                                                    │
                                      with one change: wait, release, launch or storage (tests/mutations.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
from torch import Tensor, nn

from autostream.ir import Schedule
from autostream.runtime.emulator import run_interleaved
from autostream.runtime.lower import lower
from autostream.scheduling.arena import place_storages
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from tests.mutations import Emulated, Findings, attack, changes_of, refusal
from tests.runtime.programs import (
    MODELS,
    Case,
    Inception,
    case_of,
    fused_case,
    random_assignment,
    same,
    sample,
    sliced_case,
    step_case,
)

ORDERS = 12
CHANGES = 8
"""Of each kind, and each is run."""

HARMLESS = ("storage moved", "'ones_like' must come after")
"""A product may be right in place, and ones are made of no number."""


class Drops(nn.Module):
    """Dropouts in branches use one generator, so their order matters."""

    def forward(self, x: Tensor) -> Tensor:
        branches: Sequence[Tensor] = [torch.dropout(x + shift, 0.5, True).exp() for shift in range(4)]
        return torch.stack(branches).sum(0)


CASES: Mapping[str, Callable[[], Case]] = {
    **{name: partial(sample, name) for name in MODELS},
    "inception": lambda: case_of(Inception().train(), torch.randn(2, 4, 5, 5)),
    "fused": fused_case,
    "sliced": sliced_case,
    "training step": step_case,
}


def planned(case: Case, seed: int) -> Schedule:
    graph = case.graph
    assignment = random_assignment(graph, graph.pinned, 3, Random(seed))
    return place_releases(graph, place_storages(graph, synchronize(graph, assignment)))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_every_order_computes_the_same_and_every_wrong_change_shows(name: str, seed: int) -> None:
    torch.manual_seed(0)
    case, findings = CASES[name](), Findings()
    plan, graph, emulated = planned(case, seed), case.graph, Emulated(case)
    assert refusal(graph, plan, graph.pinned) == ""
    assert emulated.symptom(graph, plan, ORDERS) == ""
    changes = changes_of(graph, plan, CHANGES, Random(0))
    run = partial(emulated.symptom, graph)
    attack(findings, name, graph, graph.pinned, changes, run, CHANGES, forgiving=True)
    assert not findings.faults, findings.faults[0]
    unseen = [fault for fault in findings.forgiven if not any(each in fault for each in HARMLESS)]
    assert not unseen, unseen[0]
    assert findings.counts["wait deleted", "rejected"] >= min(plan.wait_count, CHANGES) >= 2
    assert not findings.counts["wait deleted", "accepted"]
    assert bool(findings.counts["storage moved", "rejected"]) == (name in ("fused", "sliced"))


@pytest.mark.parametrize("seed", range(2))
def test_random_numbers_are_generated_in_program_order(seed: int) -> None:
    case = case_of(Drops(), torch.randn(4, 6))
    plan = planned(case, seed)
    lowered = lower(case.program, case.graph, plan)
    for order in range(ORDERS):
        torch.manual_seed(1)
        expected, _ = case.expected()
        torch.manual_seed(1)
        assert same(run_interleaved(lowered, case.args(), order), expected)
    unordered = replace(plan, launches=tuple(replace(launch, waits=(), releases=()) for launch in plan.launches))
    assert refusal(case.graph, unordered, case.graph.pinned)
