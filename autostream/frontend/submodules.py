"""Where the calls of a model's submodules lie in its graphs, and what each of them keeps for a backward.

Dynamo and ``make_fx`` write the ids of the submodules that a node was called in into its ``nn_module_stack``. A second
call of one has the suffix ``@1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from autostream.errors import TraceError, first_line
from autostream.frontend.aten import drop_weak_references
from autostream.frontend.capture import Capture
from autostream.utils.storages import storage_of


def calls_of(graph: fx.Graph, model: nn.Module) -> dict[str, tuple[int, int]]:
    """The submodules that are called once: the positions of their first and last node, outer ones first.

    Args:
        graph: of Dynamo's, or of ATen ops.
        model: whose call it is.

    Example:
        >>> from autostream.frontend.trace import trace
        >>> model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
        >>> calls_of(trace(model, [torch.ones(2, 3)]).captured.module.graph, model)
        {'0': (5, 5), '1': (6, 6), '2': (7, 8), '2.0': (7, 7), '2.1': (8, 8)}
    """
    found: dict[str, list[int]] = {}
    repeated: set[str] = set()
    for at, node in enumerate(graph.nodes):
        for key in (node.meta.get("nn_module_stack") or {}) if node.op == "call_function" else ():
            module, _, again = str(key).partition("@")
            found.setdefault(module, []).append(at)
            repeated.update([module] * bool(again))
    ids = ((name, str(id(module))) for name, module in model.named_modules() if name)
    return {name: (found[key][0], found[key][-1]) for name, key in ids if key in found and key not in repeated}


@dataclass(frozen=True, slots=True)
class Saved:
    """An activation that a node keeps for the backward: the node's position, the storage, and its bytes."""

    node: int
    storage: str
    bytes: int


def saved_for_backward(captured: Capture) -> Sequence[Saved]:
    """What the nodes of a captured graph keep for a backward, besides weights. Nothing is computed.

    Args:
        captured: the call.

    Raises:
        TraceError: it cannot be run with gradients on fake tensors; the message says why.

    Example:
        >>> from autostream.frontend.trace import trace
        >>> [saved.bytes for saved in saved_for_backward(trace(nn.Linear(3, 3), [torch.ones(2, 3)]).captured)]
        [24]
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in captured.tensors]
            weights = {storage_of(fake) for fake in fakes if fake.requires_grad}
            run = _Run(captured.module, weights)
            with mode, torch.autograd.graph.saved_tensors_hooks(run.keep, _unpacked):
                run.run(*fakes)
    except Exception as error:
        raise TraceError(f"it does not run with gradients: {first_line(error)}") from error
    finally:
        drop_weak_references(mode)
    return run.saved


def _unpacked(tensor: Any) -> Any:
    return tensor


class _Run(fx.Interpreter):
    """Runs a graph, and lists what autograd saves meanwhile.

    Attributes:
        saved: by node.
    """

    def __init__(self, module: fx.GraphModule, weights: set[int]) -> None:
        super().__init__(module)
        self.saved: list[Saved] = []
        self._weights, self._at = weights, -1
        self._kept: list[Tensor] = []
        """Keeps storages alive: another one at the same address would count as the same."""

    def run_node(self, n: fx.Node) -> Any:
        self._at += 1
        return super().run_node(n)

    def keep(self, tensor: Tensor) -> Tensor:
        """List a tensor that is saved, unless it is a weight."""
        self._kept.append(tensor)
        with suppress(NotImplementedError):  # a tensor without a storage, such as a sparse one
            storage = storage_of(tensor)
            if storage not in self._weights:
                self.saved.append(Saved(self._at, str(storage), tensor.untyped_storage().nbytes()))
        return tensor


def trained_of(model: nn.Module) -> frozenset[str]:
    """All names of the parameters that are trained."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, weight in named if weight.requires_grad)
