"""Models cut into stages by the cost model, as a user sees it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.costs.device import profile_named
from autostream.costs.interconnects import interconnect_of
from autostream.costs.training_time import training_us
from autostream.errors import OptionError, TargetError, TraceError
from autostream.scheduling.partition import stages_from
from autostream.splitting import chain_of, compare

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # from pipelining


def layers(count: int, width: int = 256) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)))


def test_equal_layers_become_equal_stages() -> None:
    model = layers(8)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = autostream.split(model, [torch.ones(64, 256)], 4, device="h200")
    assert [*found.split_spec] == ["2", "4", "6"]
    assert found.submodules == (("0", "1"), ("2", "3"), ("4", "5"), ("6", "7"))
    times = [stage.forward_us for stage in found.stages]
    assert max(times) <= 1.1 * min(times)
    assert [stage.crossing_bytes for stage in found.stages] == [0, *[64 * 256 * 4] * 3]
    assert found.microbatches == 16
    assert found.step_us == pytest.approx(3 * times[0] * (16 + 3), rel=0.3)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_the_split_is_what_pytorch_makes_of_it() -> None:
    from torch.distributed.pipelining import pipeline

    model, x = layers(8), torch.rand(4, 256)
    expected = model(x)
    found = autostream.split(model, [x], 4, device="h200")
    pipe = pipeline(model, (x,), split_spec=found.split_spec)
    assert pipe.num_stages == 4
    for at, names in enumerate(found.submodules):
        weights = {name for name, _ in pipe.get_stage_module(at).named_parameters()}
        assert weights == {f"{name}.0.{kind}" for name in names for kind in ("weight", "bias")}
    assert torch.equal(pipe(x)[0], expected)


@pytest.mark.parametrize("optimized", [autostream.optimize, autostream.optimize_])
def test_an_optimized_model_is_split_like_the_model(optimized: Callable[[nn.Module], nn.Module]) -> None:
    from torch.distributed.pipelining import pipeline

    x = torch.rand(4, 256)
    model = optimized(layers(4))
    found = autostream.split(model, [x], 2, device="h200")
    assert found.stages == autostream.split(layers(4), [x], 2, device="h200").stages
    expected = model(x)
    assert torch.equal(pipeline(model, (x,), split_spec=found.split_spec)(x)[0], expected)


def test_memory_is_that_of_training_with_activations_in_flight() -> None:
    """Each layer keeps the input of its linear layer, and the ReLU its result: what the next layer keeps anyway.

    Between the stages an activation and its gradient have a buffer for each microbatch. The outputs of all are kept,
    and joined at last, when there are no activations any more.
    """
    found = autostream.split(layers(4), [torch.ones(64, 256)], 2, device="h200", microbatches=8)
    weights = 2 * (256 * 256 + 256) * 4 * 4
    activation = 64 * 256 * 4
    assert [stage.weight_bytes for stage in found.stages] == [weights] * 2
    assert [stage.saved_bytes for stage in found.stages] == [3 * activation] * 2
    buffers = 8 * activation
    assert found.memory_bytes == (weights + buffers + 2 * 3 * activation, weights + buffers + 2 * 8 * activation)
    assert found.outputs_bytes == (0, (2 * 8 - 3) * activation)


def test_weights_of_several_stages_are_named() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.head = nn.Linear(256, 256), layers(2), nn.Linear(256, 256)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.head(self.inner(self.embed(x))))

    found = autostream.split(Tied(), [torch.ones(64, 256)], 2, device="h200")
    assert found.shared == ("embed.weight",)
    assert str(found).endswith("Several stages have a copy of embed.weight: add up its gradients yourself.")


def test_a_split_prints_its_stages() -> None:
    text = str(autostream.split(layers(4), [torch.ones(64, 256)], 2, device="h200", microbatches=8))
    first, head, _, one, two, last, outputs = text.splitlines()
    assert first == "Sequential in 2 stages on NVIDIA H200, 8 microbatches a step"
    assert " ".join(head.split()) == "stage submodules forward backward bytes in weights, gradients, states memory"
    assert one.split()[:3] == ["0", "0,", "1"]
    assert two.split()[:3] == ["1", "2,", "3"]
    assert "65.5 kB" in two
    assert last.startswith("A step by 1F1B takes ")
    assert outputs.startswith("Of the last stage's memory, 852.0 kB are the outputs of all microbatches, and a copy: ")


def test_fewer_microbatches_than_stages_are_those_of_gpipe() -> None:
    """PyTorch's 1F1B refuses them."""
    found = autostream.split(layers(4), [torch.ones(64, 256)], 4, device="h200", microbatches=3)
    assert found.schedule == "GPipe"
    assert "A step by GPipe takes " in str(found)
    first, *_ = found.stages
    assert found.memory_bytes[0] == first.memory_bytes(3, 3)  # the activations of all three


