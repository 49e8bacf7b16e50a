"""Cutting, drawn and worked out by hand; capital letters are ops that a graph cannot hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import Op, OpGraph, Role, Storage
from autostream.scheduling.cut import LONG_BYTES, Part, cut
from tests.cuts import REFUSED, cut_everything
from tests.scheduling.graphs import graph_of, op, random_graphs


def refusing(graph: OpGraph, names: Collection[str]) -> OpGraph:
    """The same, where a graph cannot hold these."""
    return replace(graph, ops={n: replace(o, uncapturable=REFUSED if n in names else "") for n, o in graph.ops.items()})


def drawn(edges: str, names: str = "", outputs: str = "") -> OpGraph:
    graph = graph_of(edges, names, outputs)
    return refusing(graph, "".join(filter(str.isupper, graph.ops)))


def words(parts: tuple[Part, ...]) -> list[str]:
    """Parts as words, those that are captured in brackets: round ones on the second device. Copies beside have a ~."""
    brackets = {"": "{}", "cuda:0": "[{}]", "cuda:1": "({})"}
    return ["~" * part.beside + brackets[part.device].format("".join(part.ops)) for part in parts]


def copying(
    graph: OpGraph, uploads: Iterable[str] = (), downloads: Iterable[str] = (), size: int = LONG_BYTES
) -> OpGraph:
    """The same, where these copy between the host and the device."""
    ways = {**dict.fromkeys(uploads, "upload"), **dict.fromkeys(downloads, "download")}
    copies = {name: replace(graph.ops[name], crosses=way, bytes_written=size) for name, way in ways.items()}
    return replace(graph, ops={**graph.ops, **copies})


def over_two(edges: str, second: str, copies: str, names: str = "") -> OpGraph:
    """A graph of which these ops are on the second device; of the copies between devices, those that go there."""
    graph = drawn(edges, names)
    devices = {name: "cuda:1" if name in second else "cuda:0" for name in graph.ops}
    crosses = {name: "peer" if name in copies else "" for name in graph.ops}
    return replace(graph, ops={n: replace(o, device=devices[n], crosses=crosses[n]) for n, o in graph.ops.items()})


def test_what_does_not_need_a_refused_op_comes_before_it() -> None:
    r"""One graph, the op, one graph.

    a ─ b ─ X ─ c ─ d
     \             /
      ─── e ── f ──
    """
    assert words(cut_everything(drawn("a-b b-X X-c c-d a-e e-f f-d", "abXcefd"))) == ["[abef]", "X", "[cd]"]


def test_refused_ops_run_together_where_they_can() -> None:
    """Y needs nothing, but if it came first there would be a part more."""
    assert words(cut_everything(drawn("a-X X-b Y-b", "YaXb"))) == ["[a]", "YX", "[b]"]


def test_the_kind_that_makes_fewer_parts_is_first() -> None:
    """Were graphs first, c would be alone in one: [c] X [a] Y [b]."""
    assert words(cut_everything(drawn("X-a a-Y Y-b c-Y", "cXaYb"))) == ["X", "[ca]", "Y", "[b]"]


def test_each_number_of_alternations_is_one_more_part() -> None:
    assert words(cut_everything(drawn("a-X X-b b-Y Y-c"))) == ["[a]", "X", "[b]", "Y", "[c]"]


def test_what_can_be_captured_whole_is_one_part() -> None:
    assert words(cut(drawn("a-b b-c c-d"))) == ["[abcd]"]


def test_nothing_is_cut_where_no_part_is_worth_a_graph() -> None:
    assert cut(drawn("a-X X-b")) == ()
    assert cut(OpGraph({}, (), {}, (), "cuda:0")) == ()


def test_a_graph_has_fewer_launches_than_its_ops() -> None:
    """The input is copied in, it is replayed, and what X takes is copied out: three launches."""
    assert words(cut(drawn("a-b b-c c-X"))) == []
    assert words(cut(drawn("a-b b-c c-d d-X"))) == ["[abcd]", "X"]
    assert words(cut(drawn("a-b b-c c-d d-X", outputs="a"))) == [], "the output is copied too"
    assert words(cut(drawn("a-b b-c c-d d-X a-X"))) == [], "and so is what X takes besides"


def test_weights_stay_where_they_are() -> None:
    """So nothing is copied in."""
    graph = drawn("a-b b-c c-X")
    weights = replace(graph.storages["x_in"], role=Role.PARAMETER)
    assert words(cut(replace(graph, storages={**graph.storages, "x_in": weights}))) == ["[abc]", "X"]


def test_what_a_graph_writes_to_its_input_is_copied_back() -> None:
    graph = drawn("a-b b-c c-d d-X")
    first = replace(graph.ops["a"], writes=frozenset({"a", "x_in"}))
    assert words(cut(replace(graph, ops={**graph.ops, "a": first}))) == []


def test_what_holds_no_bytes_is_not_copied() -> None:
    graph = drawn("a-b b-c c-X")
    empty = {name: replace(storage, bytes=0) for name, storage in graph.storages.items()}
    assert words(cut(replace(graph, storages=empty))) == ["[abc]", "X"]


def test_parts_that_are_not_worth_it_are_one_with_their_neighbours() -> None:
    assert words(cut(drawn("a-b b-c c-d d-X X-e e-Y Y-f"))) == ["[abcd]", "XeYf"]


def literal(name: str, **fields: object) -> Op:
    return op(name, device="cpu", **fields)


def with_literals(graph: OpGraph, *ops: Op) -> OpGraph:
    """The same, with ops on the CPU before all others."""
    made = {o.name: Storage(o.name, Role.INTERMEDIATE, 4, (o.name,)) for o in ops}
    return replace(graph, ops={**{o.name: o for o in ops}, **graph.ops}, storages={**graph.storages, **made})


def reading(graph: OpGraph, name: str, storage: str) -> OpGraph:
    reads = graph.ops[name].reads | {storage}
    return replace(graph, ops={**graph.ops, name: replace(graph.ops[name], reads=reads)})


def test_what_is_computed_from_literals_is_in_each_part_that_needs_it() -> None:
    """m, which writes what k made, and l, which is made of it, are needed by a and b; nobody needs n."""
    writes = literal("m", reads="k", writes=frozenset({"k"}), allocates=frozenset())
    graph = with_literals(drawn("a-X X-b"), literal("k"), writes, literal("l", reads="k"), literal("n"))
    graph = reading(reading(graph, "a", "k"), "b", "l")
    assert words(cut_everything(graph)) == ["[kma]", "X", "[kmlb]"]


def test_a_literal_is_no_launch() -> None:
    graph = reading(with_literals(drawn("a-b b-c c-X"), literal("k"), literal("l", reads="k")), "a", "l")
    assert words(cut(graph)) == []


def test_what_uses_a_literal_that_changes_between_uses_is_not_captured() -> None:
    """B uses k before m writes it; d uses what l made of it then; a and c use nothing of the kind."""
    graph = reading(reading(drawn("a-b b-c c-d"), "b", "k"), "d", "l")
    writes = literal("m", reads="k", writes=frozenset({"k"}), allocates=frozenset())
    last, graph = graph.ops["d"], with_literals(graph, literal("k"))
    ops = {n: o for n, o in graph.ops.items() if n != "d"} | {"m": writes, "l": literal("l", reads="k"), "d": last}
    assert words(cut_everything(replace(graph, ops=ops))) == ["[a]", "kbml", "[c]", "d"]


def test_what_uses_a_literal_that_is_returned_is_not_captured() -> None:
    graph = reading(with_literals(drawn("a-b b-c"), literal("k")), "b", "k")
    returned = replace(graph.storages["k"], escapes=True)
    assert words(cut_everything(replace(graph, storages={**graph.storages, "k": returned}))) == ["[a]", "kb", "[c]"]


def test_each_device_has_parts_of_its_own() -> None:
    """Two stages of a pipeline, of which the second needs something of the middle of the first, too."""
    graph = over_two("a-b b-C a-S C-d d-e S-e", second="CSde", copies="CS")
    assert words(cut_everything(graph)) == ["[ab]", "CS", "(de)"]
    assert words(cut_everything(over_two("a-b c-d", second="cd", copies=""))) == ["[ab]", "(cd)"]


def test_what_another_device_waits_for_comes_first_and_a_copy_after_what_it_would_stall() -> None:
    r"""Neither of b and d waits for the other.

    cuda:0   a ── b ─────── f
              \            /
    cuda:1     C ─ d ─ B ─
    """
    graph = over_two("a-b a-C C-d d-B b-f B-f", second="Cd", copies="CB")
    assert words(cut_everything(graph)) == ["[a]", "C", "(d)", "[b]", "B", "[f]"]


def test_a_copy_to_an_idle_device_comes_before_all_else() -> None:
    """An input is copied before the device that copies it is given b, which is first in the program."""
    graph = over_two("b-f C-d d-B B-f", second="Cd", copies="CB", names="bCdBf")
    assert words(cut_everything(graph)) == ["C", "(d)", "[b]", "B", "[f]"]


def test_both_devices_have_what_they_can_before_the_host_waits() -> None:
    graph = over_two("a-X X-b b-Y Y-c d-e", second="de", copies="")
    assert words(cut_everything(graph)) == ["[a]", "(de)", "X", "[b]", "Y", "[c]"]


def test_a_part_of_one_device_that_is_not_worth_a_graph_runs_plainly() -> None:
    assert words(cut(over_two("a-b b-c c-d d-C C-e", second="Ce", copies="C"))) == ["[abcd]", "Ce"]


def test_a_long_upload_runs_beside_what_does_not_need_it() -> None:
    r"""Were it short, it would come first, for a part less.

    U ─ c ─╮
    a ─ b ─┴ d
    """
    graph = drawn("U-c c-d a-b b-d", "Ucabd")
    assert words(cut_everything(copying(graph, "U"))) == ["[ab]", "~U", "[cd]"]
    assert words(cut_everything(copying(graph, "U", size=LONG_BYTES - 1))) == ["U", "[cabd]"]
    assert words(cut_everything(copying(graph, "", "U"))) == ["[ab]", "~U", "[cd]"]


def test_what_a_long_download_waits_for_is_a_part_of_its_own() -> None:
    """It copies what a has computed, while b and c are."""
    graph = drawn("a-D a-b b-c", "aDbc")
    assert words(cut_everything(copying(graph, "", "D"))) == ["[a]", "[bc]", "~D"]
    assert words(cut_everything(copying(graph, "", "D", LONG_BYTES - 1))) == ["[abc]", "D"]


def test_uploads_come_before_what_makes_the_host_wait() -> None:
    """The download of a is launched when all that needs the upload has been."""
    graph = drawn("a-D U-b b-c", "aDUbc")
    assert words(cut_everything(copying(graph, "U", "D"))) == ["[a]", "~U", "[bc]", "~D"]


def test_a_long_copy_with_nothing_to_run_beside_is_an_op_like_others() -> None:
    assert words(cut_everything(copying(drawn("U-a a-b"), "U"))) == ["U", "[ab]"]
    assert words(cut_everything(copying(drawn("a-b b-D D-E"), "", "D"))) == ["[ab]", "DE"]
    assert words(cut_everything(copying(drawn("X-U U-a b-c c-a", "XUbca"), "U"))) == ["[bc]", "XU", "[a]"], "X is first"


def test_a_copy_of_what_is_computed_from_literals_is_an_op_like_others() -> None:
    graph = reading(with_literals(drawn("U-c c-d a-b b-d", "Ucabd"), literal("k")), "U", "k")
    assert words(cut_everything(copying(graph, "U"))) == ["[ab]", "kU", "[cd]"]


@given(graph=random_graphs(), data=st.data())
def test_copies_beside_need_nothing_of_the_part_before(graph: OpGraph, data: st.DataObject) -> None:
    ways = {name: data.draw(st.sampled_from(["", "X", "upload", "download"])) for name in graph.ops}
    graph = refusing(graph, [name for name, way in ways.items() if way])
    uploads, downloads = ([n for n, each in ways.items() if each == way] for way in ("upload", "download"))
    parts = cut_everything(copying(graph, uploads, downloads))
    home = {name: at for at, part in enumerate(parts) for name in part.ops}
    assert not parts or home.keys() == graph.ops.keys()
    assert all(home[d.before] <= home[d.after] for d in graph.dependencies if parts)
    for at, part in enumerate(parts):
        if part.beside:
            assert at > 0
            assert {ways[name] for name in part.ops} <= {"upload", "download"}
            assert all(home[d.before] < at - 1 for d in graph.dependencies if d.after in part.ops)


@given(graph=random_graphs(), data=st.data())
def test_no_part_has_ops_of_two_devices(graph: OpGraph, data: st.DataObject) -> None:
    kinds = st.sampled_from([("", ""), ("peer", REFUSED), ("", REFUSED)])
    devices = st.sampled_from(["cuda:0", "cuda:1", "cuda:2", "cpu"])
    for name, each in graph.ops.items():
        (crosses, refusal), device = data.draw(kinds), data.draw(devices)
        refusal = refusal or (REFUSED if device == "cpu" else "")
        placed = replace(each, device=device, crosses=crosses, uncapturable=refusal)
        graph = replace(graph, ops={**graph.ops, name: placed})
    for parts in filter(None, (cut_everything(graph), cut(graph))):
        home = {name: at for at, part in enumerate(parts) for name in part.ops}
        assert sorted(home) == sorted(graph.ops)
        assert sum(len(part.ops) for part in parts) == len(graph.ops)
        assert all(home[d.before] <= home[d.after] for d in graph.dependencies)
        assert all(one.device != other.device for one, other in pairwise(parts))
        for part in filter(lambda part: part.captured, parts):
            assert {(graph.ops[n].device, graph.ops[n].uncapturable) for n in part.ops} == {(part.device, "")}


@given(graph=random_graphs(), data=st.data())
def test_every_hazard_is_respected_and_no_kind_comes_twice_in_a_row(graph: OpGraph, data: st.DataObject) -> None:
    refused = data.draw(st.sets(st.sampled_from(list(graph.ops))))
    order = {name: at for at, name in enumerate(graph.ops)}
    for parts in filter(None, (found(refusing(graph, refused)) for found in (cut_everything, cut))):
        home = {name: at for at, part in enumerate(parts) for name in part.ops}
        assert home.keys() == graph.ops.keys()
        assert sum(len(part.ops) for part in parts) == len(graph.ops)
        assert all(home[d.before] <= home[d.after] for d in graph.dependencies)
        assert all(one.captured != other.captured for one, other in pairwise(parts))
        assert not any(refused.intersection(part.ops) for part in parts if part.captured)
        assert all(list(part.ops) == sorted(part.ops, key=order.__getitem__) for part in parts)


@given(graph=random_graphs(max_ops=7), data=st.data())
def test_no_order_has_fewer_parts(graph: OpGraph, data: st.DataObject) -> None:
    """A path to an op with so many changes of kind needs so many parts before that of the op."""
    refused = data.draw(st.sets(st.sampled_from(list(graph.ops))))

    def least(first_is_refused: bool) -> int:
        changes: dict[str, int] = {}
        for name in graph.ops:
            earliest = max((changes[d.before] for d in graph.dependencies if d.after == name), default=0)
            fits = (earliest % 2 == 0) == ((name in refused) == first_is_refused)
            changes[name] = earliest if fits else earliest + 1
        return max(changes.values()) + 1 - (0 not in changes.values())

    parts = cut_everything(refusing(graph, refused))
    assert len(parts) == (min(map(least, (True, False))) if len(refused) < len(graph.ops) else 0)
