"""A captured training step as one program: losses, backwards, clipping, updates of optimizers and of averages.

    captured graph, on fake tensors ──▶ torch.autograd.grad as it is ──▶ optimizers.update for each ``optimizer_step``
                      └──────────────────── traced by make_fx, below autograd ────────────────────┘

The step runs on fake tensors, and the ops that it dispatches are recorded: those of an eager step, in the same order,
random and in-place ops included. A weight's update depends on its own gradient only, so a schedule may run it before
the backward ends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import set_stack_trace
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from autostream.errors import AutostreamError, TraceError
from autostream.frontend.aten import GraphInput, as_program, is_random, traced_on_fakes
from autostream.frontend.capture import Capture
from autostream.frontend.data_parallel import NOT_OF_A_BACKWARD, DataParallel
from autostream.frontend.decompositions import SPLIT_CONVOLUTIONS, split_lists
from autostream.frontend.eager_only import unusual
from autostream.frontend.gradient_sums import add_products
from autostream.frontend.inputs import names_of
from autostream.frontend.optimizers import Group, update
from autostream.frontend.parameters import State, clear_gradients, have_hooks
from autostream.frontend.saved_tensors import hooks_set_aside
from autostream.frontend.scalers import SCALER, Scalers
from autostream.frontend.step_capture import OPTIMIZER_STEP, backward_nodes
from autostream.frontend.tensor_parallel import (
    is_distributed,
    local_of,
    placement_of,
    shard_like,
    whole_of,
    with_local,
)
from autostream.ir import Program, Role
from autostream.utils.storages import layout_of, storage_of


@dataclass(frozen=True)
class Update:
    """What tracing has to know of an optimizer.

    Attributes:
        optimizer: the optimizer.
        groups: its hyperparameters, with an ``Input`` for each that is one.
        state: its tensors.
        numbers: the values of its inputs, in one tensor, which stays the same.
    """

    optimizer: Optimizer
    groups: Sequence[Group]
    state: State
    numbers: Tensor


@dataclass(frozen=True)
class Traced:
    """A step's program.

    Attributes:
        program: returns the outputs of the captured graph, detached.
        sources: for each placeholder, the position of its tensor among the inputs of the captured graph, then all state
            and all numbers of the optimizers; or the tensor itself, if it is a constant.
        wholes: by position, the outputs that are DTensors: what makes them of their local tensors, which it returns.
    """

    program: Program
    sources: Sequence[int | Tensor]
    wholes: Mapping[int, Callable[[Tensor], Tensor]]

    def arguments(self, inputs: Sequence[Tensor], updates: Sequence[Update]) -> list[Tensor]:
        """The program's arguments for a step whose captured graph has these inputs: of DTensors, the local tensors."""
        flat = _flat(inputs, updates)
        return [local_of(flat[at]) if isinstance(at, int) else at for at in self.sources]


def _flat(inputs: Sequence[Tensor], updates: Sequence[Update]) -> list[Tensor]:
    states = [tensor for each in updates for tensor in each.state.tensors]
    return [*inputs, *states, *(each.numbers for each in updates)]


def trace_step(
    captured: Capture,
    updates: Sequence[Update],
    modules: nn.Module,
    trained: Sequence[Tensor] = (),
    data_parallel: DataParallel | None = None,
    *,
    device: str | None = None,
) -> Traced:
    """Trace a captured step. Nothing is computed, and no tensor changes.

    Args:
        captured: by ``step_capture.capture_step``.
        updates: the optimizers, in the order in which they were given there.
        modules: the owner of parameters and buffers, which gives them their names.
        trained: the parameters of the optimizers.
        data_parallel: averages the gradients of these after each backward, if the step does not do so itself.
        device: the device that the program is for, to plan for one that this machine lacks.

    Raises:
        TraceError: it cannot be traced; the message says why.
    """
    flat = _flat(captured.tensors, updates)
    names: list[tuple[Role, str]] = [
        *names_of(captured, modules),
        *((Role.BUFFER, f"optimizer_{k}.{n}_{at}") for k, each in enumerate(updates) for at, n in each.state.names),
        *((Role.BUFFER, f"optimizer_{k}.hyperparameters") for k in range(len(updates))),
    ]
    for tensor, (_, name) in zip(flat, names, strict=True):
        if reason := unusual(local_of(tensor)):
            raise TraceError(f"{name} {reason}")
    if len({id(tensor) for tensor in flat}) < len(flat):
        raise TraceError("a tensor is given to it twice")
    if have_hooks([tensor for tensor in captured.tensors if tensor.requires_grad]):
        raise TraceError(HOOKED)
    order = sorted(range(len(flat)), key=lambda at: (_ROLES.index(names[at][0]), at))
    inputs: list[GraphInput] = [(*names[at], local_of(flat[at])) for at in order]
    indices = [order.index(at) for at in range(len(flat))]
    averaging = None if data_parallel is None else _Averaging(data_parallel, captured, trained)
    run = _Run(captured, updates, indices, averaging, recomputes=True)
    try:
        graph = _traced_below_autograd(run, inputs)
    except _RandomRecomputation:
        run = _Run(captured, updates, indices, averaging, recomputes=False)
        graph = _traced_below_autograd(run, inputs)
    add_products(graph)
    program, constants = as_program(graph, inputs, device)
    positions = {names[at]: at for at in order}
    sources: list[int | Tensor] = []
    for placeholder in program.placeholders:
        at = positions.get((placeholder.role, placeholder.target))
        sources.append(constants[placeholder.target] if at is None else at)
    return Traced(program, sources, run.wholes)


