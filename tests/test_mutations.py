"""Every small change to a schedule: mistakes are refused and give wrong numbers, other changes neither.

The short form of ``python -m tests.mutations``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autostream.errors import ScheduleError
from autostream.ir import FORK, Arena, Launch, Role, Schedule
from tests import mutations
from tests.mutations import (
    AS_IS,
    KINDS,
    MORE_ORDERS,
    Emulated,
    Findings,
    attack_model,
    attack_random,
    main,
    model_case,
    refusal,
    rubbish_in_new_memory,
)
from tests.runtime.programs import Case, Kernels
from tests.scheduling.brute_force import Oracle


def attacked(graphs: int) -> Findings:
    """The results for random graphs of seeds that the long form does not use."""
    findings = Findings()
    for seed in range(10_000, 10_000 + graphs):
        attack_random(findings, seed, schedules=2, emulated=1)
    return findings


def test_random_schedules() -> None:
    findings = attacked(24)
    assert not findings.faults, findings.faults[0]
    assert all(findings.counts[kind, verdict] for kind in KINDS for verdict in ("accepted", "rejected"))
    assert all(findings.counts[kind, "rejected, wrong numbers"] for kind in KINDS)


def test_a_model_of_the_zoo() -> None:
    findings, name = Findings(), "squeezenet1_1"
    attack_model(findings, name, model_case(name), seed=0, most=20, runs=2)
    assert not findings.faults, findings.faults[0]
    assert not findings.forgiven, findings.forgiven[0]
    assert findings.counts[AS_IS, "accepted, right"] == len(mutations.PLANS)
    assert findings.counts["wait deleted", "accepted"] == 0
    assert all(findings.counts[kind, "rejected"] for kind in KINDS)


@pytest.mark.parametrize(
    ("broken", "symptom"),
    [("accepts all", "verify: right"), ("refuses all", "oracle: right"), ("emulator", "run: right")],
)
def test_a_broken_verifier_or_emulator_is_found(broken: str, symptom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ScheduleError("refused")

    if broken == "emulator":
        monkeypatch.setattr(mutations.Emulated, "symptom", lambda *_, **__: "")
    else:
        monkeypatch.setattr(mutations, "verify", refuse if broken == "refuses all" else lambda *_, **__: None)
    findings = attacked(1)
    assert symptom in findings.faults[0]
    assert "kernel0" in findings.faults[0], "the graph is printed"


def check_only_random_orders_show(case: Case, plan: Schedule, fault: str, refused: str) -> None:
    emulated = Emulated(case)
    assert Oracle(case.graph).fault(plan) == fault
    assert refused in refusal(case.graph, plan, frozenset())
    assert emulated.symptom(case.graph, plan) == ""
    assert emulated.symptom(case.graph, plan, MORE_ORDERS) == "wrong numbers"


def test_lifetimes_that_overlap_in_the_middle_are_shown_by_random_orders() -> None:
    """
    0:  x ─┬─▶ a ─▶ b ─▶ e      what a writes for b, and c for d, have the same offset; either stream as a whole
           │            ╱       before the other is right
    1:     ╰─▶ c ─▶ d ─╯
    """
    kernels = Kernels({"x": torch.randn(4)})
    (x,) = kernels.arguments
    a, b, c, d, e = (kernels.taken(4) for _ in range(5))

    def launch(name: str, function: object, *tensors: object) -> None:
        kernels.launch(name, lambda *given: function(*given[:-1], out=given[-1]), *tensors)  # type: ignore[operator]

    launch("a", torch.sin, x, a)
    launch("b", torch.cos, a, b)
    launch("c", torch.exp, x, c)
    launch("d", torch.cos, c, d)
    launch("e", torch.add, b, d, e)
    launches = (Launch("a", 0), Launch("c", 1, (FORK,)), Launch("b", 0), Launch("d", 1), Launch("e", 0, ("d",)))
    plan = Schedule("drawn", 2, launches, arena=Arena(512, {a.name: 0, c.name: 0}))
    check_only_random_orders_show(kernels.case(e, Role.INPUT), plan, "arena", "of the arena")


def test_a_write_between_a_write_and_its_reader_is_shown_by_random_orders() -> None:
    """
    0:  b ──────▶ d ─▶ e      a, b and d write a buffer that c reads, e adds the results of a and c; a is in no order
         ╲       ╱│           with b and c, and only between them it changes a number
    1:    ╰▶ c ─╯ │
                  │
    2:  a ────────╯
    """
    kernels = Kernels({"x": torch.randn(4), "m": torch.randn(4)})
    x, m = kernels.arguments
    u, v, result = (kernels.taken(4) for _ in range(3))
    kernels.launch("a", lambda x, m, u: m.copy_(u.copy_(x.sin())), x, m, u, written=2)
    kernels.launch("b", lambda x, m: m.copy_(x.exp()), x, m)
    kernels.launch("c", lambda m, v: v.copy_(m.cos()), m, v)
    kernels.launch("d", lambda x, m: m.copy_(x), x, m)
    kernels.launch("e", lambda u, v, out: torch.add(u, v, out=out), u, v, result)
    first = (Launch("a", 2, (FORK,)), Launch("b", 0), Launch("c", 1, ("b",)))
    plan = Schedule("drawn", 3, (*first, Launch("d", 0, ("c", "a")), Launch("e", 0)))
    case = kernels.case(result, Role.INPUT, Role.BUFFER)
    check_only_random_orders_show(case, plan, "order", "write after write of storage 'm'")


def test_new_memory_holds_rubbish() -> None:
    """Else the allocator may return the right numbers of the run before, and a read that is too early is right."""
    with rubbish_in_new_memory():
        assert torch.ops.aten.empty_strided.default([4, 2], [2, 1]).isnan().all()
        integers = torch.ops.aten.empty_strided.default([4, 2], [2, 1], dtype=torch.int64)
        assert integers.eq(torch.iinfo(torch.int64).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_command_leaves_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mutations.json"
    sizes = ["--graphs", "1", "--schedules", "2", "--emulated", "0", "--most", "2", "--runs", "1"]
    assert main([*sizes, "--models", "towers8", "--seed", "3", "--out", str(out)]) == 0
    summary = json.loads(out.read_text())
    assert summary["random"]["counts"]["as is: accepted, right"] == 2
    assert summary["ops"].keys() == {"towers8"}
    assert (summary["seed"], summary["models"]["faults"]) == (3, [])
    assert "| storage moved" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--models", "nothing"])
