"""Cutting, drawn and worked out by hand; capital letters are ops that a CUDA graph cannot hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import Op, OpGraph, Role, Storage
from autostream.scheduling.cut import LONG_BYTES, Part, cut
from tests.cuts import REFUSED, cut_everything
from tests.scheduling.graphs import graph_of, op, random_graphs


def refusing(graph: OpGraph, names: Collection[str]) -> OpGraph:
    """The same graph, where a CUDA graph cannot hold these ops."""
    return replace(graph, ops={n: replace(o, uncapturable=REFUSED if n in names else "") for n, o in graph.ops.items()})


def drawn(edges: str, names: str = "", outputs: str = "") -> OpGraph:
    graph = graph_of(edges, names, outputs)
    return refusing(graph, "".join(filter(str.isupper, graph.ops)))


def words(parts: tuple[Part, ...]) -> str:
    """Captured parts are in brackets: round ones on the second device. Copies beside another part have a ~."""
    brackets = {"": "{}", "cuda:0": "[{}]", "cuda:1": "({})"}
    return " ".join("~" * part.beside + brackets[part.device].format("".join(part.ops)) for part in parts)


def copying(
    graph: OpGraph, uploads: Iterable[str] = (), downloads: Iterable[str] = (), size: int = LONG_BYTES
) -> OpGraph:
    """The same graph, where these ops copy between the host and the device."""
    directions = {**dict.fromkeys(uploads, "upload"), **dict.fromkeys(downloads, "download")}
    copies = {name: replace(graph.ops[name], crosses=to, bytes_written=size) for name, to in directions.items()}
    return replace(graph, ops={**graph.ops, **copies})


def on_two_devices(edges: str, second: str, copies: str, names: str = "") -> OpGraph:
    """A graph with these ops on the second device, and these copies between devices, with their destination."""
    graph = drawn(edges, names)
    devices = {name: "cuda:1" if name in second else "cuda:0" for name in graph.ops}
    crosses = {name: "peer" if name in copies else "" for name in graph.ops}
    return replace(graph, ops={n: replace(o, device=devices[n], crosses=crosses[n]) for n, o in graph.ops.items()})


@pytest.mark.parametrize(
    ("edges", "names", "parts"),
    [
        # a ─ b ─ X ─ c ─ d      ops that do not need X come before it
        #  ╲             ╱
        #   ── e ── f ───
        pytest.param("a-b b-X X-c c-d a-e e-f f-d", "abXcefd", "[abef] X [cd]", id="ops that do not need it"),
        pytest.param("a-X X-b Y-b", "YaXb", "[a] YX [b]", id="Y first would be one part more"),
        pytest.param("X-a a-Y Y-b c-Y", "cXaYb", "X [ca] Y [b]", id="graphs first would be [c] X [a] Y [b]"),
        pytest.param("a-X X-b b-Y Y-c", "", "[a] X [b] Y [c]", id="each alternation is a part"),
        pytest.param("a-b b-c c-d", "", "[abcd]", id="whole"),
        pytest.param("X-Y", "", "", id="nothing to capture"),
    ],
)
def test_ops_of_one_kind_run_together(edges: str, names: str, parts: str) -> None:
    assert words(cut_everything(drawn(edges, names))) == parts


def test_a_part_with_no_more_launches_than_its_replay_needs_runs_eagerly() -> None:
    """The input is copied in, the graph is replayed, and the input of X is copied out: three launches."""
    four = "a-b b-c c-d d-X"
    assert words(cut(drawn("a-b b-c c-X"))) == ""
    assert words(cut(drawn(four))) == "[abcd] X"
    assert words(cut(drawn(four, outputs="a"))) == "", "the output is copied too"
    assert words(cut(drawn(f"{four} a-X"))) == "", "and so is a second input of X"
    assert words(cut(drawn(f"{four} X-e e-Y Y-f"))) == "[abcd] XeYf", "eager parts are merged"
    assert words(cut(on_two_devices("a-b b-c c-d d-C C-e", second="Ce", copies="C"))) == "[abcd] Ce"
    assert cut(OpGraph({}, (), {}, (), "cuda:0")) == ()

    graph = drawn(four)
    first = replace(graph.ops["a"], writes=frozenset({"a", "x_in"}))
    assert words(cut(replace(graph, ops={**graph.ops, "a": first}))) == "", "a written input is copied back"
    graph = drawn("a-b b-c c-X")
    weights = replace(graph.storages["x_in"], role=Role.PARAMETER)
    assert words(cut(replace(graph, storages={**graph.storages, "x_in": weights}))) == "[abc] X", (
        "weights are not copied"
    )
    empty = {name: replace(storage, bytes=0) for name, storage in graph.storages.items()}
    assert words(cut(replace(graph, storages=empty))) == "[abc] X", "nor are empty storages"


def test_over_several_devices_parts_read_results_where_others_leave_them() -> None:
    r"""No launch for any of a ... d, which f uses: the input is copied in, the graph is replayed, d is copied out.

    a ─ b ─ c ─ d ─ C ─ e ─ B ─ f
     ╲___╲___╲___╲_____________/
    """
    edges = "a-b b-c c-d d-C C-e e-B B-f a-f b-f c-f d-f"
    assert words(cut(on_two_devices(edges, second="Ce", copies="CB"))) == "[abcd] CeBf"


def literal(name: str, **fields: object) -> Op:
    return op(name, device="cpu", **fields)


def with_literals(graph: OpGraph, *ops: Op) -> OpGraph:
    """The same graph, with ops on the CPU before all others."""
    storages = {o.name: Storage(o.name, Role.INTERMEDIATE, 4, (o.name,)) for o in ops}
    return replace(graph, ops={**{o.name: o for o in ops}, **graph.ops}, storages={**graph.storages, **storages})


def reading(graph: OpGraph, name: str, storage: str) -> OpGraph:
    reads = graph.ops[name].reads | {storage}
    return replace(graph, ops={**graph.ops, name: replace(graph.ops[name], reads=reads)})


def test_an_op_that_computes_from_literals_is_in_each_part_that_needs_it() -> None:
    """m, which writes k, and l, which reads it, are needed by a and b; n is not needed. None of them is a launch."""
    writes = literal("m", reads="k", writes=frozenset({"k"}), allocates=frozenset())
    graph = with_literals(drawn("a-X X-b"), literal("k"), writes, literal("l", reads="k"), literal("n"))
    assert words(cut_everything(reading(reading(graph, "a", "k"), "b", "l"))) == "[kma] X [kmlb]"
    few = with_literals(drawn("a-b b-c c-X"), literal("k"), literal("l", reads="k"))
    assert words(cut(reading(few, "a", "l"))) == ""


def test_an_op_that_uses_a_literal_which_changes_or_is_returned_runs_eagerly() -> None:
    """In the first graph b uses k before m writes it, and d what l made of it then; in the second k is returned."""
    graph = reading(reading(drawn("a-b b-c c-d"), "b", "k"), "d", "l")
    writes = literal("m", reads="k", writes=frozenset({"k"}), allocates=frozenset())
    last, graph = graph.ops["d"], with_literals(graph, literal("k"))
    ops = {n: o for n, o in graph.ops.items() if n != "d"} | {"m": writes, "l": literal("l", reads="k"), "d": last}
    assert words(cut_everything(replace(graph, ops=ops))) == "[a] kbml [c] d"
    graph = reading(with_literals(drawn("a-b b-c"), literal("k")), "b", "k")
    returned = replace(graph.storages["k"], escapes=True)
    assert words(cut_everything(replace(graph, storages={**graph.storages, "k": returned}))) == "[a] kb [c]"


@pytest.mark.parametrize(
    ("edges", "names", "second", "copies", "parts"),
    [
        pytest.param("a-b b-C a-S C-d d-e S-e", "", "CSde", "CS", "[ab] CS (de)", id="two stages of a pipeline"),
        pytest.param("a-b c-d", "", "cd", "", "[ab] (cd)", id="two devices that share nothing"),
        # cuda:0   a ── b ─────── f      C comes as soon as a has run; then b, which can start before d
        #           ╲            ╱
        # cuda:1     C ─ d ─ B ─
        pytest.param("a-b a-C C-d d-B b-f B-f", "", "Cd", "CB", "[a] C [b] (d) B [f]", id="a device waits"),
        pytest.param("b-f C-d d-B B-f", "bCdBf", "Cd", "CB", "C [b] (d) B [f]", id="a copy to an idle device"),
        pytest.param("a-X X-b b-Y Y-c d-e", "", "de", "", "[a] (de) X [b] Y [c]", id="the host waits last"),
    ],
)
def test_each_device_has_parts_of_its_own(edges: str, names: str, second: str, copies: str, parts: str) -> None:
    assert words(cut_everything(on_two_devices(edges, second, copies, names))) == parts


@pytest.mark.parametrize(
    ("edges", "names", "uploads", "downloads", "parts", "if_short"),
    [
        # U ─ c ─╮      the upload runs beside a and b
        # a ─ b ─┴ d
        pytest.param("U-c c-d a-b b-d", "Ucabd", "U", "", "[ab] ~U [cd]", "U [cabd]", id="upload"),
        pytest.param("U-c c-d a-b b-d", "Ucabd", "", "U", "[ab] ~U [cd]", "U [cabd]", id="download first"),
        pytest.param("a-D a-b b-c", "aDbc", "", "D", "[a] [bc] ~D", "[abc] D", id="download of a beside b and c"),
        pytest.param("a-D U-b b-c", "aDUbc", "U", "D", "[a] ~U [bc] ~D", "[a] DU [bc]", id="uploads before downloads"),
        pytest.param("U-a a-b", "", "U", "", "U [ab]", "U [ab]", id="nothing to run beside"),
        pytest.param("a-b b-D D-E", "", "", "D", "[ab] DE", "[ab] DE", id="the part before is needed"),
        pytest.param("X-U U-a b-c c-a", "XUbca", "U", "", "[bc] XU [a]", "XU [bca]", id="X is needed"),
    ],
)
def test_a_long_copy_runs_beside_the_part_before_it(
    edges: str, names: str, uploads: str, downloads: str, parts: str, if_short: str
) -> None:
    graph = drawn(edges, names)
    assert words(cut_everything(copying(graph, uploads, downloads))) == parts
    assert words(cut_everything(copying(graph, uploads, downloads, LONG_BYTES - 1))) == if_short


def check_parts(graph: OpGraph, parts: tuple[Part, ...]) -> dict[str, int]:
    """The position of each op's part; every op is in one, and every dependency is respected."""
    part_of = {name: at for at, part in enumerate(parts) for name in part.ops}
    assert part_of.keys() == graph.ops.keys()
    assert sum(len(part.ops) for part in parts) == len(graph.ops)
    assert all(part_of[d.before] <= part_of[d.after] for d in graph.dependencies)
    return part_of


