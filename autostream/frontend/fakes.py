"""Fake tensors: what a graph is traced with in the place of those that it stands for."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import fx


def mode_of(module: fx.GraphModule) -> Any:
    """The mode that the values of Dynamo's graph belong to, if it has any."""
    values = (node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder"))
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


def forget(mode: Any) -> None:
    """Let a mode drop the weak references by which ``torch.utils.swap_tensors`` would refuse the tensors.

    Private to PyTorch (seen in 2.11 and 2.13); where a version remembers in another way, the references stay.
    """
    with suppress(AttributeError):
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()
