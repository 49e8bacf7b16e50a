"""Padding: calls of all lengths share the schedules of buckets; calls that cannot be padded run at their own shape.

tokens ─▶ embed ─┬─▶ left ──┬─▶ sum ─▶ logits, one for each token
                 └─▶ right ─┘
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autostream.dispatch import padding
from autostream.dispatch.padding import PaddingDispatcher
from autostream.errors import TargetError
from autostream.frontend.buckets import Bucket
from autostream.frontend.trial import tried
from autostream.options import Options
from tests.semantics import Model, same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LENGTH = Bucket("length", (4, 8))
QUICK = Options(policy="sequential")


class Tagger(nn.Module):
    """Two branches over each token, and the mean over those that are not masked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.left, self.right = nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(tokens)
        logits = self.left(x) + self.right(x)
        kept = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        return {
            "logits": logits,
            "pooled": (logits * kept[..., None]).sum(1),
            "columns": logits.mT.clone(),
            "labels": 8,
        }


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(9, (rows, length), generator=torch.Generator().manual_seed(length))


def mask(rows: int, length: int) -> Tensor:
    return torch.ones(rows, length, dtype=torch.bool)


def tagging() -> PaddingDispatcher:
    dynamic = {"tokens": {1: LENGTH}, "mask": {1: LENGTH}}
    return PaddingDispatcher(Tagger().eval(), QUICK, dynamic)


class Forward(Model):
    def forward(self, x: Any) -> Any:
        return super().forward(x)


def over(forward: Callable[..., Any], value: float = 0, **attributes: Any) -> PaddingDispatcher:
    return PaddingDispatcher(Forward(forward, **attributes), QUICK, {"x": {0: Bucket("n", (4, 8), value)}})


def shapes(dispatch: PaddingDispatcher) -> list[str]:
    """The shape of the first tensor of each signature, the most recently used first."""
    return [report.signature.partition(":")[0] for report in dispatch.reports]


def reasons(dispatch: PaddingDispatcher) -> list[str]:
    (found,) = {
        tuple(refusal.reason for refusal in report.refusals if refusal.choice == "not padded")
        for report in dispatch.reports
    }
    return list(found)


# What is padded


@torch.no_grad()
def test_calls_share_the_schedules_of_buckets() -> None:
    dispatch = tagging()
    for length in (1, 3, 4, 2, 7, 8, 5, 3):
        plain = dispatch.model(tokens(2, length), mask(2, length))
        same(dispatch(tokens(2, length), mask(2, length)), plain, 1e-5)
        same(dispatch(tokens(2, length), mask=mask(2, length)), plain, 1e-5)
    assert shapes(dispatch) == ["2x4", "2x4", "2x8", "2x8"], "one each for named and for positional masks"
    assert reasons(dispatch) == []
    ours, theirs = (call(tokens(2, 3), mask(2, 3)) for call in (dispatch, dispatch.model))
    assert {name: value.stride() for name, value in ours.items() if isinstance(value, Tensor)} == {
        name: value.stride() for name, value in theirs.items() if isinstance(value, Tensor)
    }
    assert ours["pooled"].shape == (2, 8), "not cut, though the labels are as many as the largest bucket is long"


def test_gradients_are_those_without_padding() -> None:
    dispatch = tagging()
    for length in (3, 4, 2):
        given, found = (tokens(2, length), mask(2, length)), []
        for call in (dispatch, dispatch.model):
            dispatch.model.zero_grad()
            outputs = call(*given)
            (outputs["logits"].square().mean() + outputs["pooled"].sum()).backward()
            found.append([parameter.grad for parameter in dispatch.model.parameters()])
        torch.testing.assert_close(*found)
    assert [report.mode for report in dispatch.reports] == ["forward and backward"]
    assert shapes(dispatch) == ["2x4"]


@torch.no_grad()
def test_two_dimensions_each_have_their_buckets() -> None:
    both = {0: Bucket("batch", (4,)), 1: LENGTH}
    dispatch = PaddingDispatcher(Tagger(), QUICK, {"tokens": both, "mask": both})
    for size in ((4, 3), (2, 3), (3, 7), (3, 3), (4, 4)):
        same(dispatch(tokens(*size), mask(*size)), dispatch.model(tokens(*size), mask(*size)), 1e-5)
    assert shapes(dispatch) == ["4x4", "4x8"]


