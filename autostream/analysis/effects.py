"""The effects of one fx node: what it reads and writes, what its results may alias, and why it cannot be captured.

They come from operator schemas and fake values, except where those are known to be wrong:

- Some composite operators update running statistics although their schemas do not say so (PyTorch also keeps a list of
  their names: ``torch/csrc/utils/schema_info.cpp``).
- A dropout that drops nothing returns its argument, but its fake value comes from a decomposition that clones.
- ``lift_fresh_copy`` copies, but its fake value shares memory with its argument.

A call without a schema is assumed to read and write all of its arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from autostream.analysis.capturability import opaque_refusal_of, refusal_of
from autostream.analysis.values import (
    input_tensors,
    nodes_in,
    storages_in,
    submodule_graph,
    tensors_in,
    value_of,
)
from autostream.utils.kernels import Kernel
from autostream.utils.operators import base_name, bound_arguments, draws, written_names

# Operators that update running_mean and running_var, unknown to their schema, if this argument is true ("": always).
_UPDATES_STATISTICS = {
    "aten::batch_norm": "training",
    "aten::native_batch_norm": "training",
    "aten::cudnn_batch_norm": "training",
    "aten::miopen_batch_norm": "training",
    "aten::_batch_norm_impl_index": "training",
    "aten::instance_norm": "use_input_stats",
    "aten::batch_norm_update_stats": "",
    "aten::batch_norm_gather_stats": "",
    "aten::batch_norm_gather_stats_with_counts": "",
}

_STATISTICS = ("running_mean", "running_var")

# Return their argument if they drop nothing.
_DROPOUTS = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})

# Copy, although their fake values share memory with their argument.
_COPIES = frozenset({"lift_fresh_copy"})

# Views if strides allow it, else copies; strides can differ between the device of the trace and that of the run.
_VIEWS_IF_STRIDES_ALLOW = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous", "channel_shuffle"})

# Operators that overwrite their first argument without reading it.
_OVERWRITES = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})

_HOST_QUERY_NAMES = """
    _assert_scalar _assert_tensor_metadata dim get_device is_complex is_conj is_contiguous is_floating_point is_neg
    is_pinned is_same_size is_signed numel result_type size storage_offset stride sym_constrain_range
    sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride
"""
_HOST_QUERIES = frozenset(_HOST_QUERY_NAMES.split())

ALLOCATES_ONLY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"})
"""Operators whose result is uninitialized."""

_CHECKS = frozenset({"_assert_async", "_linalg_check_errors"})

_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
_WAIT = "_c10d_functional::wait_tensor"
EVERY_GROUP = "collective"
"""The order of a call that may communicate over any process group."""
_EVERY_ORDER = frozenset({"world", "rng", EVERY_GROUP})


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of one fx node. The nodes named here are its arguments, in the order in which it takes them.

    Attributes:
        reads: every argument but those that it only overwrites. A wait for a collective also reads what that takes.
        writes: the arguments that it mutates.
        aliases: the arguments that its results may alias, even if the fake values do not.
        orders: resources whose users keep their program order: ``"rng"``, ``"collective:0"`` for the process group
            ``"0"``, ``"collective"`` for all process groups, ``"world"``.
        launches: whether it does more than make a view or compute a size.
        may_copy: whether strides decide if it is a view or a copy.
        copies: whether its result is new memory, even if the fake values alias.
        allocates: whether it only allocates uninitialized memory.
        uncapturable: why a CUDA graph cannot hold it, or ``""``.
    """

    reads: tuple[fx.Node, ...] = ()
    writes: tuple[fx.Node, ...] = ()
    aliases: tuple[fx.Node, ...] = ()
    orders: frozenset[str] = frozenset()
    launches: bool = True
    may_copy: bool = False
    copies: bool = False
    allocates: bool = False
    uncapturable: str = ""


