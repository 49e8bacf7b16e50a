"""Graphs whose calls record gradients: AOTAutograd makes a forward and a backward graph of them.

    graph of torch ops ──AOTAutograd──┬─▶ forward: the outputs and the saved activations
                                      └─▶ backward: the inputs' gradients, from both and the outputs' gradients

AOTAutograd handles all that PyTorch's autograd sees: aliases, mutations, saved tensors, hooks and errors. Saved
activations stay in the memory of the forward's CUDA graph until its next call (``runtime/saved_activations.py``).

Private interfaces of AOTAutograd are listed in ``frontend/__init__.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from autostream.errors import TraceError, first_line
from autostream.frontend.aten import drop_weak_references, mode_of
from autostream.frontend.attention_fast_path import use_attention_fast_path
from autostream.frontend.attention_masks import simplify_masks
from autostream.frontend.decompositions import SPLIT_CONVOLUTIONS
from autostream.frontend.dropouts import drop_idle_dropouts
from autostream.frontend.dynamo import compile_lock, compile_session, graph_break
from autostream.frontend.eager_only import unusual_memory
from autostream.frontend.inputs import names_like
from autostream.frontend.saved_tensors import call_keeping_errors
from autostream.frontend.static_tensors import attributes_as_inputs, with_attributes
from autostream.frontend.tensor_parallel import is_distributed, local_of
from autostream.ir import Role
from autostream.runtime.saved_activations import SavedActivations
from autostream.utils.storages import storage_of


class Run(Protocol):
    """Runs a graph by a schedule, without recording gradients."""

    def __call__(self, *values: Any) -> Sequence[Any]:
        """The outputs of the graph."""

    def share_outputs(self, values: Sequence[Any], indices: frozenset[int]) -> frozenset[int]:
        """Return the outputs with these indices as they lie in the captured graph's memory, from the next call on.

        Returns:
            The positions for which that is possible.
        """


class Make(Protocol):
    """Makes a :class:`Run` of a graph."""

    def __call__(self, module: GraphModule, names: Sequence[tuple[Role, str]], *, half: str = "") -> Run:
        """Take the graph, and the roles and names of its inputs.

        Where gradients are recorded, ``half`` is ``"forward"`` or ``"backward"``. A forward has a memory pool of its
        own, where its saved activations stay.
        """


def run_graph(module: GraphModule, example_inputs: Sequence[Any], make: Make) -> Callable[..., Any]:
    """What a backend of ``torch.compile`` returns for a graph.

    Args:
        module: a graph of torch ops.
        example_inputs: tensors like its inputs.
        make: makes what runs a graph without gradients.
    """
    module, attributes = attributes_as_inputs(module)
    drop_idle_dropouts(module)
    simplify_masks(module)
    use_attention_fast_path(module)
    values = [*example_inputs, *attributes]
    names = names_like(values)
    recorded = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)
    run: Callable[..., Any]
    if recorded or any(map(is_distributed, values)):  # AOTAutograd takes DTensors apart
        run = differentiable(module, values, names, make)
    else:
        run = make(module, names)
    drop_weak_references(mode_of(module))
    return with_attributes(run, attributes)


def op_by_op(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The same without a schedule: the graph runs op by op.

    Activation checkpoints in it need AOTAutograd, which restores the states of random generators in the backward.
    """
    graphs = (graph for graph in module.modules() if isinstance(graph, GraphModule))
    if not any("tag_activation_checkpoint(" in graph.code for graph in graphs):
        return module.forward
    run: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(module, [*example_inputs])
    return run


