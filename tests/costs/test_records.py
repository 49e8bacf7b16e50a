"""Measurements as values and as JSON: what is sound comes back as it was, and what is not is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autostream.costs import records
from autostream.costs.device import known_names, profile_named
from autostream.costs.records import (
    SCHEMA,
    Context,
    Measurements,
    check_context,
    context_of,
    from_json,
    profile_from_json,
    profile_to_json,
    to_json,
)
from autostream.errors import CostError

H200 = Context("NVIDIA H200", 132, {"torch": "2.13.0", "driver": "570.86.15", "method": "1"})
KEPT = Measurements(H200, profile_named("h200"), {"relu": {"duration_us": 2.5, "sm_share": 0.5}, "view": {}})

contents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
plain = st.text(st.characters().filter(str.isprintable))
contexts = st.builds(Context, plain, st.integers(1, 1000), st.dictionaries(plain, plain, max_size=3))
numbers = st.fixed_dictionaries(
    {},
    optional={
        "duration_us": st.floats(0, 1e30),
        "sm_share": st.floats(0, 1),
        "read_bytes": st.integers(0, 2**63),
        "copies": st.integers(1, 20),
    },
)


@given(contexts, st.none() | st.sampled_from(known_names()), st.dictionaries(st.text(), numbers, max_size=5))
def test_what_is_written_is_read_as_it_was(
    context: Context, known: str | None, found: dict[str, dict[str, float]]
) -> None:
    own = {"name": context.device, "multiprocessors": context.multiprocessors}
    kept = Measurements(context, replace(profile_named(known), **own) if known else None, found)
    assert from_json(to_json(kept), "it") == (kept, ())


@given(st.binary() | contents.map(json.dumps))
def test_what_is_something_else_is_refused(text: str | bytes) -> None:
    with pytest.raises(CostError, match=r"^it (is not JSON|has schema|does not hold measurements).*: measure again$"):
        from_json(text, "it")


@given(st.integers(0, len(to_json(KEPT)) - 1), contents.map(json.dumps))
def test_whatever_is_written_over_it_there_is_no_other_error(at: int, scrawl: str) -> None:
    text = to_json(KEPT)
    try:
        found, faults = from_json(text[:at] + scrawl + text[at + len(scrawl) :], "it")
    except CostError:
        return
    assert isinstance(found, Measurements)
    assert all(isinstance(fault, str) for fault in faults)


def test_half_of_it_is_refused_wherever_it_ends() -> None:
    text = to_json(KEPT)
    for end in range(len(text)):
        with pytest.raises(CostError, match="it is not JSON"):
            from_json(text[:end], "it")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": SCHEMA + 1}, f"has schema {SCHEMA + 1}, and only {SCHEMA} can be read"),
        ({"schema": None}, "has schema None"),
        ({"device": 7}, "does not hold measurements"),
        ({"multiprocessors": 132.5}, "does not hold measurements"),
        ({"versions": ["2.13.0"]}, "does not hold measurements"),
        ({"profile": "h200"}, "does not hold measurements"),
        ({"records": []}, "does not hold measurements"),
    ],
)
def test_a_file_of_another_make_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(CostError, match=f"^costs.json {reason}.*: measure again$"):
        from_json(json.dumps({**json.loads(to_json(KEPT)), **changes}), "costs.json")


@pytest.mark.parametrize("missing", ["schema", "device", "multiprocessors", "versions", "profile", "records"])
def test_a_file_that_lacks_something_is_refused(missing: str) -> None:
    data = json.loads(to_json(KEPT))
    del data[missing]
    with pytest.raises(CostError, match="does not hold measurements"):
        from_json(json.dumps(data), "it")


CURSOR = '\x1b[2J<script>"\\N'
HOSTILE = [CURSOR, "a\nb", "\u202eabc", "\ud800", "x" * 10_000]


def test_a_profile_is_from_somewhere_that_there_is() -> None:
    profile = {**profile_to_json(profile_named("h200")), "source": "my own clock"}
    with pytest.raises(CostError, match="source='my own clock' is not allowed: use 'table', 'properties', 'measured'"):
        profile_from_json(profile)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
@pytest.mark.parametrize(
    "changes",
    [
        lambda text: {"device": text},
        lambda text: {"schema": text},
        lambda text: {"versions": {text: "1"}},
        lambda text: {"versions": {"torch": text}},
        lambda text: {"records": {text: 1}},
        lambda text: {"records": {"relu": {text: -1}}},
        lambda text: {"profile": {**profile_to_json(profile_named("h200")), "name": text}},
        lambda text: {"profile": {**profile_to_json(profile_named("h200")), "source": text}},
        lambda text: {"profile": {**profile_to_json(profile_named("h200")), "flops": {text: 1.0}}},
        lambda text: {"profile": {**profile_to_json(profile_named("h200")), "flops": {text: -1.0}}},
        lambda text: {"profile": {**profile_to_json(profile_named("h200")), text: 1.0}},
    ],
    ids=range(11),
)
def test_text_that_does_more_than_be_read_is_refused_in_a_line_that_does_not(
    changes: Callable[[str], dict[str, object]], text: str
) -> None:
    """It could move a terminal's cursor, or fill a log."""
    try:
        _, faults = from_json(json.dumps({**json.loads(to_json(KEPT)), **changes(text)}), "it")
    except CostError as error:
        faults = (str(error),)
    assert len(faults) == 1
    assert faults[0].isprintable()
    assert len(faults[0]) < 400