@torch.no_grad()
def test_models_with_graph_breaks_are_padded_as_well() -> None:
    dispatch = over(lambda s, x: x.sin() * 2 if x.sum() < 1e9 else x)
    for rows in (2, 3, 4):
        same(dispatch(torch.ones(rows)), dispatch.model(torch.ones(rows)))
    assert [report.mode for report in dispatch.reports] == ["graph breaks"]
    assert shapes(dispatch) == ["4"]


@torch.no_grad()
def test_prepare_compiles_for_the_bucket_of_the_example() -> None:
    dispatch = tagging()
    dispatch.prepare(tokens(2, 3), mask(2, 3))
    (tokens_in, _), _ = dispatch.static_inputs(tokens(2, 2), mask(2, 2))
    assert dispatch.lowered(tokens(2, 4), mask(2, 4)) is not None
    assert shapes(dispatch) == ["2x4"]
    assert tokens_in.shape == (2, 2), "nothing is captured"
    with pytest.raises(TargetError, match="itself fails at these example inputs"):
        dispatch.prepare(tokens(2, 3), 1)


@torch.no_grad()
def test_trials_change_nothing() -> None:
    """Neither attributes, buffers nor random number generators, the model's own included."""
    dice, expected = (torch.Generator().manual_seed(3) for _ in range(2))

    def counts(s: Any, x: Tensor) -> Any:
        s.count += 1
        return x + s.count + torch.rand(1, generator=dice)

    dispatch = over(counts, count=nn.Buffer(torch.zeros(())))
    state = torch.get_rng_state()
    for number, rows in enumerate((3, 2, 7), 1):
        same(dispatch(torch.zeros(rows)), torch.full((rows,), float(number)) + torch.rand(1, generator=expected))
    same(torch.get_rng_state(), state)
    assert shapes(dispatch) == ["8", "4"]


@torch.no_grad()
def test_an_output_that_is_an_input_without_padding_stays_that_input() -> None:
    class Both(Model):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y)

    model = Both(lambda s, x, y: (x, x.sum() + y))
    dispatch = PaddingDispatcher(model, QUICK, {"y": {0: Bucket("n", 4)}})
    x = torch.ones(2)
    ours, total = dispatch(x, torch.ones(3))
    assert ours.data_ptr() == x.data_ptr()
    same(total, torch.full((3,), 3.0))
    assert not reasons(dispatch)


# What is not


class Opaque:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)


