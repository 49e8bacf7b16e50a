"""Faults of steps: errors of their users, no memory, Ctrl-C, kernels that do not compile, forks.

Each call of a step gives what the eager step gives, an error too, and leaves all that the step writes as the eager step
does; an error while a step is prepared leaves it to the eager step. Faults of a GPU are in ``gpu/test_faults.py``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from autostream.dispatch.captured_step import CapturedStep
from autostream.errors import FusionError
from autostream.utils.collector import paused
from tests.alone import run_alone
from tests.faults import Risk, Surroundings, fail_once, messages, out_of_memory
from tests.semantics import same
from tests.step_faults import Script, Trainer, X, check_alike, modes, strike_steps

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

QUICK: dict[str, Any] = {"policy": "sequential", "kernels": "eager"}


@pytest.fixture(autouse=True)
def _no_risk() -> Iterator[None]:
    yield
    Risk.is_over()


# What users do


def fail(trainer: Trainer) -> None:
    trainer.fails = True


def fail_no_more(trainer: Trainer) -> None:
    trainer.fails = False


def freeze(trainer: Trainer) -> None:
    trainer.model.requires_grad_(False)


def thaw(trainer: Trainer) -> None:
    trainer.model.requires_grad_(True)


def replace_weight(trainer: Trainer) -> None:
    """The optimizer keeps the old one, which no loss depends on any more."""
    trainer.model.left.weight = nn.Parameter(trainer.model.left.weight.detach().clone())
    trainer.model.left.weight.requires_grad_(False)


def replace_weight_everywhere(trainer: Trainer) -> None:
    replace_weight(trainer)
    thaw(trainer)
    trainer.adam.param_groups[0]["params"] = [*trainer.model.parameters()]


def delete_weight(trainer: Trainer) -> None:
    del trainer.model.left.weight


def restore_weight(trainer: Trainer) -> None:
    trainer.model.left.weight = trainer.adam.param_groups[0]["params"][2]


def without_bias(trainer: Trainer) -> None:
    for module in (trainer.model, trainer.average):
        module.left.register_parameter("bias", None)


def add_group(trainer: Trainer) -> None:
    """A norm gets a bias that its model trains at another rate."""
    for module in (trainer.model, trainer.average):
        module.right = nn.Sequential(module.right, nn.Linear(8, 8, bias=False).double())
        nn.init.eye_(module.right[1].weight)
    trainer.average.requires_grad_(False)
    trainer.adam.add_param_group({"params": [trainer.model.right[1].weight], "lr": 0.5})


def forget(trainer: Trainer) -> None:
    trainer.adam.state.clear()


def spoil_rate(trainer: Trainer) -> None:
    trainer.adam.param_groups[0]["lr"] = "fast"


def mend_rate(trainer: Trainer) -> None:
    trainer.adam.param_groups[0]["lr"] = 0.02


def clear(trainer: Trainer) -> None:
    trainer.adam.zero_grad()


@dataclass(frozen=True)
class Family:
    """What happens to a step, and the modes of its reports in the end.

    Attributes:
        script: batches, and changes between them.
        graphs: how many graphs there are.
        plainly: whether some steps run as they are written, with a reason.
    """

    script: Script
    graphs: int
    plainly: bool = False


GOOD, NAN = (X,), (X * torch.nan,)
FAMILIES: Mapping[str, Family] = {
    "an error in the first call": Family((fail, GOOD, fail_no_more, GOOD, GOOD, GOOD), 1),
    "an error in the second call": Family((GOOD, fail, GOOD, GOOD, fail_no_more, GOOD, GOOD), 1),
    "an error in a replayed call": Family((GOOD, GOOD, GOOD, fail, GOOD, fail_no_more, GOOD), 1),
    "a shape that no layer takes": Family((GOOD, GOOD, (X[:, :3],), GOOD, (X[:, :3],), GOOD), 1),
    "such a shape at first": Family(((X[:, :3],), GOOD, (X[:, :3],), GOOD, GOOD), 1),
    "five such shapes": Family((GOOD, GOOD, *((X[:, :width],) for width in range(1, 6)), (X[:3],), GOOD), 2),
    "another device": Family((GOOD, (X.to("meta"),), GOOD, (X.to("meta"),), GOOD), 1),
    "another dtype": Family((GOOD, (X.float(),), GOOD, (X.float(),), GOOD), 1),
    "no tensor": Family((GOOD, GOOD, (3,), GOOD), 1),
    "no argument": Family((GOOD, GOOD, (), GOOD), 1),
    "losses that are no numbers": Family((GOOD, NAN, GOOD, NAN, GOOD), 1),
    "losses that are no numbers at first": Family((NAN, GOOD, GOOD), 1),
    "all parameters frozen": Family((GOOD, GOOD, freeze, GOOD, GOOD, thaw, GOOD), 1),
    "all parameters frozen at first": Family((freeze, GOOD, thaw, GOOD, GOOD), 1),
    "a parameter replaced": Family((GOOD, GOOD, replace_weight, GOOD, GOOD), 2),
    "a parameter replaced in the optimizer too": Family((GOOD, GOOD, replace_weight_everywhere, GOOD, GOOD), 2),
    "a parameter deleted": Family((GOOD, GOOD, delete_weight, GOOD, restore_weight, GOOD), 1),
    "a bias that goes": Family((GOOD, GOOD, without_bias, GOOD, GOOD), 2),
    "a new group": Family((GOOD, GOOD, add_group, GOOD, GOOD, GOOD), 2),
    "states that are forgotten": Family((GOOD, GOOD, forget, GOOD, GOOD), 1),
    "a rate that is no number": Family((GOOD, GOOD, spoil_rate, GOOD, mend_rate, clear, GOOD, GOOD), 1),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_goes_wrong_goes_wrong_as_in_the_eager_step(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Afterwards the step is in its graph again, and nothing is reported of calls that raise anyway."""
    family, ours, eager = FAMILIES[name], Trainer(**QUICK), Trainer()
    with caplog.at_level(logging.WARNING, "autostream"):
        check_alike(ours, eager, family.script)
    assert vars(ours.adam).keys() - {"_opt_called"} == vars(eager.adam).keys() - {"_opt_called"}
    assert modes(ours) == ["one stream"] * family.graphs + ["plain"] * family.plainly
    assert len(messages(caplog)) == family.plainly


