"""Every small change to a schedule: what is wrong is refused and gives wrong numbers, and what is right does neither.

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
from tests.runtime.programs import Kernels
from tests.scheduling.judge import Judge

pytestmark = pytest.mark.usefixtures("one_thread_for_each_op")

GRAPHS = range(10_000, 10_024)
"""Seeds that the long form does not draw."""


def attacked(graphs: range = GRAPHS) -> Findings:
    findings = Findings()
    for seed in graphs:
        attack_random(findings, seed, schedules=2, emulated=1)
    return findings


def test_random_schedules() -> None:
    findings = attacked()
    assert not findings.faults, findings.faults[0]
    assert all(findings.counts[kind, verdict] for kind in KINDS for verdict in ("accepted", "rejected"))
    assert all(findings.counts[kind, "rejected, wrong numbers"] for kind in KINDS)


@pytest.mark.parametrize("name", ["squeezenet1_1", "towers8"])
def test_models(name: str) -> None:
    findings = Findings()
    attack_model(findings, name, model_case(name), seed=0, most=30, runs=3)
    assert not findings.faults, findings.faults[0]
    assert not findings.forgiven, findings.forgiven[0]
    assert findings.counts[AS_IS, "accepted, right"] == len(mutations.PLANS)
    assert findings.counts["wait deleted", "accepted"] == 0
    assert all(findings.counts[kind, "rejected"] for kind in KINDS)


@pytest.mark.parametrize("asked", ["fewer", "more"])
def test_a_verifier_that_is_wrong_is_found_out(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ScheduleError("whatever it is")

    monkeypatch.setattr(mutations, "verify", refuse if asked == "more" else lambda *_, **__: None)
    findings = attacked(GRAPHS[:1])
    assert findings.faults
    assert ("judge: right" in findings.faults[0]) == (asked == "more")


def test_an_emulator_that_forgives_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations.Emulated, "symptom", lambda *_, **__: "")
    findings = attacked(GRAPHS[:1])
    assert "run: right" in findings.faults[0]
    assert "kernel0" in findings.faults[0], "the graph is drawn"


def test_lifetimes_that_meet_show_where_streams_take_turns() -> None:
    """
    0:  x ─┬─▶ a ─▶ b ─▶ e      what a writes for b, and c for d, is at one place; each stream by itself, one after
           │            ╱       the other, is right
    1:     ╰─▶ c ─▶ d ─╯
    """
    kernels = Kernels({"x": torch.randn(4)})
    (x,) = kernels.arguments
    a, b, c, d, e = (kernels.taken(4) for _ in range(5))
    for name, function, *args in (
        ("a", torch.sin, x, a),
        ("b", torch.cos, a, b),
        ("c", torch.exp, x, c),
        ("d", torch.cos, c, d),
        ("e", torch.add, b, d, e),
    ):
        kernels.launch(name, lambda *given, f=function: f(*given[:-1], out=given[-1]), *args)
    case = kernels.case(e, Role.INPUT)
    launches = (Launch("a", 0), Launch("c", 1, (FORK,)), Launch("b", 0), Launch("d", 1), Launch("e", 0, ("d",)))
    plan = Schedule("drawn", 2, launches, arena=Arena(512, {a.name: 0, c.name: 0}))
    emulated = Emulated(case)
    assert Judge(case.graph).fault(plan) == "arena"
    assert "of the arena" in refusal(case.graph, plan, frozenset())
    assert emulated.symptom(case.graph, plan) == ""
    assert emulated.symptom(case.graph, plan, MORE_ORDERS) == "wrong numbers"


def test_a_write_between_a_write_and_its_reader_shows_where_streams_take_turns() -> None:
    """
    0:  b ──────▶ d ─▶ e      a, b and d write a buffer that c reads, e adds up what a and c made; of a, which is in
         ╲       ╱│           no order with b and c, only a run between them does harm
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
    case = kernels.case(result, Role.INPUT, Role.BUFFER)
    launches = (
        Launch("a", 2, (FORK,)),
        Launch("b", 0),
        Launch("c", 1, ("b",)),
        Launch("d", 0, ("c", "a")),
        Launch("e", 0),
    )
    plan = Schedule("drawn", 3, launches)
    emulated = Emulated(case)
    assert Judge(case.graph).fault(plan) == "order"
    assert "write after write of storage 'm'" in refusal(case.graph, plan, frozenset())
    assert emulated.symptom(case.graph, plan) == ""
    assert emulated.symptom(case.graph, plan, MORE_ORDERS) == "wrong numbers"


def test_memory_that_nobody_has_written_holds_rubbish() -> None:
    """Otherwise the allocator may return the right numbers of the run before, and a read that is too early be right."""
    with rubbish_in_new_memory():
        assert torch.ops.aten.empty_strided.default([4, 2], [2, 1]).isnan().all()
        taken = torch.ops.aten.empty_strided.default([4, 2], [2, 1], dtype=torch.int64)
        assert taken.eq(torch.iinfo(torch.int64).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_command_leaves_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mutations.json"
    sizes = ["--graphs", "2", "--schedules", "2", "--emulated", "1", "--most", "2", "--runs", "1"]
    assert main([*sizes, "--models", "towers8", "--seed", "3", "--out", str(out)]) == 0
    summary = json.loads(out.read_text())
    assert summary["random"]["counts"]["as is: accepted, right"] == 4
    assert summary["ops"].keys() == {"towers8"}
    assert (summary["seed"], summary["models"]["faults"]) == (3, [])
    assert "| storage moved" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--models", "nothing"])
