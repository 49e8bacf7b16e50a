from __future__ import annotations

import torch
from torch import nn

from autostream.analysis.argument_views import argument_views
from tests.runtime.programs import case_of
from tests.semantics import Model


def test_views_of_views_and_of_several_results_are_views_of_arguments() -> None:
    model = Model(lambda s, x: (s.w.t()[1:], *x.unbind()), w=nn.Parameter(torch.randn(4, 4)))
    views = argument_views(case_of(model, torch.randn(2, 4)).program.module.graph)
    assert views == {"t", "slice_1", "unbind", "getitem", "getitem_1"}


def test_views_of_results_possible_copies_and_allocations_are_not() -> None:
    case = case_of(lambda x: (x.sin().t(), x.reshape(-1)[1:], x.t(), torch.empty(4) + x), torch.randn(4, 4))
    assert argument_views(case.program.module.graph) == {"t_1"}
