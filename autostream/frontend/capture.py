"""Capture with TorchDynamo: a callable and its arguments in, a graph and guards out.

    model, args, kwargs ──▶ Capture ──┬─ module   an fx graph of torch ops: flat tensors in, flat tensors out
                                      ├─ inputs   where each of its inputs comes from, and whether it stays there
                                      ├─ guards   what has to hold for the graph to stand for a call
                                      └─ restore  puts Python's side effects and the outputs back, by Dynamo's bytecode

Dynamo is the only judge of whether a call is as it was traced. It does not guard which object a weight is, for its
bytecode fetches weights anew in each call; a captured CUDA graph has their addresses. So the identity of every tensor
that is no argument is guarded as well, by Dynamo's own guard for identities.

What Dynamo traces and guards with is private to it, and used in this file alone (seen in torch 2.11 and 2.13):

    ``convert_frame.compile_frame``                 traces a code object; what ``fullgraph_capture`` is made of
    ``GraphCaptureOutput``                          guards, bytecode and globals of a trace
    ``CheckFunctionManager``                        builds guards; asks them about the locals of a call
    ``InstructionTranslator.current_tx``            what Python objects the callable writes to (``side_effects``)
    ``fx.Node._dynamo_source``                      where an input of the graph comes from

Where one is missing, :func:`capture` raises a :class:`~autostream.errors.TraceError` that names it.
"""

from __future__ import annotations

import builtins
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.torch_version import TorchVersion
from torch.utils.weak import TensorWeakRef

from autostream.analysis.source import user_line
from autostream.errors import FastPathError, TraceError, first_line
from autostream.frontend.dynamo_log import overheard

Arguments = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""Of a call: what is called, and its positional and keyword arguments."""

Store = tuple[Any, str, Any]
"""An object, the name of an attribute, and the constant that it is set to."""

SETTINGS: Mapping[str, Any] = {
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,  # another size is another graph
    "specialize_float": True,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "trace_autograd_ops": True,
    "allow_rnn": True,
    "skip_nnmodule_hook_guards": False,  # a hook that comes later takes effect
    "use_recursive_dict_tags_for_guards": False,  # what is skipped, and what is not, is said below
    "error_on_nested_fx_trace": False,
    "trace_numpy": False,  # NumPy's functions would draw other numbers, and return arrays where there were scalars
    "suppress_errors": False,
}
"""Dynamo's, while it captures. Those that a version lacks are left out."""


GUARDS_SKIP_WEIGHTS = TorchVersion(torch.__version__) < TorchVersion("2.13")
"""Whether the version of a dictionary vouches for the sizes of weights in it, and for whether they require gradients.

So it does to torch 2.11, though it does not change with these; whoever relies on guards looks at weights as well then.
"""


