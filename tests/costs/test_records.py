"""Measurements as values and as JSON: valid ones are read as they were written, invalid ones are refused by name."""

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
from hypothesis import given, settings
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
VALID = Measurements(H200, profile_named("h200"), {"relu": {"duration_us": 2.5, "sm_share": 0.5}, "view": {}})
PROFILE = profile_to_json(profile_named("h200"))


def changed(**changes: object) -> str:
    return json.dumps({**json.loads(to_json(VALID)), **changes})


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
@settings(max_examples=30)
def test_measurements_are_read_as_they_were_written(
    context: Context, known: str | None, found: dict[str, dict[str, float]]
) -> None:
    device = {"name": context.device, "multiprocessors": context.multiprocessors}
    measurements = Measurements(context, replace(profile_named(known), **device) if known else None, found)
    assert from_json(to_json(measurements), "it") == (measurements, ())


@given(st.integers(0, len(to_json(VALID)) - 1), contents.map(json.dumps))
@settings(max_examples=50)
def test_damaged_text_raises_no_other_error(at: int, damage: str) -> None:
    text = to_json(VALID)
    for damaged in (damage, text[:at]):
        with pytest.raises(CostError, match=r"^it (is not JSON|has schema|does not hold).*: measure again$"):
            from_json(damaged, "it")
    try:
        found, faults = from_json(text[:at] + damage + text[at + len(damage) :], "it")
    except CostError:
        return
    assert isinstance(found, Measurements)
    assert all(isinstance(fault, str) for fault in faults)


LACKING = [
    json.dumps({key: value for key, value in json.loads(to_json(VALID)).items() if key != missing})
    for missing in ("schema", "device", "multiprocessors", "versions", "profile", "records")
]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (to_json(VALID)[:-1], "is not JSON"),
        ("[" * 1_000_000, r"is not JSON \(RecursionError"),
        (changed(schema=SCHEMA + 1), f"has schema {SCHEMA + 1}, and only {SCHEMA} can be read"),
        (changed(schema=None), "has schema None"),
        (changed(device=7), "does not hold measurements"),
        *((changed(multiprocessors=value), "does not hold measurements") for value in (132.5, 0, -1, True)),
        (changed(versions=["2.13.0"]), "does not hold measurements"),
        (changed(versions={"a": 1}), "does not hold measurements"),
        (changed(profile="h200"), "does not hold measurements"),
        (changed(records=[]), "does not hold measurements"),
        *((text, "does not hold measurements") for text in LACKING),
    ],
    ids=range(19),
)
def test_a_file_in_another_format_is_refused(text: str, reason: str) -> None:
    with pytest.raises(CostError, match=f"^costs.json {reason}.*: measure again$"):
        from_json(text, "costs.json")


@pytest.mark.parametrize("text", ['\x1b[2J<script>"\\N', "\u202eabc\ud800", "x" * 10_000], ids=ascii)
@pytest.mark.parametrize(
    "changes",
    [
        lambda text: {"device": text},
        lambda text: {"schema": text},
        lambda text: {"versions": {text: "1"}},
        lambda text: {"versions": {"torch": text}},
        lambda text: {"records": {text: 1}},
        lambda text: {"records": {"relu": {text: -1}}},
        lambda text: {"profile": {**PROFILE, "name": text}},
        lambda text: {"profile": {**PROFILE, "source": text}},
        lambda text: {"profile": {**PROFILE, "flops": {text: 1.0}}},
        lambda text: {"profile": {**PROFILE, "flops": {text: -1.0}}},
        lambda text: {"profile": {**PROFILE, text: 1.0}},
    ],
    ids=range(11),
)
def test_messages_are_one_printable_line_whatever_text_is_in_a_file(
    changes: Callable[[str], dict[str, object]], text: str
) -> None:
    """Text from a file could move a terminal's cursor, or fill a log."""
    try:
        _, faults = from_json(changed(**changes(text)), "it")
    except CostError as error:
        faults = (str(error),)
    assert len(faults) == 1
    assert faults[0].isprintable()
    assert len(faults[0]) < 400


