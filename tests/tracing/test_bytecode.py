"""What the bytecode of functions tells, the same in all versions of Python: nothing where a jump leads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from autostream.tracing.bytecode import LITERAL, inner_of, makers, names_of, uses


def told(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
    return [(use.does, use.name, use.of) for use in uses(function.__code__)]


total: Any = 0
handed: Any = None


def names(x: Any) -> Any:
    global total
    total = x.attribute["key"]
    x.other = math.pi
    return lambda: x.inner


def test_names_of_code_and_of_what_it_defines() -> None:
    named = names_of(names.__code__)
    assert named.variables == {"math"}
    assert named.attributes == {"attribute", "pi", "inner"}
    assert named.written == {"total", "other"}
    assert "key" in named.keys
    assert [code.co_name for code in inner_of(names.__code__)] == ["<lambda>"]


def test_what_is_only_asked_for_attributes_is_not_used_whole() -> None:
    def function(x: Any, owner: Any, other: Any) -> Any:
        x.owned.count += 1
        x.owned.last = None
        handed(owner.part, x.owned.value)
        return (lambda: other), math.pi

    assert names_of(function.__code__).whole == {"handed", "part", "value", "count", "other", "pi"}


def test_what_is_written_to_an_object_of_the_code_itself_is_left_out() -> None:
    def function(ctx: Any, x: Any) -> None:
        ctx.scale = x.scale
        x.count = 1

    assert names_of(function.__code__).written == {"scale", "count"}
    assert names_of(function.__code__, "ctx").written == {"count"}


def test_what_super_is_asked_for_is_named() -> None:
    class Child(dict[str, int]):
        def of(self, name: str) -> Any:
            return super().get(name)

    assert names_of(Child.of.__code__).attributes == {"get"}
    assert told(Child.of) == [("reads", "super", ()), ("asks", "get", ())]


def test_attributes_belong_to_the_variable_of_others_that_is_asked_at_once() -> None:
    factor = 2.0

    def function(x: Any, y: Any) -> Any:
        return math.floor.real(x.real) + factor.real + (x or math).imag + y.__class__.__name__ + x.real.imag + (-x).real

    assert told(function) == [
        ("reads", "math", ("floor", "real")),
        ("asks", "real", ("x",)),
        ("reads", "factor", ("real",)),
        ("reads", "math", ()),
        ("asks", "imag", ()),
        ("asks", "__class__.__name__", ("y",)),
        ("asks", "real", ("x",)),
        ("asks", "imag", ("", "real")),
        ("asks", "real", ()),
    ]


def test_variables_of_its_own_are_not_written_to_others() -> None:
    def function(x: Any) -> Any:
        y = x
        x.y = x

        def inner() -> None:
            nonlocal y
            y = x

        return inner

    assert told(function) == [("writes", "y", ())]
    (inner,) = inner_of(function.__code__)
    assert [(use.does, use.name) for use in uses(inner)] == [("reads", "x"), ("writes", "y")]


def items(x: Any, c: Any, at: int) -> None:
    x[at] = 0
    x[at, c.real] = c
    x[1:at] = c
    x[at] += 1
    x[1:at] -= 1
    del x[at]
    x[0 if c else 1] = c
    x.real[0] = c
    (x or c)[0] = 1


def test_items_are_those_of_a_variable_where_that_is_plain() -> None:
    written = [(use.does, use.of) for use in uses(items.__code__) if use.does in ("writes", "changes")]
    plain, unknown = ("writes", ("x",)), ("writes", ())
    change = ("changes", ())
    assert written == [plain, plain, plain, change, plain, change, plain, plain, unknown, unknown, unknown]


def test_values_that_are_changed_are_those_of_a_variable() -> None:
    def function(x: Any, y: Any) -> None:
        x += y * 2
        y.real.imag @= x

    changes = [(use.name, use.of) for use in uses(function.__code__) if use.does == "changes"]
    assert changes == [("+=", ("x",)), ("@=", ())]


def test_lines_are_told() -> None:
    first = items.__code__.co_firstlineno
    assert [use.line - first for use in uses(items.__code__) if use.does == "writes"] == list(range(1, 10))


def displays(x: Any, c: Any) -> Any:
    one, two = [], {}
    three = {"a": x, **c}
    four = [1, 2, 3, *x]
    five = {x, 1}
    six = [x] * len(c) + four
    return one, two, three, four, five, six


def comprehensions(xs: Iterable[Any]) -> Any:
    one = [x for x in xs]  # noqa: C416
    two = {x: 1 for x in xs if x}
    three = [(i, x) for i, x in enumerate(xs)]
    four = [x for x in xs]  # noqa: C416
    return one, two, three, lambda: four


def calls(x: Any, c: Any) -> Any:
    one = list()  # noqa: C408
    two = math.floor(x, c.real, key=one)
    three = x.clone()
    four = x.real.clone(c, [*x])
    return one, two, three, four


@pytest.mark.parametrize(
    ("function", "made"),
    [
        (displays, dict.fromkeys(["one", "two", "three", "four", "five", "six"], LITERAL)),
        (comprehensions, dict.fromkeys(["one", "two", "three", "four"], LITERAL)),
        (calls, {"one": ("list",), "two": ("math", "floor"), "three": ("", "clone"), "four": ("", "clone")}),
    ],
)
def test_makers(function: Callable[..., Any], made: dict[str, tuple[str, ...]]) -> None:
    found = makers(function.__code__)
    assert {name: found[name] for name in made} == {name: {by} for name, by in made.items()}


def unknown(x: Any, c: Any) -> Any:
    one = [] if c else x
    two = x if c else []
    three = c or []
    _, four = x.split()
    five = x[[0]]
    six = math.floor(x if c else [])
    seven = x.real
    eight = (c or x)([])
    for nine in [x]:
        ten = nine
    with x as eleven:
        twelve = (lambda: x)()
    thirteen = [c] | x
    fourteen = (c or math).floor(x)
    return one, two, three, four, five, six, seven, eight, ten, eleven, twelve, thirteen, fourteen


def test_what_comes_another_way_has_no_known_maker() -> None:
    found = makers(unknown.__code__)
    assert set(found) == set(unknown.__code__.co_varnames) - {"x", "c"} | {*unknown.__code__.co_cellvars} - {"x"}
    assert [name for name, made in found.items() if () not in made] == []


def test_arguments_have_other_makers_but_for_keywords_that_are_a_new_dictionary() -> None:
    def function(x: Any, *args: Any, y: Any = None, **kwargs: Any) -> Any:
        x = args = y = 1
        return x, args, y, kwargs

    assert makers(function.__code__) == {"kwargs": {LITERAL}}


def test_each_value_of_a_variable_has_its_maker() -> None:
    def function(x: Any) -> Any:
        y = []
        if x:
            y = x
        return y

    assert makers(function.__code__)["y"] == {LITERAL, ()}
