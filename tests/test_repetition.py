"""What is kept of a call so that the model can repeat it: little, and enough."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autostream.repetition import Repetition
from autostream.tracing.gradients import trace_gradients
from autostream.frontend.tree import flatten


class Counting(nn.Linear):
    """Counts calls; the first count matters, the second does not, and the third is a part of the first."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("first", torch.ones(4))
        self.register_buffer("second", torch.ones(4))
        self.register_buffer("third", self.first[1:])  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        self.second.add_(1)  # type: ignore[operator]
        return super().forward(x) * self.first.mul_(2) + self.third.sum()  # type: ignore[operator]


def repetition(model: nn.Module) -> tuple[Repetition, dict[str, Tensor]]:
    """Of a model at three rows of four, and its state."""
    tensors, structure = flatten(((torch.ones(3, 4),), {}))
    found = trace_gradients(model, tensors, structure)
    names = [own.target for own in found.state]
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Repetition(model, found.forward.program, names), {name: state[name] for name in names}


def names(state: dict[str, Tensor], positions: Any) -> list[str]:
    return [list(state)[at] for at in positions]


def test_of_what_is_written_only_that_is_copied_which_matters() -> None:
    found, state = repetition(Counting())
    assert names(state, found.written) == ["first", "second", "third"]
    before = found.before([*state.values()])
    assert names(state, before.copies) == ["first", "third"]
    assert before.generators == ()


def test_running_statistics_do_not_matter() -> None:
    found, state = repetition(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert names(state, found.written) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert found.before([*state.values()]).copies == {}


def test_inputs_that_stay_are_written_as_state_is() -> None:
    """As buffers come to a piece of a model: the first of two, which the results depend on."""

    class Piece(nn.Linear):
        def forward(self, first: Tensor, x: Tensor) -> Tensor:
            return super().forward(x) * first.mul_(2)

    model, first, x = Piece(4, 4), torch.ones(4), torch.ones(3, 4)
    tensors, structure = flatten(((first, x), {}))
    halves = trace_gradients(model, tensors, structure, {0})
    values = [*model.parameters(), first, x]
    found = Repetition(model, halves.forward.program, [own.target for own in halves.state])
    assert [values[at] is first for at in found.written] == [True]
    before = found.before(values)
    first.zero_()
    again = found.values(values, before, {0, 1})
    assert again[2].tolist() == [1] * 4
    assert again[2].add_(1).sum() == 8
    assert first.sum() == 0


def test_copies_share_memory_where_the_state_does() -> None:
    """And hold what it held before the call; what is written to them is not seen in the state."""
    found, state = repetition(Counting())
    before = found.before([*state.values()])
    state["first"].zero_()
    values = dict(zip(state, found.values([*state.values()], before, ()), strict=True))
    values["first"][2] = 5
    assert values["third"].tolist() == [1, 5, 1]
    assert state["first"].sum() == 0


def test_gradients_lead_from_a_copy_to_the_value() -> None:
    class Shrinking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)

    model = Shrinking(4, 4)
    found, state = repetition(model)
    trained = [at for at, name in enumerate(state) if name in ("weight", "bias")]
    values = dict(zip(state, found.values([*state.values()], found.before([*state.values()]), trained), strict=True))
    values["weight"].square().sum().backward()
    torch.testing.assert_close(model.weight.grad, 2 * model.weight.detach())


def test_numbers_are_drawn_once_more_and_modes_are_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    found, state = repetition(model)
    before, x = found.before([*state.values()]), torch.ones(3, 4)
    first, after = model(x), torch.get_rng_state()
    model.eval()
    with found.as_then(before):
        assert model.training
        assert torch.equal(model(x), first)
    assert not model.training
    assert torch.equal(torch.get_rng_state(), after)


def test_what_required_gradients_then_is_what_does_now() -> None:
    """A weight that has been frozen since leads nowhere, but may be asked for; one that was frozen is no business."""
    model = nn.Linear(4, 4)
    found, state = repetition(model)
    now, trained = [*state.values()], [[*state].index("weight")]
    before = found.before(now)
    model.weight.requires_grad_(False)
    values = dict(zip(state, found.values(now, before, trained), strict=True))
    assert values["weight"].requires_grad
    assert not values["bias"].requires_grad
    (gradient,) = torch.autograd.grad(values["weight"].square().sum(), values["weight"])
    torch.testing.assert_close(gradient, 2 * model.weight)
