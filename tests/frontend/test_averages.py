"""Moving averages of models: how they follow, and models whose tensors come, go and change their shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import TargetError
from autostream.frontend.averages import check_average, differing_buffers, follow


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def filled(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)
    return model


def test_parameters_are_averaged_and_buffers_copied_whatever_their_order() -> None:
    model, average = filled(layers(), 1.0), filled(layers(), 0.0)
    norm = average[1]._buffers
    norm["running_mean"] = norm.pop("running_mean")  # to the end
    model[1].running_mean.fill_(3.0)
    check_average(average, model)
    follow(average, model, decay=0.75)
    assert {name: tensor.float().mean().item() for name, tensor in average.state_dict().items()} == {
        **dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias"), 0.25),
        "1.running_mean": 3.0,
        "1.running_var": 1.0,
        "1.num_batches_tracked": 1.0,
    }


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("before", ["absent", None, torch.zeros(3)], ids=["absent", "none", "of another shape"])
def test_buffers_come_go_and_change_with_the_models(before: Tensor | str | None, persistent: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    if not isinstance(before, str):
        model[0].register_buffer("seen", before, persistent)
    average = copy.deepcopy(model)
    model[0].register_buffer("seen", torch.ones(2), persistent)
    assert differing_buffers(average, model) == ["0.seen"]
    check_average(average, model)
    follow(average, model, decay=0.5)
    model[0].seen.add_(1)
    assert torch.equal(average[0].seen, torch.ones(2))
    assert list(average.state_dict()) == list(model.state_dict())
    model[0].seen = None
    follow(average, model, decay=0.5)
    assert average[0].seen is None


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda model: model.append(nn.Linear(2, 2)), "2.weight, 2.bias: "),
        (lambda model: model.__delitem__(1), "1.weight, 1.bias, 1.running_mean: "),
        (lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(3, 2))), "0.weight: "),
        (lambda model: model.append(nn.BatchNorm1d(2, affine=False)), "2.running_mean, 2.running_var, "),
        (lambda model: model.__setitem__(1, nn.ReLU()), "1.weight, 1.bias: "),
    ],
)
def test_a_model_with_other_parameters_or_modules_needs_a_new_average(
    change: Callable[[nn.Sequential], object], names: str
) -> None:
    model = layers()
    average = copy.deepcopy(model)
    change(model)
    with pytest.raises(TargetError, match=f"differ in {names}.*make a new one"):
        check_average(average, model)
