"""Options are checked when they are made, and a refusal says what is allowed."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from torch import nn

from autostream.errors import OptionError
from autostream.options import (
    MAX_STREAMS,
    Options,
    PolicyName,
    StepOptions,
    cache_folder,
    colours,
    disabled,
    environment,
    log_level,
    paranoid,
)
from autostream.scheduling.policies import POLICIES

ALLOWED = {
    "streams": ["auto", 1, 2, MAX_STREAMS],
    "policy": ["auto", "sequential", "critical_path", "path_cover", "search"],
    "costs": ["auto", "roofline", "measured"],
    "cuda_graph": ["auto", True, False],
    "kernels": ["auto", "eager", "inductor"],
    "inductor_options": [{}],
    "guards": ["dynamo", "inputs"],
    "strict": [True, False],
    "max_signatures": [1, 8, 1000],
    "tuning_seconds": [10.0, 0.1, 60],
    "memory_budget": [1.1, 0.5, 100.0, math.inf, 101, 2**40],
    "seed": [0, 1, 2**40],
    "microbatches": [1, 8],
    "max_norm": [None, 1.0, 3],
    "average": [None],
    "decay": [0.999, 0, 1, 0.5],
    "scaler": [None],
}
REFUSED = {
    "streams": [0, -1, MAX_STREAMS + 1, 2.0, True, "2", None, "AUTO"],
    "policy": ["", "auto ", "heft", None, 1],
    "costs": ["", "guess", None],
    "cuda_graph": ["yes", 1, 0, None],
    "kernels": ["aten", "triton", None],
    "inductor_options": [None, "max_autotune", ["max_autotune"], {1: True}],
    "guards": ["", "none", True, None],
    "strict": [1, 0, "auto", None],
    "max_signatures": [0, -1, 1.5, True, "8", None],
    "tuning_seconds": [0, 0.0, -1.0, 10**400, math.nan, math.inf, True, "10", None],
    "memory_budget": [
        *[0, 0.0, -1, -0.5, math.nan, -math.inf, 4e9, 101.0, 1, 2, 100, 10**400, True, "1.1", None],
        *[Fraction(10**400, 3), Decimal("1.1"), np.bool_(True), 1.5 + 0j],
    ],
    "seed": [-1, 1.5, True, "0", None],
    "microbatches": [0, -1, 2.0, True, None],
    "max_norm": [0, -1.0, math.inf, math.nan, True, "1"],
    "average": [],
    "decay": [-0.1, 1.1, math.nan, True, None],
    "scaler": [],
}


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_every_option_is_tested_and_all_by_default_are_allowed() -> None:
    names = [field.name for field in fields(StepOptions)]
    assert names == list(ALLOWED) == list(REFUSED)
    assert Options() == Options.parse({})
    assert names[: len(fields(Options))] == [field.name for field in fields(Options)]


@pytest.mark.parametrize(("name", "value"), pairs(ALLOWED))
def test_what_is_allowed_is_kept(name: str, value: object) -> None:
    others = {"average": nn.Linear(1, 1)} if name == "decay" else {}
    kept = getattr(StepOptions.parse({name: value, **others}), name)
    assert (kept, type(kept)) == (value, type(value))


@pytest.mark.parametrize(("name", "value"), pairs(REFUSED))
def test_what_is_not_allowed_is_refused_with_what_is(name: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        StepOptions.parse({name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r} is not allowed: use ")
    some = ALLOWED[name][0]
    assert f'"{some}"' in message or str(some) in message


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("memory_budget", np.int64(2**30), 2**30),
        ("memory_budget", np.float32(1.5), 1.5),
        ("memory_budget", np.float64(1.5), 1.5),
        ("memory_budget", np.float16("inf"), math.inf),
        ("memory_budget", Fraction(3, 2), 1.5),
        ("streams", np.int8(3), 3),
        ("seed", np.uint16(0), 0),
        ("tuning_seconds", np.int64(10), 10),
        ("decay", np.float32(0.5), 0.5),
    ],
)
def test_numbers_of_other_kinds_become_pythons_own(name: str, value: Any, kept: float) -> None:
    others = {"average": nn.Linear(1, 1)} if name == "decay" else {}
    found = getattr(StepOptions.parse({name: value, **others}), name)
    assert (found, type(found)) == (kept, type(kept))


def test_and_are_told_of_as_those_are() -> None:
    with pytest.raises(OptionError, match=r"^memory_budget=2 is not allowed: use a ratio as a float, such as"):
        Options(memory_budget=np.int64(2))
    with pytest.raises(OptionError, match=r"^memory_budget=4000000000.0 is not allowed: .* or int\(4e\+09\) for bytes"):
        Options(memory_budget=np.float32(4e9))  # type: ignore[arg-type]


def test_settings_of_inductor_belong_to_its_kernels() -> None:
    settings = {"max_autotune": True}
    assert Options(kernels="inductor", inductor_options=settings).inductor_options == settings
    with pytest.raises(OptionError, match='are of no use with kernels="eager": use "auto" or "inductor"'):
        Options(kernels="eager", inductor_options=settings)


def test_settings_of_inductor_stay_what_they_were_when_they_were_looked_at() -> None:
    settings: dict[str, Any] = {"max_autotune": True}
    options = Options(inductor_options=settings)
    settings["freezing"] = "False"
    assert options.inductor_options == {"max_autotune": True}


def test_a_refusal_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="streams=17"):
        Options(streams=17)


def test_an_unknown_name_is_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(OptionError, match=r"there is no option 'stream' \(did you mean 'streams'\?\): use streams, "):
        Options.parse({"stream": 2})


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({"xyzzy": 2})
    assert "did you mean" not in str(caught.value)
    assert all(field.name in str(caught.value) for field in fields(Options))


def test_options_do_not_change_and_may_be_keys() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().streams = 3  # type: ignore[misc]
    assert len({Options(), Options(streams=2), Options(streams=2)}) == 2


def test_every_policy_can_be_asked_for_and_no_other() -> None:
    assert set(get_args(PolicyName)) == {"auto", *POLICIES}


@pytest.mark.parametrize(("value", "off"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_the_environment_can_switch_autostream_off(
    monkeypatch: pytest.MonkeyPatch, value: str | None, off: bool
) -> None:
    if value is None:
        monkeypatch.delenv("AUTOSTREAM_DISABLE", raising=False)
    else:
        monkeypatch.setenv("AUTOSTREAM_DISABLE", value)
    assert disabled() is off


@pytest.mark.parametrize(("value", "asked"), [(None, False), ("", False), ("paranoid", True)])
def test_the_environment_can_ask_for_comparisons(
    monkeypatch: pytest.MonkeyPatch, value: str | None, asked: bool
) -> None:
    monkeypatch.delenv("AUTOSTREAM_VERIFY", raising=False)
    if value is not None:
        monkeypatch.setenv("AUTOSTREAM_VERIFY", value)
    assert paranoid() is asked


@pytest.mark.parametrize("value", ["1", "yes", "paranoia"])
def test_what_cannot_be_asked_for_is_told(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AUTOSTREAM_VERIFY", value)
    with pytest.raises(OptionError, match=f"AUTOSTREAM_VERIFY is '{value}': use 'paranoid'"):
        paranoid()


@pytest.mark.parametrize(
    ("asked", "shared", "folder"),
    [
        ("/fast/costs", "/home/ann/caches", "/fast/costs"),
        ("~/costs", "", "/home/ann/costs"),
        ("", "/home/ann/caches", "/home/ann/caches/autostream"),
        ("", "caches", "/home/ann/.cache/autostream"),
        ("", "", "/home/ann/.cache/autostream"),
    ],
)
def test_the_environment_says_where_measurements_are_kept(
    monkeypatch: pytest.MonkeyPatch, asked: str, shared: str, folder: str
) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", asked)
    monkeypatch.setenv("XDG_CACHE_HOME", shared)
    assert cache_folder() == Path(folder)


def test_without_a_home_it_must_be_said_where_measurements_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    for variable in ("AUTOSTREAM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(FileNotFoundError, match=r"no home directory for .*: set AUTOSTREAM_CACHE_DIR"):
        cache_folder()
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", "/fast/costs")
    assert cache_folder() == Path("/fast/costs")


@pytest.mark.parametrize("asked", ["", "~/costs"])
def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """It is not the root of the file system."""
    monkeypatch.setenv("HOME", "")
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", asked)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(FileNotFoundError, match=r"no home directory for ~/.*: set AUTOSTREAM_CACHE_DIR"):
        cache_folder()
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", "/fast/costs")
    assert cache_folder() == Path("/fast/costs")


@pytest.mark.parametrize(
    ("variables", "allowed"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colours_are_left_to_the_user(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], allowed: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert colours() is allowed


def test_the_environment_is_what_results_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_LOGS", "CUDA_VISIBLE_DEVICES", "SECRET"):
        monkeypatch.setenv(name, "0")
    assert environment().items() >= {"CUDA_VISIBLE_DEVICES": "0", "TORCH_LOGS": "0"}.items()
    assert "SECRET" not in environment()


@pytest.mark.parametrize(("value", "level"), [("", ""), ("debug", "DEBUG"), ("Warning", "WARNING")])
def test_the_level_of_logs(monkeypatch: pytest.MonkeyPatch, value: str, level: str) -> None:
    monkeypatch.setenv("AUTOSTREAM_LOG", value)
    assert log_level() == level


def test_there_is_no_such_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_LOG", "loud")
    with pytest.raises(OptionError, match="AUTOSTREAM_LOG is 'loud': use debug, info, warning, error, or leave"):
        log_level()
