"""One model is prepared at a time. Forks are in tests/test_faults.py."""

from __future__ import annotations

import threading

import torch
from torch import nn

from autostream import optimize
from autostream.utils.locks import preparing


@torch.no_grad()
def test_one_model_is_prepared_at_a_time() -> None:
    done = threading.Event()
    with preparing:
        thread = threading.Thread(target=lambda: (optimize(nn.ReLU())(torch.ones(3)), done.set()))
        thread.start()
        assert not done.wait(0.2)
    thread.join()
    assert done.is_set()
