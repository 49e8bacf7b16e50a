"""A training step's loss, captured by Dynamo: its guards, its inputs, and how to rebuild what ``loss_fn`` returned."""

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
    """A loss, captured with gradients recorded.

    Args:
        loss: the loss.
        batch: an example.
        parts: the number of microbatches; the graph is for one of them.

    Attributes:
        captured: the capture, with the tensors of this call until :meth:`let_go`.
        takes: for each input of the graph, the position of the batch's tensor that it is, or is a part of; ``None`` for
            inputs that are not from the batch.

    Raises:
        TargetError: the batch has no equal parts, or with several parts ``loss_fn`` returns more than the loss.
        TraceError: the loss cannot be captured.

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
        self._returned = None if captured.effects else self._result_structure(part)
        if captured.effects:
            self._check_first()

    @property
    def held(self) -> list[Tensor]:
        """The inputs of the graph that are not from the batch, such as weights, when it was captured."""
        return [tensor for tensor, at in zip(self.captured.tensors, self.takes, strict=True) if at is None]

    def held_now(self, batch: Batch) -> list[Tensor]:
        """The same inputs now; :meth:`stands_for` is true for the batch."""
        with torch.enable_grad():
            inputs = self.captured.graph_inputs(self._loss, self.part(batch), {})
        return [tensor for tensor, at in zip(inputs, self.takes, strict=True) if at is None]

    def stands_for(self, batch: Batch) -> bool:
        """Whether the graph may be reused for this batch: checks Dynamo's guards."""
        with torch.enable_grad():
            return self.captured.guards(self._loss, self.part(batch), {})

    def failed(self, batch: Batch) -> str:
        """The guard that fails, as Dynamo writes it."""
        with torch.enable_grad():
            return self.captured.guards.failed(self._loss, self.part(batch), {}).strip()

    def part(self, batch: Batch) -> Batch:
        """The first microbatch of a batch.

        Raises:
            TargetError: the batch has no equal parts.
        """
        return batch if self._parts == 1 else parts_of(batch, self._parts)[0]

    def result(self, outputs: Sequence[Tensor | None], batch: Batch) -> Any:
        """What ``loss_fn`` returns, rebuilt from the graph's outputs; side effects on Python objects are applied."""
        if self._returned is not None:
            structure, sources = self._returned
            return outputs[0] if structure is TENSOR else unflatten(structure, [outputs[at] for at in sources])
        return detached(self._restore(outputs, self.part(batch))[1])

    def let_go(self) -> None:
        """Release the tensors of the captured call."""
        self.captured = replace(self.captured, tensors=())

    def _restore(self, outputs: Sequence[Tensor | None], part: Batch) -> tuple[Any, Any]:
        """The loss and the result of ``loss_fn``, by Dynamo's bytecode."""
        self._outputs = outputs
        try:
            with torch.enable_grad():
                loss, result = self._restored(self._loss, part, {})
                return loss, result
        finally:
            self._outputs = ()

    def _result_structure(self, part: Batch) -> tuple[Structure, list[int]] | None:
        """The structure of what ``loss_fn`` returns, and which outputs of the graph are its tensors.

        ``None`` where only Dynamo's bytecode can rebuild it. The bytecode is run twice on placeholder outputs: a value
        that it computes from their numbers differs between the two runs.
        """
        results: Any = self.captured.module.graph.output_node().args[0]
        runs = list[tuple[Any, Structure, list[int]]]()
        for number in range(2):
            outputs = [torch.full((), number) for _ in results]
            loss, result = self._restore(outputs, part)
            if loss is not outputs[0]:
                raise TraceError(_WHICH)
            if self._parts > 1 and result is not loss:
                raise TargetError("with microbatches, loss_fn has to return the loss alone")
            try:
                tensors, structure = flatten(result)
            except TraceError:
                return None
            positions = {id(output): at for at, output in enumerate(outputs)}
            runs.append((result, structure, [positions.get(id(tensor), -1) for tensor in tensors]))
        (result, structure, sources), (again, *others) = runs
        if others != [structure, sources] or -1 in sources or shares_containers(result, again):
            return None
        return structure, sources

    def _check_first(self) -> None:
        """Check that the first output may be the loss, where the bytecode cannot be run without its side effects."""
        results: Any = self.captured.module.graph.output_node().args[0]
        value = results[0].meta.get("example_value")
        if self._parts > 1:
            raise TraceError("loss_fn changes Python objects, and is called for each of the microbatches")
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise TraceError(_WHICH)


_WHICH = "which output of the captured graph is the loss is not known"
