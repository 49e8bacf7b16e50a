"""Guards: what is checked before a captured graph is reused for a call, and which checks may be skipped.

Dynamo builds and checks the guards, in C++. Three things are added to what it guards:

- the identity of every tensor that is not an argument (:func:`guard_identities`): Dynamo's bytecode fetches weights
  anew in each call, but a CUDA graph holds their addresses;
- the class of every module, and the ``forward`` of the model's class (:class:`Guards`);
- the settings of libraries, such as cuDNN's; those are in ``settings.py``.

Private to PyTorch; see the table in ``frontend/__init__.py``.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.weak import TensorWeakRef

from autostream.analysis.source import user_line
from autostream.frontend.dynamo import configured, timed

GUARDS_SKIP_WEIGHTS = TorchVersion(torch.__version__) < TorchVersion("2.13")
"""Whether Dynamo skips guards of weights as long as the dictionary that holds them has not been written.

So it does up to torch 2.11, although a weight can change its size or ``requires_grad`` without such a write. Code that
relies on guards checks weights itself then.
"""

_CHECK_INTERVAL = 256
"""In one of so many calls it is checked whether guards have become slow."""

_MOST_BUILDS = 8
"""How often guards are built at most: a model that keeps writing dictionaries keeps making them slow."""


@dataclass(frozen=True, slots=True)
class FailedGuard:
    """A guard that fails for a call.

    Attributes:
        code: what it checks, as Dynamo writes it.
        name: of what it checks, as the user's code has it, such as ``memory.pointer``; ``""`` if that is not known.
        line: of the user's code, for which Dynamo checks it; ``""`` if that is not known.
    """

    code: str
    name: str = ""
    line: str = ""


class Guards:
    """Whether a captured graph may be reused for a call.

    For a module that has not changed, Dynamo compares the versions of its dictionaries only. Once one of them is
    written, even with the same value, it checks each guard again, from then on. So guards that hold but have become
    slow are built anew. No dictionary holds a module's class, so classes are compared separately.

    Args:
        build: builds Dynamo's guard manager for the locals of a call for which the guards hold.
        scope: the locals of the captured call.
        guards: Dynamo's, from which it is built.
    """

    def __init__(self, build: Callable[[dict[str, Any]], Any], scope: dict[str, Any], guards: Iterable[Any]) -> None:
        self._build, self._guards = build, guards
        modules = _modules_of(scope["model"])
        self._classes, self._forward = [*map(type, modules)], _forward_of(modules)
        self._modules: list[nn.Module] | None = None
        self._calls = self._builds = 0
        self._rebuild(scope)

    def __call__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Check all guards, in C++."""
        scope = {"model": model, "args": args, "kwargs": kwargs}
        if not self._check(scope) or self._manager.lost or not self._has_same_classes(model):
            self._modules = None  # the model may have other modules now
            return False
        self._calls += 1
        if self._calls % _CHECK_INTERVAL == 0 and self._builds < _MOST_BUILDS and any(map(_is_slow, self._roots)):
            self._rebuild(scope)
        return True

    def failed(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> FailedGuard | None:
        """The guard that fails for a call; ``None`` where none does."""
        if self._manager.lost:
            return FailedGuard(f"{self._manager.lost} is gone")
        checked = self._manager.guard_manager.check_verbose({"model": model, "args": args, "kwargs": kwargs})
        if not checked.result:
            return self._in_words([_COMMENT.split(part)[0].strip() for part in checked.verbose_code_parts])
        if self._has_same_classes(model):
            return None
        return FailedGuard("a module is of another class now, or its class has changed")

    def _in_words(self, parts: Sequence[str]) -> FailedGuard:
        """A guard, as its parts are written, with what Dynamo keeps of the one from which it was built."""
        failed = [guard for guard in self._guards if {*parts} & {*(getattr(guard, "code_list", None) or ())}]
        if not failed:
            return FailedGuard("; ".join(parts))
        source = failed[0].originating_source
        stacks = (getattr(guard, "user_stack", None) for guard in self._guards if guard.originating_source == source)
        lines = (user_line("".join(traceback.format_list(stack or ()))) for stack in stacks)
        return FailedGuard("; ".join(parts), words_of(source), next(filter(None, lines), ""))

    def _has_same_classes(self, model: Callable[..., Any]) -> bool:
        """Whether all modules have the classes that they had when they were captured.

        Dynamo does not notice another ``forward`` in the model's class either: to it that is another code object.
        """
        if self._modules is None:
            self._modules = _modules_of(model)
        return [*map(type, self._modules)] == self._classes and _forward_of(self._modules) is self._forward

    def _rebuild(self, scope: dict[str, Any]) -> None:
        self._builds += 1
        self._manager = self._build(scope)
        self._check: Callable[[dict[str, Any]], bool] = self._manager.guard_manager.check
        self._roots = [node for node in _subtree(self._manager.guard_manager.root) if _is_root(node)]


def _modules_of(model: Callable[..., Any]) -> list[nn.Module]:
    """The modules of a model, or those of a step's ``owner``."""
    owner = model if isinstance(model, nn.Module) else getattr(model, "owner", None)
    return list(owner.modules()) if isinstance(owner, nn.Module) else []


def _forward_of(modules: Sequence[nn.Module]) -> Callable[..., Any] | None:
    """The ``forward`` of the model's class: the model is the first of its modules, and of those of its methods."""
    return type(modules[0]).forward if modules else None


def guards_of(graph_output: Any, code: CodeType, scope: dict[str, Any]) -> Guards:
    """The guards of a trace.

    Args:
        graph_output: Dynamo's ``GraphCaptureOutput``.
        code: what was traced.
        scope: its locals.
    """
    state = graph_output.output_graph

    def build(scope: dict[str, Any]) -> Any:
        state.local_scope = scope
        try:
            with timed(), configured():
                manager = _manager_type()(code, state)
            _mark_skippable(manager.guard_manager.root)
            manager.guard_manager.check(scope)  # records the versions of dictionaries; raises if a guard fails
            return manager
        finally:
            state.local_scope = {}  # it would keep the arguments alive
            _drop_weak_references(state.guards)

    return Guards(build, scope, state.guards)


@cache
def _manager_type() -> Any:
    from torch._dynamo.guards import CheckFunctionManager

    class Manager(CheckFunctionManager):
        """Builds guards, and records when an object that is guarded by identity is deleted: ids are used again."""

        lost = ""

        def invalidate(self, obj_str: str) -> None:
            self.lost = obj_str

    return Manager


def source_name(source: Any) -> str:
    """A source as Dynamo writes it: ``name`` is a property in torch 2.13, a method in 2.11."""
    return str(source.name() if callable(source.name) else source.name)


def words_of(source: Any) -> str:
    """What Dynamo reads from a source, as the user's code names it, as far as that is known.

    A path begins with a global, or with a variable of a closure. Others, such as those in a model, are the last
    attribute alone.
    """
    steps: list[str] = []
    while not (name := getattr(source, "freevar_name", "") or getattr(source, "global_name", "")):
        base, index = getattr(source, "base", None), getattr(source, "index", None)
        if base is None:
            last = next((at for at, step in enumerate(steps) if step.startswith(".")), len(steps))
            return "".join(reversed(steps[: last + 1])).removeprefix(".")
        is_attribute = isinstance(index, str) and _is_table(source_name(base))
        if member := index if is_attribute else getattr(source, "member", ""):
            steps.append(f".{member}")
        elif isinstance(index, int | str):
            steps.append(f"[{index!r}]")
        source = base.base if is_attribute else base
    path = "".join(reversed(steps))
    return path.removeprefix(".") if name.startswith("__import_") else f"{name}{path}"


_COMMENT = re.compile(r"\s+# |\s+\(HINT: ")
"""What Dynamo writes behind a guard: the user's line, and the name of a variable."""


def guard_identities(graph_output: Any, sources: Sequence[Any]) -> None:
    """Guard which object each of these sources is, with the C++ guard that ``ID_MATCH`` uses.

    ``ID_MATCH`` itself does not serve. In 2.11 it formats the object into its message, which for a tensor prints the
    values. It also holds a weak reference, for which ``torch.utils.swap_tensors`` refuses the tensor. Without that, a
    new tensor may get the id of one that is gone. Then it passes all other guards too, and its address is checked when
    the graph runs.
    """
    guards = graph_output.output_graph.guards
    for source in sources:
        guards.add(source.make_guard(_identity))


def _identity(builder: Any, guard: Any) -> None:
    message = [f"{source_name(guard.originating_source)} is the object that was captured"]
    guard.code_list = message
    builder.get_guard_manager(guard).add_id_match_guard(id(builder.get(guard)), message, guard.user_stack)


class Values:
    """The values that Dynamo finds at its sources, each of which is looked up once.

    Args:
        scope: the locals of what was traced.
        globals_: its globals.
    """

    def __init__(self, scope: dict[str, Any], globals_: dict[str, Any]) -> None:
        self._names: dict[str, Any] = {"L": scope, "G": globals_}
        self._known: dict[Any, Any] = {}

    def at(self, source: Any) -> object:
        """The value there, or ``None``."""
        try:
            value: object = source.get_value(self._names, {}, self._known)
        except Exception:  # some sources stand for nothing that can be looked up
            return None
        return value

    def steps_to(self, source: Any) -> Iterator[tuple[object, str]]:
        """The steps by which Dynamo reaches a value, the last one first.

        Each is an object, and the attribute or the string key of it that is read.
        """
        while (base := getattr(source, "base", None)) is not None:
            member = getattr(source, "member", None) or getattr(source, "index", None)
            yield self.at(base), member if isinstance(member, str) else ""
            source = base


def compare_identities(graph_output: Any, values: Values, is_argument: Callable[[Any], bool]) -> None:
    """Replace each guard that two sources are one object by guards of the identity of both, unless one is an argument.

    Dynamo evaluates such guards as Python code in each call. The others are checked in C++, and can be skipped. Where
    it does not guard how it reached a source, in its own polyfills, there is no such guard either.

    Args:
        graph_output: Dynamo's ``GraphCaptureOutput``.
        values: of what was traced.
        is_argument: whether a source is an argument of the call, or lies in one.
    """
    from torch._dynamo.source import is_from_skip_guard_source

    guards = graph_output.output_graph.guards
    for guard in [*guards.inner]:
        other = getattr(guard.create_fn, "keywords", {}).get("source_b")
        sources = [guard.originating_source, other]
        if other is None or any(map(is_argument, sources)) or any(map(is_from_skip_guard_source, sources)):
            continue
        if not isinstance(values.at(other), dict):  # guards of those take no others
            guards.inner.discard(guard)
            guard_identities(graph_output, sources)


def guard_empty_tables(graph_output: Any, values: Values) -> None:
    """Guard the length of each empty table of a module, such as its submodules, instead of the order of its keys.

    Guards of that order are never skipped where there are no keys, and a step that goes through all modules of a model
    has one for each layer.

    Args:
        graph_output: Dynamo's ``GraphCaptureOutput``.
        values: of what was traced.
    """
    state = graph_output.output_graph
    make = _length_guard()
    for source in [*state.guard_on_key_order]:
        value = values.at(source)
        if isinstance(value, dict) and not value and _is_table(source_name(source)):
            state.guard_on_key_order.discard(source)
            state.guards.add(source.make_guard(make))


def _is_table(source: str) -> bool:
    """Whether a source is the dictionary of a module's parameters, buffers, submodules or hooks."""
    return source.rpartition(".")[2] in _TABLES


_TABLES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))


