"""Views of arguments, and what only seems to be one."""

from __future__ import annotations

import torch
from torch import nn

from autostream.analysis.argument_views import argument_views
from tests.runtime.programs import case_of
from tests.semantics import Model


def test_views_of_views_and_results_of_several_are_views() -> None:
    model = Model(lambda s, x: (s.w.t()[1:], *x.unbind()), w=nn.Parameter(torch.randn(4, 4)))
    found = argument_views(case_of(model, torch.randn(2, 4)).program.module.graph)
    assert found == {"t", "slice_1", "unbind", "getitem", "getitem_1"}


def test_what_looks_at_a_result_is_none_nor_is_what_may_copy_nor_what_looks_at_that() -> None:
    case = case_of(lambda x: (x.sin().t(), x.reshape(-1)[1:], x.t()), torch.randn(4, 4))
    assert argument_views(case.program.module.graph) == {"t_1"}


def test_memory_that_is_taken_is_no_view() -> None:
    assert argument_views(case_of(lambda x: torch.empty(3) + x, torch.randn(3)).program.module.graph) == frozenset()
