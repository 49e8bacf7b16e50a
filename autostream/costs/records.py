"""The data types of measured costs and device profiles, and their JSON format.

    Context         the device and the versions that it was measured with
    Record          one measurement, names to numbers: {"warm_us": 3.2, "busy_share": 0.4}
    Measurements    a context, the profile of its device, and records by key

A record is valid only in the context in which it was measured. All numbers are finite. Their names tell their range:
names that end in ``_share`` from 0 to 1, in ``_us`` or ``_bytes`` from 0, all others above 0.

A file is not trusted: text from it is escaped and cut before it becomes part of a message.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from autostream.errors import CostError, first_line
from autostream.ir import DeviceProfile

SCHEMA = 1
"""Version of the JSON format: increase it when a key is removed, or changes its name or meaning."""

Record = Mapping[str, float]
"""One measurement, name to number. An empty one says that the op cannot be measured."""


@dataclass(frozen=True, slots=True)
class Context:
    """The device and the versions with which something was measured.

    Attributes:
        device: the driver's name of it, e.g. ``"NVIDIA H200"``.
        multiprocessors: SMs, or cores of a CPU; a MIG slice of a GPU has fewer than the whole.
        versions: name to version of the libraries that choose and time kernels.
    """

    device: str
    multiprocessors: int
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measurements:
    """The measurements of one context.

    Attributes:
        context: the device and the versions.
        profile: the measured profile of the device, or ``None``.
        records: by :func:`~autostream.store.key_of` each op, oldest first.

    Raises:
        CostError: a number is outside the range that its name tells.

    Example:
        >>> Measurements(Context("NVIDIA H200", 132), records={"relu": {"duration_us": float("nan")}})
        Traceback (most recent call last):
        ...
        autostream.errors.CostError: record relu: duration_us=nan is not allowed: use a number from 0 to 1e+30
    """

    context: Context
    profile: DeviceProfile | None = None
    records: Mapping[str, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.profile is not None:
            profile_from_json(profile_to_json(self.profile))
        for key, record in self.records.items():
            if fault := _fault(key, record):
                raise CostError(fault)


def context_of(device: str, profile: DeviceProfile, method: int) -> Context:
    """The context of measurements on this machine.

    Args:
        device: ``"cpu"`` or ``"cuda:0"``.
        profile: of that device, measured or not.
        method: the version of the method of measuring.

    Example:
        >>> from autostream.costs.device import profile_of
        >>> sorted(context_of("cpu", profile_of("cpu"), method=1).versions)
        ['method', 'torch']
    """
    versions = {"torch": str(torch.__version__), "method": str(method)}
    if device.startswith("cuda"):
        libraries = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
        libraries |= {"triton": _triton(), "driver": _driver()}
        versions |= {name: str(value) for name, value in libraries.items() if value}
    return Context(profile.name, profile.multiprocessors, versions)


def check_context(measured: Context, here: Context, name: str) -> None:
    """Refuse measurements of another device or with other versions.

    Args:
        measured: the context in which they were made.
        here: the context in which they are to be used.
        name: the name of the file, for the message.

    Raises:
        CostError: the contexts differ; the message names both devices, and the versions that differ.

    Example:
        >>> check_context(Context("NVIDIA H200", 132), Context("Tesla T4", 40, {"torch": "2.13.0"}), "h200.json")
        ... # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        ...
        autostream.errors.CostError: h200.json was measured on NVIDIA H200 (132 multiprocessors, torch unknown),
        and this is Tesla T4 (40 multiprocessors, torch 2.13.0): measure again here
    """
    both = {**here.versions, **measured.versions}
    differing = [package for package in both if measured.versions.get(package) != here.versions.get(package)]
    if measured != here:
        there, this = _named(measured, differing), _named(here, differing)
        raise CostError(f"{name} was measured on {there}, and this is {this}: measure again here")


def to_json(measurements: Measurements) -> str:
    """Serialize measurements to one line of JSON, which :func:`from_json` reads."""
    context, profile = measurements.context, measurements.profile
    return json.dumps(
        {
            "schema": SCHEMA,
            "device": context.device,
            "multiprocessors": context.multiprocessors,
            "versions": context.versions,
            "profile": None if profile is None else profile_to_json(profile),
            "records": {key: dict(record) for key, record in measurements.records.items()},
        }
    )


def from_json(text: str | bytes, name: str) -> tuple[Measurements, tuple[str, ...]]:
    """Read measurements from JSON that may be damaged.

    Args:
        text: the JSON.
        name: the name of the file, for messages.

    Returns:
        The valid measurements, and one message for each record or profile that is invalid.

    Raises:
        CostError: none of it can be used: it is not JSON, or has another schema, or no valid context.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CostError(f"{name} is not JSON ({first_line(error)}): measure again") from error
    match data:
        case {"schema": schema} if schema != SCHEMA:
            raise CostError(f"{name} has schema {reprlib.repr(schema)}, and only {SCHEMA} can be read: measure again")
        case {
            "schema": int(),
            "device": str(device),
            "multiprocessors": int(multiprocessors),
            "versions": dict(versions),
            "profile": dict() | None as profile,
            "records": dict(records),
        } if _is_context(device, multiprocessors, versions):
            context = Context(device, multiprocessors, versions)
        case _:
            raise CostError(f"{name} does not hold measurements as autostream writes them: measure again")
    faults = {key: fault for key, record in records.items() if (fault := _fault(key, record))}
    valid = {key: record for key, record in records.items() if key not in faults}
    try:
        measured = None if profile is None else _profile_of(context, profile)
    except CostError as error:
        return Measurements(context, None, valid), (str(error), *faults.values())
    return Measurements(context, measured, valid), tuple(faults.values())