@pytest.mark.parametrize("changes", [{"multiprocessors": value} for value in (0, -1, True)] + [{"versions": {"a": 1}}])
def test_a_place_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CostError, match="does not hold measurements"):
        from_json(json.dumps({**json.loads(to_json(KEPT)), **changes}), "it")


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(CostError, match=r"it is not JSON \(RecursionError"):
        from_json("[" * 1_000_000, "it")


def test_of_damaged_parts_the_sound_ones_remain() -> None:
    data = json.loads(to_json(KEPT))
    data["profile"]["bandwidth"] = -1.0
    data["records"] |= {"add": {"duration_us": math.nan}, "mul": 3}
    found, faults = from_json(json.dumps(data), "it")
    assert found == replace(KEPT, profile=None)
    assert faults == (
        "device profile: bandwidth=-1.0 is not allowed: use a number from 1e-30 to 1e+30",
        "record add: duration_us=nan is not allowed: use a number from 0 to 1e+30",
        "record mul: 3 is not allowed: use a dict of numbers",
    )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *(("duration_us", value, "a number from 0 to 1e+30") for value in (math.nan, math.inf, -1e-9, 1e308, 10**400)),
        *(("duration_us", value, "a number from 0 to 1e+30") for value in (True, None, "3", [3.0])),
        *(("sm_share", value, "a number from 0 to 1") for value in (-0.1, 1.1, math.nan)),
        *(("copies", value, "a number from 1e-30 to 1e+30") for value in (0, -1, math.inf)),
    ],
)
def test_what_no_measurement_can_be_is_refused(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(CostError, match=f"^record relu: {name}=.* is not allowed: use {re.escape(allowed)}$"):
        Measurements(H200, records={"relu": {"sm_share": 0.5, name: value}})


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_profile_that_no_device_has_is_refused(value: float) -> None:
    with pytest.raises(CostError, match="kernel_us="):
        Measurements(H200, replace(profile_named("h200"), kernel_us=value))
    with pytest.raises(CostError, match="float16 of flops="):
        Measurements(H200, replace(profile_named("h200"), flops={"float16": value}))


@pytest.mark.parametrize("changes", [{"name": "Tesla T4"}, {"multiprocessors": 40}])
def test_a_profile_of_another_device_is_refused_with_both_named(changes: dict[str, Any]) -> None:
    data = json.loads(to_json(KEPT))
    data["profile"] |= changes
    found, faults = from_json(json.dumps(data), "h200.json")
    assert found == replace(KEPT, profile=None)
    other = f"{changes.get('name', 'NVIDIA H200')} ({changes.get('multiprocessors', 132)} multiprocessors)"
    assert faults == (
        f"device profile: it is of {other}, all else of NVIDIA H200 (132 multiprocessors): measure again",
    )


@dataclass(frozen=True)
class Profile:
    """A profile of another time, with fields of every type that one can have."""

    name: str
    cores: int
    edge_us: Mapping[int, float]
    speed: float = 1.0


SMALL = {"name": "Z1", "cores": 2, "edge_us": {"1": 0, "2": 1.5}}


def test_the_fields_of_a_profile_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "DeviceProfile", Profile)
    profile: Any = Profile("Z1", 2, {1: 0.0, 2: 1.5})
    assert profile_from_json(SMALL) == profile
    assert profile_from_json(json.loads(json.dumps(profile_to_json(profile)))) == profile


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": 1}, "name=1 is not allowed: use a string of at most 200 characters that can be printed"),
        ({"cores": 2.5}, "cores=2.5 is not allowed: use a whole number"),
        ({"cores": True}, "cores=True is not allowed: use a number from 1e-30 to 1e+30"),
        ({"cores": 0}, "cores=0 is not allowed: use a number from 1e-30 to 1e+30"),
        ({"speed": "1"}, "speed='1' is not allowed: use a number from 1e-30 to 1e+30"),
        ({"speed": math.inf}, "speed=inf is not allowed"),
        ({"edge_us": {}}, "edge_us={} is not allowed: use a dict that is not empty"),
        ({"edge_us": 1.0}, "edge_us=1.0 is not allowed: use a dict that is not empty"),
        ({"edge_us": {"two": 1.0}}, "a key of edge_us='two' is not allowed: use a whole number"),
        ({"edge_us": {"2": math.nan}}, "2 of edge_us=nan is not allowed: use a number from 0 to 1e+30"),
        ({"sped": 1.0}, "sped is unknown: use name, cores, edge_us, speed"),
    ],
)
def test_a_field_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], reason: str
) -> None:
    monkeypatch.setattr(records, "DeviceProfile", Profile)
    with pytest.raises(CostError, match=f"^device profile: {re.escape(reason)}"):
        profile_from_json(SMALL | changes)


