"""Values as JSON has them, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from autostream.costs.device import profile_named
from autostream.ir import Arena, Candidate, Decision, DeviceProfile, Launch, Limit, OpCost, Schedule
from autostream.utils.data import decoded, encoded

SCHEDULE = Schedule(
    "mine",
    2,
    (Launch("a", 0, (), ("x",)), Launch("b", 1, ("a",))),
    ("b",),
    (Decision("", "two streams", "why not"),),
    Arena(64, {"x": 0}),
)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (tuple[Candidate, ...], (Candidate(SCHEDULE, True, 0.1 + 0.2), Candidate(SCHEDULE, False, 2.0, 1.5, "", None))),
        (Candidate, Candidate(SCHEDULE, True, 1.0, None, "too much", Limit.BUDGET, 7, True)),
        (
            tuple[DeviceProfile, Mapping[str, OpCost], tuple[Decision, ...]],
            (profile_named("h200"), {"a": OpCost(1e-3, 0.5, 1.0, "measured")}, ()),
        ),
    ],
    ids=["several", "refused", "costs"],
)
def test_values_come_back_as_they_were(kind: object, value: object) -> None:
    assert decoded(kind, json.loads(json.dumps(encoded(value)))) == value


def test_what_is_no_such_value_is_refused() -> None:
    with pytest.raises(TypeError):
        decoded(Launch, {"op": "a"})
    with pytest.raises(ValueError, match="is not a valid Limit"):
        decoded(Limit, "none of these")