def _length_guard() -> Any:
    from torch._dynamo.guards import GuardBuilder

    return GuardBuilder.SEQUENCE_LENGTH


def drop_guards(graph_output: Any, values: Values, unguarded: Callable[[object, str], bool]) -> None:
    """Drop the guards of attributes, and of all that is reached through them, after :func:`compare_identities`.

    Args:
        graph_output: Dynamo's ``GraphCaptureOutput``.
        values: of what was traced.
        unguarded: of an object and the name of an attribute of it, whether it is such an attribute.
    """
    guards = graph_output.output_graph.guards
    for guard in [*guards.inner]:
        create = getattr(guard.create_fn, "func", guard.create_fn)
        is_of_attribute = getattr(create, "__name__", "") == "HASATTR"  # its source is the object that may have one
        if not is_of_attribute and is_reached(guard.originating_source, values, unguarded):
            guards.inner.discard(guard)


def is_reached(source: Any, values: Values, through: Callable[[object, str], bool]) -> bool:
    """Whether Dynamo reaches a value through such an attribute: see :func:`drop_guards`."""
    for owner, name in values.steps_to(source):
        if through(owner, name):
            return True
        if isinstance(owner, Tensor):  # the value is an attribute of a tensor that may be reached so
            return False
    return False


def _drop_weak_references(guards: Any) -> None:
    """Let guards, which are kept to be built again, drop their weak references to tensors."""
    for guard in guards:
        guard.obj_weakref = None
        create = guard.create_fn
        if isinstance(create, partial) and isinstance(create.keywords.get("value"), TensorWeakRef):
            guard.create_fn = partial(create.func)  # without a value, it looks the tensor up in the scope


