"""Averages of the gradients of eager steps, over the processes that share a step.

    backward ends ──▶ gradients like those of an earlier one? ──yes──▶ average
                       │ no
                       ╰─▶ do all processes have the same? ──yes──╯     no ──▶ a GroupError that names the rank

A process with other gradients, or with one backward more, would meet a reduction of other sizes: it would get wrong
numbers, or wait for ever. What all have agreed on once costs no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autostream.errors import TargetError
from autostream.frontend.data_parallel import NOT_OF_A_BACKWARD, DataParallel
from autostream.frontend.parameters import parameters_of
from autostream.tuning.agreement import agree, check_all_there


class EagerAverages:
    """Averages gradients over a process group.

    Args:
        data_parallel: the group.
    """

    def __init__(self, data_parallel: DataParallel) -> None:
        self._data_parallel = data_parallel
        self._agreed = set[tuple[str, ...]]()
        self._averaged = set[int]()
        """Identities of the parameters whose gradients were averaged since their optimizer stepped."""

    def average(self, parameters: Iterable[Tensor], backward: int = 1) -> None:
        """Average the gradients that these parameters have.

        Args:
            parameters: in the same order in all processes.
            backward: the number of the backward in its step.

        Raises:
            GroupError: another process has other gradients, or has not come here in time, or has ended.
            TargetError: one is sparse.
        """
        trained = [each for each in dict.fromkeys(parameters) if each.requires_grad and each.grad is not None]
        gradients = [each.grad for each in trained if each.grad is not None]
        if any(each.layout is not torch.strided for each in gradients):
            raise TargetError("data_parallel averages no sparse gradients: make the embedding with sparse=False")
        place = f"after backward {backward} of an eager step"
        said = tuple(f"a gradient of {tuple(each.shape)} and {each.dtype} {place}" for each in gradients)
        if said not in self._agreed:
            agree(self._data_parallel.group, said)
            self._agreed.add(said)
        try:
            with torch.no_grad():
                for gradient, mean in zip(gradients, self._data_parallel.averages(gradients, trained), strict=True):
                    gradient.copy_(mean)
        except RuntimeError as error:
            check_all_there([self._data_parallel.group], error)
            raise

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
        backwards = 0

        def average() -> None:
            nonlocal backwards
            backwards += 1
            parameters = sorted(reached, key=lambda each: order[id(each)])
            reached.clear()
            self.average(parameters, backwards)
            self._averaged.update(map(id, parameters))

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
            for handle in handles:
                handle.remove()