def writes(s: Any, x: Tensor) -> Tensor:
    return x.add_(1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda s, x: x - x.mean(0), "something depends on what n is filled up with: output 0 is off by"),
        (lambda s, x: x.flip(0), "something depends on what n is filled up with: output 0 is off by"),
        (lambda s, x: s.norm(x) * 0, "something depends on what n is filled up with: norm.running_mean is off by"),
        (lambda s, x: torch.cat([x, x]), "dimension 0 of output 0 depends on n, and is not as long"),
        (lambda s, x: (x + 1, len(x)), "it returns other values or containers with padding"),
        (lambda s, x: [x + 1] * len(x), "it returns other values or containers with padding"),
        (lambda s, x: x.reshape(3, 2) + 1, "it fails when it is tried with padding and without (RuntimeError: shape"),
        (lambda s, x: {"y": x + 1, "range": Opaque()}, "a value of type tests.dispatch.test_padding.Opaque is neither"),
        (writes, "it writes to its inputs"),
        (lambda s, x: (x, x + 1), "an output is an input that is padded, or a view of one"),
        (lambda s, x: x[:, :1].t(), "an output is an input that is padded, or a view of one"),
    ],
)
def test_calls_that_cannot_be_padded_run_at_their_own_shape(
    forward: Callable[..., Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    dispatch = over(forward, norm=nn.BatchNorm1d(2))
    plain = copy.deepcopy(dispatch.model)
    x = torch.arange(6.0).view(3, 2)
    for _ in range(2):
        torch.manual_seed(0)
        ours = dispatch(given := x.clone())
        torch.manual_seed(0)
        same(ours, plain(expected := x.clone()))
        same(given, expected)
    same(list(dispatch.model.state_dict().values()), list(plain.state_dict().values()))
    assert all("3x2" in report.signature or report.signature == "some calls" for report in dispatch.reports)
    (reason,) = reasons(dispatch)
    assert reason.startswith(said)
    assert caplog.text.count("runs at its own shape, not padded") == 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("tried", "other"),
    [
        (lambda x: x + 1, lambda x: torch.cat([x, x])),
        (lambda x: x + 1, lambda x: (x, x)),
        (lambda x: x[:1] + 1, lambda x: x + 1),
        (lambda x: x.sum(), lambda x: x + 1),
    ],
)
def test_another_branch_may_return_outputs_of_other_sizes(
    tried: Callable[[Tensor], Any], other: Callable[[Tensor], Any]
) -> None:
    dispatch = over(lambda s, x: tried(x) if x.sum() < 99 else other(x))
    plain = copy.deepcopy(dispatch.model)
    for size, value in ((3, 1.0), (3, 99.0), (2, 99.0), (3, 1.0), (4, 99.0)):
        same(dispatch(torch.full((size, 2), value)), plain(torch.full((size, 2), value)))
    assert "outputs of other sizes" in reasons(dispatch)[0]


@torch.no_grad()
def test_failing_trials_are_not_repeated_for_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(s: Model, x: Tensor) -> Tensor:
        if len(x) > 3:
            raise ValueError(f"no such rows: {x.sum().item()}")
        return x * 2

    trials: list[nn.Module] = []
    monkeypatch.setattr(padding, "tried", lambda model, *call: (trials.append(model), tried(model, *call))[1])
    dispatch = over(forward)
    for value in range(9):
        same(dispatch(torch.full((3, 2), float(value))), torch.full((3, 2), 2.0 * value))
    assert len(trials) == 2 * len(reasons(dispatch)) == 6
    assert caplog.text.count("runs at its own shape, not padded") == 3
    dispatch.forget()
    dispatch(torch.ones(3, 2))
    assert len(trials) == 8


@torch.no_grad()
def test_trials_take_nothing_from_an_iterator_and_a_generator_prevents_them() -> None:
    stream = iter(range(9))
    dispatch = over(lambda s, x: x * next(stream))
    assert [dispatch(torch.ones(3, 2)).mean() for _ in range(4)] == [0, 1, 2, 3]
    assert not reasons(dispatch)
    numbers = (number for number in range(9))
    dispatch = over(lambda s, x: x * next(numbers))
    assert [dispatch(torch.ones(3, 2)).mean() for _ in range(4)] == [0, 1, 2, 3]
    (reason,) = reasons(dispatch)
    assert "it cannot be copied, to be tried without being changed" in reason


@torch.no_grad()
@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: x[:6] * 2,
        lambda s, x: x.topk(min(6, len(x)), 0).values,
        lambda s, x: nn.functional.pad(x, [0, max(0, 6 - len(x))]),
    ],
)
def test_outputs_that_stop_growing_at_some_length_are_not_cut(forward: Callable[..., Any]) -> None:
    """They stop at 6 of 8: lengths of 6 and more alone, or of 5, do not show it. The first call decides."""
    for rows in ((5, 6, 7), (6, 5, 7), (7, 5, 6)):
        dispatch = over(forward, value=float("-inf"))
        for count in rows:
            x = torch.arange(float(count))
            same(dispatch(x), forward(None, x))


@torch.no_grad()
def test_a_model_that_fails_for_shorter_arguments_is_padded() -> None:
    dispatch = over(lambda s, x: x + 0 * x[6])
    same(dispatch(torch.ones(7)), torch.ones(7))
    assert not reasons(dispatch)