def _profile_of(context: Context, data: Mapping[str, Any]) -> DeviceProfile:
    """Read a profile, which must be of the context's device."""
    profile = profile_from_json(data)
    actual = replace(context, device=profile.name, multiprocessors=profile.multiprocessors)
    if actual != context:
        raise CostError(
            f"device profile: it is of {_named(actual, ())}, all else of {_named(context, ())}: measure again"
        )
    return profile


def profile_to_json(profile: DeviceProfile) -> dict[str, Any]:
    """A profile as a dict for :func:`json.dumps`: its fields, with the keys of mappings as strings."""
    values = {known.name: getattr(profile, known.name) for known in fields(profile)}
    return {
        name: {str(key): number for key, number in value.items()} if isinstance(value, Mapping) else value
        for name, value in values.items()
    }


def profile_from_json(data: Mapping[str, Any]) -> DeviceProfile:
    """Read a profile from the dict that :func:`profile_to_json` makes.

    Args:
        data: the fields by name; those that have a default may be absent.

    Raises:
        CostError: a field is missing or unknown, has the wrong type, or is a number out of range.

    Example:
        >>> from autostream.costs.device import profile_named
        >>> h200 = profile_named("h200")
        >>> profile_from_json(profile_to_json(h200)) == h200
        True
        >>> profile_from_json({**profile_to_json(h200), "bandwidth": -1.0})
        Traceback (most recent call last):
        ...
        autostream.errors.CostError: device profile: bandwidth=-1.0 is not allowed: use a number from 1e-30 to 1e+30
    """
    types = get_type_hints(DeviceProfile)
    for known in fields(DeviceProfile):
        if known.name not in data and known.default is known.default_factory is MISSING:
            raise CostError(f"device profile: there is no {known.name}: measure again")
    for name in data:
        if name not in types:
            raise CostError(f"device profile: {_shown(name)} is unknown: use {', '.join(types)}")
    return DeviceProfile(**{name: _value(name, types[name], value) for name, value in data.items()})


def _value(name: str, kind: Any, value: Any) -> Any:
    """A field of a profile, checked against the type of the field."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise _refusal(name, value, ", ".join(map(repr, get_args(kind))))
        return value
    if get_origin(kind) is not Mapping:
        return _scalar(name, kind, value)
    if not isinstance(value, Mapping) or not value:
        raise _refusal(name, value, "a dict that is not empty")
    key_kind, inner_kind = get_args(kind)
    return {
        _key(name, key_kind, key): _scalar(f"{_shown(key)} of {name}", inner_kind, inner)
        for key, inner in value.items()
    }


def _key(name: str, kind: Any, key: str) -> Any:
    if kind is str:
        return _scalar(f"a key of {name}", str, key)
    try:
        return kind(key)
    except ValueError:
        raise _refusal(f"a key of {name}", key, "a whole number") from None


def _scalar(name: str, kind: Any, value: Any) -> Any:
    if kind is str:
        allowed = "" if _is_plain(value) else f"a string of at most {_LONGEST} characters that can be printed"
    elif kind is int and not isinstance(value, int):
        allowed = "a whole number"
    else:
        allowed = _allowed_instead(name, value)
    if allowed:
        raise _refusal(name, value, allowed)
    return kind(value)


def _refusal(name: str, value: object, allowed: str) -> CostError:
    return CostError(f"device profile: {name}={reprlib.repr(value)} is not allowed: use {allowed}")


def _fault(key: str, record: object) -> str:
    """Why this is not a valid record, or ``""``."""
    if not isinstance(record, Mapping):
        return f"record {_shown(key)}: {reprlib.repr(record)} is not allowed: use a dict of numbers"
    for name, value in record.items():
        if allowed := _allowed_instead(name, value):
            return f"record {_shown(key)}: {_shown(name)}={reprlib.repr(value)} is not allowed: use {allowed}"
    return ""


_MOST = 1e30
"""More than any measured number, and so small that sums and products of such numbers are finite."""


def _allowed_instead(name: str, value: object) -> str:
    """The range of a number with this name, if this value is outside of it, else ``""``."""
    # NaN stands for all values that are not numbers: every comparison with it is false.
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if name.endswith("_share"):
        return "" if 0 <= number <= 1 else "a number from 0 to 1"
    if name.endswith(("_us", "_bytes")):
        return "" if 0 <= number <= _MOST else f"a number from 0 to {_MOST:g}"
    return "" if 1 / _MOST <= number <= _MOST else f"a number from {1 / _MOST:g} to {_MOST:g}"


def _is_context(device: str, multiprocessors: int, versions: Mapping[Any, Any]) -> bool:
    whole = not _allowed_instead("multiprocessors", multiprocessors)
    return whole and all(map(_is_plain, (device, *versions, *versions.values())))


_LONGEST = 200


def _is_plain(text: object) -> bool:
    """Whether this is printable text of at most one line or so, safe to show in a terminal or a log."""
    return isinstance(text, str) and text.isprintable() and len(text) <= _LONGEST


def _shown(text: str) -> str:
    """Text from a file, as it appears in a message: escaped and cut unless it is plain."""
    return text if _is_plain(text) else reprlib.repr(text)


def _named(context: Context, packages: Iterable[str]) -> str:
    versions = [f"{package} {context.versions.get(package, 'unknown')}" for package in packages]
    return f"{context.device} ({', '.join([f'{context.multiprocessors} multiprocessors', *versions])})"


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    """The version of NVIDIA's kernel module, or ``""`` if it is unknown."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match[0] if match else ""
