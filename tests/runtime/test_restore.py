"""Trial runs start from the same state each time, and leave none of their writes behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from autostream.runtime.restore import Restore, undone, versions_kept


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).view(2, 3).t(),
        lambda: torch.arange(6.0)[::2],
        lambda: torch.arange(3.0).expand(2, 3),
        lambda: torch.arange(3.0).to(torch.bfloat16),
        lambda: torch.tensor(4),
        lambda: torch.empty(0),
        lambda: torch.nn.Parameter(torch.arange(3.0)),
        lambda: torch.inference_mode()(torch.arange)(3.0),
    ],
    ids=["transposed", "gaps", "expanded", "half", "scalar", "empty", "weight", "inference"],
)
def test_tensors_of_any_layout_are_restored_several_times(make: Callable[[], Tensor]) -> None:
    """Beside one of another dtype."""
    tensor, mask = make(), torch.tensor([True, False])
    expected = tensor.tolist()
    restore = Restore([tensor, mask])
    for _ in range(2):
        with torch.inference_mode():
            tensor.untyped_storage().fill_(255)
            mask.logical_not_()
        restore()
        assert (tensor.tolist(), mask.tolist()) == (expected, [True, False])


def test_writes_and_random_state_are_undone_after_a_run_that_fails_too() -> None:
    """Of two tensors that share memory, and of an expanded one."""
    x, y, z = torch.arange(4.0), torch.ones(3).expand(2, 3), torch.ones(2)
    state, starts = torch.get_rng_state(), []
    with pytest.raises(IndexError), undone([x[:3], x[1:], y, z], [True, True, True, False], ["cpu"]) as restore:
        for _ in range(3):
            restore()
            starts.append(x.tolist())
            x.add_(1)
            y.untyped_storage().fill_(0)
            torch.rand(1)
        torch.arange(4)[9]
    assert starts == [[0, 1, 2, 3]] * 3
    assert (x.tolist(), x._version) == ([0, 1, 2, 3], 0)
    assert y.tolist() == [[1, 1, 1]] * 2
    assert torch.equal(torch.get_rng_state(), state)
    with undone([z], [False], ["cpu"]) as restore:
        assert restore.spans == ()


def test_generators_of_all_devices_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[list[str]] = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: saved.append(devices) or nullcontext())
    with undone([], [], ("cuda:0", "cuda:1", "cpu")):
        pass
    assert saved == [["cuda:0", "cuda:1"]], "the host's always is"


@pytest.mark.parametrize("private", [True, False])
def test_undone_writes_do_not_fail_a_pending_backward(monkeypatch: pytest.MonkeyPatch, private: bool) -> None:
    """Unless this version of PyTorch lacks the function that hides them."""
    if not private:
        monkeypatch.delattr(torch.autograd, "_unsafe_preserve_version_counter")
    weight, inference = torch.ones(2, requires_grad=True), torch.inference_mode()(torch.ones)(2)
    factor = torch.ones(2)
    loss = (weight * factor).sum()
    with versions_kept([factor, inference]):
        factor.mul_(2).div_(2)
    if private:
        loss.backward()
    assert (factor._version == 0) is private