def test_costs_may_be_measured() -> None:
    x = torch.rand(64, 256)
    found = autostream.split(layers(4), [x], 2, costs="measured")
    assert [stage.segments for stage in found.stages][-1][1] == len(layers(4)) * 2
    assert found.step_us > 0


def test_measured_costs_add_up_to_forward_and_backward_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one stage of PyTorch's, whose traced Python and added gradients take their time too."""
    from torch.distributed.pipelining import Pipe

    monkeypatch.setattr("autostream.splitting.training_us", lambda model, args: 3000.0 * isinstance(model, Pipe))
    found = autostream.split(layers(4), [torch.rand(64, 256)], 2, costs="measured")
    assert sum(stage.forward_us + stage.backward_us for stage in found.stages) == pytest.approx(3000.0)


class Cached(nn.Module):
    """Writes its input, and the next row of a cache that has one row left."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8))
        self.register_buffer("rows", torch.zeros(2, 8))
        self.register_buffer("at", torch.tensor([1]))

    def forward(self, x: Tensor) -> Tensor:
        self.rows.index_copy_(0, self.at, x[:1])
        self.at.add_(1)
        return self.layers(x.mul_(2))  # type: ignore[no-any-return]


def test_measuring_changes_nothing_and_runs_nothing_twice(caplog: pytest.LogCaptureFixture) -> None:
    """A second run would write behind the end of the cache, which on a GPU loses the process."""
    model, x = Cached(), torch.ones(4, 8)
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    assert training_us(model, [x]) > 0
    autostream.split(model, [x], 2, costs="measured")
    assert "cannot be timed" not in caplog.text
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(x, torch.ones(4, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_model_that_is_not_trained_has_the_times_of_its_ops(caplog: pytest.LogCaptureFixture) -> None:
    found = autostream.split(layers(4).requires_grad_(False), [torch.rand(64, 256)], 2, costs="measured")
    assert found.step_us > 0
    assert "the model cannot be timed" in caplog.text


def test_a_schedule_that_needs_more_memory_than_there_is_is_refused() -> None:
    """GPipe holds the activations of 32 microbatches, 1F1B those of two; outputs need not be held."""
    small = replace(profile_named("h200"), memory_bytes=6_000_000)
    comparison = compare(chain_of(layers(4), [torch.ones(64, 256)], small), 2, 32, interconnect_of(small, "nvlink"))
    runs = {run.schedule: run.refusal for run in comparison.asked()}
    assert runs["GPipe"] == "a device would hold 10.5 MB, and has 6.0 MB"
    assert runs["1F1B"] == ""
    assert max(comparison.best.memory_bytes) > 6_000_000
    assert comparison.best.schedule != "GPipe"


class Masked(nn.Module):
    """Each layer reads a mask: one that is computed from trained weights, or one that is not."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256).requires_grad_(trained)
        self.layers = layers(8)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.sigmoid(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x)) * mask
        return x


@pytest.mark.parametrize("trained", [True, False])
def test_schedules_that_pytorch_does_not_run_over_skipped_stages_are_refused(trained: bool) -> None:
    """No backward skips a stage; with two stages on each device, no forward does. Two stages in all skip none."""
    chain = chain_of(Masked(trained), [torch.ones(64, 256)], "h200")
    nvlink = interconnect_of(chain.profile)
    runs = {run.schedule: run.refusal for run in compare(chain, 2, 8, nvlink).asked()}
    assert runs["GPipe"] == runs["1F1B"] == ""
    why = "there is no backward over stages between" if trained else "only neighbours communicate"
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        assert "stage 3 reads what stage 0 computes (" in runs[schedule]
        assert "mask = torch.sigmoid(self.first(x))" in runs[schedule]
        assert runs[schedule].endswith(why)
    if trained:
        with pytest.raises(TargetError, match="no schedule of PyTorch's trains Masked over 3 devices: stage 2 reads"):
            compare(chain, 3, 8, nvlink)
    else:
        assert compare(chain, 3, 8, nvlink).best.schedule in ("GPipe", "1F1B")