# While a step is prepared

STAGES = [
    "dispatch.captured_step.capture_step", "frontend.step_capture.capture", "dispatch.captured_step.trace_step",
    "frontend.steps.update", "frontend.steps.as_program", "tuning.tune.static_copies", "tuning.tune.undone",
    "tuning.select.build", "dispatch.scheduled_program.Frozen", "dispatch.scheduled_program.planned",
]  # fmt: skip
"""Those of steps, and some of what models go through as well, all of which tests/test_faults.py has."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_in_any_stage_while_a_step_is_prepared(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C reaches the caller, and the next call prepares the step; with an error, it runs as it is written."""
    ours, eager = Trainer(**QUICK), Trainer()
    check_alike(ours, eager, [GOOD])
    before, surroundings, others = ours.state, ours.surroundings, Surroundings(ours.model)
    due = fail_once(monkeypatch, stage, KeyboardInterrupt())
    torch.set_rng_state(before[0][-1])
    with pytest.raises(KeyboardInterrupt):
        ours.step(X)
    assert not due
    same(ours.state, before)
    assert ours.surroundings == surroundings
    others.check(Surroundings(ours.model))
    assert (ours.step.reports, messages(caplog)) == ((), [])
    check_alike(ours, eager)
    assert modes(ours) == ["one stream"]

    fault = [out_of_memory, lambda: MemoryError("no memory"), lambda: RuntimeError("no way")][STAGES.index(stage) % 3]()
    fail_once(monkeypatch, stage, fault)
    check_alike(ours, eager, [(X[:3],), (X[:3],), GOOD])
    assert ours.surroundings == surroundings
    assert modes(ours) == ["one stream", "plain"]
    (refusal,) = ours.step.reports[-1].refusals
    assert str(fault).splitlines()[0] in refusal.reason
    assert messages(caplog) == [f"autostream: the step Trainer.update runs as it is written: {refusal.reason}"]


