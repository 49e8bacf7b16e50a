"""A graph that records gradients, as a forward and a backward by AOTAutograd.

    graph of torch ops ──AOTAutograd──┬─▶ forward: outputs and what the backward needs
                                      └─▶ backward: from that and the outputs' gradients, the inputs' gradients

AOTAutograd owns what PyTorch's autograd sees: aliases, mutations, saved tensors, hooks and errors. What the backward
needs stays in the memory of the forward's CUDA graph until another call comes (``runtime/saved_activations.py``).

Private to PyTorch (seen in torch 2.11 and 2.13): ``aot_module_simplified``, the front door of AOTAutograd for backends,
its list of saved tensors that a backward may write to (``bw_donated_idxs``), its register of ops with effects, and the
mode that looks on at the first call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from autostream.errors import TraceError, first_line
from autostream.frontend.capture import compile_lock
from autostream.frontend.convolutions import GRADIENTS_APART
from autostream.frontend.eager_only import unusual_memory
from autostream.frontend.fakes import forget, mode_of
from autostream.frontend.inputs import names_like
from autostream.ir import Role
from autostream.runtime.saved_activations import Lending
from autostream.utils.storages import storage_of


class Run(Protocol):
    """Runs a graph without gradients, by a schedule."""

    def __call__(self, *values: Any) -> Sequence[Any]:
        """What the graph returns."""

    def lend(self, values: Sequence[Any], places: frozenset[int]) -> frozenset[int]:
        """Hand out outputs at these places where a captured graph computes them; says which of them are."""


class Make(Protocol):
    """Makes what runs a graph."""

    def __call__(self, module: GraphModule, names: Sequence[tuple[Role, str]], *, half: str = "") -> Run:
        """From the graph and what its inputs are.

        Where gradients are recorded, ``half`` is ``"forward"``, which computes where no other graph does, for it lends
        what it saves; or ``"backward"``.
        """


def run_graph(module: GraphModule, example_inputs: Sequence[Any], make: Make) -> Callable[..., Any]:
    """What runs a graph that a backend of ``torch.compile`` is given.

    Args:
        module: of torch ops.
        example_inputs: tensors like those that it will take.
        make: makes what runs a graph without gradients.
    """
    names = names_like(example_inputs)
    run: Callable[..., Any]
    if torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in example_inputs):
        run = differentiable(module, example_inputs, names, make)
    else:
        run = make(module, names)
    forget(mode_of(module))
    return run


def op_by_op(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The same without any schedule.

    What is checkpointed in it Dynamo leaves to AOTAutograd, which puts the generators' states back in the backward.
    """
    graphs = (graph for graph in module.modules() if isinstance(graph, GraphModule))
    if not any("tag_activation_checkpoint(" in graph.code for graph in graphs):
        return module.forward
    run: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(module, [*example_inputs])
    return run


def differentiable(
    module: GraphModule, tensors: Sequence[Any], names: Sequence[tuple[Role, str]], make: Make
) -> Callable[..., Any]:
    """What runs a graph whose calls record gradients: to autograd, its forward and backward are one node.

    Args:
        module: of torch ops.
        tensors: what it is called with now.
        names: what its inputs are.
        make: makes what runs a graph without gradients; it is called for the forward, then for the backward.

    Raises:
        TraceError: its backward would lack something, or fail.
    """
    from torch._functorch.aot_autograd import aot_module_simplified

    state = {storage_of(t) for t, (role, _) in zip(tensors, names, strict=True) if role is not Role.INPUT}
    halves = _Halves(make, state)
    context = TracingContext.try_get() or TracingContext(mode_of(module))
    with compile_lock(), tracing(context), _checks_kept():
        try:
            run: Callable[..., Any] = aot_module_simplified(
                module,
                list(tensors),
                fw_compiler=halves.forward,  # type: ignore[arg-type]
                bw_compiler=halves.backward,  # type: ignore[arg-type]
                inference_compiler=halves.inference,  # type: ignore[arg-type]
                partition_fn=halves.partition,
                decompositions=dict(GRADIENTS_APART),
                keep_inference_input_mutations=True,
            )
        except RuntimeError as error:
            if _OVERWRITTEN in str(error):  # the model's own fault, which only those notice who go back
                raise TraceError(f"its backward fails: {first_line(error)}") from error
            raise
    return run


_OVERWRITTEN = "modified by an inplace operation"


@contextmanager
def _checks_kept() -> Iterator[None]:
    """Let AOTAutograd keep what raises where a factorization failed: torch 2.11 takes it for unused, 2.13 does not."""
    try:
        from torch._higher_order_ops.effects import _EffectType, _get_effect, _register_effectful_op

        known = _get_effect(_CHECK) is not None
    except (ImportError, AttributeError):  # nobody knows of effects, in a version not seen
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


_ONE_WAY = torch.ops.aten.mkldnn_rnn_layer.default


def _keep_what_is_saved() -> None:
    """Let a backward be gone through again: nothing writes to what is saved, so nobody need be told not to."""
    context = TracingContext.try_get()
    donated = getattr(context and context.fw_metadata, "bw_donated_idxs", None)
    if donated:
        donated.clear()


