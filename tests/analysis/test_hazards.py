from __future__ import annotations

from autostream.analysis.hazards import AccessHistory
from autostream.ir import Dependency, Hazard


def test_each_hazard_by_hand() -> None:
    """Down the page in program order; ``r`` reads x, ``w`` writes x::

    w1   write
    r1   read     w1 ─RAW─▶ r1
    r2   read     w1 ─RAW─▶ r2
    w2   write    r1 ─WAR─▶ w2, r2 ─WAR─▶ w2
    w3   write    w2 ─WAW─▶ w3
    """
    history = AccessHistory()
    assert history.record("w1", [], ["x"]) == ()
    assert history.record("r1", ["x"], []) == (Dependency("w1", "r1", Hazard.RAW, "x"),)
    assert history.record("r2", ["x"], []) == (Dependency("w1", "r2", Hazard.RAW, "x"),)
    assert history.record("w2", [], ["x"]) == (
        Dependency("r1", "w2", Hazard.WAR, "x"),
        Dependency("r2", "w2", Hazard.WAR, "x"),
    )
    assert history.record("w3", [], ["x"]) == (Dependency("w2", "w3", Hazard.WAW, "x"),)
    assert history.directly_before("w2") == {"r1", "r2"}
    assert history.last_writer("x") == "w3"


def test_reading_what_nobody_wrote_is_free() -> None:
    history = AccessHistory()
    assert history.record("a", ["parameter"], []) == history.record("b", ["parameter"], []) == ()


def test_an_update_in_place_depends_once_on_the_writer() -> None:
    history = AccessHistory()
    history.record("w", [], ["x"])
    assert history.record("add_", ["x"], ["x"]) == (Dependency("w", "add_", Hazard.RAW, "x"),)
    assert history.record("mul_", ["x"], ["x"]) == (Dependency("add_", "mul_", Hazard.RAW, "x"),), (
        "an op that reads and writes is no reader any more"
    )


def test_one_dependency_for_each_pair_and_hazard() -> None:
    history = AccessHistory()
    history.record("split", [], ["x", "y"])
    found = history.record("add", ["x", "y"], [], ["rng"])
    assert found == (Dependency("split", "add", Hazard.RAW, "x"),)
    assert history.record("mul_", [], ["x", "y"], ["rng"]) == (
        Dependency("add", "mul_", Hazard.WAR, "x"),
        Dependency("add", "mul_", Hazard.ORDER, "rng"),
    )


def test_ordered_resources_make_a_chain() -> None:
    history = AccessHistory()
    history.record("a", [], [], ["rng"])
    history.record("b", [], [], ["rng"])
    assert history.record("c", [], [], ["rng"]) == (Dependency("b", "c", Hazard.ORDER, "rng"),)


def test_the_number_of_dependencies_stays_linear() -> None:
    """Many readers, one writer, again and again: each access is told of once."""
    history, count = AccessHistory(), 0
    for round_ in range(100):
        count += len(history.record(f"w{round_}", [], ["x"]))
        count += sum(len(history.record(f"r{round_}.{reader}", ["x"], [])) for reader in range(10))
    assert count == 100 * 10 + 99 * 10
