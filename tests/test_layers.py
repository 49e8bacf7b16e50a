"""The floor plan of ARCHITECTURE.md, checked: imports run downward, and what is dangerous is done in one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import autostream

PACKAGE = Path(autostream.__file__).parent
ROOT = PACKAGE.parent
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in PACKAGE.rglob("*.py")}

FLOORS = {
    0: {"errors", "options", "ir", "version", "store", "utils"},
    1: {"scheduling"},
    2: {"frontend", "fusion", "analysis", "costs", "runtime", "reporting"},
    3: {"pipeline", "tuning", "dispatch"},
    4: {"api", "explaining", "backend", "training", "parallel", "prefetching", "scaling", "splitting"},
    5: {"cli", "__main__", "__init__"},
}
"""Rooms by floor; a room is a package or a module of its own."""

FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}

NEIGHBOURS = {
    *(("costs", "runtime"), ("costs", "frontend")),
    *(("frontend", "analysis"), ("frontend", "runtime"), ("fusion", "frontend")),
}
"""On floor 2, who may import another room: measuring an op captures it, and holds for the settings that calls watch; a
front end says which of the user's lines it means, and its gradients come from memory that graphs lend; kernels are
fused from graphs of ATen ops."""


def room_of(module: str) -> str:
    """The room that a module is in: ``autostream.costs.device`` is in ``costs``, ``autostream`` in ``__init__``."""
    _, _, path = module.partition(".")
    return path.partition(".")[0] or "__init__"


@cache
def imports_of(module: str) -> tuple[str, ...]:
    """What a module imports, anywhere in its code: modules by their full name."""
    return tuple(_imports_in(module))


def _imports_in(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            assert node.module is not None
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES or f"{name}.__init__" in MODULES else node.module for name in inner)


def own_imports_of(module: str) -> Iterator[str]:
    return (name for name in imports_of(module) if name.partition(".")[0] == "autostream")


def test_every_module_is_on_a_floor() -> None:
    assert {room_of(module.removesuffix(".__init__")) for module in MODULES} == set(FLOOR_OF)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_downward(module: str) -> None:
    room = room_of(module.removesuffix(".__init__"))
    for imported in own_imports_of(module):
        used = room_of(imported)
        assert FLOOR_OF[used] <= FLOOR_OF[room], f"{module} imports {imported}, which is above it"
        strangers = used != room and FLOOR_OF[used] == FLOOR_OF[room] == 2
        assert not strangers or (room, used) in NEIGHBOURS, f"{module} imports {imported}, another room of its floor"


def test_no_two_rooms_import_each_other() -> None:
    """Nor do several in a circle: the rooms of a floor have an order as well."""
    used: dict[str, set[str]] = {room: set() for room in FLOOR_OF}
    for module in MODULES:
        room = room_of(module.removesuffix(".__init__"))
        used[room] |= {room_of(imported) for imported in own_imports_of(module)} - {room}
    try:
        [*TopologicalSorter(used).static_order()]
    except CycleError as error:
        pytest.fail(f"these rooms import each other: {error.args[1]}")


def test_imports_are_found() -> None:
    assert room_of("autostream") == "__init__"
    assert room_of("autostream.fusion.inductor") == "fusion"
    assert set(own_imports_of("autostream.runtime.lower")) == {
        "autostream.errors", "autostream.ir", "autostream.runtime.arena", "autostream.runtime.streams",
        "autostream.utils.storages",
    }  # fmt: skip


def test_the_proof_shares_no_code_with_what_it_proves() -> None:
    assert set(own_imports_of("autostream.scheduling.verify")) == {"autostream.errors", "autostream.ir"}


ESTIMATES = {f"autostream.costs.{name}" for name in ("roofline", "locality", "occupancy")}


@pytest.mark.parametrize(
    "module",
    sorted(name for name in MODULES if room_of(name) in {"scheduling", "reporting", *FLOORS[0]} or name in ESTIMATES),
)
def test_estimates_plans_and_reports_need_no_torch(module: str) -> None:
    """Only a type checker sees torch there."""
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    names = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    ]
    assert not [name for name in names if name.partition(".")[0] == "torch"]


BASELINES = {"runtime.clock", "cli.modes"}
"""What autostream is compared with, and the clock."""

ONLY_IN = [
    # creates, copies or edits nodes of an fx graph; front ends complete graphs that they have just made
    (
        r"\.(create_node|node_copy|graph_copy|erase_node|call_function|call_module|inserting_(before|after)"
        r"|replace_all_uses_with|replace_input_with|eliminate_dead_code)\(",
        {
            "dispatch.compiled_graph",
            "runtime.cutting",
            "runtime.lower",
            "frontend.aten",
            "frontend.attention_fast_path",
            "frontend.attention_masks",
            "frontend.counters",
            "frontend.dropouts",
            "frontend.gradient_sums",
            "frontend.reduction_buckets",
            "frontend.static_tensors",
            "frontend.steps",
            "dispatch.children",
            "fusion.collectives",
            "fusion.in_place_products",
            "fusion.inductor",
            "fusion.kernel_graph",
            "fusion.kernel_json",
            "fusion.kernel_values",
            "fusion.out_variants",
            "fusion.scalars",
        },
    ),
    (
        r"\bfx\.Graph\(|\.GraphModule\(",
        {
            *("dispatch.compiled_graph", "runtime.cutting", "runtime.lower", "dispatch.children"),
            *("frontend.counters", "frontend.reduction_buckets", "frontend.static_tensors"),
            *("fusion.collectives", "fusion.in_place_products", "fusion.kernel_json"),
        },
    ),
    (
        r"\.(create_node|node_copy)\(",
        {
            *("dispatch.compiled_graph", "frontend.counters", "frontend.static_tensors", "fusion.collectives"),
            *("frontend.gradient_sums", "runtime.cutting", "runtime.lower"),
        },
    ),
    # a stream that others are handed as well must not be captured
    (r"torch\.cuda\.(Stream\(|ExternalStream\()", {"runtime.streams"}),
    # touches streams and events
    (
        r"torch\.cuda\.(Event|current_stream|set_stream|stream\()|\.(wait_stream|wait_event|record_event)\(",
        {
            "runtime.streams",
            "runtime.capture",
            "runtime.host_copies",
            "runtime.cuda_graph",
            "runtime.peer_copies",
            "runtime.saved_activations",
            "runtime.transfer",
            "costs.measured",
            "costs.measured_collectives",
            "costs.microbenchmarks",
            "costs.replay_time",
            "tuning.select",
            "fusion.kernel_graph",
            *BASELINES,
        },
    ),
    (r"\.record_stream\(", set()),
    (r"torch\.cuda\.(CUDAGraph\(|graph\()", {"runtime.capture"}),
    # runs what a file says
    (r"\b(pickle|marshal|shelve|dill)\b|torch\.load\(|(?<![\w.])(eval|exec|compile|__import__)\(", set()),
    # the same, of a file that Inductor itself keeps
    (r"\bPyCodeCache\b", {"fusion.kernel_graph", "fusion.inductor"}),
    # reads what others may have written
    (
        r"\bjson\.loads?\(",
        {
            *("cli.compare", "costs.records", "runtime.profiled_kernels"),
            *("fusion.cache", "fusion.kernel_json", "tuning.agreement", "tuning.choices"),
        },
    ),
    (r"os\.(environ|getenv)", {"options"}),
]


@pytest.mark.parametrize(("pattern", "places"), ONLY_IN)
def test_it_is_done_in_one_place(pattern: str, places: set[str]) -> None:
    found = {name.removeprefix("autostream.") for name in MODULES if re.search(pattern, code_of(name))}
    assert found == places


@cache
def code_of(module: str) -> str:
    """A module's code without comments, docstrings and other strings that stand alone."""
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not _is_text(statement)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_the_floor_plan_names_every_room() -> None:
    """ARCHITECTURE.md has a row for each room with its floor."""
    rows = re.findall(r"^\| (\d) \| (.*?) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    named = {
        name.removesuffix("/").removesuffix(".py"): int(floor)
        for floor, cell in rows
        for name in re.findall(r"`(.*?)`", cell)
    }
    assert named == {room: floor for room, floor in FLOOR_OF.items() if not room.startswith("__")}
