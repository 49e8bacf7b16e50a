"""What the bytecode of functions tells, in words that are the same for all versions of Python.

    code ──▶ steps ──┬──▶ the names that it reads and writes (``reads.py``, ``writes.py``)
                     └──▶ what it does with them, and what its variables were made by (``purity.py``)

Where a value on the stack is from is followed along straight code only: behind a jump nobody knows.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Named:
    """What code names.

    Attributes:
        variables: global ones.
        attributes: of whatever it reads.
        keys: its strings.
        written: the variables and attributes that it writes.
        whole: the variables, its own among them, and the attributes that it does not ask at once for an attribute, but
            calls, hands on, or does anything else with.
    """

    variables: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()

    def __or__(self, other: Named) -> Named:
        """What either names."""
        return Named(
            self.variables | other.variables,
            self.attributes | other.attributes,
            self.keys | other.keys,
            self.written | other.written,
            self.whole | other.whole,
        )


@lru_cache(maxsize=1024)
def names_of(code: CodeType, own: str = "") -> Named:
    """What code names, that of functions which it defines included.

    Args:
        code: of a function.
        own: a variable with an object that is made for each call: what code writes to that is not told.

    Example:
        >>> names_of((lambda x: x.real * scale).__code__).variables
        frozenset({'scale'})
    """
    inner = [names_of(each, own) for each in inner_of(code)]
    keys = (constant for constant in code.co_consts if isinstance(constant, str))
    return Named(
        _arguments(code, _VARIABLES).union(*(each.variables for each in inner)),
        _arguments(code, _ATTRIBUTES).union(*(each.attributes for each in inner)),
        frozenset(keys).union(*(each.keys for each in inner)),
        frozenset(_written(code, own)).union(*(each.written for each in inner)).difference(code.co_cellvars),
        frozenset(_whole(code)).union(*(each.whole for each in inner)),
    )


def inner_of(code: CodeType) -> Iterator[CodeType]:
    """The code of functions, classes and comprehensions that code defines."""
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


class Use(NamedTuple):
    """Something that code does with a name.

    Attributes:
        does: ``"reads"`` a global variable or one of an outer function, ``"asks"`` a value for an attribute,
            ``"writes"`` one, or an item, or a variable of others, or ``"changes"`` a value in place (``+=``).
        line: where.
        name: of the variable or the attribute; ``"an item"``; or how it changes a value. What ``__class__`` is asked at
            once is part of it.
        of: the attributes that what is read is asked for at once; else the variable with the value, where one has it,
            or ``""`` and the attribute, of what is asked.
    """

    does: str
    line: int
    name: str
    of: tuple[str, ...] = ()


def uses(code: CodeType) -> Iterator[Use]:
    """What code does with names, in order; functions that it defines are not looked into.

    Example:
        >>> [use[::2] for use in uses((lambda x: math.nan.real * x.imag).__code__)]
        [('reads', 'math'), ('asks', 'imag')]
    """
    steps = _steps(code)
    asked = 0
    for at, step in enumerate(steps):
        asked -= 1
        if _is_of_others(code, step) and not _begins_super(steps, at):
            of = tuple(_asked(steps, at + 1))
            asked = 1 + len(of)
            yield Use("reads", step.line, step.argument, of)
        elif step.op in _ATTRIBUTES and asked <= 0:
            of = _owner(steps, at) if step.op == "LOAD_ATTR" else ()
            asking = list(_asked(steps, at)) if step.argument == "__class__" else [step.argument]
            asked = len(asking)
            yield Use("asks", step.line, ".".join(asking), of)
        elif step.op in _WRITING | _IMPORTING and (step.op not in _CELLS or step.argument in code.co_freevars):
            yield Use("writes", step.line, step.argument)
        elif step.op in _ITEMS:
            turns = 0  # what changes an item has read it first, and turns the stack
            while steps[at - 1 - turns].op == "SWAP":
                turns += 1
            yield Use("writes", step.line, "an item", _variable(steps, at - turns, _ITEMS[step.op] + bool(turns)))
        elif step.op == "BINARY_OP" and step.argument.endswith("="):
            yield Use("changes", step.line, step.argument, _variable(steps, at, 1))


LITERAL = ("[]",)
"""What makes a list, a set or a dictionary that nobody else has: a display, or a comprehension."""


def makers(code: CodeType) -> Mapping[str, frozenset[tuple[str, ...]]]:
    """What made the values of code's own variables that are no arguments: each time that one was set.

    Returns:
        By variable, :data:`LITERAL`, or what was called: a variable of others and attributes of it; ``""`` and the
        attribute that another value was asked for; and nothing where nobody knows.

    Example:
        >>> def function(x):
        ...     first, second = [x], x.clone()
        ...     return first, second
        >>> makers(function.__code__)["first"], makers(function.__code__)["second"]
        (frozenset({('[]',)}), frozenset({('', 'clone')}))
    """
    found = defaultdict[str, set[tuple[str, ...]]](set)
    steps = _steps(code)
    for at, step in enumerate(steps):
        if step.op in ("STORE_FAST", "STORE_DEREF"):
            found[step.argument].add(LITERAL if _ends_comprehension(steps, at) else _maker(steps, at, 0))
    given = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    if code.co_flags & inspect.CO_VARKEYWORDS:
        found[code.co_varnames[given]].add(LITERAL)
    others = {*code.co_freevars, *code.co_varnames[:given]}
    return {name: frozenset(made) for name, made in found.items() if name not in others}


class _Step(NamedTuple):
    """An instruction, by how much it makes the stack higher, and whether a jump leads here."""

    op: str
    argument: Any
    line: int
    effect: int
    target: bool


@lru_cache(maxsize=64)
def _steps(code: CodeType) -> Sequence[_Step]:
    """The instructions of code: without those that do nothing, those that are two taken apart, and alike ones alike."""
    steps = list[_Step]()
    instructions = list(dis.get_instructions(code))
    targets = {own.argval for own in instructions if own.opname in _JUMPING}
    target = False
    for own in instructions:
        target |= own.offset in targets
        if own.opname in _NOTHING:
            continue
        line = (own.positions.lineno if own.positions else None) or code.co_firstlineno
        parts = re.findall("LOAD_FAST|STORE_FAST", own.opname)
        if len(parts) == 2:
            effects = (1 if part.startswith("LOAD") else -1 for part in parts)
            each = zip(parts, own.argval, effects, strict=True)
            steps += [_Step(op, name, line, effect, target) for op, name, effect in each]
        else:
            op = _ALIKE.get(own.opname, own.opname)
            argument = own.argrepr if op == "BINARY_OP" else own.argval
            effect = dis.stack_effect(own.opcode, own.arg, jump=False)
            if op == "CALL":
                effect = -1 - own.argval  # of which PRECALL, where there is one, has a share
            steps.append(_Step(op, argument, line, effect, target))
        target = False
    return steps


def _arguments(code: CodeType, ops: frozenset[str]) -> frozenset[str]:
    return frozenset(step.argument for step in _steps(code) if step.op in ops)


def _written(code: CodeType, own: str) -> Iterator[str]:
    """The names of what code writes, but to attributes of one variable."""
    steps = _steps(code)
    return (
        step.argument
        for at, step in enumerate(steps)
        if step.op in _WRITING and not (own and step.op in _OF_OWNERS and _variable(steps, at, 0) == (own,))
    )


def _whole(code: CodeType) -> Iterator[str]:
    """The names of what code reads and does not ask at once for an attribute."""
    steps = _steps(code)
    return (
        step.argument
        for at, step in enumerate(steps)
        if step.op in _VARIABLES | _ATTRIBUTES | _READING and not _is_owner(steps, at + 1)
    )


def _is_owner(steps: Sequence[_Step], at: int) -> bool:
    """Whether a step takes the value on top for its attributes alone: to read one, to write one, or both."""
    at += steps[at].op == "COPY"
    return not steps[at].target and steps[at].op in _OF_OWNERS


def _is_of_others(code: CodeType, step: _Step) -> bool:
    """Whether a step reads a variable that is not the code's own."""
    return step.op in _VARIABLES or (step.op == "LOAD_DEREF" and step.argument in code.co_freevars)


