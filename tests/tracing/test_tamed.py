"""What tracing changes for its time is as before afterwards, and other threads do not see it."""

from __future__ import annotations

import inspect
import logging
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.compiler import is_compiling

from autostream import optimize
from autostream.tracing import tamed as tamed_module
from autostream.tracing.tamed import patched_for_this_thread, tamed, unreferenced

TALKATIVE = logging.getLogger("torch.fx.experimental.symbolic_shapes")


def test_pytorch_says_nothing_inside_and_speaks_again_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with tamed():
            TALKATIVE.error("inside")
            warnings.warn_explicit("inside", UserWarning, torch.__file__, 1)
        TALKATIVE.error("after")
        warnings.warn("after", stacklevel=1)
    assert [record.message for record in caplog.records] == ["after"]
    assert [str(warning.message) for warning in seen] == ["after"]


def test_what_a_model_warns_of_is_said_once() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with tamed():
            for _ in range(2):
                warnings.warn("inside", stacklevel=1)
            assert not seen
    assert [(str(warning.message), warning.filename) for warning in seen] == [("inside", __file__)]


class TwoWords(UserWarning):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def test_a_warning_may_be_made_of_more_than_a_text() -> None:
    with pytest.warns(TwoWords, match="not yet"), tamed():
        warnings.warn(TwoWords("not", "yet"), stacklevel=1)


def test_where_warnings_are_errors_a_model_that_warns_fails_as_it_does() -> None:
    class Warns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
            return x + 1

    model, x = Warns(), torch.ones(2)
    with warnings.catch_warnings(), pytest.raises(DeprecationWarning):
        warnings.simplefilter("error")
        optimize(model)(x)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        torch.testing.assert_close(optimize(model)(x), x + 1)


def test_what_a_user_logs_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    with tamed():
        logging.getLogger("a.user").error("inside")
    assert [record.message for record in caplog.records] == ["inside"]


def test_flags_that_a_failure_leaves_set_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", False, raising=False)

    def fail() -> None:
        with tamed():
            torch.compiler._is_exporting_flag = True
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.compiler._is_exporting_flag is False


def told() -> tuple[object, ...]:
    return torch.compiler.is_exporting(), is_compiling()


def told_in_another_thread() -> tuple[object, ...]:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(told).result()


@pytest.mark.parametrize("lacking", [False, True])
def test_other_threads_are_not_told_of_an_export(lacking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a version of PyTorch has no function that says so, they are. All are told so by a ``bool``.

    Models compute with it: ``tracing |= is_fake(tensor)``.
    """
    if lacking:
        monkeypatch.setattr(tamed_module, "_FLAGS", ("_nothing",))
    seen = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.extend([told(), told_in_another_thread()])
            return x + 1

    with tamed():
        torch.export.export(Asking(), (torch.ones(2),), strict=False)
        assert told() == (False, False)
    seen.append(told())
    assert seen[-3:] == [(True, True), (lacking, lacking), (False, False)]
    assert {type(answer) for answers in seen for answer in answers} == {bool}


def test_what_tells_of_an_export_is_as_it_was_afterwards() -> None:
    codes = [function.__code__ for function in (is_compiling, torch.compiler.is_exporting)]
    source = inspect.getsource(is_compiling)
    with pytest.raises(KeyError), tamed():
        assert is_compiling.__code__ is not codes[0]
        assert inspect.getsource(is_compiling) == source, "TorchScript reads it"
        with tamed():
            assert told() == told_in_another_thread() == (False, False)
        raise KeyError
    assert [function.__code__ for function in (is_compiling, torch.compiler.is_exporting)] == codes


def test_patched_methods_are_this_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    original = nn.Module.__dict__["__call__"]

    def patched(self: nn.Module, *args: object) -> str:
        return "patched"

    monkeypatch.setattr(nn.Module, "__call__", patched)
    results = []
    with patched_for_this_thread():
        results.append(nn.Identity()(1))
        other = threading.Thread(target=lambda: results.append(nn.Identity()(1)))
        other.start()
        other.join()
    assert results == ["patched", 1]
    assert nn.Module.__dict__["__call__"] is patched
    monkeypatch.undo()
    assert nn.Module.__dict__["__call__"] is original


def test_a_mode_forgets_tensors_and_can_be_told_of_them_again() -> None:
    mode, weight = FakeTensorMode(), torch.ones(2)
    fake = mode.from_tensor(weight)
    assert weakref.getweakrefs(weight)
    unreferenced([mode])
    assert weakref.getweakrefs(weight) == []
    assert (fake + mode.from_tensor(weight)).shape == (2,)
    unreferenced([mode])
    assert weakref.getweakrefs(weight) == []


def test_a_mode_that_remembers_in_another_way_is_left_alone() -> None:
    unreferenced([object()])  # type: ignore[list-item]


def test_dynamo_compiles_nothing_in_other_threads_while_we_trace() -> None:
    """The lock is Dynamo's own, which it takes for each of its compilations."""
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    thread = threading.Thread(target=lambda: done.append(compiled(torch.ones(1))))
    done: list[torch.Tensor] = []
    with tamed():
        thread.start()
        thread.join(0.5)
        assert not done
    thread.join(60)
    assert torch.equal(done[0], torch.full((1,), 2.0))
