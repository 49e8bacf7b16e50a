"""PyTorch's ``AveragedModel`` in a step: its first update copies, and later ones average, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import autostream
from autostream import TraceError

QUICK: dict[str, Any] = {"policy": "sequential", "kernels": "eager", "strict": True}


def made(**options: Any) -> tuple[Callable[[Tensor, bool], Tensor], AveragedModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    average = AveragedModel(model, **options)

    def update(x: Tensor, averages: bool) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if averages:
            average.update_parameters(model)
        return loss

    return update, average, optimizer


@pytest.mark.parametrize("since", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.3), "use_buffers": True},
        {"avg_fn": get_ema_avg_fn(0.9)},
        {},
        {"use_buffers": True},
    ],
    ids=["moving", "with buffers", "one by one", "equal", "equal with buffers"],
)
def test_an_averaged_model_is_updated_in_the_graph(options: dict[str, Any], since: int) -> None:
    """Whether its first update is in the step that runs eagerly, or in a graph."""
    (ours, average, optimizer), (eager, other, _) = made(**options), made(**options)
    step = autostream.step(optimizers=[optimizer], **QUICK)(ours)
    for at in range(10):
        if at == 8:  # it starts anew
            for each in (average, other):
                each.n_averaged.zero_()
        x = torch.randn(4, 3, dtype=torch.double)
        torch.testing.assert_close(step(x, at >= since), eager(x, at >= since).detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(average.state_dict(), other.state_dict(), rtol=0, atol=1e-10)
    assert average.n_averaged == 10 - max(since, 8)
    assert len(step.reports) == (2 if since else 1)


def test_a_counter_on_another_device_is_refused_with_what_to_write() -> None:
    update, average, optimizer = made()
    step = autostream.step(optimizers=[optimizer], **QUICK)(update)
    step(torch.randn(4, 3, dtype=torch.double), False)
    average.n_averaged = average.n_averaged.to("meta")
    with pytest.raises(TraceError, match="AveragedModel"):
        step(torch.randn(4, 3, dtype=torch.double), True)
