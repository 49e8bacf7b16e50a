"""A graph that records gradients, as a forward and a backward by AOTAutograd.

    graph of torch ops ──AOTAutograd──┬─▶ forward: outputs and what the backward needs
                                      └─▶ backward: from that and the outputs' gradients, the inputs' gradients

AOTAutograd owns what PyTorch's autograd sees: aliases, mutations, saved tensors, hooks and errors. What the backward
needs stays in the memory of the forward's CUDA graph until another call comes (``execution/lending.py``).

Private to PyTorch (seen in torch 2.11 and 2.13): ``aot_module_simplified``, the front door of AOTAutograd for backends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule

from autostream.execution.lending import Lending
from autostream.frontend.inputs import names_like
from autostream.ir import Role
from autostream.storages import storage_of


class Half(Protocol):
    """What runs a graph."""

    def __call__(self, *values: Any) -> Sequence[Any]:
        """Run it."""


Make = Callable[[GraphModule, Sequence[tuple[Role, str]]], Any]
"""Makes what runs a graph, from the graph and what its inputs are."""


def run_graph(module: GraphModule, example_inputs: Sequence[Any], make: Make) -> Callable[..., Any]:
    """What runs a graph that a backend of ``torch.compile`` is given.

    Args:
        module: of torch ops.
        example_inputs: tensors like those that it will take.
        make: makes what runs a graph without gradients.
    """
    names = names_like(example_inputs)
    if torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in example_inputs):
        return differentiable(module, example_inputs, names, make)
    run: Callable[..., Any] = make(module, names)
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
    """
    from functorch.compile import default_partition
    from torch._dynamo.backends.common import fake_tensor_unsupported  # noqa: F401
    from torch._functorch.aot_autograd import aot_module_simplified

    state = {storage_of(t) for t, (role, _) in zip(tensors, names, strict=True) if role is not Role.INPUT}
    halves = _Halves(make, state)
    context = TracingContext.try_get() or TracingContext(_fake_mode(module))
    with tracing(context):
        run: Callable[..., Any] = aot_module_simplified(
            module,
            list(tensors),
            fw_compiler=halves.forward,
            bw_compiler=halves.backward,
            inference_compiler=halves.inference,
            partition_fn=default_partition,
            keep_inference_input_mutations=True,
        )
    return run


def _fake_mode(module: GraphModule) -> Any:
    values = (node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder"))
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


class _Halves:
    """Makes the halves of one graph, and what they share.

    Args:
        make: makes what runs a graph.
        state: the storages of what stays where it is from call to call.
    """

    def __init__(self, make: Make, state: set[int]) -> None:
        self._make, self._state = make, state
        self._outputs: dict[str, int] = {}
        self._lending: Lending | None = None
        self._lock = threading.Lock()
        self._memory: list[Tensor] = []
        self._lent: list[int] = []

    def inference(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs a graph of which nothing requires gradients after all."""
        return _Lazy(self._make, module, self._state)

    def forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs the forward."""
        results = module.graph.output_node().args[0]
        self._outputs = {node.name: at for at, node in enumerate(results) if isinstance(node, torch.fx.Node)}  # type: ignore[union-attr, arg-type]
        return _Lazy(self._make, module, self._state)

    def backward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs the backward."""
        return _Lazy(self._make, module, self._state)


class _Lazy:
    """A half that is made in its first call: only then is it known which of its inputs are the model's own."""

    def __init__(self, make: Make, module: GraphModule, state: set[int]) -> None:
        self._make, self._module, self._state = make, module, state
        self._run: Callable[..., Any] | None = None

    def __call__(self, *values: Any) -> Any:
        if self._run is None:
            self._run = self._make(self._module, [(self._role(v), str(at)) for at, v in enumerate(values)])
        return self._run(*values)

    def _role(self, value: Any) -> Role:
        return Role.PARAMETER if isinstance(value, Tensor) and storage_of(value) in self._state else Role.INPUT
