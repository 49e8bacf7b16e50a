"""What the inputs of captured graphs are called, and whose they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autostream.frontend.capture import capture
from autostream.frontend.inputs import names_like, names_of
from autostream.ir import Role

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    """A parameter, a buffer and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.shift = nn.Buffer(torch.ones(2))
        self.plain = torch.ones(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x) + self.shift + self.plain + y


@torch.no_grad()
def test_the_models_own_tensors_go_by_its_names_and_arguments_by_number() -> None:
    model = Net()
    captured = capture(model, (torch.ones(1, 2),), {"y": torch.ones(2)})
    assert captured is not None
    names = names_of(captured, model)
    assert len(set(names)) == len(names)
    assert (Role.PARAMETER, "layer.weight") in names
    assert (Role.BUFFER, "shift") in names
    assert [name for role, name in names if role is Role.CONSTANT] == ["L['model'].plain"]
    assert sum(role is Role.INPUT for role, _ in names) == 2


def test_a_backend_knows_weights_by_their_type() -> None:
    assert [role for role, _ in names_like([nn.Parameter(torch.ones(2)), torch.ones(2), 3])] == [
        Role.PARAMETER,
        Role.INPUT,
        Role.INPUT,
    ]
