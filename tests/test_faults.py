"""Faults: out of memory, Ctrl-C, ops that raise, forks.

After a fault at any time, the model runs, nothing that the user can see has changed, no lock is held, and there is one
message; Ctrl-C reaches the caller. Faults of a GPU are in ``gpu/test_faults.py``, and those of the cache folder in
``test_store.py``.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import autostream
from autostream.dispatch.captured_call import CapturedCall
from autostream.tuning import tune as tuning
from autostream.utils.collector import paused
from tests.alone import run_alone
from tests.faults import (
    Noisy,
    Quiet,
    Risk,
    Surroundings,
    check_free,
    check_works,
    fail_once,
    messages,
    out_of_memory,
    risky,
    strike,
)
from tests.semantics import CONFIGURATIONS, Model, force_streams, let_policy_assign, same, scattered, t

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


OTHERS = [lambda: MemoryError("no memory"), lambda: RuntimeError("no way"), KeyboardInterrupt]
MakeFault = Callable[[], BaseException]


@pytest.fixture(autouse=True)
def _no_risk() -> Iterator[None]:
    yield
    Risk.is_over()


# While a model is prepared

STAGES = [
    "dispatch.entries.capture", "dispatch.entries.names_of", "dispatch.compiled_graph.program_of",
    "tuning.tune.price_program", "tuning.tune.candidates_for", "tuning.tune.static_copies", "tuning.tune.undone",
    "runtime.restore.copyable", "tuning.tune.select", "tuning.select.build", "tuning.select.lower",
    "tuning.select.uncaptured", "tuning.select.interleaved", "dispatch.scheduled_program.Frozen",
    "dispatch.scheduled_program.planned",
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_in_any_stage_while_a_model_is_prepared(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C first, then one error; which one depends on the stage."""
    errors = [out_of_memory, lambda: MemoryError("no memory"), lambda: RuntimeError("no way")]
    options = force_streams(monkeypatch)
    for fault in (KeyboardInterrupt(), errors[STAGES.index(stage) % 3]()):
        model, x = Noisy(), t(4, 8)
        fast = autostream.optimize(model, costs="roofline", **options)
        due, before = fail_once(monkeypatch, stage, fault), Surroundings(model)
        if isinstance(fault, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                fast.prepare(x)
            assert (fast.reports, messages(caplog)) == ((), [])
        else:
            fast.prepare(x)
            (report,) = fast.reports
            (refusal,) = report.refusals
            assert report.mode == "plain"
            assert messages(caplog) == [f"autostream: Noisy runs plainly: {refusal.reason}"]
            assert str(fault).splitlines()[0] in refusal.reason
        assert not due
        before.check(Surroundings(model))
        check_free(fast)
        check_works(fast, model, x)


@torch.no_grad()
@pytest.mark.parametrize("make_fault", [out_of_memory, KeyboardInterrupt])
def test_an_op_that_raises_in_any_of_its_runs_while_a_model_is_prepared(
    make_fault: MakeFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first run, in the second one, and so on with larger steps, until there are fewer runs."""
    options: dict[str, Any] = {"costs": "measured", "policy": "critical_path", "streams": 2, "memory_budget": math.inf}
    let_policy_assign(monkeypatch, scattered)
    monkeypatch.setattr("autostream.costs.this_device.save", lambda measurements: ())  # ops are timed each time
    monkeypatch.setattr("autostream.tuning.select._ROUNDS", 1)
    monkeypatch.setattr("autostream.tuning.select._MAX_RUNS", 1)
    monkeypatch.setattr("autostream.tuning.select.VARIANTS", 0)
    assert 5 < strike(Noisy(), t(4, 8), options, make_fault, (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)) < 10


@torch.no_grad()
@pytest.mark.parametrize("stage", ["tuning.select.interleaved", "dispatch.scheduled_program.planned"])
def test_copies_of_inputs_are_freed_at_once_after_a_fault(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference cycle keeps them until the garbage collector runs."""
    copies: list[weakref.ref[Tensor]] = []
    static_copies = tuning.static_copies

    def watched(tensors: Sequence[Tensor], copied: Sequence[int]) -> list[Tensor]:
        made = static_copies(tensors, copied)
        copies.extend(weakref.ref(made[index]) for index in copied)
        return made

    monkeypatch.setattr(tuning, "static_copies", watched)
    fail_once(monkeypatch, stage, out_of_memory())
    gc.collect()
    with paused():
        fast = autostream.optimize(Noisy(), t(4, 8))
        assert [copy() for copy in copies] == [None]
    assert [report.mode for report in fast.reports] == ["plain"]


# In a call


@torch.no_grad()
@pytest.mark.parametrize("make_fault", OTHERS, ids=lambda make: type(make()).__name__)
@pytest.mark.parametrize("configuration", ["default", "scattered"])
def test_an_error_of_an_op_in_a_call_reaches_the_caller_and_the_next_call_works(
    configuration: str, make_fault: MakeFault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x, fault = Noisy(), t(4, 8), make_fault()
    fast = autostream.optimize(model, x, **CONFIGURATIONS[configuration](monkeypatch))
    mode, grad = fast.reports[0].mode, torch.is_grad_enabled()
    Risk.is_at(1, make_fault)
    with pytest.raises(type(fault), match=f"^{fault}$"):
        fast(x)
    assert torch.is_grad_enabled() == grad
    check_free(fast)
    check_works(fast, model, x)
    assert [report.mode for report in fast.reports] == [mode]
    assert messages(caplog) == []


@torch.no_grad()
@pytest.mark.parametrize("short", [False, True], ids=["slow path", "fast path"])
@pytest.mark.parametrize("configuration", ["default", "scattered"])
def test_a_schedule_that_runs_out_of_memory_is_replaced_by_eager_calls(
    configuration: str, short: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams take more memory than the model alone. A call that fails on the fast path is tried on the slow path."""
    model, x = Quiet(), t(4, 8)
    fast = autostream.optimize(model, x, **CONFIGURATIONS[configuration](monkeypatch))
    entry = watched_entry(fast)
    if short:
        fast(x)
    failures = 2 if short else 1
    Risk.is_at(1, out_of_memory, times=failures)
    with paused():
        same(fast(x), model(x))
        assert entry() is None, "its memory is freed"
    assert Risk.runs == failures + 2
    check_free(fast)
    (report,) = fast.reports
    (refusal,) = report.refusals
    assert refusal.reason == (
        "there is too little memory to run it as scheduled (OutOfMemoryError: CUDA out of memory. Tried to allocate "
        "2.00 GiB.): free some, or lower memory_budget, and optimize it again"
    )
    assert messages(caplog) == [f"autostream: Quiet runs plainly: {refusal.reason}"]
    check_works(fast, model, x)


@torch.no_grad()
def test_hooks_of_saved_tensors_do_not_prevent_that_but_their_errors_are_raised() -> None:
    """A checkpoint sets them."""
    model, x = Quiet(), t(4, 8)
    fast = autostream.optimize(model, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        Risk.is_at(1, lambda: RuntimeError("of a hook"))
        with pytest.raises(RuntimeError, match="of a hook"):
            fast(x)
        assert [report.mode for report in fast.reports] == ["one stream"]
        Risk.is_at(1, out_of_memory)
        same(fast(x), model(x))
    assert [report.mode for report in fast.reports] == ["plain"]


@torch.no_grad()
def test_a_call_that_has_mutated_a_buffer_is_not_run_again(caplog: pytest.LogCaptureFixture) -> None:
    """The running mean is updated before the error; the next call runs eagerly."""
    model, x = Noisy(), t(4, 8)
    fast = autostream.optimize(model, x)
    Risk.is_at(1, out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        fast(x)
    assert Risk.runs == 1
    assert model.norm.num_batches_tracked == torch.tensor(1)
    assert len(messages(caplog)) == 1
    check_free(fast)
    check_works(fast, model, x)
    assert [report.mode for report in fast.reports] == ["plain"]


def stores(s: Model, x: Tensor) -> Tensor:
    s.told = 7
    return risky(x)


def appends(s: Model, x: Tensor) -> Tensor:
    s.seen.append(1)
    return risky(x)


@torch.no_grad()
@pytest.mark.parametrize("function", [stores, appends])
def test_a_call_that_has_side_effects_in_python_is_not_run_again(function: Callable[..., Tensor]) -> None:
    model, x = Model(function, told=0, seen=[]), t(4, 8)
    fast = autostream.optimize(model, x)
    Risk.is_at(1, lambda: RuntimeError("no way"))
    with pytest.raises(RuntimeError, match="no way"):
        fast(x)
    assert (model.told, model.seen) == (0, [])
    same(fast(x), x)
    assert (model.told, model.seen) in ((7, []), (0, [1]))


@torch.no_grad()
def test_strict_raises_the_error_and_keeps_the_schedule() -> None:
    model, x = Quiet(), t(4, 8)
    fast = autostream.optimize(model, x, strict=True)
    Risk.is_at(1, out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        fast(x)
    check_works(fast, model, x)
    assert [report.mode for report in fast.reports] == ["one stream"]


def watched_entry(fast: autostream.OptimizedModule) -> weakref.ref[Any]:
    ((entry,),) = fast._autostream._admission.entries.values()
    assert isinstance(entry, CapturedCall)
    assert entry.compiled is not None
    (ready,) = entry.compiled.signatures
    assert ready.scheduled is not None
    return weakref.ref(ready.scheduled)


# In a forked process


def test_a_process_that_is_forked_while_others_prepare_and_call() -> None:
    """Both processes run and prepare models on the CPU, although CUDA cannot be used in the child."""
    run_alone(
        """
        import os, signal, threading, time
        import torch
        import autostream
        from autostream.utils.locks import preparing

        def refuse(*args):
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

        def prepare():
            with preparing:
                prepares.set()
                forks.wait()
                time.sleep(0.1)  # a fork that does not wait for this has happened by now
                prepared.append(True)

        def call():
            with fast._autostream._lock, learning._autostream._lock:
                calls.set()
                ended.wait()

        def check():
            with torch.no_grad():
                for rows in (2, 2, 3):
                    x = torch.randn(rows, 4)
                    assert torch.equal(fast(x), model(x))
            assert [report.mode for report in fast.reports] == ["one stream"] * 2, fast.reports
            learn()

        def learn():
            learning(torch.ones(2, 4)).sum().backward()
            (report,) = learning.reports
            assert report.mode == "forward and backward"

        torch.set_num_threads(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        fast = autostream.optimize(model, torch.ones(2, 4), policy="sequential")
        learning = autostream.optimize(model, policy="critical_path")
        learn()
        prepares, forks, calls, ended, prepared = *(threading.Event() for _ in range(4)), []
        threads = [threading.Thread(target=target) for target in (prepare, call)]
        for thread in threads:
            thread.start()
        prepares.wait()
        calls.wait()
        os.register_at_fork(before=forks.set)
        if not (child := os.fork()):
            signal.alarm(100)  # ends it if it hangs
            torch.cuda.init = torch.cuda._lazy_init = refuse
            assert prepared
            check()
            os._exit(0)
        ended.set()
        assert os.waitpid(child, 0)[1] == 0
        check()
        """
    )