class Residual(nn.Module):
    """x + b(a(x)), several times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(256, 256)
        self.a, self.b = layers(8), layers(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for a, b in zip(self.a, self.b, strict=True):
            x = x + b(a(x))
        return x


@pytest.mark.parametrize(("inside", "refused"), [("a", False), ("b", True)])
def test_no_zero_bubble_where_a_stage_gives_away_what_its_weights_need(inside: str, refused: bool) -> None:
    """Before b(a(x)) both a(x) and x go to the next stage, and the gradient of a's weight needs x. PyTorch detaches it.

    Seen in 2.11 and 2.13: "Trying to use a saved tensor that has been detached in-place". Before a(x), only x goes.
    """
    chain = chain_of(Residual(), [torch.ones(64, 256)], "h200")
    names = [*chain.cuts.values()]
    bounds = [0, *(1 + names.index(f"{inside}.{at}") for at in (2, 4, 6)), len(names) + 1]
    stages = [[*stages_from(chain.segments, first)][end - first - 1] for first, end in itertools.pairwise(bounds)]
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
        assert chain.refusal(schedule, stages) == ""
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        assert ("stage 0 gives away what it keeps" in chain.refusal(schedule, stages)) == refused


def test_no_zero_bubble_v_over_gloo() -> None:
    chain = chain_of(layers(8), [torch.ones(64, 256)], "cpu")
    runs = {run.schedule: run.refusal for run in compare(chain, 2, 8, interconnect_of(chain.profile)).asked()}
    assert runs["ZBVZeroBubble"] == "it fails over gloo"
    assert runs["InterleavedZeroBubble"] == ""


def test_what_cannot_be_split_is_said() -> None:
    x = torch.ones(64, 256)
    with pytest.raises(OptionError, match='device=3 is not allowed: use a name such as "h200", or a measured profile'):
        autostream.split(layers(4), [x], 2, device=3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"stages=9 is not allowed: the model has 7 cut points.*use 2 to 8"):
        autostream.split(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), [x], 9, device="h200")
    for stages in (0, 1, "2"):
        with pytest.raises(OptionError, match=f"stages={stages!r} is not allowed: use a whole number from 2"):
            autostream.split(layers(4), [x], stages, device="h200")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"stages=2 is not allowed: the model has 0 cut points.*; it cannot be cut"):
        autostream.split(nn.Linear(256, 256), [x], 2, device="h200")
    with pytest.raises(TargetError, match=r"a list of example arguments, not a Tensor: split\(model, \[x\], 2\)"):
        autostream.split(layers(4), x, 2, device="h200")  # type: ignore[arg-type]
    with pytest.raises(TargetError, match=r"split takes a torch.nn.Module, not 3"):
        autostream.split(3, [x], 2, device="h200")  # type: ignore[arg-type]
    with pytest.raises(TargetError, match=r"fails at these example inputs \(RuntimeError: mat1 and mat2 shapes"):
        autostream.split(layers(4), [x[:, :9]], 2, device="h200")
    for microbatches in (0, True):
        with pytest.raises(OptionError, match=f"microbatches={microbatches} is not allowed: use a whole number from 1"):
            autostream.split(layers(4), [x], 2, device="h200", microbatches=microbatches)
    with pytest.raises(OptionError, match="interconnect='rings' is not allowed: use nvlink or infiniband"):
        autostream.split(layers(4), [x], 2, device="h200", interconnect="rings")
    with pytest.raises(OptionError, match="costs='guessed' is not allowed"):
        autostream.split(layers(4), [x], 2, costs="guessed")
    with pytest.raises(OptionError, match="needs the device itself: leave out device"):
        autostream.split(layers(4), [x], 2, device="h200", costs="measured")
    with pytest.raises(TargetError, match="there is no profile named 'h3'"):
        autostream.split(layers(4), [x], 2, device="h3")


def test_a_model_that_is_no_one_graph_is_refused() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(TraceError, match="Branching is no one graph"):
        autostream.split(Branching(), [torch.ones(2)], 2, device="h200")
