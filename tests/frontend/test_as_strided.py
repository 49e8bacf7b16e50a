"""``as_strided``: allowed where arguments cover all memory of the result, refused for memory around them."""

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


_BASE = torch.randn(4)

ALLOWED: dict[str, tuple[Forward, tuple[Tensor, ...]]] = {
    "another layout of all elements": (lambda _, x: x.as_strided((3, 2), (1, 3)) + 1, (torch.randn(2, 3),)),
    "windows": (lambda _, x: x.as_strided((3, 2), (1, 1)).sum(1), (torch.randn(4),)),
    "a part": (lambda _, x: x.as_strided((2,), (2,), 1) + 1, (torch.randn(4),)),
    "an expanded input": (lambda _, x: x.as_strided((4,), (1,)) + 1, (torch.randn(1, 4).expand(3, 4),)),
    "gaps of an input that another input covers": (
        lambda _, x, y: x.as_strided((4,), (1,)) + y.sum(),
        (_BASE[::2], _BASE),
    ),
    "memory of an intermediate": (lambda _, x: (x + 1)[::2].as_strided((8,), (1,)) * 2, (torch.randn(8),)),
    "a copy": (lambda _, x: torch.as_strided_copy(x, (2, 2), (1, 2)), (torch.randn(4),)),
    "a weight": (lambda s, x: x @ s.weight.as_strided((3, 2), (1, 1)), (torch.randn(2, 3),)),
}

REFUSED: dict[str, tuple[Forward, tuple[Tensor, ...]]] = {
    "gaps": (lambda _, x: x.as_strided((2, 2), (1, 2)) + 1, (torch.randn(8)[::2],)),
    "behind": (lambda _, x: x.as_strided((4,), (1,)) + 1, (torch.randn(4)[:2],)),
    "before": (lambda _, x: x.as_strided((2,), (1,), 0) + 1, (torch.randn(4)[2:],)),
    "gaps of a written input": (lambda _, x: x.relu_()[:2].as_strided((2, 2), (1, 2)) + 1, (torch.randn(8)[::2],)),
    "gaps of a view": (lambda _, x: x[1:].as_strided((2,), (1,)) + 1, (torch.randn(8)[::2],)),
    "a copy of gaps": (lambda _, x: torch.as_strided_copy(x, (2, 2), (1, 2)), (torch.randn(8)[::2],)),
}


def test_memory_that_arguments_cover_is_allowed() -> None:
    for forward, inputs in ALLOWED.values():
        assert trace(Model(forward, weight=nn.Parameter(torch.randn(4))), inputs).program.outputs


def test_memory_around_arguments_is_refused_with_the_users_line() -> None:
    for forward, inputs in REFUSED.values():
        with pytest.raises(TraceError, match=r"as_strided reaches memory of an argument .*: .*as_strided"):
            trace(Model(forward), inputs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_with_a_refused_call_runs_eagerly(device: str) -> None:
    """A captured graph would read its own copy of the input, which has nothing in the gaps."""

    def forward(_: nn.Module, x: Tensor) -> Tensor:
        return x.relu_().as_strided((2, 2), (1, 2)).sin_() + 1

    fast = check_same(Model(forward), ([torch.randn(8, device=device)[::2]], {}), {"kernels": "auto"})
    assert all("as_strided reaches memory" in report.refusals[0].reason for report in fast.reports)
    assert isinstance(fast, autostream.OptimizedModule)
