"""What all tests share."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from autostream.dispatch.dispatcher import Dispatcher
from autostream.options import Options
from autostream.tuning import select

settings.register_profile("no clocks", deadline=None, max_examples=40)
settings.load_profile("no clocks")

# PyTorch formats what it compiles for a log of its own, as soon as that has handlers; pytest adds some to each logger
# whose records do not reach the root.
traces = logging.getLogger("torch.__trace")
traces.propagate = True
traces.handlers.clear()


@pytest.fixture(autouse=True, scope="session")
def _collections_are_rare() -> Iterator[None]:
    """Dynamo makes objects by the million, few of them in cycles: looking for those takes a tenth of a test's time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(20_000, 10, 10)
    yield
    gc.set_threshold(*thresholds)


@pytest.fixture(autouse=True, scope="session")
def _guards_are_not_timed() -> Iterator[None]:
    """After each capture Dynamo empties the caches of the CPU, and times its guards for the log: 30 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_collected() -> None:
    """A collection of all that a session has imported takes a second, and tests of what is freed make many."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo compiles a function a few times only, and then lets it be; most models in a test file share one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def as_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU and Triton, though no tensor is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("autostream.fusion.inductor._installed", lambda package: True)


@pytest.fixture
def aten_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops of ATen by default on a GPU too: for tests of streams and memory, which need no compiler for that."""
    monkeypatch.setitem(Options.__init__.__kwdefaults__, "kernels", "eager")


@pytest.fixture(autouse=True, scope="session")
def _one_thread_for_each_op() -> Iterator[None]:
    """Tests run side by side, lanes and processes too: of more threads than cores, those of OpenMP spin."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for processes that tests start
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements of tests are kept apart from the user's, and from those of earlier tests; choices are not kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSTREAM_CACHE_DIR", str(tmp_path_factory.mktemp("autostream")))
        patch.setattr("autostream.tuning.tune.choice_key", lambda *_: "")
        yield


@pytest.fixture(autouse=True, scope="session")
def _short_rounds() -> Iterator[None]:
    """On a CPU a round of the clock lasts 10 ms, so that other work does not disturb it; no test depends on times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(select._ROUND_US, "cpu", 1.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def _schedules_run() -> Iterator[None]:
    """On a CPU the clock decides between a schedule and the model itself; most tests are of schedules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autostream.dispatch.entries.is_contested", lambda options, report: False)
        yield


_FALL_BACK = Dispatcher._fall_back


@pytest.fixture(autouse=True, scope="session")
def _no_schedule_fails() -> Iterator[None]:
    """A schedule that fails where the model does not is a fault of ours, which the model would hide."""

    def fall_back(self: Dispatcher, key: Any, entry: Any, error: str, *call: Any) -> Any:
        _FALL_BACK(self, key, entry, error, *call)
        raise AssertionError(f"a schedule has failed: {error}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "_fall_back", fall_back)
        yield


@pytest.fixture
def schedules_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """For models that catch what data makes their ops raise."""
    monkeypatch.setattr(Dispatcher, "_fall_back", _FALL_BACK)