_ROLES = list(Role)

HOOKED = "a parameter has hooks on its gradient, which a graph would not call"


def _traced_below_autograd(run: Callable[..., list[Tensor]], inputs: Sequence[GraphInput]) -> fx.GraphModule:
    """The graph of the ops that a function with backwards in it dispatches, called with fake tensors like these."""
    # A tracer records the ops of its own thread only, so the backward has to run in it.
    with torch.no_grad(), hooks_set_aside(), torch.autograd.set_multithreading_enabled(False), _transforms_left():
        graph = traced_on_fakes(run, [tensor for *_, tensor in inputs], {**SPLIT_CONVOLUTIONS, **split_lists()})
    if graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer_backward.default):
        raise TraceError(_RECURRENT)
    return graph


@contextmanager
def _transforms_left() -> Iterator[None]:
    """Leave the function transforms (vmap, grad) that a failed trace has entered: their ends are nodes of the graph."""
    before = torch._C._functorch.maybe_current_level() or 0
    try:
        yield
    finally:
        while (torch._C._functorch.maybe_current_level() or 0) > before:
            torch._C._functorch.pop_dynamic_layer_stack()


_RECURRENT = (
    "oneDNN's kernel, which computes LSTMs in float32 on a CPU, leaves its backward what that needs (a workspace) "
    "where autograd records it, and in a graph nothing does"
)


class _Run:
    """The function to trace: the captured graph on fake tensors, with the optimizers' updates in it.

    Attributes:
        wholes: what makes those outputs that are DTensors, by position.
    """

    def __init__(
        self,
        captured: Capture,
        updates: Sequence[Update],
        indices: Sequence[int],
        averaging: _Averaging | None,
        *,
        recomputes: bool,
    ) -> None:
        self._captured, self._updates, self._indices, self._recomputes = captured, updates, indices, recomputes
        self._averaging = averaging
        self.wholes = dict[int, Callable[[Tensor], Tensor]]()

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """The outputs of the captured graph, for the local tensors of its inputs."""
        clear_gradients(values)  # a fake tensor has a gradient if the real one has
        fakes = iter([values[index] for index in self._indices])
        inputs = [with_local(tensor, next(fakes)) for tensor in self._captured.tensors]
        states = [[with_local(tensor, next(fakes)) for tensor in each.state.tensors] for each in self._updates]
        numbers = [*fakes]
        known = self._captured.module, self._recomputes, self._updates, states, numbers, self._averaging
        interpreter = _Interpreter(*known)
        with torch.enable_grad(), torch.autograd.set_detect_anomaly(True, check_nan=False):  # records the user's lines
            outputs = interpreter.run(*inputs)
        interpreter.scalers.check()
        if interpreter.recomputes_random:
            raise _RandomRecomputation
        if not all(isinstance(output, Tensor) for output in outputs):
            raise TraceError("the number of a tensor goes to Python: return the tensor instead")
        given = {id(tensor) for tensor in inputs if not tensor.requires_grad}
        # What an op with ``out=`` returns may be an input: a module that keeps it has the same buffer as before.
        outputs = [output if id(output) in given else output.detach() for output in outputs]
        self.wholes = {at: whole_of(output) for at, output in enumerate(outputs) if is_distributed(output)}
        return [*map(local_of, outputs)]


