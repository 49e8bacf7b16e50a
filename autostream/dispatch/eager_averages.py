"""Averages of the gradients of eager steps, over the processes that share a step.

    backward ends ──▶ gradients of the same parameters as in the step before? ──yes──▶ average
                       │ no
                       ╰─▶ do all processes have these? ──yes──╯     no ──▶ a GroupError that names the rank

A process with other gradients, or with one backward more, would meet another reduction: it would get wrong numbers, or
wait for ever. A process that changes waits for all others to change too, so that none averages what others do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autostream.analysis.process_groups import limit_s_of
from autostream.errors import TargetError
from autostream.frontend.data_parallel import NOT_OF_A_BACKWARD, DataParallel
from autostream.frontend.parameters import parameters_of
from autostream.tuning.agreement import agree, check_all_there

Agreed = Sequence[str]
"""What all processes average after a backward."""


class EagerAverages:
    """Averages gradients over a process group.

    Args:
        data_parallel: the group.
    """

    def __init__(self, data_parallel: DataParallel) -> None:
        self._data_parallel = data_parallel
        self._before: list[Agreed] = []
        """After each backward of the step before; empty if that had fewer than the one before it."""
        self._averaged = set[int]()
        """Identities of the parameters whose gradients were averaged since their optimizer stepped."""

    def average(self, parameters: Sequence[Tensor]) -> None:
        """Average the gradients that these parameters have, after the only backward of a step.

        Args:
            parameters: in the same order in all processes.

        Raises:
            GroupError: another process has other gradients, or has not come here in time, or has ended.
            TargetError: one is sparse.
        """
        self._before = [self._average(dict(enumerate(dict.fromkeys(parameters))), [])]

    def _average(self, parameters: Mapping[int, Tensor], earlier: Sequence[Agreed]) -> Agreed:
        """Average the gradients of parameters, by their places among all; return what all processes agree on.

        Args:
            parameters: those that a backward may have reached.
            earlier: what was agreed on after the earlier backwards of the step.
        """
        trained = {at: each for at, each in parameters.items() if each.requires_grad and each.grad is not None}
        gradients = [each.grad for each in trained.values() if each.grad is not None]
        if any(each.layout is not torch.strided for each in gradients):
            raise TargetError("data_parallel averages no sparse gradients: make the embedding with sparse=False")
        place = f"after backward {1 + len(earlier)} of an eager step"
        said = [
            f"a gradient of {tuple(each.shape)} and {each.dtype}, of parameter {at}, {place}"
            for at, each in trained.items()
        ]
        if [*earlier, said] != self._before[: 1 + len(earlier)]:
            agree(self._data_parallel.group, said, limit_s_of(self._data_parallel.group))
        try:
            with torch.no_grad():
                means = self._data_parallel.averages(gradients, [*trained.values()])
                for gradient, mean in zip(gradients, means, strict=True):
                    gradient.copy_(mean)
        except RuntimeError as error:
            check_all_there([self._data_parallel.group], error)
            raise
        return said

    @contextmanager
    def after_backwards(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Average the gradients of these optimizers' parameters at the end of each eager backward inside.

        Raises:
            GroupError: another process has other gradients, or has not come here in time.
            TargetError: an optimizer steps with a gradient that no backward has computed, or a gradient is sparse.
        """
        every = {id(each): each for each in chain.from_iterable(map(parameters_of, optimizers)) if each.requires_grad}
        order = {of: at for at, of in enumerate(every)}
        reached: list[Tensor] = []
        done: list[Agreed] = []

        def average() -> None:
            parameters = {order[id(each)]: each for each in reached}
            reached.clear()
            done.append(self._average(dict(sorted(parameters.items())), done))
            self._averaged.update(map(id, parameters.values()))

        def reach(parameter: Tensor) -> None:
            if not reached:
                torch.autograd.Variable._execution_engine.queue_callback(average)
            reached.append(parameter)

        def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            own = (each for each in parameters_of(optimizer) if each.requires_grad and each.grad is not None)
            if not self._averaged.issuperset(map(id, own)):
                raise TargetError(NOT_OF_A_BACKWARD)

        def forget(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._averaged.difference_update(map(id, parameters_of(optimizer)))

        parameters: list[Any] = [*every.values()]
        handles = [each.register_post_accumulate_grad_hook(reach) for each in parameters]
        handles += [optimizer.register_step_pre_hook(check) for optimizer in optimizers]
        handles += [optimizer.register_step_post_hook(forget) for optimizer in optimizers]
        try:
            yield
        finally:
            self._before = done if len(done) >= len(self._before) else []
            for handle in handles:
                handle.remove()
