"""Options: allowed and refused values, and environment variables."""

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
    "memory_budget": [1.1, 1.0, 100.0, math.inf, 101, 2**40],
    "seed": [0, 1, 2**40],
    "microbatches": [1, 8],
    "max_norm": [None, 1.0, 3],
    "average": [None],
    "decay": [0.999, 0, 1, 0.5],
    "scaler": [None],
    "data_parallel": [False, None],
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
        *[0, 0.0, 0.5, -1, -0.5, math.nan, -math.inf, 4e9, 101.0, 1, 2, 100, 10**400, True, "1.1", None],
        *[Fraction(10**400, 3), Decimal("1.1"), np.bool_(True), 1.5 + 0j],
    ],
    "seed": [-1, 1.5, True, "0", None],
    "microbatches": [0, -1, 2.0, True, None],
    "max_norm": [0, -1.0, math.inf, math.nan, True, "1"],
    "average": [],
    "decay": [-0.1, 1.1, math.nan, True, None],
    "scaler": [],
    "data_parallel": [],
}


def options_with(name: str, value: Any) -> StepOptions:
    others = {"average": nn.Linear(1, 1)} if name == "decay" else {}
    return StepOptions.parse({name: value, **others})


def test_every_option_is_in_the_tables_and_every_policy_is_allowed() -> None:
    names = [field.name for field in fields(StepOptions)]
    assert names == list(ALLOWED) == list(REFUSED)
    assert Options() == Options.parse({})
    assert names[: len(fields(Options))] == [field.name for field in fields(Options)]
    assert set(get_args(PolicyName)) == {"auto", *POLICIES}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_values_are_kept_and_others_refused_with_what_is_allowed(name: str) -> None:
    for value in ALLOWED[name]:
        kept = getattr(options_with(name, value), name)
        assert (kept, type(kept)) == (value, type(value))
    for value in REFUSED[name]:
        with pytest.raises(OptionError) as caught:
            StepOptions.parse({name: value})
        message, allowed = str(caught.value), ALLOWED[name][0]
        assert message.startswith(f"{name}={value!r} is not allowed: use ")
        assert f'"{allowed}"' in message or str(allowed) in message
        assert isinstance(caught.value, ValueError)


def test_options_that_exclude_each_other_are_refused() -> None:
    for options, why in [
        ({"policy": "sequential", "streams": 4}, r'streams=4 is of no use with policy="sequential": leave one of them'),
        ({"kernels": "eager", "inductor_options": {"max_autotune": True}}, "are of no use with kernels="),
    ]:
        with pytest.raises(OptionError, match=why):
            Options.parse(options)


def test_numbers_of_other_types_become_pythons() -> None:
    for name, value, expected in [
        ("memory_budget", np.int64(2**30), 2**30),
        ("memory_budget", np.float32(1.5), 1.5),
        ("memory_budget", np.float16("inf"), math.inf),
        ("memory_budget", Fraction(3, 2), 1.5),
        ("streams", np.int8(3), 3),
        ("tuning_seconds", np.int64(10), 10),
        ("decay", np.float32(0.5), 0.5),
    ]:
        kept = getattr(options_with(name, value), name)
        assert (kept, type(kept)) == (expected, type(expected))
    with pytest.raises(OptionError, match=r"^memory_budget=2 is not allowed: use a ratio as a float, such as"):
        Options(memory_budget=np.int64(2))
    with pytest.raises(OptionError, match=r"^memory_budget=4000000000.0 is not allowed: .* or int\(4e\+09\) for bytes"):
        Options(memory_budget=np.float32(4e9))  # type: ignore[arg-type]


def test_settings_of_inductor_are_copied_and_refused_without_its_kernels() -> None:
    settings: dict[str, Any] = {"max_autotune": True}
    options = Options(kernels="inductor", inductor_options=settings)
    with pytest.raises(OptionError, match='are of no use with kernels="eager": use "auto" or "inductor"'):
        Options(kernels="eager", inductor_options=settings)
    settings["freezing"] = "False"
    assert options.inductor_options == {"max_autotune": True}


def test_an_unknown_name_is_refused_with_similar_ones_or_all() -> None:
    with pytest.raises(OptionError, match=r"there is no option 'stream' \(did you mean 'streams'\?\): use streams, "):
        Options.parse({"stream": 2})
    with pytest.raises(OptionError) as caught:
        Options.parse({"xyzzy": 2})
    assert "did you mean" not in str(caught.value)
    assert all(field.name in str(caught.value) for field in fields(Options))


def test_options_are_immutable_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().streams = 3  # type: ignore[misc]
    assert len({Options(), Options(streams=2), Options(streams=2)}) == 2


# Environment variables


def set_to(monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None) -> None:
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)


def test_switches_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in ((None, False), ("", False), ("0", False), ("1", True), ("yes", True)):
        set_to(monkeypatch, "AUTOSTREAM_DISABLE", value)
        assert disabled() is expected
    for value, expected in ((None, False), ("", False), ("paranoid", True)):
        set_to(monkeypatch, "AUTOSTREAM_VERIFY", value)
        assert paranoid() is expected
    monkeypatch.setenv("AUTOSTREAM_VERIFY", "yes")
    with pytest.raises(OptionError, match="AUTOSTREAM_VERIFY is 'yes': use 'paranoid'"):
        paranoid()
    for value, level in (("", ""), ("debug", "DEBUG"), ("Warning", "WARNING")):
        monkeypatch.setenv("AUTOSTREAM_LOG", value)
        assert log_level() == level
    monkeypatch.setenv("AUTOSTREAM_LOG", "loud")
    with pytest.raises(OptionError, match="AUTOSTREAM_LOG is 'loud': use debug, info, warning, error, or leave"):
        log_level()


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
def test_the_cache_folder_is_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, asked: str, shared: str, folder: str
) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", asked)
    monkeypatch.setenv("XDG_CACHE_HOME", shared)
    assert cache_folder() == Path(folder)


@pytest.mark.parametrize("why", ["no home", "an empty home"])
@pytest.mark.parametrize("asked", ["", "~/costs"])
def test_without_a_home_directory_the_cache_folder_has_to_be_named(
    monkeypatch: pytest.MonkeyPatch, why: str, asked: str
) -> None:
    """An empty HOME is not the root of the file system."""
    if why == "no home":
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    else:
        monkeypatch.setenv("HOME", "")
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", asked)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(FileNotFoundError, match=r"no home directory for ~/.*: set AUTOSTREAM_CACHE_DIR"):
        cache_folder()
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", "/fast/costs")
    assert cache_folder() == Path("/fast/costs")


def test_colours_and_variables_that_measurements_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for no_color, term, allowed in (
        (None, "xterm", True),
        ("1", "xterm", False),
        ("", "xterm", True),
        (None, "dumb", False),
    ):
        set_to(monkeypatch, "NO_COLOR", no_color)
        monkeypatch.setenv("TERM", term)
        assert colours() is allowed
    for name in ("TORCH_LOGS", "CUDA_VISIBLE_DEVICES", "SECRET"):
        monkeypatch.setenv(name, "0")
    assert environment().items() >= {"CUDA_VISIBLE_DEVICES": "0", "TORCH_LOGS": "0"}.items()
    assert "SECRET" not in environment()