def _begins_super(steps: Sequence[_Step], at: int) -> bool:
    """Whether a step reads the class that ``super()`` begins at."""
    after = [step.op for step in steps[at + 1 : at + 3]]
    return steps[at].argument == "__class__" and after == ["LOAD_FAST", "LOAD_SUPER_ATTR"]


def _asked(steps: Sequence[_Step], at: int) -> Iterator[str]:
    """The attributes that the value on top is asked for from a step on, one after the other."""
    while steps[at].op == "LOAD_ATTR" and not steps[at].target:
        yield steps[at].argument
        at += 1


def _pushed_by(steps: Sequence[_Step], at: int, depth: int) -> int | None:
    """The step that put what lies so deep on the stack before another step; none where nobody knows."""
    height = 0
    while at > 0 and not steps[at].target:
        at -= 1
        if steps[at].op in _TURNING:
            return None
        if height <= -depth and steps[at].op not in _POPPING:
            return at if height == -depth else None
        height -= steps[at].effect
    return None


def _variable(steps: Sequence[_Step], at: int, depth: int) -> tuple[str, ...]:
    """The variable that the value so deep on the stack was read from."""
    found = _pushed_by(steps, at, depth)
    return () if found is None or steps[found].op not in _READING else (steps[found].argument,)


def _owner(steps: Sequence[_Step], at: int) -> tuple[str, ...]:
    """What the value that a step asks was read from: a variable, or ``""`` and an attribute."""
    if steps[at - 1].op in _ATTRIBUTES and not steps[at].target:
        return "", steps[at - 1].argument
    return _variable(steps, at, 0)