def differentiable(
    module: GraphModule, tensors: Sequence[Any], names: Sequence[tuple[Role, str]], make: Make
) -> Callable[..., Any]:
    """What runs a graph whose calls record gradients, as one node of autograd's graph.

    Args:
        module: a graph of torch ops.
        tensors: its inputs now.
        names: the roles and names of its inputs.
        make: makes what runs the forward, and later what runs the backward.

    Raises:
        TraceError: the backward cannot be traced, or would fail.
    """
    from torch._functorch.aot_autograd import aot_module_simplified

    static = {storage_of(local_of(t)) for t, (role, _) in zip(tensors, names, strict=True) if role is not Role.INPUT}
    halves = _Halves(make, static)
    context = TracingContext.try_get() or TracingContext(mode_of(module))
    with compile_lock(), compile_session(), tracing(context), _error_checks_kept():
        try:
            run: Callable[..., Any] = aot_module_simplified(
                module,
                list(tensors),
                fw_compiler=halves.forward,  # type: ignore[arg-type]
                bw_compiler=halves.backward,  # type: ignore[arg-type]
                inference_compiler=halves.inference,  # type: ignore[arg-type]
                partition_fn=halves.partition,
                decompositions=dict(SPLIT_CONVOLUTIONS),
                keep_inference_input_mutations=True,
            )
        except RuntimeError as error:
            if _OVERWRITTEN in str(error):  # an error of the model's, which eager would raise in the backward only
                raise TraceError(f"its backward fails: {first_line(error)}") from error
            raise
    return partial(call_keeping_errors, run)


_OVERWRITTEN = "modified by an inplace operation"


@contextmanager
def _error_checks_kept() -> Iterator[None]:
    """Let AOTAutograd keep the op that raises if a factorization failed: torch 2.11 removes it as unused."""
    try:
        from torch._higher_order_ops.effects import _EffectType, _get_effect, _register_effectful_op

        known = _get_effect(_CHECK) is not None
    except (ImportError, AttributeError):  # this version of PyTorch has no register of effects
        known = True
    if known:
        yield
        return
    registered = _register_effectful_op(_CHECK, _EffectType.ORDERED)
    try:
        yield
    finally:
        registered.destroy()


_CHECK = "aten::_linalg_check_errors"


_MKLDNN_RNN = torch.ops.aten.mkldnn_rnn_layer.default


def _allow_second_backward() -> None:
    """Clear the list of saved tensors that a backward may write to: ours never write to them.

    With such tensors, AOTAutograd refuses ``retain_graph=True``.
    """
    context = TracingContext.try_get()
    donated = getattr(context and context.fw_metadata, "bw_donated_idxs", None)
    if donated:
        donated.clear()


