"""Averages that follow models whose tensors come, go and change their shapes."""

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


def values(model: nn.Module) -> dict[str, float]:
    return {name: tensor.float().mean().item() for name, tensor in model.state_dict().items()}


def test_parameters_come_nearer_and_buffers_are_copied_whatever_their_order() -> None:
    model = filled(layers(), 1.0)
    average = filled(layers(), 0.0)
    norm = average[1]._buffers
    norm["running_mean"] = norm.pop("running_mean")  # to the end
    model[1].running_mean.fill_(3.0)
    check_average(average, model)
    follow(average, model, decay=0.75)
    assert {name: value for name, value in values(average).items() if "run" not in name} == {
        **dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias"), 0.25),
        "1.num_batches_tracked": 1.0,
    }
    assert (average[1].running_mean.mean().item(), average[1].running_var.mean().item()) == (3.0, 1.0)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("before", [None, torch.zeros(3)], ids=["none", "of another shape"])
def test_a_buffer_that_comes_or_changes_its_shape_does_so_in_the_average(
    before: Tensor | None, persistent: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("seen", before, persistent)
    average = copy.deepcopy(model)
    model[0].seen = torch.ones(2)
    assert differing_buffers(average, model) == ["0.seen"]
    check_average(average, model)
    follow(average, model, decay=0.5)
    model[0].seen.add_(1)
    assert torch.equal(average[0].seen, torch.ones(2))
    assert list(average.state_dict()) == list(model.state_dict())
    model[0].seen = None
    follow(average, model, decay=0.5)
    assert average[0].seen is None


def test_a_buffer_without_a_place_there_gets_one() -> None:
    model = nn.Linear(2, 2)
    average = copy.deepcopy(model)
    model.register_buffer("seen", torch.ones(2), persistent=False)
    follow(average, model, decay=0.5)
    assert torch.equal(average.seen, torch.ones(2))
    assert "seen" not in average.state_dict()


def add_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def add_parameter(model: nn.Sequential) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))


def remove_layer(model: nn.Sequential) -> None:
    del model[1]


def resize(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.ones(3, 2))


def add_statistics(model: nn.Sequential) -> None:
    model.append(nn.BatchNorm1d(2, affine=False))


def remove_statistics(model: nn.Sequential) -> None:
    model[1] = nn.ReLU()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (add_layer, "2.weight, 2.bias: "),
        (add_parameter, "scale: "),
        (remove_layer, "1.weight, 1.bias, 1.running_mean: "),
        (resize, "0.weight: "),
        (add_statistics, "2.running_mean, 2.running_var, 2.num_batches_tracked: "),
        (remove_statistics, "1.weight, 1.bias: "),
    ],
)
def test_a_model_that_has_become_another_needs_another_average(
    change: Callable[[nn.Sequential], None], name: str
) -> None:
    model = layers()
    average = copy.deepcopy(model)
    change(model)
    with pytest.raises(TargetError, match=f"differ in {name}.*make a new one"):
        check_average(average, model)


def test_statistics_whose_module_has_gone_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    average = copy.deepcopy(model)
    del model[1]
    with pytest.raises(TargetError, match=r"differ in 1\.running_mean"):
        check_average(average, model)