class _Halves:
    """The halves of one graph, and what they share.

    What the backward needs of the forward stays in the memory of the forward's captured graph. The next call of the
    forward moves it away first, if somebody may still go back from the last one.

    Args:
        make: makes what runs a graph.
        state: the storages of what stays where it is from call to call.
    """

    def __init__(self, make: Make, state: set[int]) -> None:
        self._make, self._state = make, state
        self._taken: set[str] = set()
        self._outputs: dict[str, int] = {}
        self._saved: frozenset[int] = frozenset()
        self._lending: Lending | None = None
        self._memory: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def partition(self, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """The halves of a joint graph. The forward runs before the backward is compiled, when somebody goes back."""
        from functorch.compile import default_partition  # type: ignore[import-untyped]

        forward, backward = default_partition(*args, **kwargs)
        self._taken = {node.name for node in backward.graph.find_nodes(op="placeholder")}
        return forward, backward

    def inference(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs a graph of which nothing requires gradients after all."""

        def run(values: list[Any]) -> Sequence[Any]:
            taken = _emptied(values)
            return made.of(taken)(*taken)

        made = _Made(lambda values: self._make(module, self._names(values)))
        return _boxed(run)

    def forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs the forward.

        Raises:
            TraceError: PyTorch's kernel saves nothing for a backward.
        """
        if module.graph.find_nodes(op="call_function", target=_ONE_WAY):
            raise TraceError("MKLDNN's LSTM leaves its backward nothing, for it is traced without gradients")
        _keep_what_is_saved()
        results: Any = module.graph.output_node().args[0]
        self._outputs = {node.name: at for at, node in enumerate(results) if isinstance(node, torch.fx.Node)}
        self._saved = frozenset(at for name, at in self._outputs.items() if name in self._taken)

        def run(values: list[Any]) -> Sequence[Any]:
            taken = _emptied(values)
            half = made.of(taken)
            with self._lock:
                lent = half.lend(taken, self._saved)
                if self._lending is not None:
                    self._lending.recall()
                self._memory = {}
                if not lent:
                    return half(*taken)
                self._lending = self._lending or Lending(_device_of(taken))
                outputs = list(half(*taken))
                self._memory = {at: outputs[at] for at in sorted(lent)}
                for at, tensor in zip(self._memory, self._lending.lend([*self._memory.values()]), strict=True):
                    outputs[at] = tensor
                return outputs

        made = _Made(lambda values: self._make(module, self._names(values), half="forward"))
        return _boxed(run)

    def backward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs the backward."""
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        saved = {at: self._outputs[name] for at, name in enumerate(names) if name in self._outputs}

        def run(values: list[Any]) -> Sequence[Any]:
            taken = _emptied(values)
            if any(isinstance(value, Tensor) and unusual_memory(value) for value in taken):  # such as many gradients
                plain: Sequence[Any] = module.forward(*taken)
                return plain
            with self._lock:
                memory, lending = self._memory, self._lending
                lent = {at: memory[place] for at, place in saved.items() if place in memory}
                if lending is not None:
                    lending.put_back([taken[at] for at in lent], [*lent.values()])
                    for at, tensor in lent.items():
                        taken[at] = tensor
                return made.of(taken, frozenset(lent))(*taken)

        made = _Made(lambda values, lent: self._make(module, self._names(values, lent), half="backward"))
        return _boxed(run)

    def _names(self, values: Sequence[Any], lent: frozenset[int] = frozenset()) -> list[tuple[Role, str]]:
        """What the inputs of a half are: lent memory stays where it is, as weights do."""
        return [(Role.BUFFER if at in lent else self._role(value), str(at)) for at, value in enumerate(values)]

    def _role(self, value: Any) -> Role:
        return Role.PARAMETER if isinstance(value, Tensor) and storage_of(value) in self._state else Role.INPUT


class _Made:
    """What runs a half, made in its first call: only then is it known which of its inputs are the model's own."""

    def __init__(self, make: Callable[..., Run]) -> None:
        self._make, self._run = make, dict[tuple[Any, ...], Run]()

    def of(self, values: Sequence[Any], *lent: frozenset[int]) -> Run:
        """What runs it with these values."""
        if lent not in self._run:
            self._run[lent] = self._make(values, *lent)
        return self._run[lent]


def _emptied(values: list[Any]) -> list[Any]:
    """What a boxed call was given, which it is to let go of."""
    taken = list(values)
    values.clear()
    return taken


def _boxed(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., Any]:
    """As AOTAutograd calls what it was given: with a list, to be emptied.

    It looks on at the ops of a first call, to find custom ops that return what they were given. In that call a schedule
    is made, which is no part of it.
    """

    def boxed(values: list[Any]) -> Sequence[Any]:
        if torch._C._len_torch_dispatch_stack() and type(_get_current_dispatch_mode()).__name__ == _ONLOOKER:
            with _pop_mode_temporarily():
                return run(values)
        return run(values)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


_ONLOOKER = "_AnalyzeCustomOpInputOutputMode"


def _device_of(values: Sequence[Any]) -> torch.device:
    devices = [value.device for value in values if isinstance(value, Tensor) and value.is_cuda]
    return devices[0] if devices else torch.device("cpu")