def _mark_skippable(root: Any) -> None:
    """Let Dynamo skip a module's guards while no dictionary below it has been written ("recursive dict tags").

    Dynamo's own choice (``find_tag_safe_roots``) skips too much: the methods of a list and guards on its items,
    attributes that a weight is guarded not to have, closures and defaults of functions; and since Python 3.12 it does
    not see what ``update`` writes into an empty dictionary. It also skips too little: in
    torch 2.11 modules that iterate over an ``nn.Sequential``, and in any version guards on the code of a class's
    method.
    """
    if not hasattr(root, "mark_tag_safe_root"):
        return

    def mark(node: Any) -> bool:
        inner = [mark(child) for child in _children(node)]  # a list: every child has to be marked
        if skippable := all(inner) and _is_skippable(node):
            node.mark_tag_safe()
        return skippable

    def mark_roots(node: Any) -> None:
        if node.is_tag_safe() and issubclass(node.get_type_of_guarded_value(), nn.Module):
            node.mark_tag_safe_root()
            return
        for child in _children(node):
            mark_roots(child)

    mark(root)
    mark_roots(root)


def _is_skippable(node: Any) -> bool:
    """Whether what this node guards can change only with a dictionary's version, if that holds for all nodes below."""
    kind = node.get_type_of_guarded_value()
    if hasattr(node, "get_key_value_managers"):
        return bool(_children(node))  # Dynamo records no version of an empty dictionary
    if issubclass(kind, Tensor):
        absent = any(type(guard).__name__ == "NO_HASATTR" for guard in node.get_leaf_guards())
        return bool(node.has_no_accessors()) and not node.has_object_aliasing_guard() and not absent
    if node.is_guarded_value_immutable() or _is_identity(node):
        return True
    if issubclass(kind, dict) and not _children(node) and not _is_table(node.get_source()):
        return False  # it may be empty
    return all(
        _is_skippable_access(kind, node.get_source(), type(accessor).__name__, child)
        for accessor, child in zip(node.get_accessors(), node.get_child_managers(), strict=True)
    ) and issubclass(kind, (dict, nn.Module, type, *_FUNCTIONS, tuple))