@pytest.mark.parametrize("make_fault", [out_of_memory, KeyboardInterrupt])
def test_an_op_that_raises_in_any_of_its_runs_while_a_step_is_prepared(
    make_fault: Callable[[], BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a forward or a backward; each run begins with the state that the call found."""
    options: dict[str, Any] = {"kernels": "eager", "costs": "measured", "policy": "critical_path", "streams": 2}
    monkeypatch.setattr("autostream.costs.this_device.save", lambda measurements: ())  # ops are timed each time
    monkeypatch.setattr("autostream.tuning.select._ROUNDS", 1)
    monkeypatch.setattr("autostream.tuning.select._MAX_RUNS", 1)
    monkeypatch.setattr("autostream.tuning.select.VARIANTS", 0)
    assert strike_steps(options, make_fault, (1, 3, 7, 20)) > 2


def test_kernels_that_do_not_compile_leave_the_ops_that_they_would_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise FusionError("TorchInductor cannot fuse it: CppCompileError: no compiler")

    monkeypatch.setattr("autostream.tuning.tune.fused_here", refuse)
    monkeypatch.setattr("autostream.training.check_requirements", lambda options: None)  # as if a GPU were there
    ours = Trainer(policy="sequential", kernels="inductor")
    check_alike(ours, Trainer(), [GOOD] * 4)
    (report,) = ours.step.reports
    assert report.mode == "one stream"
    assert "no compiler" in report.refusals[0].reason


# In a call


@pytest.mark.parametrize("is_replay", [False, True], ids=["slow path", "fast path"])
def test_an_error_of_an_op_reaches_the_caller_and_the_step_stays_in_its_graph(
    is_replay: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What the ops before it have written is written, as in the eager step."""
    ours, eager = Trainer(**QUICK), Trainer()
    faults = (lambda: MemoryError("no memory"), lambda: RuntimeError("no"), KeyboardInterrupt)
    for make_fault, run in product(faults, (1, 2)):  # in a forward, and in a backward
        check_alike(ours, eager, [GOOD, GOOD] if is_replay else [GOOD, GOOD, (X[:3],)])  # whose replay is the latest
        for trainer in (ours, eager):
            Risk.is_at(run, make_fault)
            outcome = trainer.call(X)
            assert outcome == (type(make_fault()), str(make_fault()))
            Risk.is_over()
            trainer.adam.zero_grad()
        same(ours.state, eager.state, tolerance=1e-10)
        check_alike(ours, eager)
        assert set(modes(ours)) == {"one stream"}
    assert messages(caplog) == []


@pytest.mark.parametrize("is_replay", [False, True], ids=["slow path", "fast path"])
def test_a_graph_that_runs_out_of_memory_is_given_up(is_replay: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets the error, since weights may have been written; later calls are eager, with the memory back."""
    ours, eager = Trainer(**QUICK), Trainer()
    check_alike(ours, eager, [GOOD, GOOD] if is_replay else [GOOD])
    if not is_replay:
        real = CapturedStep.run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                CapturedStep,
                "run",
                lambda *args: (Risk.is_at(1, out_of_memory), real(*args))[1],
            )
            assert ours.call(X)[0] is torch.OutOfMemoryError
    else:
        Risk.is_at(1, out_of_memory)
        assert ours.call(X)[0] is torch.OutOfMemoryError
    Risk.is_at(1, out_of_memory)
    assert eager.call(X)[0] is torch.OutOfMemoryError
    Risk.is_over()
    same(ours.state, eager.state, tolerance=1e-10)
    check_alike(ours, eager)
    (report,) = ours.step.reports
    (refusal,) = report.refusals
    assert refusal.reason.startswith("there is too little memory to run it as scheduled (OutOfMemoryError: CUDA out of")
    assert messages(caplog) == [f"autostream: the step Trainer.update runs as it is written: {refusal.reason}"]
    check_alike(ours, eager, [(X[:3],), (X[:3],)])
    assert modes(ours) == ["one stream", "plain"]


def test_strict_raises_the_error_and_keeps_the_graph() -> None:
    ours, eager = Trainer(strict=True, **QUICK), Trainer()
    check_alike(ours, eager)
    for trainer in (ours, eager):
        Risk.is_at(1, out_of_memory)
        assert trainer.call(X)[0] is torch.OutOfMemoryError
        Risk.is_over()
    check_alike(ours, eager)
    assert modes(ours) == ["one stream"]


def test_the_memory_of_a_graph_that_is_given_up_is_freed() -> None:
    ours = Trainer(**QUICK)
    check_alike(ours, Trainer())
    (entries,) = ours.step._graphs._admission.entries.values()
    graph = weakref.ref(entries[0].scheduled)
    del entries
    Risk.is_at(1, out_of_memory)
    with paused():
        ours.call(X)
        assert graph() is None


# In a forked process


def test_a_process_that_is_forked_while_another_thread_is_in_a_step() -> None:
    """Both go on with steps of the graph, and with new ones, from the weights that there were."""
    run_alone(
        """
        import os, signal, threading
        import torch
        import autostream
        from torch import nn

        def square(model, x):
            if len(x) == 5:  # runs as it is written
                is_inside.set()
                ended.wait()
            return model(x).square().mean()

        def update(x):
            loss = square(model, x)
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            return loss

        def check():
            for rows in (2, 2, 3):
                weight = model.weight.detach().clone()
                step(torch.ones(rows, 4))
                assert not torch.equal(model.weight, weight)
            assert [report.mode for report in step.reports].count("one stream") == 2, step.reports

        torch.set_num_threads(1)
        for is_decorated in (True, False):
            model = nn.Linear(4, 1)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if is_decorated:
                step = autostream.step(optimizers=[sgd], kernels="eager")(update)
            else:
                step = autostream.train_step(model, sgd, square, kernels="eager")
            for _ in range(3):
                step(torch.ones(2, 4))
            is_inside, ended = threading.Event(), threading.Event()
            thread = threading.Thread(target=step, args=(torch.ones(5, 4),))
            thread.start()
            is_inside.wait()
            if not (child := os.fork()):
                signal.alarm(100)  # ends it if it hangs
                check()
                os._exit(0)
            ended.set()
            thread.join()
            assert os.waitpid(child, 0)[1] == 0
            check()
        """
    )