def _keep_lines(loss: Tensor) -> None:
    """Let the ops of a backward have the user's source lines of the forward ops that they belong to.

    Args:
        loss: computed in anomaly mode, in which autograd records the lines of forward ops.
    """
    for node in backward_nodes(loss):
        if lines := node.metadata.get("traceback_"):
            node.register_prehook(lambda gradients, lines=lines: set_stack_trace(lines))


class _RandomRecomputation(AutostreamError):  # noqa: N818 - control flow within this file, not an error
    """A checkpointed part has random ops, which would give other numbers when they are recomputed."""


class _Interpreter(fx.Interpreter):
    """Runs a captured step, with updates for the ops that stand for them.

    Activation checkpoints are run as checkpoints, and so recomputed in the backward.

    Attributes:
        recomputes_random: whether random ops were recomputed.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        recomputes: bool,
        updates: Sequence[Update],
        states: Sequence[Sequence[Tensor]],
        numbers: Sequence[Tensor],
        averaging: _Averaging | None,
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False  # messages of errors are reasons in reports
        self._averaging = averaging
        self._averages: dict[int, Tensor] = {}
        """Averaged gradients, and the memory that they were copied to, by identity."""
        self._recomputes, self.recomputes_random = recomputes, False
        self._updates, self._states, self._numbers = updates, states, numbers
        self.scalers = Scalers(self._update)
        self._taken = {_storage_of(tensor) for state in states for tensor in state}
        """The storages of all tensors but gradients that no parameter has yet."""
        self._takes = not any(map(_may_save_gradients, module.graph.nodes))

    def run_node(self, node: fx.Node) -> Any:
        """Run a node. A gradient that Dynamo copies for its parameter is not copied if nothing else has its memory.

        Autograd does the same in an eager backward; clipping and optimizers write gradients in place.
        """
        if _takes_gradient(node):
            memory, gradient = (self.env[each] for each in node.args[:2])  # type: ignore[index]
            if gradient.layout is not torch.strided:
                raise TraceError(f"the gradient of a parameter has the layout {gradient.layout}")
            kinds = [(each.dtype, each.shape, layout_of(each), placement_of(each)) for each in (memory, gradient)]
            is_average = id(gradient) in self._averages  # a part of its bucket that nothing else uses
            if is_average:
                self._averages[id(memory)] = memory
            is_own = is_average or (self._takes and _storage_of(gradient) not in self._taken)
            if kinds[0] == kinds[1] and is_own:
                self._taken.add(_storage_of(gradient))
                self.env[node.args[0]] = gradient  # type: ignore[index]
                return gradient
        result = super().run_node(node)
        if node.target is torch.autograd.grad and self._averaging is not None:
            result = self._averaged(self._averaging, node, result)
        if node.target is not torch.autograd.grad and not _is_gradient(node):
            tensors = result if isinstance(result, tuple | list) else (result,)
            self._taken.update(map(_storage_of, filter(_has_storage, tensors)))
        return result

    def _averaged(self, averaging: _Averaging, node: fx.Node, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients of a backward, with averages for those of the optimizers' parameters."""
        places, sources = averaging.places(node), _inputs_of(node)
        parameters = [self.env[sources[at]] for at in places]
        if any(gradients[at].requires_grad for at in places):
            raise TraceError("data_parallel averages no gradients that are differentiated again: no create_graph=True")
        with torch.no_grad():
            means = averaging.data_parallel.in_graph([gradients[at] for at in places], parameters)
        self._averages.update((id(mean), mean) for mean in means)
        found = dict(zip(places, means, strict=True))
        return [found.get(at, gradient) for at, gradient in enumerate(gradients)]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a ``call_function`` node."""
        if target is OPTIMIZER_STEP or target is torch.ops.autostream.optimizer_step:
            return self._update(*args)
        if target is SCALER or target is SCALER.default:
            return self.scalers(*args)
        if target is torch.autograd.grad:
            outputs = args[0] if args else kwargs["outputs"]
            for output in outputs if isinstance(outputs, Sequence) else [outputs]:
                _keep_lines(output)
        if target is not torch.ops.higher_order.tag_activation_checkpoint:
            return super().call_function(target, args, kwargs)
        body, *inputs = args
        if not self._recomputes or len(kwargs) > 1:
            return fx.Interpreter(body).run(*inputs)
        runs = 0

        def run(*values: Any) -> Any:
            nonlocal runs
            runs += 1
            before = _random_ops()
            try:  # a recomputation ends with an exception as soon as it has all tensors that are needed
                return fx.Interpreter(body).run(*values)
            finally:
                self.recomputes_random |= runs > 1 and _random_ops() != before

        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)

    def _update(
        self,
        index: int,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        skipped: Tensor | None = None,
    ) -> None:
        if self._averaging is not None and any(
            gradient is not None and id(gradient) not in self._averages for gradient in gradients
        ):
            raise TraceError(NOT_OF_A_BACKWARD)
        known = self._updates[index]
        gradients = [shard_like(gradient, each) for gradient, each in zip(gradients, parameters, strict=True)]
        shards = [*map(local_of, parameters)]  # each number is updated for itself
        state: dict[Tensor, dict[str, Tensor]] = {}
        for (at, name), value in zip(known.state.names, self._states[index], strict=True):
            if value.dim() and placement_of(value) != placement_of(parameters[at]):
                raise TraceError(f"{name} of an optimizer's state is placed in a mesh otherwise than its parameter")
            state.setdefault(shards[at], {})[name] = local_of(value)
        parameters, left = shards, iter(shards)
        by_group = [[next(left) for _ in group["params"]] for group in known.optimizer.param_groups]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        update(known.optimizer, known.groups, self._numbers[index], by_group, state, skipped)
        clear_gradients(parameters)


class _Averaging:
    """Which gradients of a captured step are averaged.

    Args:
        data_parallel: how.
        captured: the step.
        trained: the parameters of its optimizers.

    Attributes:
        data_parallel: how.
    """

    def __init__(self, data_parallel: DataParallel, captured: Capture, trained: Sequence[Tensor]) -> None:
        self.data_parallel = data_parallel
        order = {id(parameter): at for at, parameter in enumerate(dict.fromkeys(trained))}
        placeholders = captured.module.graph.find_nodes(op="placeholder")
        self._order = {
            node: order[id(tensor)]
            for node, tensor in zip(placeholders, captured.tensors, strict=True)
            if id(tensor) in order
        }

    def places(self, node: fx.Node) -> list[int]:
        """The places of these gradients among the results of a backward, in the order of the parameters.

        ``torch.autograd.grad`` of a user has none: as in an eager step, only those are averaged that go to ``.grad``.
        """
        sources = _inputs_of(node)
        taken = {user.args[1] for user in node.users if _is_gradient(user) and any(map(_takes_gradient, user.users))}
        places = [at for at, source in enumerate(sources) if at in taken and source in self._order]
        return sorted(places, key=lambda at: self._order[sources[at]])


def _inputs_of(node: fx.Node) -> Sequence[Any]:
    """What a call of ``torch.autograd.grad`` differentiates by."""
    inputs: Any = node.args[1] if len(node.args) > 1 else node.kwargs["inputs"]
    return inputs if isinstance(inputs, Sequence) else [inputs]


def _is_gradient(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is torch.autograd.grad


def _takes_gradient(node: fx.Node) -> bool:
    """Whether a node copies a gradient to new memory like its parameter's, as Dynamo writes ``backward()``."""
    if node.target != "copy_" or len(node.args) < 2:
        return False
    memory, gradient = node.args[:2]
    is_new = isinstance(memory, fx.Node) and memory.target is torch.empty_like and next(iter(memory.users)) is node
    return is_new and isinstance(gradient, fx.Node) and _is_gradient(gradient) and len(gradient.users) == 1


def _may_save_gradients(node: fx.Node) -> bool:
    """Whether a gradient may be a tensor that a node's forward computed: a user's own function may save one."""
    namespace = getattr(node.target, "namespace", getattr(getattr(node.target, "default", None), "namespace", ""))
    is_users = isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return "autograd_function" in str(node.target) or (is_users and namespace not in _SAVE_NO_GRADIENTS)


_SAVE_NO_GRADIENTS = ("aten", "prims", "autostream", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operators whose backward passes on no tensor that their forward has computed."""


def _storage_of(tensor: Tensor) -> int:
    return storage_of(local_of(tensor))


def _has_storage(value: Any) -> bool:
    return isinstance(value, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _random_ops() -> int:
    """The number of random ops traced so far."""
    mode: Any = get_proxy_mode()
    return sum(is_random(node) for node in mode.tracer.graph.nodes)
