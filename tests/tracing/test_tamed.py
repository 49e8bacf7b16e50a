"""What tracing changes for its time is as before afterwards, and other threads do not see it."""

from __future__ import annotations

import inspect
import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.compiler import is_compiling
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import make_fx

from autostream import optimize
from autostream.tracing import tamed as tamed_module
from autostream.tracing.tamed import compiling, patched_for_this_thread, tamed, tell_by_thread, unreferenced

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
    return torch.compiler.is_exporting(), is_compiling(), is_fx_symbolic_tracing()


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


class Asking(nn.Module):
    """Calls this while it is traced."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        self.ask()
        return x + 1


def test_other_threads_are_not_told_of_a_trace() -> None:
    """But for one that is not ours, of which all are told. Who asks gets a ``bool``.

    Models compute with it: ``tracing |= is_fake(tensor)``.
    """
    seen = []
    asking = Asking(lambda: seen.extend([told(), in_another_thread(told)])), (torch.ones(2),)
    with tamed():
        torch.export.export(*asking, strict=False)
        assert told() == in_another_thread(told) == (False, False, False)
    assert seen == [(True, True, False), (False, False, False)]
    torch.export.export(*asking, strict=False)
    assert seen[2:] == [(True, True, False)] * 2
    assert told() == (False, False, False)
    assert {type(answer) for answers in seen for answer in answers} == {bool}


def test_other_threads_are_not_told_of_what_is_compiled_here() -> None:
    def fail() -> None:
        with compiling():
            assert (told(), in_another_thread(told)) == ((False, True, False), (False, False, False))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert told() == (False, False, False)


@pytest.mark.parametrize("trace", [partial(make_fx, tracing_mode="fake"), make_fx])
def test_what_is_compiled_runs_in_other_threads_meanwhile(trace: Callable[..., Any]) -> None:
    """Of a trace that PyTorch does not call an export, it says that it cannot be traced."""
    compiled, x = torch.compile(lambda x: x.sin(), backend="eager"), torch.ones(2)
    expected, seen = compiled(x), list[Tensor]()
    with tamed():
        trace(Asking(lambda: seen.append(in_another_thread(lambda: compiled(x)))))(x)
    torch.testing.assert_close(seen, [expected] * len(seen))
    assert seen


@pytest.mark.parametrize("trace", [partial(make_fx, tracing_mode="fake"), make_fx])
def test_what_is_compiled_is_traced_as_it_was_written(trace: Callable[..., Any]) -> None:
    """It is refused outside, as ever."""
    compiled, x = torch.compile(lambda x: x.sin() + 1, backend="eager"), torch.ones(2)
    compiled(x)
    with tamed():
        graph = trace(compiled)(x).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.sin.default,
        torch.ops.aten.add.Tensor,
    ]
    with pytest.raises(RuntimeError, match="dynamo-optimized function"):
        make_fx(compiled)(x)


def test_what_is_compiled_stays_when_something_is_traced() -> None:
    """What asks whether it is compiled is guarded by the code that it asks."""

    def ask(x: Tensor) -> Tensor:
        return x.sin() if torch.compiler.is_compiling() else x.cos()

    counter = CompileCounter()
    compiled = torch.compile(ask, backend=counter)
    for _ in range(3):
        compiled(torch.ones(2))
        optimize(nn.Linear(2, 2), policy="critical_path").eval()(torch.ones(1, 2))
    assert counter.frame_count == 1


def test_who_asks_finds_pytorchs_own_source() -> None:
    """TorchScript reads it."""
    assert "torch.jit.is_scripting()" in inspect.getsource(is_compiling)


def test_a_function_of_another_kind_tells_what_it_told() -> None:
    def other() -> int:
        return 3

    def bound() -> bool:
        return bool(seen and torch.compiler._is_compiling_flag)

    seen: list[int] = []
    for function in (other, bound, lambda _is_compiling_flag: True, len, None):
        code = getattr(function, "__code__", None)
        assert not tell_by_thread(function, tamed_module.is_compiling, "_is_compiling_flag")
        assert getattr(function, "__code__", None) is code
    assert other() == 3


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