@torch.no_grad()
def test_a_trial_that_ran_out_of_memory_is_repeated() -> None:
    full = [True]

    def forward(s: Model, x: Tensor) -> Tensor:
        if len(x) == 5 and full[0]:  # a shorter call of the trial
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x[:6] * 2

    dispatch, x = over(forward), torch.arange(7.0)
    same(dispatch(x), x[:6] * 2)
    assert "too little memory to try it at other lengths" in reasons(dispatch)[0]
    full[0] = False
    same(dispatch(x), x[:6] * 2)
    assert "dimension 0 of output 0 depends on n" in reasons(dispatch)[1]


CENTRED = False


def centred(model: nn.Module, x: Tensor) -> Tensor:
    return x - x.mean(0) if CENTRED or model.centred or model.training else x + 1


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda model, patch: model.train(),
        lambda model, patch: setattr(model, "centred", True),
        lambda model, patch: patch.setitem(globals(), "CENTRED", True),
    ],
    ids=["mode", "attribute", "global"],
)
def test_a_model_that_has_changed_is_tried_again(change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch, x = over(centred, centred=False), torch.arange(3.0)
    dispatch.model.eval()
    same(dispatch(x), x + 1)
    change(dispatch.model, monkeypatch)
    for _ in range(2):
        same(dispatch(x), x - x.mean(0))
    assert shapes(dispatch) == ["3", "4"]
    assert "filled up with" in reasons(dispatch)[0]


@torch.no_grad()
def test_calls_longer_than_all_buckets_run_at_their_own_shape() -> None:
    dispatch = over(lambda s, x: x + 1)
    for rows in (9, 10, 3):
        same(dispatch(torch.ones(rows)), torch.full((rows,), 2.0))
    assert shapes(dispatch) == ["4", "10", "9"]
    assert reasons(dispatch) == ["n is longer than its largest bucket, 8"]


@torch.no_grad()
def test_a_call_whose_dimensions_cannot_be_told_apart_is_not_padded() -> None:
    dynamic = {"x": {0: Bucket("n", (4,)), 1: Bucket("m", (4,))}}
    dispatch = PaddingDispatcher(Forward(lambda s, x: x.mT + 1), QUICK, dynamic)
    for shape in ((3, 3), (2, 3), (3, 3)):
        x = torch.randn(shape)
        same(dispatch(x), x.mT + 1)
    assert shapes(dispatch) == ["4x4", "3x3"]
    assert "n and m are as long as each other" in reasons(dispatch)[0]
    bucket = Bucket("n", (4, 8))
    dispatch = PaddingDispatcher(Forward(lambda s, x: x * 2), QUICK, {"x": {0: bucket, -1: bucket}})
    same(dispatch(torch.ones(3)), torch.full((3,), 2.0))
    assert reasons(dispatch) == ["dimensions 0 and -1 of x are one: use one of them"]


@torch.no_grad()
def test_dispatch_modes_vmap_and_hooks_see_no_padding() -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((str(op), args[0].shape))
            return op(*args, **(kwargs or {}))

    seen: list[tuple[str, tuple[int, ...]]] = []
    dispatch, x = over(lambda s, x: x.relu()), torch.ones(3, 2)
    with Watching():
        dispatch(x)
    assert seen == [("aten.relu.default", (3, 2))]
    same(torch.vmap(dispatch)(torch.ones(2, 3, 2)), torch.vmap(dispatch.model)(torch.ones(2, 3, 2)))
    assert reasons(dispatch) == []
    shapes_seen: list[tuple[int, ...]] = []
    dispatch = over(lambda s, x: s.layer(x), layer=nn.ReLU())
    dispatch.model.layer.register_forward_hook(lambda module, args, output: shapes_seen.append(output.shape))
    same(dispatch(torch.ones(2)), torch.ones(2))
    assert shapes_seen == [(2,)]


@torch.no_grad()
def test_copies_are_padded_as_well_unless_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = tagging()
    for twin in (copy.copy(dispatch), copy.deepcopy(dispatch), pickle.loads(pickle.dumps(dispatch))):
        twin(tokens(2, 3), mask(2, 3))
        assert shapes(twin) == ["2x4"]
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    assert over(lambda s, x: x.numel())(torch.ones(3)) == 3