def _is_identity(node: Any) -> bool:
    """Whether a node guards which object there is, and nothing about it."""
    return bool(node.has_no_accessors()) and {type(guard).__name__ for guard in node.get_leaf_guards()} == {"ID_MATCH"}


def _is_skippable_access(kind: type, source: str, accessor: str, child: Any) -> bool:
    """Whether the step from a value of this type to what is guarded below it goes through a dictionary or a class."""
    if issubclass(kind, dict):
        return accessor == "DictGetItemGuardAccessor"
    if issubclass(kind, nn.Module):
        has_no_guards = not child.get_leaf_guards() and not child.get_child_managers()  # such as for ``__iter__``
        return accessor in ("GetGenericDictGuardAccessor", "TypeGuardAccessor") or has_no_guards
    if issubclass(kind, type):
        method = issubclass(child.get_type_of_guarded_value(), (type, *_FUNCTIONS))
        return accessor in ("TypeDictGuardAccessor", "TypeMROGuardAccessor") or method
    if issubclass(kind, _FUNCTIONS):
        return accessor == "CodeGuardAccessor"
    return accessor == "TupleGetItemGuardAccessor" and source.endswith("__mro__")


_FUNCTIONS = (FunctionType, MethodType, staticmethod, classmethod)


def _subtree(node: Any) -> Iterator[Any]:
    """A node of the guard tree, and all below it."""
    yield node
    for child in _children(node):
        yield from _subtree(child)


def _children(node: Any) -> list[Any]:
    children = list(node.get_child_managers())
    if hasattr(node, "get_key_value_managers"):
        children += [child for pair in node.get_key_value_managers().values() for child in pair if child is not None]
    return children


def _is_root(node: Any) -> bool:
    return bool(getattr(node, "is_tag_safe_root", bool)()) and hasattr(node, "is_recursive_dict_tag_matching_disabled")


def _is_slow(root: Any) -> bool:
    return bool(root.is_recursive_dict_tag_matching_disabled())
