"""A loss as a graph: when that stands for a step, what it takes, and how what the loss returns is put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autostream.errors import TargetError, TraceError
from autostream.frontend.batches import Batch, detached, parts_of
from autostream.frontend.capture import capture
from autostream.frontend.losses import Loss
from autostream.frontend.tree import TENSOR, Structure, flatten, shares_containers, unflatten


class CapturedLoss:
    """A loss captured with its gradients recorded.

    Args:
        loss: the loss.
        batch: such as it will be called with.
        parts: into which a batch is taken apart; the graph is of one of them.

    Attributes:
        captured: by Dynamo, with the tensors of this call until :meth:`let_go`.
        takes: for each input of the graph, the position of the batch's tensor that it is, or is a part of; ``None`` for
            those that are no part of a batch.

    Raises:
        TargetError: a batch has no equal parts, or what is returned for one is more than the loss.
        TraceError: it cannot be captured.

    Example:
        >>> loss = Loss(torch.nn.MSELoss(), torch.nn.Linear(2, 2))
        >>> captured = CapturedLoss(loss, (torch.ones(4, 2), torch.ones(4, 2)), 1)
        >>> captured.takes
        [None, None, 0, 1]
        >>> captured.stands_for((torch.zeros(4, 2), torch.zeros(4, 2))), captured.stands_for((torch.ones(2, 2),) * 2)
        (True, False)
        >>> captured.result([torch.tensor(0.5)], (torch.ones(4, 2), torch.ones(4, 2)))
        tensor(0.5000)
    """

    def __init__(self, loss: Loss, batch: Batch, parts: int) -> None:
        self._loss, self._parts = loss, parts
        part = self.part(batch)
        with torch.enable_grad():
            captured = capture(loss, part, {})
        if captured is None:
            raise TraceError("it computes nothing with tensors")
        self.captured = captured
        positions = {id(tensor): at for at, tensor in reversed([*enumerate(flatten(part)[0])])}
        self.takes = [
            positions.get(id(tensor), -1) if item.is_argument else None
            for item, tensor in zip(captured.inputs, captured.tensors, strict=True)
        ]
        if -1 in self.takes:
            raise TraceError("the loss takes a tensor of the batch from an object that cannot be opened")
        self._outputs: Sequence[Tensor | None] = ()
        self._restored = captured.restored(lambda *_: self._outputs)
        self._returned = None if captured.effects else self._found(part)
        if captured.effects:
            self._check_first()

    @property
    def held(self) -> list[Tensor]:
        """The tensors that it took when it was captured, and that are no part of the batch."""
        return [own for own, at in zip(self.captured.tensors, self.takes, strict=True) if at is None]

    def held_now(self, batch: Batch) -> list[Tensor]:
        """Those that it takes now, where :meth:`stands_for` holds of a batch."""
        with torch.enable_grad():
            given = self.captured.given(self._loss, self.part(batch), {})
        return [own for own, at in zip(given, self.takes, strict=True) if at is None]

    def stands_for(self, batch: Batch) -> bool:
        """Whether all is as it was captured, as far as Dynamo can see."""
        with torch.enable_grad():
            return self.captured.guards(self._loss, self.part(batch), {})

    def failed(self, batch: Batch) -> str:
        """The guard that does not hold, as Dynamo writes it."""
        with torch.enable_grad():
            return self.captured.guards.failed(self._loss, self.part(batch), {}).strip()

    def part(self, batch: Batch) -> Batch:
        """The first of the parts of a batch.

        Raises:
            TargetError: it has no equal parts.
        """
        return batch if self._parts == 1 else parts_of(batch, self._parts)[0]

    def result(self, outputs: Sequence[Tensor | None], batch: Batch) -> Any:
        """What the loss returns beside its value, of what the graph has; with all that it does to Python's objects."""
        if self._returned is not None:
            structure, sources = self._returned
            return outputs[0] if structure is TENSOR else unflatten(structure, [outputs[at] for at in sources])
        return detached(self._put_together(outputs, self.part(batch))[1])

    def let_go(self) -> None:
        """Keep no tensor of the call that was captured."""
        self.captured = replace(self.captured, tensors=())

    def _put_together(self, outputs: Sequence[Tensor | None], part: Batch) -> tuple[Any, Any]:
        """The loss and what is returned, by Dynamo's bytecode."""
        self._outputs = outputs
        try:
            with torch.enable_grad():
                loss, result = self._restored(self._loss, part, {})
                return loss, result
        finally:
            self._outputs = ()

    def _found(self, part: Batch) -> tuple[Structure, list[int]] | None:
        """How what the loss returns is made of outputs of the graph; ``None`` where only Dynamo's bytecode can make it.

        Found by that, with stand-ins for the outputs. What it computes of their numbers is another the second time.
        """
        results: Any = self.captured.module.graph.output_node().args[0]
        found = list[tuple[Any, Structure, list[int]]]()
        for number in range(2):
            outputs = [torch.full((), number) for _ in results]
            loss, result = self._put_together(outputs, part)
            if loss is not outputs[0]:
                raise TraceError(_WHICH)
            if self._parts > 1 and result is not loss:
                raise TargetError("with microbatches, loss_fn has to return the loss alone")
            try:
                tensors, structure = flatten(result)
            except TraceError:
                return None
            positions = {id(output): at for at, output in enumerate(outputs)}
            found.append((result, structure, [positions.get(id(tensor), -1) for tensor in tensors]))
        (result, structure, sources), (again, *others) = found
        if others != [structure, sources] or -1 in sources or shares_containers(result, again):
            return None
        return structure, sources

    def _check_first(self) -> None:
        """See that the first output may be the loss, where that cannot be tried: it would have effects."""
        results: Any = self.captured.module.graph.output_node().args[0]
        value = results[0].meta.get("example_value")
        if self._parts > 1:
            raise TraceError("loss_fn changes Python objects, and is called for each of the microbatches")
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise TraceError(_WHICH)


_WHICH = "which output of the captured graph is the loss is not known"
