from __future__ import annotations

from autostream.analysis.hazards import AccessHistory
from autostream.ir import Dependency, Hazard


def test_each_hazard() -> None:
    """Accesses of x in program order::

    w1     write
    r1     read             w1 ─RAW─▶ r1
    r2     read             w1 ─RAW─▶ r2
    w2     write            r1 ─WAR─▶ w2, r2 ─WAR─▶ w2
    w3     write            w2 ─WAW─▶ w3
    add_   read and write   w3 ─RAW─▶ add_
    mul_   read and write   add_ ─RAW─▶ mul_
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
    assert history.record("add_", ["x"], ["x"]) == (Dependency("w3", "add_", Hazard.RAW, "x"),)
    assert history.record("mul_", ["x"], ["x"]) == (Dependency("add_", "mul_", Hazard.RAW, "x"),)
    assert history.record("a", ["unwritten"], []) == history.record("b", ["unwritten"], []) == ()


def test_one_dependency_for_each_pair_and_hazard() -> None:
    history = AccessHistory()
    history.record("split", [], ["x", "y"])
    assert history.record("add", ["x", "y"], [], ["rng"]) == (Dependency("split", "add", Hazard.RAW, "x"),)
    assert history.record("mul_", [], ["x", "y"], ["rng"]) == (
        Dependency("add", "mul_", Hazard.WAR, "x"),
        Dependency("add", "mul_", Hazard.ORDER, "rng"),
    )
    assert history.record("last", [], [], ["rng"]) == (Dependency("mul_", "last", Hazard.ORDER, "rng"),)


def test_the_number_of_dependencies_is_linear() -> None:
    history, count = AccessHistory(), 0
    for round_ in range(100):
        count += len(history.record(f"w{round_}", [], ["x"]))
        count += sum(len(history.record(f"r{round_}.{reader}", ["x"], [])) for reader in range(10))
    assert count == 100 * 10 + 99 * 10
