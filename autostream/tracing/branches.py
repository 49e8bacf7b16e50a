"""Branches on values of tensors: Python asks for ``bool(tensor)``, and what it does next depends on the answer.

The answers of one call, in order, are the *way* that it takes through the model. They are noted in a call of the model
itself (:func:`noted`), and assumed in a trace of that way (:class:`Assumed`), whose graph expects them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autostream.errors import BranchError
from autostream.tracing.attention import fused_attention
from autostream.tracing.expecting import expect

Way = tuple[bool, ...]
"""Which of the values that Python asks for in a call are true, in order."""


@contextmanager
def noted() -> Iterator[list[bool]]:
    """Note which way this thread's calls take: outcomes are in the list when they are done.

    Example:
        >>> with noted() as outcomes:
        ...     y = 1 if torch.ones(1) > 2 else 3
        >>> outcomes
        [False]
    """
    watching = _Noted()
    with fused_attention(), watching:
        yield watching.outcomes


class _Noted(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ASKING:
            self.outcomes.append(result)
        return result


class Assumed(TorchFunctionMode):
    """Trace inside this: Python gets these outcomes, and the graph expects them.

    Args:
        way: the outcomes.

    Example:
        >>> with Assumed((False,)) as assumed:
        ...     print(1 if torch.zeros(1) else 3)
        3
        >>> assumed.check_used()
    """

    def __init__(self, way: Sequence[bool]) -> None:
        super().__init__()
        self._way, self._asked = way, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, unless it asks for a value.

        Raises:
            BranchError: it asks for more of them than the way has.
        """
        kwargs = kwargs or {}
        if func in ASKING:
            value = args[0] if args else kwargs["input"]
            if value.numel() == 1:  # of several, PyTorch says what is wrong
                return self._answer(value)
        return func(*args, **kwargs)

    def _answer(self, value: Tensor) -> bool:
        at = self._asked
        if at == len(self._way):
            raise BranchError(_OTHERWISE)
        self._asked += 1
        expect(value, at, self._way[at])
        return self._way[at]

    def check_used(self) -> None:
        """See that all outcomes were asked for.

        Raises:
            BranchError: they were not.
        """
        if self._asked != len(self._way):
            raise BranchError(_OTHERWISE)


ASKING = {Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero}
"""By what Python asks whether a tensor is true."""

_OTHERWISE = "traced, the model asks for other values to branch by than when it is called"
