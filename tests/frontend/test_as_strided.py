"""What ``as_strided`` may lay out anew: what arguments cover, and what a program takes itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.errors import TraceError
from autostream.frontend.trace import trace
from tests.semantics import Model, check_same

Forward = Callable[..., Tensor]  # of the model and its inputs


def reach(forward: Forward, *inputs: Tensor) -> None:
    trace(Model(forward), inputs)


_BASE = torch.randn(4)

ALLOWED: dict[str, tuple[Forward, tuple[Tensor, ...]]] = {
    "another layout of all that is there": (lambda _, x: x.as_strided((3, 2), (1, 3)) + 1, (torch.randn(2, 3),)),
    "windows": (lambda _, x: x.as_strided((3, 2), (1, 1)).sum(1), (torch.randn(4),)),
    "a part": (lambda _, x: x.as_strided((2,), (2,), 1) + 1, (torch.randn(4),)),
    "an input that is expanded": (lambda _, x: x.as_strided((4,), (1,)) + 1, (torch.randn(1, 4).expand(3, 4),)),
    "the gaps of one input, which another covers": (
        lambda _, x, y: x.as_strided((4,), (1,)) + y.sum(),
        (_BASE[::2], _BASE),
    ),
    "memory of the program's own": (lambda _, x: (x + 1)[::2].as_strided((8,), (1,)) * 2, (torch.randn(8),)),
    "a copy": (lambda _, x: torch.as_strided_copy(x, (2, 2), (1, 2)), (torch.randn(4),)),
}

REFUSED: dict[str, tuple[Forward, tuple[Tensor, ...]]] = {
    "gaps": (lambda _, x: x.as_strided((2, 2), (1, 2)) + 1, (torch.randn(8)[::2],)),
    "behind": (lambda _, x: x.as_strided((4,), (1,)) + 1, (torch.randn(4)[:2],)),
    "before": (lambda _, x: x.as_strided((2,), (1,), 0) + 1, (torch.randn(4)[2:],)),
    "gaps of what is written": (lambda _, x: x.relu_()[:2].as_strided((2, 2), (1, 2)) + 1, (torch.randn(8)[::2],)),
    "gaps of a view": (lambda _, x: x[1:].as_strided((2,), (1,)) + 1, (torch.randn(8)[::2],)),
    "a copy of gaps": (lambda _, x: torch.as_strided_copy(x, (2, 2), (1, 2)), (torch.randn(8)[::2],)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_arguments_cover_may_be_laid_out_anew(name: str) -> None:
    forward, inputs = ALLOWED[name]
    reach(forward, *inputs)


@pytest.mark.parametrize("name", REFUSED)
def test_gaps_and_what_lies_around_may_not(name: str) -> None:
    forward, inputs = REFUSED[name]
    with pytest.raises(TraceError, match=r"as_strided reaches memory of an argument .*: .*as_strided"):
        reach(forward, *inputs)


def test_so_may_weights() -> None:
    class Tiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.as_strided((3, 2), (1, 1))

    trace(Tiled(), (torch.randn(2, 3),))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_that_does_runs_as_it_is(device: str) -> None:
    """Captured, the graph would read its own copy of the input, with nothing in the gaps."""

    def forward(_: nn.Module, x: Tensor) -> Tensor:
        return x.relu_().as_strided((2, 2), (1, 2)).sin_() + 1

    fast = check_same(Model(forward), ([torch.randn(8, device=device)[::2]], {}), {"kernels": "auto"})
    assert all("as_strided reaches memory" in report.refusals[0].reason for report in fast.reports)
    assert isinstance(fast, autostream.OptimizedModule)