@given(graph=random_graphs(), data=st.data())
def test_copies_beside_a_part_do_not_depend_on_it(graph: OpGraph, data: st.DataObject) -> None:
    kinds = {name: data.draw(st.sampled_from(["", "X", "upload", "download"])) for name in graph.ops}
    graph = refusing(graph, [name for name, kind in kinds.items() if kind])
    uploads, downloads = ([n for n, each in kinds.items() if each == kind] for kind in ("upload", "download"))
    parts = cut_everything(copying(graph, uploads, downloads))
    part_of = check_parts(graph, parts) if parts else {}
    for at, part in enumerate(parts):
        if part.beside:
            assert at > 0
            assert {kinds[name] for name in part.ops} <= {"upload", "download"}
            assert all(part_of[d.before] < at - 1 for d in graph.dependencies if d.after in part.ops)


@given(graph=random_graphs(), data=st.data())
def test_no_part_has_ops_of_two_devices(graph: OpGraph, data: st.DataObject) -> None:
    kinds = st.sampled_from([("", ""), ("peer", REFUSED), ("", REFUSED)])
    for name, each in graph.ops.items():
        (crosses, refusal), device = data.draw(kinds), data.draw(st.sampled_from(["cuda:0", "cuda:1", "cpu"]))
        refusal = refusal or (REFUSED if device == "cpu" else "")
        placed = replace(each, device=device, crosses=crosses, uncapturable=refusal)
        graph = replace(graph, ops={**graph.ops, name: placed})
    for parts in filter(None, (cut_everything(graph), cut(graph))):
        check_parts(graph, parts)
        assert all(one.device != other.device for one, other in pairwise(parts))
        for part in filter(lambda part: part.captured, parts):
            assert {(graph.ops[n].device, graph.ops[n].uncapturable) for n in part.ops} == {(part.device, "")}


