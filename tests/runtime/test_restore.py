"""What runs write is put back before each and after the last, unseen by autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from autostream.runtime.restore import Restore, undone, versions_kept


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.arange(6.0),
        lambda: torch.arange(6.0).view(2, 3).t(),
        lambda: torch.arange(6.0)[::2],
        lambda: torch.arange(3.0).expand(2, 3),
        lambda: torch.arange(3.0).to(torch.bfloat16),
        lambda: torch.tensor(4),
        lambda: torch.empty(0),
        lambda: torch.nn.Parameter(torch.arange(3.0)),
        lambda: torch.inference_mode()(torch.arange)(3.0),
    ],
    ids=["plain", "transposed", "gaps", "expanded", "half", "scalar", "empty", "weight", "inference"],
)
def test_whatever_a_tensor_is_like_it_is_put_back(made: Callable[[], Tensor]) -> None:
    """Beside one of another dtype, again and again."""
    tensor, mask = made(), torch.tensor([True, False])
    expected = tensor.tolist()
    restore = Restore([tensor, mask])
    for _ in range(2):
        with torch.inference_mode():
            tensor.untyped_storage().fill_(255)
            mask.logical_not_()
        restore()
        assert tensor.tolist() == expected
        assert mask.tolist() == [True, False]


def test_tensors_in_the_same_memory_are_all_put_back() -> None:
    x = torch.arange(4.0)
    restore = Restore([x[:3], x[1:]])
    x.zero_()
    restore()
    assert x.tolist() == [0, 1, 2, 3]


def test_where_nothing_is_written_there_is_nothing_to_do() -> None:
    with undone([torch.ones(2)], [False], ["cpu"]) as restore:
        restore()
        assert restore.spans == ()


def test_runs_in_between_find_what_the_first_one_found() -> None:
    place, seen = torch.tensor(3), []
    with undone([place, torch.ones(2)], [True, False], ["cpu"]) as restore:
        for _ in range(3):
            restore()
            seen.append(place.item())
            place += 1
    assert seen == [3, 3, 3]
    assert (place.item(), place._version) == (3, 0)


def test_what_a_run_that_fails_has_written_is_put_back() -> None:
    place = torch.tensor(3)
    with pytest.raises(IndexError), undone([place], [True], ["cpu"]):
        place += 1
        torch.arange(4)[place + 1]
    assert place.item() == 3


def test_what_was_written_and_drawn_is_put_back() -> None:
    x, y = torch.ones(3), torch.ones(3).expand(2, 3)
    state = torch.get_rng_state()
    with undone([x, y], [True, True], ["cpu"]):
        x.fill_(7)
        y.untyped_storage().fill_(0)
        torch.rand(1)
    assert x.tolist() == [1, 1, 1]
    assert y.tolist() == [[1, 1, 1]] * 2
    assert torch.equal(torch.get_rng_state(), state)


def test_generators_of_all_devices_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[list[str]] = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: saved.append(devices) or nullcontext())
    with undone([], [], ("cuda:0", "cuda:1", "cpu")):
        pass
    assert saved == [["cuda:0", "cuda:1"]], "that of the host always is"


@pytest.mark.parametrize("private", [True, False])
def test_what_is_undone_does_not_fail_a_pending_backward(monkeypatch: pytest.MonkeyPatch, private: bool) -> None:
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
