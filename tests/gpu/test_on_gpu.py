"""What only a GPU can show, end to end: values, streams, memory and threads."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream import Bucket
from autostream.reporting.parts import captured_share
from tests.semantics import Viewed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("aten_ops")]


class Towers(nn.Module):
    """Four branches that read one input and meet in a concatenation."""

    def __init__(self, width: int = 512, towers: int = 4) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()) for _ in range(towers)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], dim=-1)


@pytest.fixture
def towers() -> Towers:
    torch.manual_seed(0)
    return Towers().cuda().eval()


@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("policy", ["sequential", "critical_path", "path_cover"])
@pytest.mark.parametrize("streams", [2, 4])
def test_same_values(towers: Towers, policy: str, streams: int, cuda_graph: bool) -> None:
    options = {"policy": policy, "streams": streams, "memory_budget": math.inf}
    fast = autostream.optimize(towers, cuda_graph=cuda_graph, **options)
    with torch.no_grad():
        for seed in range(5):
            x = torch.randn(64, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
            torch.testing.assert_close(fast(x), towers(x), rtol=0, atol=0)
    assert fast.reports[0].mode in (("cuda graph",) if cuda_graph else ("streams", "one stream"))


def test_outputs_stay_valid(towers: Towers) -> None:
    fast = autostream.optimize(towers)
    with torch.no_grad():
        xs = [torch.randn(64, 512, device="cuda") for _ in range(3)]
        ys = [fast(x) for x in xs]
        for x, y in zip(xs, ys, strict=True):
            torch.testing.assert_close(y, towers(x), rtol=0, atol=0)


def test_stream_and_device_are_as_before(towers: Towers) -> None:
    fast = autostream.optimize(towers)
    stream = torch.cuda.Stream()
    x = torch.randn(64, 512, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.no_grad():
        y = fast(x)
        assert torch.cuda.current_stream() == stream
    stream.synchronize()
    torch.testing.assert_close(y, towers(x).detach(), rtol=0, atol=0)


def test_generators_and_buffers_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).cuda().train()
    x = torch.randn(16, 8, device="cuda")
    torch.cuda.manual_seed(3)
    state, before = torch.cuda.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    fast = autostream.optimize(model, x)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    with torch.no_grad():
        y = fast(x)
    after = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.cuda.get_rng_state()
    model.load_state_dict(before)
    torch.cuda.manual_seed(3)
    with torch.no_grad():
        torch.testing.assert_close(y, model(x), rtol=0, atol=0)
    assert torch.equal(rng, torch.cuda.get_rng_state())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=0)


def test_changed_weights_are_seen(towers: Towers) -> None:
    fast = autostream.optimize(towers)
    x = torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        fast(x)
        towers.towers[0][0].weight.mul_(2)
        torch.testing.assert_close(fast(x), towers(x), rtol=0, atol=0)
        towers.towers[1][0].weight.data = torch.randn(512, 512, device="cuda")
        torch.testing.assert_close(fast(x), towers(x), rtol=0, atol=0)
        towers.towers[1][0].weight.data = towers.towers[1][0].weight.data.t()
        torch.testing.assert_close(fast(x), towers(x), rtol=0, atol=0)
        towers.towers[2][2] = nn.Linear(512, 512).cuda()
        torch.testing.assert_close(fast(x), towers(x), rtol=0, atol=0)
        towers.load_state_dict({k: torch.randn_like(v) for k, v in towers.state_dict().items()}, assign=True)
        torch.testing.assert_close(fast(x), towers(x), rtol=0, atol=0)
        fast.half()
        torch.testing.assert_close(fast(x.half()), towers(x.half()), rtol=0, atol=0)


def test_a_weight_that_moves_in_inference_mode_is_seen_by_all_modes(towers: Towers) -> None:
    fast, x = autostream.optimize(towers, cuda_graph=True), torch.randn(64, 512, device="cuda")
    with torch.inference_mode():
        fast(x)
        towers.towers[1][0].weight.data = torch.randn(512, 512, device="cuda")
        torch.testing.assert_close(fast(x), towers(x), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(fast(-x), towers(-x), rtol=0, atol=0)
    assert [report.mode for report in fast.reports] == ["cuda graph"]


def test_many_threads_on_streams_of_their_own(towers: Towers) -> None:
    """Their first calls race too. What is expected was computed before: no plain model may run while it is traced."""
    models = [towers, *(Towers().cuda().eval() for _ in range(2))]
    fasts = [autostream.optimize(model, cuda_graph=graph) for model in models for graph in (True, False)]
    xs = [torch.randn(64, 512, device="cuda") for _ in range(10)]
    with torch.no_grad():
        expected = [[model(x) for x in xs] for model in models for _ in range(2)]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                for turn in range(60):
                    which, at = (seed + turn) % len(fasts), (seed * 7 + turn) % len(xs)
                    torch.testing.assert_close(fasts[which](xs[at]), expected[which][at], rtol=0, atol=0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert [[report.refusals for report in fast.reports] for fast in fasts] == [[()]] * len(fasts)


def test_no_stream_that_a_user_may_be_on_is_captured(towers: Towers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring costs did so: one thread in 32 then had its work captured in the place of being run."""
    users = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    captured: set[int] = set()
    begin = torch.cuda.CUDAGraph.capture_begin

    def noting(self: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> None:
        captured.add(torch.cuda.current_stream().cuda_stream)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", noting)
    autostream.optimize(towers, torch.randn(64, 512, device="cuda"), costs="measured", cuda_graph=True)
    assert captured
    assert captured.isdisjoint(users)


def test_graphs_replayed_side_by_side_do_not_share_workspaces() -> None:
    """Two captured models over the same side streams, on two streams at once, with products that split their sums."""
    torch.manual_seed(0)
    models = [Towers(width=1024).cuda().half().eval() for _ in range(2)]
    x = torch.randn(16, 1024, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        expected = [model(x) for model in models]
        options = {"streams": 4, "policy": "critical_path", "memory_budget": math.inf}
        fasts = [autostream.optimize(model, x, cuda_graph=True, **options) for model in models]
        streams = [torch.cuda.Stream() for _ in models]
        torch.cuda.synchronize()
        for _ in range(100):
            outputs = []
            for fast, stream in zip(fasts, streams, strict=True):
                with torch.cuda.stream(stream):
                    outputs.append([fast(x) for _ in range(3)])
            torch.cuda.synchronize()
            for results, right in zip(outputs, expected, strict=True):
                assert all(torch.equal(result, right) for result in results)


def test_a_number_on_the_cpu_is_read_at_each_call() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.relu(x) * scale

    fast, x = autostream.optimize(Scaled()), torch.randn(64, device="cuda")
    with torch.no_grad():
        for value in (2.0, 3.0):
            assert torch.equal(fast(x, torch.tensor(value)), Scaled()(x, torch.tensor(value)))
    assert fast.reports[0].mode != "cuda graph"


def test_static_inputs_are_not_copied(towers: Towers) -> None:
    fast, x = autostream.optimize(towers, cuda_graph=True), torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        (static,), _ = fast.static_inputs(x)
        static.copy_(x)
        torch.testing.assert_close(fast(static), towers(x), rtol=0, atol=0)
        static.copy_(-x)
        torch.testing.assert_close(fast(static), towers(-x), rtol=0, atol=0)
    assert static.data_ptr() != x.data_ptr()


def test_memory_comes_back(towers: Towers) -> None:
    x = torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        autostream.optimize(towers, x)(x)
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            fast = autostream.optimize(towers, x)
            fast(x)
            del fast
            gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before


def test_lengths_share_a_captured_graph(towers: Towers) -> None:
    """What one call has filled up, and longer calls before it, are not seen in the next."""
    fast = autostream.optimize(towers, dynamic={"x": {0: autostream.Bucket("batch", (16, 64))}})
    kept = []
    with torch.no_grad():
        for rows in (13, 60, 3, 16, 33, 1, 64, 13):
            x = torch.randn(rows, 512, device="cuda")
            kept.append((fast(x), towers(x)))
        for ours, theirs in kept:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert [report.mode for report in fast.reports] == ["cuda graph", "cuda graph"]
    assert sorted(report.signature.partition(":")[0] for report in fast.reports) == ["16x512", "64x512"]


def test_both_sides_of_an_item_are_captured(towers: Towers) -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.join, self.last = towers, nn.Linear(2048, 512), Towers()

        def forward(self, x: Tensor) -> Tensor:
            y = self.join(self.first(x))
            return self.last(y) * (1 if y.sum().item() < 1e9 else -1)

    model = Asks().cuda().eval()
    fast = autostream.optimize(model)
    x = torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-4)
    (report,) = fast.reports
    assert [bool(part.ended) for part in report.parts] == [True, False]
    assert (captured_share(report) or 0.0) >= 0.8


def test_a_synchronising_op_is_refused_before_capture() -> None:
    class Nonzero(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.masked_select(x, x > 0).sum() + x.sum()

    fast = autostream.optimize(Nonzero())
    x = torch.randn(100, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), Nonzero()(x))
    (report,) = fast.reports
    assert report.mode in ("one stream", "streams")
    assert any("masked_select" in refusal.reason and "test_on_gpu.py" in refusal.reason for refusal in report.refusals)


def test_inputs_mutated_and_outputs_aliasing() -> None:
    class Mutates(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            x.add_(1)
            z = y * 2
            return x, x[1:], z, z.t()

    fast = autostream.optimize(Mutates(), cuda_graph=True)
    with torch.no_grad():
        for _ in range(3):
            x, y = torch.randn(4, 4, device="cuda"), torch.randn(4, 4, device="cuda")
            expected_x = x.clone()
            expected = Mutates()(expected_x, y)
            outputs = fast(x, y)
            assert outputs[0] is x
            assert torch.equal(x, expected_x)
            assert outputs[1].data_ptr() == x[1:].data_ptr()
            assert outputs[2].data_ptr() == outputs[3].data_ptr()
            for ours, theirs in zip(outputs, expected, strict=True):
                assert torch.equal(ours, theirs)
                assert ours.stride() == theirs.stride()
    assert fast.reports[0].mode == "cuda graph"


def test_wrong_device_is_named(towers: Towers) -> None:
    with pytest.raises(autostream.TargetError, match=r"example input 0 is on cpu, the model on cuda:0"):
        autostream.optimize(towers, torch.randn(64, 512))


@torch.no_grad()
def test_a_piece_sees_a_buffer_through_a_view_that_was_made_before_it() -> None:
    """The buffer stays where it is, the view is an input like others; what the piece writes shows through both."""
    ours, theirs = Viewed().cuda(), Viewed().cuda()
    fast = autostream.optimize(ours)
    for _ in range(4):
        x = torch.randn(4, 4, device="cuda")
        torch.testing.assert_close(fast(x.clone()), theirs(x.clone()))
        torch.testing.assert_close(ours.state, theirs.state)
    assert captured_share(fast.reports[0])


class Noisy(nn.Module):
    """Adds noise that a generator of its own draws on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.generator = torch.Generator("cuda").manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + torch.rand(y.shape, generator=self.generator, device=y.device)


@pytest.mark.parametrize("dynamic", [None, {"x": {0: Bucket("batch", 8)}}])
@pytest.mark.parametrize("example", [False, True])
def test_a_generator_of_the_models_own_draws_what_it_would(dynamic: dict[str, Any] | None, example: bool) -> None:
    """Trials on the quiet, and captures, take none of its numbers."""
    torch.manual_seed(0)
    model, twin = Noisy().cuda(), Noisy().cuda()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(16, 16, device="cuda")
    with torch.no_grad():
        fast = autostream.optimize(model, x[:8] if example else None, dynamic=dynamic)
        for rows in (8, 8, 8, 16, 8):  # none is padded: that draws more
            torch.testing.assert_close(fast(x[:rows]), twin(x[:rows]), rtol=0, atol=0)
    assert torch.equal(model.generator.get_state(), twin.generator.get_state())


class OrElse(nn.Module):
    """Catches what values make an op raise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ x.mT + self.linear(x).tanh() / 100
        try:
            return torch.linalg.cholesky(y).sin()
        except torch.linalg.LinAlgError:
            return y * 2


@pytest.mark.usefixtures("schedules_may_fail")
@pytest.mark.parametrize("gradients", [False, True])
def test_what_the_model_catches_nobody_sees(gradients: bool) -> None:
    torch.manual_seed(0)
    model = OrElse().cuda()
    fast = autostream.optimize(model)
    good, bad = torch.eye(16, device="cuda") * 5, torch.zeros(16, 16, device="cuda")
    with torch.set_grad_enabled(gradients):
        for x in (good, good, good, bad, good, bad):
            torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)
    assert fast.reports[0].mode == "plain"
    assert "perhaps it catches that" in fast.reports[0].refusals[0].reason


def test_inputs_of_a_dtype_that_is_not_copied_with_others() -> None:
    """PyTorch has no kernel that copies several tensors of half-precision complex numbers."""
    model = Product()
    fast = autostream.optimize(model, cuda_graph=True)
    with torch.no_grad():
        for seed in range(3):
            generator = torch.Generator("cuda").manual_seed(seed)
            parts = [torch.randn(64, 2, device="cuda", dtype=torch.half, generator=generator) for _ in range(2)]
            x, y = map(torch.view_as_complex, parts)
            torch.testing.assert_close(fast(x, y), model(x, y), rtol=0, atol=0)
    assert [report.mode for report in fast.reports] == ["cuda graph"]


class Product(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.view_as_real(x * y)