def test_valid_records_of_a_damaged_file_remain() -> None:
    data = json.loads(to_json(VALID))
    data["profile"]["bandwidth"] = -1.0
    data["records"] |= {"add": {"duration_us": math.nan}, "mul": 3}
    found, faults = from_json(json.dumps(data), "it")
    assert found == replace(VALID, profile=None)
    assert faults == (
        "device profile: bandwidth=-1.0 is not allowed: use a number from 1e-30 to 1e+30",
        "record add: duration_us=nan is not allowed: use a number from 0 to 1e+30",
        "record mul: 3 is not allowed: use a dict of numbers",
    )
    _, faults = from_json(changed(profile={**PROFILE, "multiprocessors": 40}), "it")
    assert faults == (
        "device profile: it is of NVIDIA H200 (40 multiprocessors), all else of NVIDIA H200 (132 multiprocessors): "
        "measure again",
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
def test_a_number_out_of_range_is_refused(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(CostError, match=f"^record relu: {name}=.* is not allowed: use {re.escape(allowed)}$"):
        Measurements(H200, records={"relu": {"sm_share": 0.5, name: value}})


# Profiles


@dataclass(frozen=True)
class Profile:
    """A profile with fields of every type, as another version may have them."""

    name: str
    cores: int
    edge_us: Mapping[int, float]
    speed: float = 1.0


FIELDS = {"name": "Z1", "cores": 2, "edge_us": {"1": 0, "2": 1.5}}


@pytest.fixture
def other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "DeviceProfile", Profile)


@pytest.mark.usefixtures("other_fields")
def test_the_fields_of_a_profile_may_change() -> None:
    profile: Any = Profile("Z1", 2, {1: 0.0, 2: 1.5})
    assert profile_from_json(FIELDS) == profile
    assert profile_from_json(json.loads(json.dumps(profile_to_json(profile)))) == profile
    for missing in FIELDS:
        with pytest.raises(CostError, match=f"^device profile: there is no {missing}: measure again$"):
            profile_from_json({name: value for name, value in FIELDS.items() if name != missing})


@pytest.mark.usefixtures("other_fields")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": 1}, "name=1 is not allowed: use a string of at most 200 characters that can be printed"),
        ({"cores": 2.5}, "cores=2.5 is not allowed: use a whole number"),
        ({"cores": True}, "cores=True is not allowed: use a number from 1e-30 to 1e+30"),
        ({"speed": "1"}, "speed='1' is not allowed: use a number from 1e-30 to 1e+30"),
        ({"speed": math.inf}, "speed=inf is not allowed"),
        ({"edge_us": {}}, "edge_us={} is not allowed: use a dict that is not empty"),
        ({"edge_us": 1.0}, "edge_us=1.0 is not allowed: use a dict that is not empty"),
        ({"edge_us": {"two": 1.0}}, "a key of edge_us='two' is not allowed: use a whole number"),
        ({"edge_us": {"2": math.nan}}, "2 of edge_us=nan is not allowed: use a number from 0 to 1e+30"),
        ({"sped": 1.0}, "sped is unknown: use name, cores, edge_us, speed"),
    ],
)
def test_an_invalid_field_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(CostError, match=f"^device profile: {re.escape(reason)}"):
        profile_from_json(FIELDS | changes)


def test_an_invalid_profile_is_refused_where_it_is_made_or_read() -> None:
    with pytest.raises(CostError, match="source='my own clock' is not allowed: use 'table', 'properties', 'measured'"):
        profile_from_json({**PROFILE, "source": "my own clock"})
    with pytest.raises(CostError, match="float16 of flops="):
        Measurements(H200, replace(profile_named("h200"), flops={"float16": math.nan}))


# Contexts


@pytest.mark.parametrize(
    ("here", "named"),
    [
        (
            replace(H200, device="Tesla T4", multiprocessors=40),
            "NVIDIA H200 (132 multiprocessors), and this is Tesla T4 (40 multiprocessors)",
        ),
        (
            replace(H200, versions={"torch": "2.11.0", "cudnn": "91900", "driver": "570.86.15", "method": "1"}),
            "NVIDIA H200 (132 multiprocessors, torch 2.13.0, cudnn unknown), "
            "and this is NVIDIA H200 (132 multiprocessors, torch 2.11.0, cudnn 91900)",
        ),
    ],
)
def test_measurements_of_another_context_are_refused(here: Context, named: str) -> None:
    check_context(H200, replace(H200, versions=dict(H200.versions)), "costs.json")
    with pytest.raises(CostError) as caught:
        check_context(H200, here, "costs.json")
    assert str(caught.value) == f"costs.json was measured on {named}: measure again here"


@pytest.mark.parametrize(
    ("driver", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  \nGCC version: gcc 12.3.0", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release Build", "580.95"),
        ("", None),
        (None, None),
    ],
)
def test_a_context_has_the_versions_of_torch_and_of_the_gpus_libraries(
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
    versions = {"torch": torch.__version__, "method": "1"}
    cpu = profile_named("cpu")
    assert context_of("cpu", cpu, method=1) == Context(cpu.name, cpu.multiprocessors, versions)
    versions |= {"cuda": "13.0", "cudnn": "91900", "triton": "3.6.0"} | ({"driver": version} if version else {})
    assert context_of("cuda:0", profile_named("h200"), method=1) == Context("NVIDIA H200", 132, versions)