def effects_of(node: fx.Node) -> Effects:
    """Determine the effects of a node of a traced program.

    Args:
        node: a node whose fake value is in ``meta["val"]``, as are those of its arguments.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> y = graph.call_function(torch.ops.aten.add_.Tensor, (x, 1))
        >>> x.meta["val"] = y.meta["val"] = torch.ones(2)
        >>> effects_of(y).writes
        (x,)
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return Effects(launches=False)
    if isinstance(node.target, OpOverload) and node.target.namespace != "c10d":
        return _operator_effects(node, node.target)
    if isinstance(node.target, Kernel):
        return _kernel_effects(node, node.target)
    body = wrapped_graph(node)
    if body is not None:
        return _wrapper_effects(node, body)
    if _computes_on_host(node):
        return Effects(reads=_inputs(node), launches=False)
    return _opaque_effects(node)


def argument_views(graph: fx.Graph, others: Container[str] = ()) -> frozenset[str]:
    """The names of the nodes that are certainly views of arguments, and of ``get_attr`` nodes.

    Ops like ``reshape`` that may copy are left out: a copy of a tensor that is mutated later keeps the old values.

    Args:
        graph: the graph of a traced program.
        others: the names of nodes of which views are wanted, too.

    Example:
        >>> import torch
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> view = graph.call_function(torch.ops.aten.t.default, (x,))
        >>> copy = graph.call_function(torch.ops.aten.ravel.default, (x,))
        >>> x.meta["val"] = view.meta["val"] = copy.meta["val"] = torch.ones(2)
        >>> argument_views(graph)
        frozenset({'t_default'})
    """
    views = set[fx.Node]()
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and _is_view_of(node, views, others)):
            views.add(node)
    return frozenset(node.name for node in views)


def _is_view_of(node: fx.Node, views: Set[fx.Node], others: Container[str]) -> bool:
    """Whether a node is certainly a view of an argument, of one of these views, or of one of the others."""
    effects = effects_of(node)
    if effects.launches or effects.may_copy or not node.all_input_nodes:
        return False

    def has_views(source: fx.Node) -> bool:
        other = source.name in others and isinstance(value_of(source), Tensor)  # the parts of a tuple are no views
        return source.op == "placeholder" or source in views or other

    return all(map(has_views, node.all_input_nodes))


def only_checks(node: fx.Node) -> bool:
    """Whether a node only raises an error for some values of its arguments.

    Example:
        >>> graph = fx.Graph()
        >>> only_checks(graph.call_function(torch.ops.aten._assert_async.default, (graph.placeholder("x"),)))
        True
    """
    ordered = node.target is torch.ops.higher_order.with_effects  # by which AOTAutograd keeps a check in order
    target = node.args[1] if ordered else node.target
    return isinstance(target, OpOverload) and base_name(target) in _CHECKS


def group_of(node: fx.Node) -> str:
    """The name of the process group over which a node communicates; ``""`` for other nodes, and if it is not known.

    Example:
        >>> import torch.distributed._functional_collectives
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> group_of(graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0")))
        '0'
    """
    if not isinstance(node.target, OpOverload) or not _takes_group(node.target):
        return ""
    group = bound_arguments(node, node.target).get("group_name", "")
    return str(getattr(group, "group_name", group))


def reduces_for_all(node: fx.Node) -> bool:
    """Whether a node is an all-reduce."""
    return isinstance(node.target, OpOverload) and base_name(node.target).startswith("all_reduce")


def waits_for_collective(node: fx.Node) -> bool:
    """Whether a node waits for the result of a collective."""
    return isinstance(node.target, OpOverload) and node.target._schema.name == _WAIT


@cache
def _takes_group(target: OpOverload) -> bool:
    return any(argument.name == "group_name" for argument in target._schema.arguments)


# --- operators with a schema -----------------------------------------------------------------------------------------


def _operator_effects(node: fx.Node, target: OpOverload) -> Effects:
    arguments = bound_arguments(node, target)
    written, aliased = _annotated(target)
    idle = base_name(target) in _DROPOUTS and not draws(target, arguments)
    writes = _named(arguments, written + _unannotated_writes(target, arguments))
    aliases = _named(arguments, (*aliased, "input") if idle else aliased)
    orders = _orders(node, target, arguments, bool(writes))
    launches = bool(writes or orders) or not (idle or _only_views(node, target))
    return Effects(
        reads=_unique(
            (
                *_named(arguments, [name for name in arguments if name not in _overwritten(target)]),
                *(_taken_by_collective(node) if target._schema.name == _WAIT else ()),
            )
        ),
        writes=writes,
        aliases=tuple(source for source in aliases if _could_alias(node, source)),
        orders=orders,
        launches=launches,
        may_copy=base_name(target) in _VIEWS_IF_STRIDES_ALLOW,
        copies=base_name(target) in _COPIES,
        allocates=base_name(target) in ALLOCATES_ONLY and not node.all_input_nodes,
        uncapturable=refusal_of(node, target, arguments) if launches else "",
    )


@cache
def _annotated(target: OpOverload) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the arguments that the schema says are written, and of those that results may alias."""
    if target._schema.name == _WAIT:
        # It returns its argument, which is complete only now. As a write, it comes before every later use.
        return ("tensor",), ("tensor",)
    infos = [(arg.name, arg.alias_info) for arg in target._schema.arguments]
    returned = {name for result in target._schema.returns for name in _alias_set(result.alias_info)}
    aliased = tuple(name for name, info in infos if returned & _alias_set(info))
    return written_names(target), aliased


@cache
def _overwritten(target: OpOverload) -> frozenset[str]:
    """The names of the arguments that are overwritten without being read: destinations of copies, and ``out=``."""
    arguments = target._schema.arguments
    outs = {arg.name for arg in arguments if arg.is_out}
    return frozenset(outs | {arguments[0].name} if target._schema.name in _OVERWRITES else outs)


def _alias_set(info: Any) -> set[str]:
    return set(info.before_set) | set(info.after_set) if info is not None else set()


def _unannotated_writes(target: OpOverload, arguments: dict[str, Any]) -> tuple[str, ...]:
    condition = _UPDATES_STATISTICS.get(target._schema.name)
    if condition is None or (condition and arguments[condition] is False):
        return ()
    return _STATISTICS


def _taken_by_collective(wait: fx.Node) -> tuple[fx.Node, ...]:
    """What the collective that a node waits for reads: until then it may still do so."""
    source = wait.args[0]
    while isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    return _inputs(source) if isinstance(source, fx.Node) and group_of(source) else ()


def _orders(node: fx.Node, target: OpOverload, arguments: dict[str, Any], writes: bool) -> frozenset[str]:
    if target._schema.name == _WAIT:
        return frozenset()  # it comes after what it waits for, and may come after other collectives
    if (group := group_of(node)) or target.namespace in _COLLECTIVES:
        return frozenset({f"{EVERY_GROUP}:{group}" if group else EVERY_GROUP})
    if draws(target, arguments):
        return frozenset({"rng"})
    only_for_its_effect = not target._schema.returns and not writes and base_name(target) not in _HOST_QUERIES
    return frozenset({"world"}) if only_for_its_effect or target.namespace == "profiler" else frozenset()


def _only_views(node: fx.Node, target: OpOverload) -> bool:
    """Whether a call that writes nothing only returns sizes, or views of its arguments."""
    if base_name(target) in _HOST_QUERIES:
        return True
    results = tensors_in(value_of(node))
    if base_name(target) in _COPIES or not results or any(result.layout is not torch.strided for result in results):
        return False
    return storages_in(results) <= storages_in(input_tensors(node))


def _could_alias(node: fx.Node, source: fx.Node) -> bool:
    """Whether two values may share memory; if their dtypes or devices differ, only if their fake values do."""
    result, argument = value_of(node), value_of(source)
    if storages_in(result) & storages_in(argument):
        return True
    return not _kinds(result).isdisjoint(_kinds(argument))


def _kinds(value: Any) -> set[tuple[torch.dtype, torch.device]]:
    return {(tensor.dtype, tensor.device) for tensor in tensors_in(value)}


# --- compiled kernels ------------------------------------------------------------------------------------------------


def _kernel_effects(node: fx.Node, kernel: Kernel) -> Effects:
    """A kernel names the positions of the arguments that it writes, and returns nothing."""

    def at(positions: Iterable[int]) -> tuple[fx.Node, ...]:
        return _unique(source for position in positions for source in nodes_in(node.args[position]))

    return Effects(
        reads=at(position for position in range(len(node.args)) if position not in kernel.overwritten),
        writes=at(sorted(kernel.written)),
        uncapturable=opaque_refusal_of(node),
    )


# --- calls without a schema ------------------------------------------------------------------------------------------


def _computes_on_host(node: fx.Node) -> bool:
    """Whether a node indexes a tuple or computes with Python numbers."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    of_numbers = getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
    symbolic = getattr(node.target, "__name__", "").startswith("sym_")
    return (of_numbers or symbolic) and not input_tensors(node)


def _opaque_effects(node: fx.Node) -> Effects:
    tensors = tuple(source for source in node.all_input_nodes if tensors_in(value_of(source)))
    return Effects(
        reads=_inputs(node),
        writes=tensors,
        aliases=tensors,
        orders=_EVERY_ORDER,
        uncapturable=opaque_refusal_of(node),
    )


# --- calls that run a graph under another autocast or gradient mode --------------------------------------------------

_WRAPPERS = frozenset({"wrap_with_autocast", "wrap_with_set_grad_enabled"})


def wrapped_graph(node: fx.Node) -> fx.Graph | None:
    """The graph of a call that only runs it under another autocast or gradient mode; ``None`` for other calls."""
    if isinstance(node.target, HigherOrderOperator) and str(node.target) in _WRAPPERS:
        return submodule_graph(_body_argument(node))
    return None


def _body_argument(node: fx.Node) -> fx.Node:
    return next(arg for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr")


def _wrapper_effects(node: fx.Node, body: fx.Graph) -> Effects:
    """The effects of the body's nodes, with every tensor followed back to the operands that it may alias."""
    operands = node.args[node.args.index(_body_argument(node)) + 1 :]
    inner = {step: effects_of(step) for step in body.nodes}
    roots = dict(zip(body.find_nodes(op="placeholder"), map(nodes_in, operands), strict=True))
    for step, effects in inner.items():
        roots.setdefault(step, _unique(root for source in _aliased(step, effects) for root in roots[source]))
    return Effects(
        reads=_inputs(node),
        writes=_unique(root for effects in inner.values() for written in effects.writes for root in roots[written]),
        aliases=_unique(root for result in body.output_node().all_input_nodes for root in roots[result]),
        orders=frozenset().union(*(effects.orders for effects in inner.values())),
        launches=any(effects.launches for effects in inner.values()),
        may_copy=any(effects.may_copy for effects in inner.values()),
        uncapturable=next((effects.uncapturable for effects in inner.values() if effects.uncapturable), ""),
    )


def _aliased(node: fx.Node, effects: Effects) -> Iterator[fx.Node]:
    """The arguments that a node's value may alias."""
    storages = storages_in(value_of(node))
    for source in node.all_input_nodes:
        if source in effects.aliases or storages & storages_in(value_of(source)):
            yield source


# --- arguments -------------------------------------------------------------------------------------------------------


def _inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(node.all_input_nodes)


def _named(arguments: dict[str, Any], names: Iterable[str]) -> tuple[fx.Node, ...]:
    return _unique(node for name in names for node in nodes_in(arguments[name]))


def _unique(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(dict.fromkeys(nodes))