def _maker(steps: Sequence[_Step], at: int, depth: int) -> tuple[str, ...]:
    """What made the value so deep on the stack."""
    found = _pushed_by(steps, at, depth)
    if found is None:
        return ()
    op, argument = steps[found][:2]
    if op in ("CALL", "CALL_KW"):
        callee = _pushed_by(steps, found, argument + (op == "CALL_KW"))
        return () if callee is None else _called(steps, callee)
    if op == "BINARY_OP" and argument in ("*", "+"):
        return LITERAL if _maker(steps, found, 1) == LITERAL else ()
    return LITERAL if op in _MAKING else ()


def _called(steps: Sequence[_Step], at: int) -> tuple[str, ...]:
    """What a step, which is the last before arguments, has put on the stack to be called."""
    if steps[at].op == "GET_ITER":  # the one of a comprehension, which is a function to some versions of Python
        return LITERAL
    at -= steps[at].op == "PUSH_NULL"
    path = list[str]()
    while steps[at].op == "LOAD_ATTR" and not steps[at].target:
        path.insert(0, steps[at].argument)
        at -= 1
    if steps[at].op in _VARIABLES:
        return steps[at].argument, *path
    return ("", path[-1]) if path else ()


def _ends_comprehension(steps: Sequence[_Step], at: int) -> bool:
    """Whether what a step stores is of a comprehension that is no function, which gives its variables back first."""
    while [step.op for step in steps[at - 2 : at]] == ["SWAP", "STORE_FAST"]:
        at -= 2
    before = [step.op for step in steps[max(at - 2, 0) : at]]
    return before[-1:] == ["END_FOR"] or before in (["END_FOR", "POP_TOP"], ["END_FOR", "POP_ITER"])


_VARIABLES = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_SUPER_ATTR"})
_READING = frozenset({"LOAD_FAST", "LOAD_DEREF"})
_WRITING = frozenset(f"{what}_{where}" for what in ("STORE", "DELETE") for where in ("GLOBAL", "DEREF", "ATTR"))
_OF_OWNERS = _ATTRIBUTES | {"STORE_ATTR", "DELETE_ATTR"}
_CELLS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
_IMPORTING = frozenset({"IMPORT_NAME", "STORE_NAME"})

_ITEMS = {"STORE_SUBSCR": 1, "DELETE_SUBSCR": 1, "STORE_SLICE": 2}
"""What writes items, and how deep below the top of the stack it finds what has them."""

_MAKING = frozenset(
    {
        *("BUILD_LIST", "BUILD_SET", "BUILD_MAP", "BUILD_CONST_KEY_MAP"),
        *("LIST_EXTEND", "LIST_APPEND", "SET_UPDATE", "SET_ADD", "DICT_UPDATE", "MAP_ADD"),
    }
)
_POPPING = frozenset({"STORE_FAST", "STORE_DEREF", "POP_TOP"})
_JUMPING = frozenset(dis.opname[op] for op in (*dis.hasjrel, *dis.hasjabs))
_TURNING = _JUMPING | {"SWAP", "UNPACK_SEQUENCE", "UNPACK_EX", "BEFORE_WITH"}
"""What jumps, or leaves another order or more values on the stack than one."""

_NOTHING = frozenset(
    {*("CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "KW_NAMES", "MAKE_CELL", "NOP"), *("NOT_TAKEN", "PRECALL", "RESUME")}
)
_ALIKE = {
    "LOAD_METHOD": "LOAD_ATTR",
    "LOAD_FAST_BORROW": "LOAD_FAST",
    "LOAD_FAST_CHECK": "LOAD_FAST",
}