@pytest.mark.parametrize("missing", sorted(SMALL))
def test_a_field_without_a_default_must_be_there(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(records, "DeviceProfile", Profile)
    with pytest.raises(CostError, match=f"^device profile: there is no {missing}: measure again$"):
        profile_from_json({name: value for name, value in SMALL.items() if name != missing})


def test_the_same_context_is_accepted() -> None:
    check_context(H200, replace(H200, versions=dict(H200.versions)), "costs.json")


@pytest.mark.parametrize(
    ("here", "named"),
    [
        (
            replace(H200, device="Tesla T4", multiprocessors=40),
            "NVIDIA H200 (132 multiprocessors), and this is Tesla T4 (40 multiprocessors)",
        ),
        (
            replace(H200, multiprocessors=60),
            "NVIDIA H200 (132 multiprocessors), and this is NVIDIA H200 (60 multiprocessors)",
        ),
        (
            replace(H200, versions={"torch": "2.11.0", "cudnn": "91900", "driver": "570.86.15", "method": "1"}),
            "NVIDIA H200 (132 multiprocessors, torch 2.13.0, cudnn unknown), "
            "and this is NVIDIA H200 (132 multiprocessors, torch 2.11.0, cudnn 91900)",
        ),
    ],
)
def test_another_context_is_refused_with_both_named(here: Context, named: str) -> None:
    with pytest.raises(CostError) as caught:
        check_context(H200, here, "costs.json")
    assert str(caught.value) == f"costs.json was measured on {named}: measure again here"


def test_times_on_the_cpu_depend_on_torch_alone() -> None:
    cpu = profile_named("cpu")
    versions = {"torch": torch.__version__, "method": "3"}
    assert context_of("cpu", cpu, method=3) == Context(cpu.name, cpu.multiprocessors, versions)


@pytest.mark.parametrize(
    ("driver", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  \nGCC version: gcc 12.3.0", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release Build", "580.95"),
        ("", None),
        (None, None),
    ],
)  # fmt: skip
def test_times_on_a_gpu_depend_on_its_libraries_too(
    monkeypatch: pytest.MonkeyPatch, driver: str | None, version: str | None
) -> None:
    def read_text(path: Path) -> str:
        if driver is None:
            raise FileNotFoundError(path)
        return driver

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(records, "version", lambda package: {"triton": "3.6.0"}[package])
    context = context_of("cuda:0", profile_named("h200"), method=1)
    assert (context.device, context.multiprocessors) == ("NVIDIA H200", 132)
    known = {"torch": torch.__version__, "method": "1", "cuda": "13.0", "cudnn": "91900", "triton": "3.6.0"}
    assert context.versions == known | ({"driver": version} if version else {})
