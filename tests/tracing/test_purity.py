"""Which Python does nothing but compute, and what is said of the other."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autostream.tracing.purity import impurity
from tests.semantics import Model

SCALE, HISTORY = 2.0, list[float]()
log = logging.getLogger(__name__)


def scaled(x: Tensor, by: float = SCALE) -> Tensor:
    return F.relu(x) * by


def pure(s: Model, x: Tensor) -> Tensor:
    y = torch.stack([scaled(layer(x)) for layer in s.layers]).sum(0)
    if not isinstance(y, Tensor) or len(y) == 0:
        raise ValueError(f"of shape {tuple(y.shape)}")
    with torch.no_grad():
        first, *_ = (y.sin(), y.cos())
    return first if first.sum() > 0 else s.layers[0](max(y.unbind(), key=lambda row: row.norm()))


def test_what_computes_is_pure() -> None:
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())])
    assert impurity(Model(pure, layers=layers)) == ""
    assert impurity(nn.TransformerEncoderLayer(8, 2)) == ""


def writes_global(s: Any, x: Tensor) -> Tensor:
    global SCALE
    SCALE = 3.0
    return x


def counts(s: Any, x: Tensor) -> Tensor:
    s.calls += 1
    return x


def fills(s: Any, x: Tensor) -> Tensor:
    s.seen["x"] = True
    return x


def imports(s: Any, x: Tensor) -> Tensor:
    import math

    return x * math.pi


def by_helper(s: Any, x: Tensor) -> Tensor:
    return tagged(x)


def tagged(x: Tensor) -> Tensor:
    x.tag = 1  # type: ignore[attr-defined]
    return x


class Through:
    """An object whose methods nobody looks into."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (writes_global, "writes_global writes SCALE"),
        (counts, "counts writes calls"),
        (fills, "fills writes an item"),
        (imports, "imports writes math"),
        (by_helper, "tagged writes tag"),
        (lambda s, x: [x, s.eval()][0], "uses eval"),
        (lambda s, x: [x, s.w.requires_grad_(False)][0], "uses requires_grad_"),
        (lambda s, x: [x, torch.set_default_dtype(torch.float64)][0], "uses set_default_dtype"),
        (lambda s, x: [x, torch.manual_seed(0)][0], "uses manual_seed"),
        (lambda s, x: [x, HISTORY.append(1.0)][0], "HISTORY"),
        (lambda s, x: [x, s.history][0], "Model.history"),
        (lambda s, x: [x, print(x)][0], "print"),
        (lambda s, x: [x, log.warning("x")][0], "log"),
        (lambda s, x: [x, warnings.warn("x", stacklevel=1)][0], "warnings"),
        (lambda s, x: getattr(s, "w") + x, "getattr"),  # noqa: B009
        (lambda s, x: s.through(x), "Model.through"),
        (lambda s, x: x * s.settings.scale, "Model.settings"),
        (lambda s, x: vars(s), "vars"),
    ],
)
def test_what_may_do_more_is_not(forward: Callable[..., Any], said: str) -> None:
    attributes = {"history": [], "settings": SimpleNamespace(scale=2.0), "through": Through(), "calls": 0, "seen": {}}
    model = Model(forward, w=nn.Parameter(torch.ones(1)), **attributes)
    assert said in impurity(nn.Sequential(model))


def test_variables_of_a_function_are_looked_at() -> None:
    seen, factor = [], 2.0

    def one(x: Tensor) -> Tensor:
        return x * factor

    def other(x: Tensor) -> Tensor:
        seen.append(1)
        return x

    assert impurity(Model(lambda s, x: one(x))) == ""
    assert "uses append" in impurity(Model(lambda s, x: other(x))) or "seen" in impurity(Model(lambda s, x: other(x)))


def test_inherited_methods_and_properties_are_looked_at() -> None:
    class Counting(nn.Module):
        def counted(self, x: Tensor) -> Tensor:
            self.calls = 1
            return x

        @property
        def scale(self) -> float:
            self.asked = True
            return 2.0

    class Derived(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return self.counted(x)

    class Scaled(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    assert "counted writes calls" in impurity(Derived())
    assert "scale writes asked" in impurity(Scaled())


def test_what_cannot_be_looked_at_is_not_known() -> None:
    def outer() -> Callable[..., Any]:
        if False:
            later = 1
        return lambda s, x: x * later

    assert "cannot be looked at (ValueError)" in impurity(Model(outer()))
