"""Ops of a backward keep the user's lines of what was computed forward."""

from __future__ import annotations

import torch
from torch.fx.traceback import get_current_meta, preserve_node_meta

from autostream.frontend.source_lines import keep_lines


def test_gradients_have_the_lines_of_what_they_are_gradients_of() -> None:
    weight = torch.ones(2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # it notes lines
        loss = weight.exp().sum()
    seen: list[str] = []
    with preserve_node_meta():
        keep_lines(loss)
        weight.register_hook(lambda gradient: seen.append("".join(get_current_meta()["stack_trace"])))
        loss.backward()
    assert "loss = weight.exp().sum()" in seen[0]