@given(graph=random_graphs(max_ops=8), data=st.data())
def test_there_are_as_few_parts_as_possible_in_program_order(graph: OpGraph, data: st.DataObject) -> None:
    """An op after a path with n changes of kind is in part n + 1 at the earliest."""
    refused = data.draw(st.sets(st.sampled_from(list(graph.ops))))
    order = {name: at for at, name in enumerate(graph.ops)}

    def least(first_is_refused: bool) -> int:
        changes: dict[str, int] = {}
        for name in graph.ops:
            earliest = max((changes[d.before] for d in graph.dependencies if d.after == name), default=0)
            fits = (earliest % 2 == 0) == ((name in refused) == first_is_refused)
            changes[name] = earliest if fits else earliest + 1
        return max(changes.values()) + 1 - (0 not in changes.values())

    parts = cut_everything(refusing(graph, refused))
    assert len(parts) == (min(map(least, (True, False))) if len(refused) < len(graph.ops) else 0)
    for found in filter(None, (parts, cut(refusing(graph, refused)))):
        check_parts(graph, found)
        assert all(one.captured != other.captured for one, other in pairwise(found))
        assert not any(refused.intersection(part.ops) for part in found if part.captured)
        assert all(list(part.ops) == sorted(part.ops, key=order.__getitem__) for part in found)
