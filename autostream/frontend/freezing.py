"""``requires_grad`` that a step sets and sets back, as those of GANs do.

Dynamo refuses that for tensors that exist before the call. While it traces a step, it puts a node into the graph
instead, which does the same to the tensors of the trace, of which autograd makes the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from autostream.errors import TraceError


@contextmanager
def freezing_traced() -> Iterator[None]:
    """Let Dynamo trace it.

    Raises:
        TraceError: a tensor does not get its ``requires_grad`` back.
    """
    from torch._dynamo.variables import builtin, tensor

    owners = [
        (tensor.TensorVariable, "method_requires_grad_"),
        (getattr(builtin, "SetAttrBuiltinVariable", None), "_call_setattr"),  # torch 2.13
        (builtin.BuiltinVariable, "call_setattr"),
    ]
    before: list[tuple[Any, str, Any]] = [
        (owner, name, vars(owner)[name]) for owner, name in owners if name in getattr(owner, "__dict__", ())
    ]
    thread, found = threading.get_ident(), dict[Tensor, bool]()

    def sets(variable: Any, tx: Any, flag: Any) -> bool:
        """Put the node into the graph of this thread, for a tensor that exists before the call."""
        if threading.get_ident() != thread or not variable.source:
            return False
        example = variable.as_proxy().node.meta["example_value"]
        value = flag if isinstance(flag, bool) else flag.as_python_constant()
        found.setdefault(example, example.requires_grad)
        tx.output.create_proxy("call_method", "requires_grad_", (variable.as_proxy(), value), {})
        example.requires_grad_(value)
        variable.requires_grad = value
        return True

    def replaced(eager: Any, is_method: bool) -> Any:
        def method(self: Any, tx: Any, flag: Any = True) -> Any:
            return self if sets(self, tx, flag) else eager(self, tx, flag)

        def attribute(self: Any, tx: Any, target: Any, name: Any, value: Any) -> Any:
            is_flag = target.is_tensor() and name.is_python_constant() and name.as_python_constant() == "requires_grad"
            return value if is_flag and sets(target, tx, value) else eager(self, tx, target, name, value)

        return method if is_method else attribute

    try:
        for owner, name, eager in before:
            setattr(owner, name, replaced(eager, owner is tensor.TensorVariable))
        yield
        if any(each.requires_grad is not flag for each, flag in found.items()):
            raise TraceError(
                "it leaves requires_grad of a tensor changed: set it back where the step ends, or set it outside"
            )
    finally:
        for owner, name, eager in before:
            setattr(owner, name, eager)