class _Halves:
    """Compiles the forward and the backward of one graph, and passes saved activations between them.

    Saved activations stay in the memory of the forward's captured graph. The next call of the forward copies them to
    other memory first, if the last call may still get a backward.

    Args:
        make: makes what runs a graph.
        static: the storages of static inputs, such as weights.
    """

    def __init__(self, make: Make, static: set[int]) -> None:
        self._make, self._static = make, static
        self._backward_inputs: set[str] = set()
        self._outputs: dict[str, int] = {}
        self._saved: frozenset[int] = frozenset()
        self._activations: SavedActivations | None = None
        self._memory: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def partition(self, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Split a joint graph. The backward is compiled in its first call only, after the forward has run."""
        from functorch.compile import default_partition  # type: ignore[import-untyped]

        forward, backward = default_partition(*args, **kwargs)
        self._backward_inputs = {node.name for node in backward.graph.find_nodes(op="placeholder")}
        return forward, backward

    def inference(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs a graph without a backward: nothing in it requires gradients after all."""

        def run(values: list[Any]) -> Sequence[Any]:
            inputs = _taken_from(values)
            return lazy.get(inputs)(*inputs)

        lazy = _Lazy(lambda values: self._make(module, self._names(values)))
        return _boxed(run)

    def forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs the forward.

        Raises:
            TraceError: a kernel saves nothing for the backward.
        """
        if module.graph.find_nodes(op="call_function", target=_MKLDNN_RNN):
            raise TraceError("MKLDNN's LSTM leaves its backward nothing, for it is traced without gradients")
        _allow_second_backward()
        results: Any = module.graph.output_node().args[0]
        self._outputs = {node.name: at for at, node in enumerate(results) if isinstance(node, torch.fx.Node)}
        self._saved = frozenset(at for name, at in self._outputs.items() if name in self._backward_inputs)

        def run(values: list[Any]) -> Sequence[Any]:
            inputs = _taken_from(values)
            forward = lazy.get(inputs)
            with self._lock:
                shared = forward.share_outputs(inputs, self._saved)
                if self._activations is not None:
                    self._activations.preserve()
                self._memory = {}
                if not shared:
                    return forward(*inputs)
                self._activations = self._activations or SavedActivations(_device_of(inputs))
                outputs = list(forward(*inputs))
                self._memory = {at: outputs[at] for at in sorted(shared)}
                for at, tensor in zip(self._memory, self._activations.alias([*self._memory.values()]), strict=True):
                    outputs[at] = tensor
                return outputs

        lazy = _Lazy(lambda values: self._make(module, self._names(values), half="forward"))
        return _boxed(run)

    def backward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs the backward."""
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        saved = {at: self._outputs[name] for at, name in enumerate(names) if name in self._outputs}

        def run(values: list[Any]) -> Sequence[Any]:
            inputs = _taken_from(values)
            if any(
                isinstance(value, Tensor) and unusual_memory(value) for value in inputs
            ):  # such as gradients in vmap
                outputs: Sequence[Any] = module.forward(*inputs)
                return outputs
            with self._lock:
                memory, activations = self._memory, self._activations
                shared = {at: memory[output] for at, output in saved.items() if output in memory}
                if activations is not None:
                    activations.restore([inputs[at] for at in shared], [*shared.values()])
                    for at, tensor in shared.items():
                        inputs[at] = tensor
                return lazy.get(inputs, frozenset(shared))(*inputs)

        lazy = _Lazy(lambda values, shared: self._make(module, self._names(values, shared), half="backward"))
        # Behind a graph break, the user's code runs the backward, where Dynamo would compile what is called in it.
        return graph_break(_boxed(run))

    def _names(self, values: Sequence[Any], shared: frozenset[int] = frozenset()) -> list[tuple[Role, str]]:
        """Roles and names of inputs: activations in the forward's memory are static inputs, as weights are."""
        return [(Role.BUFFER if at in shared else self._role(value), str(at)) for at, value in enumerate(values)]

    def _role(self, value: Any) -> Role:
        return Role.PARAMETER if isinstance(value, Tensor) and storage_of(value) in self._static else Role.INPUT


class _Lazy:
    """A :class:`Run` that is made in its first call: only then is it known which inputs are static."""

    def __init__(self, make: Callable[..., Run]) -> None:
        self._make, self._runs = make, dict[tuple[Any, ...], Run]()

    def get(self, values: Sequence[Any], *shared: frozenset[int]) -> Run:
        """What runs the graph with these values."""
        if shared not in self._runs:
            self._runs[shared] = self._make(values, *shared)
        return self._runs[shared]


def _taken_from(values: list[Any]) -> list[Any]:
    """The arguments of a boxed call, which empties the list that it gets."""
    inputs = list(values)
    values.clear()
    return inputs


def _boxed(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., Any]:
    """A function with AOTAutograd's calling convention: it takes a list, and empties it.

    AOTAutograd watches the ops of the first call in a dispatch mode, to find custom ops that return their inputs. That
    mode is off while ``run`` runs, because the first call makes a schedule.
    """

    def boxed(values: list[Any]) -> Sequence[Any]:
        if torch._C._len_torch_dispatch_stack() and type(_get_current_dispatch_mode()).__name__ == _ANALYSIS_MODE:
            with _pop_mode_temporarily():
                return run(values)
        return run(values)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


_ANALYSIS_MODE = "_AnalyzeCustomOpInputOutputMode"


def _device_of(values: Sequence[Any]) -> torch.device:
    devices = [value.device for value in values if isinstance(value, Tensor) and value.is_cuda]
    return devices[0] if devices else torch.device("cpu")