def call(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What Dynamo traces: it inlines the model's ``__call__``, so hooks and wrappers are guarded like all else."""
    return model(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Input:
    """Where an input of a captured graph comes from.

    Attributes:
        name: of the placeholder.
        source: as Dynamo writes it, such as ``L['model']._modules['fc']._parameters['weight']``.
        is_argument: whether it is, or lies in, an argument of the call. Others are the model's, or globals.
    """

    name: str
    source: str
    is_argument: bool


class Guards:
    """Whether a call is one that a graph was captured for, as far as Dynamo can see.

    For a module that has not changed, Dynamo looks at the versions of its dictionaries alone, until one is written,
    with whatever value; then at each guard again, for good. So guards that hold and have become slow are built anew.
    No dictionary knows of a module's class, so the classes are compared beside them.

    Args:
        build: builds Dynamo's manager of the guards for the locals of a call for which they hold.
        scope: the locals of the captured call.
    """

    def __init__(self, build: Callable[[dict[str, Any]], Any], scope: dict[str, Any]) -> None:
        self._build = build
        self._forward = getattr(type(scope["model"]), "forward", None)
        self._classes = [type(module) for module in _modules_of(scope["model"])]
        self._modules: list[nn.Module] | None = None
        self._calls = self._builds = 0
        self._renew(scope)

    def __call__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Ask all guards, in C++."""
        scope = {"model": model, "args": args, "kwargs": kwargs}
        if not self._check(scope) or self._manager.lost or not self._of_one_class(model):
            self._modules = None  # some may be the model's no longer
            return False
        self._calls += 1
        if self._calls % _LOOK == 0 and self._builds < _MOST and any(map(_is_slow, self._roots)):
            self._renew(scope)
        return True

    def failed(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The guard that does not hold of a call, as Dynamo writes it; ``""`` where all do."""
        if self._manager.lost:
            return f"{self._manager.lost} is gone"
        found = self._manager.guard_manager.check_verbose({"model": model, "args": args, "kwargs": kwargs})
        if found.result:
            return "" if self._of_one_class(model) else "a module is of another class now, or its class has changed"
        return "; ".join(part.partition("#")[0].strip() for part in found.verbose_code_parts)

    def _of_one_class(self, model: Callable[..., Any]) -> bool:
        """Whether all modules are of the classes that they were captured in.

        To Dynamo, another ``forward`` of the model's class is other code, with guards of its own.
        """
        if self._modules is None:
            self._modules = _modules_of(model)
        return [*map(type, self._modules)] == self._classes and getattr(type(model), "forward", None) is self._forward

    def _renew(self, scope: dict[str, Any]) -> None:
        self._builds += 1
        self._manager = self._build(scope)
        self._check: Callable[[dict[str, Any]], bool] = self._manager.guard_manager.check
        self._roots = [node for node in _nodes(self._manager.guard_manager.root) if _is_root(node)]


def _modules_of(model: Callable[..., Any]) -> list[nn.Module]:
    return list(model.modules()) if isinstance(model, nn.Module) else []


_LOOK = 256
"""In one of so many calls it is looked whether guards have become slow."""

_MOST = 8
"""How often guards are built: what writes dictionaries all the time makes them slow all the time."""


def _nodes(node: Any) -> Iterator[Any]:
    """A node of a tree of guards, and all below it."""
    yield node
    for child in _children(node):
        yield from _nodes(child)


def _children(node: Any) -> list[Any]:
    children = list(node.get_child_managers())
    if hasattr(node, "get_key_value_managers"):
        children += [child for pair in node.get_key_value_managers().values() for child in pair if child is not None]
    return children


def _is_root(node: Any) -> bool:
    return bool(getattr(node, "is_tag_safe_root", bool)()) and hasattr(node, "is_recursive_dict_tag_matching_disabled")


def _is_slow(root: Any) -> bool:
    return bool(root.is_recursive_dict_tag_matching_disabled())


@dataclass(frozen=True, slots=True)
class Capture:
    """A call of a model as a graph.

    Attributes:
        module: takes the tensors of ``inputs`` and returns a tuple of tensors.
        inputs: what it takes, in order.
        tensors: what the captured call gave it.
        guards: for which other calls it stands.
        restore: see :meth:`restored`.
        stores: the constants that a call leaves in attributes of Python objects: the object, the name, the value.
        effects: whether a call does more to Python's objects than that.
    """

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    tensors: tuple[Tensor, ...]
    guards: Guards
    restore: Callable[[Callable[..., Any]], Callable[..., Any]]
    stores: tuple[Store, ...] = ()
    effects: bool = False

    def given(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The tensors that Dynamo's bytecode gives the graph in a call; nothing is run."""
        try:
            self.restore(_take)(model, args, kwargs)
        except _Given as given:
            return given.values
        raise AssertionError("a captured call runs its graph")

    def restored(self, run: Callable[..., Sequence[Any]]) -> Callable[[Any, Any, Any], Any]:
        """A function of ``(model, args, kwargs)`` that does what the model does, with ``run`` for the graph.

        Args:
            run: takes the flat tensors, and returns as many as ``module``.
        """
        return self.restore(run)


class _Given(Exception):  # noqa: N818 - a notice within this file, not an error
    """A graph has been called, with these values."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__()
        self.values = values


def _take(*values: Any) -> Sequence[Any]:
    raise _Given(values)


def capture(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture | None:
    """Trace a call, in the modes that are set now. Nothing is computed, and nothing that Python can see changes.

    Args:
        model: any callable.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        Nothing for a call that computes nothing with tensors.

    Raises:
        FastPathError: ``torch.compile`` would not do the same as the model.
        TraceError: Dynamo cannot capture it as one graph, or this version of PyTorch lacks what capturing builds on;
            the message is Dynamo's.

    Example:
        >>> captured = capture(torch.nn.Linear(2, 3), (torch.ones(1, 2),), {})
        >>> [given.is_argument for given in captured.inputs]
        [False, False, True]
        >>> captured.guards(torch.nn.Linear(2, 3), (torch.ones(1, 2),), {})
        False
    """
    found: list[tuple[fx.GraphModule, Sequence[Any], tuple[Store, ...], bool]] = []

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        found.append((module, example_inputs, *_effects()))
        return module

    # Dynamo adds what it imports to the globals of the code that it traces: these are nobody's but this capture's.
    globals_: dict[str, Any] = {"__name__": __name__, "__builtins__": builtins}
    function, scope = FunctionType(call.__code__, globals_), {"model": model, "args": args, "kwargs": kwargs}
    with compiling(), _timed(), overheard(lambda reason: None):
        drawn = random.getstate()  # Dynamo draws from it in the place of the model
        try:
            output = _compile_frame(function, scope, backend)
        except Exception as error:
            raise TraceError(reason_of(error)) from error
        finally:
            random.setstate(drawn)
        if output.tracer_output.output_graph.random_calls:  # graphs would draw the same numbers again and again
            raise FastPathError("it draws random numbers from a generator of Python's")
        if not found:
            return None
        ((module, example_inputs, stores, effects),) = found
        captured = _capture_of(output, function.__code__, scope, module, example_inputs)
        return replace(captured, stores=stores, effects=effects)


def _compile_frame(function: FunctionType, scope: dict[str, Any], backend: Callable[..., Any]) -> Any:
    from torch._dynamo.convert_frame import compile_frame, get_compile_id
    from torch._guards import CompileContext, compile_context

    with compile_context(CompileContext(get_compile_id({}))):
        return compile_frame(
            function.__code__,
            function.__globals__,
            scope,
            builtins.__dict__,
            (),  # type: ignore[arg-type]  # it has no closure
            compiler_fn=backend,
            one_graph=True,
            restart_reasons=set(),
        )


def _capture_of(
    output: Any,
    code: CodeType,
    scope: dict[str, Any],
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
) -> Capture:
    graph_output = output.graph_capture_output()
    placeholders = module.graph.find_nodes(op="placeholder")
    sources = [getattr(node, "_dynamo_source", None) for node in placeholders]
    if None in sources:
        raise TraceError(f"torch {torch.__version__} does not say where inputs of a captured graph come from")
    if numbers := [node.name for node, value in zip(placeholders, example_inputs, strict=True) if _no_tensor(value)]:
        raise TraceError(f"the graph takes a number, {numbers[0]}: pass it as a tensor")
    inputs = tuple(
        Input(node.name, _name(source), _root(source) in ("args", "kwargs"))
        for node, source in zip(placeholders, sources, strict=True)
    )
    _guard_identities(graph_output, [s for s, given in zip(sources, inputs, strict=True) if not given.is_argument])
    state = graph_output.output_graph

    def build(scope: dict[str, Any]) -> Any:
        state.local_scope = scope
        try:
            with _timed(), _configured():
                manager = _manager_type()(code, state)
            _skip_what_is_vouched_for(manager.guard_manager.root)
            manager.guard_manager.check(scope)  # it notes what dictionaries there are, and raises if a value is another
            return manager
        finally:
            state.local_scope = {}  # it would keep the arguments
            _forget_guarded(state.guards)

    environment = graph_output.get_runtime_env()
    used = _used(environment, graph_output.f_globals)
    backend_id = module.meta.get("backend_id") or module._backend_id

    def restore(run: Callable[..., Any]) -> Callable[..., Any]:
        restored: Callable[..., Any] = environment.forward_callable(backend_id, run, extra_globals=used)
        return restored

    return Capture(module, inputs, tuple(example_inputs), Guards(build, scope), restore)


@cache
def _manager_type() -> Any:
    from torch._dynamo.guards import CheckFunctionManager

    class Manager(CheckFunctionManager):
        """Builds guards, and hears when an object that they know by identity is gone: another may have that one's."""

        lost = ""

        def invalidate(self, obj_str: str) -> None:
            self.lost = obj_str

    return Manager


def _used(environment: Any, globals_: dict[str, Any]) -> dict[str, Any]:
    """The globals that Dynamo's bytecode names."""
    known = {**vars(builtins), **globals_}
    return {name: known[name] for name in environment.external_refs if name in known}


def _no_tensor(value: Any) -> bool:
    return not isinstance(value, Tensor)


def _name(source: Any) -> str:
    """A source as Dynamo writes it: a property in 2.13, a method in 2.11."""
    return str(source.name() if callable(source.name) else source.name)


def _root(source: Any) -> str:
    """The local that a source begins with, or ``""``."""
    while (base := getattr(source, "base", None)) is not None:
        source = base
    return str(getattr(source, "local_name", ""))


def _guard_identities(graph_output: Any, sources: Sequence[Any]) -> None:
    """Guard which object each of these sources is, by the guard that ``ID_MATCH`` is made of.

    That itself writes the object into its message, which for a tensor is its values (in 2.11), and refers to it weakly,
    for which ``torch.utils.swap_tensors`` would refuse it. Once it is gone, another tensor may have its identity: all
    else that is guarded is the same then, and what runs the graph looks at addresses.
    """

    def identity(builder: Any, guard: Any) -> None:
        told = [f"{_name(guard.originating_source)} is the tensor that was captured"]
        builder.get_guard_manager(guard).add_id_match_guard(id(builder.get(guard)), told, guard.user_stack)

    guards = graph_output.output_graph.guards
    for source in sources:
        guards.add(source.make_guard(identity))


def _forget_guarded(guards: Any) -> None:
    """Let guards, which are kept to be built again, drop their weak references to tensors."""
    for guard in guards:
        guard.obj_weakref = None
        made = guard.create_fn
        if isinstance(made, partial) and isinstance(made.keywords.get("value"), TensorWeakRef):
            guard.create_fn = partial(made.func)  # which looks for the tensor in the scope


def _skip_what_is_vouched_for(root: Any) -> None:
    """Let Dynamo skip guards of modules as long as no dictionary below has been written ("recursive dict tags").

    Dynamo's own choice of them (``find_tag_safe_roots``) skips too much: a list's methods and what is guarded of that
    list, attributes that a weight is guarded not to have, closures and defaults of functions. And too little: on torch
    2.11 what iterates over an ``nn.Sequential``, and in any version what looks at the code of a class's method.
    """
    if not hasattr(root, "mark_tag_safe_root"):
        return

    def mark(node: Any) -> bool:
        inner = [mark(child) for child in _children(node)]  # all of them
        if vouched := all(inner) and _is_vouched_for(node):
            node.mark_tag_safe()
        return vouched

    def mark_roots(node: Any) -> None:
        if node.is_tag_safe() and issubclass(node.get_type_of_guarded_value(), nn.Module):
            node.mark_tag_safe_root()
            return
        for child in _children(node):
            mark_roots(child)

    mark(root)
    mark_roots(root)


def _is_vouched_for(node: Any) -> bool:
    """Whether what is guarded here changes only with a dictionary's version, if that is so of all below."""
    kind = node.get_type_of_guarded_value()
    if hasattr(node, "get_key_value_managers"):
        return True
    if issubclass(kind, Tensor):
        absent = any(type(guard).__name__ == "NO_HASATTR" for guard in node.get_leaf_guards())
        return bool(node.has_no_accessors()) and not node.has_object_aliasing_guard() and not absent
    if node.is_guarded_value_immutable():
        return True
    return all(
        _is_vouched_access(kind, node.get_source(), type(accessor).__name__, child)
        for accessor, child in zip(node.get_accessors(), node.get_child_managers(), strict=True)
    ) and issubclass(kind, (dict, nn.Module, type, *_FUNCTIONS, tuple))


def _is_vouched_access(kind: type, source: str, accessor: str, child: Any) -> bool:
    """Whether the way from a value of this kind to what is guarded below it is a dictionary's, or a class's."""
    if issubclass(kind, dict):
        return accessor == "DictGetItemGuardAccessor"
    if issubclass(kind, nn.Module):
        has_no_guards = not child.get_leaf_guards() and not child.get_child_managers()  # such as ``__iter__`` has
        return accessor in ("GetGenericDictGuardAccessor", "TypeGuardAccessor") or has_no_guards
    if issubclass(kind, type):
        method = issubclass(child.get_type_of_guarded_value(), (type, *_FUNCTIONS))
        return accessor in ("TypeDictGuardAccessor", "TypeMROGuardAccessor") or method
    if issubclass(kind, _FUNCTIONS):
        return accessor == "CodeGuardAccessor"
    return accessor == "TupleGetItemGuardAccessor" and source.endswith("__mro__")


_FUNCTIONS = (FunctionType, MethodType, staticmethod, classmethod)


def _effects() -> tuple[tuple[Store, ...], bool]:
    """What the trace that has come to its backend does to Python objects that were there before it.

    Returns:
        The constants that it leaves in attributes; and whether there is more than that.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    output_graph: Any = InstructionTranslator.current_tx().output
    effects = output_graph.side_effects
    changed = [
        item
        for item in effects.id_to_variable.values()
        if effects.is_modified(item) and not isinstance(item.mutation_type, AttributeMutationNew | ValueMutationNew)
    ]
    stores: list[Store] = []
    for item in changed:
        owner, attributes = vars(item).get("value"), effects.store_attr_mutations.get(item)
        constants = None if attributes is None else _constants(attributes)
        if constants is None or owner is None or isinstance(owner, list | dict | set | tuple):
            return (), True
        stores += [(owner, name, value) for name, value in constants.items()]
    return tuple(stores), bool(effects.tensor_hooks or effects.save_for_backward)


def _constants(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """What attributes are set to, if these are constants."""
    try:
        constants = {name: value.as_python_constant() for name, value in attributes.items()}
    except Exception:  # each version of PyTorch says in its own way that something is none
        return None
    mutable = any(isinstance(value, list | dict | set | Tensor) for value in constants.values())
    return None if mutable else constants


def reason_of(error: BaseException) -> str:
    """Why Dynamo cannot capture something, in one line, with the user's line where it says which."""
    stack = getattr(error, "real_stack", None)
    line = user_line("".join(traceback.format_list(stack))) if stack else ""
    reason = first_line(error).removeprefix("Unsupported: ").removeprefix("UserError: ")
    return f"{reason} ({line})" if line else reason


@contextmanager
def compiling(**settings: Any) -> Iterator[None]:
    """Dynamo's settings and its lock."""
    with ExitStack() as stack:
        stack.enter_context(compile_lock())
        stack.enter_context(_configured(**settings))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"torch\.")  # of tracing; what is refused is told by its reason
        yield


def _configured(**settings: Any) -> AbstractContextManager[Any]:
    from torch._dynamo import config

    known = {name: value for name, value in {**SETTINGS, **settings}.items() if hasattr(config, name)}
    patched: AbstractContextManager[Any] = config.patch(known)
    return patched


@contextmanager
def _timed() -> Iterator[None]:
    """What Dynamo's entry points enter, and what it does not work without."""
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    with get_metrics_context(), dynamo_timed("autostream.capture", log_pt2_compile_event=True):
        yield


def compile_lock() -> AbstractContextManager[Any]:
    """Dynamo's own: it, its tracers and Inductor change what all threads see."""
    lock: AbstractContextManager[Any] = getattr(torch._dynamo.convert_frame, "compile_lock", None) or nullcontext()
    return lock
