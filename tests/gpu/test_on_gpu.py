"""Models on one GPU, end to end: outputs, aliases, mutation, random numbers, weights that change, and streams."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autostream
from autostream import Bucket
from autostream.cli.modes import captured
from autostream.fusion import inductor
from autostream.ir import Program
from autostream.reporting.parts import captured_share
from tests.gpu.common import SmoothTowers, Towers, fused_kernels
from tests.semantics import Model, Viewed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("aten_ops"),
    pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty"),  # Inductor's own
]

TOLERANCE = {"eager": {"rtol": 0.0, "atol": 0.0}, "inductor": {"rtol": 1e-4, "atol": 1e-5}}


@pytest.fixture
def towers() -> Towers:
    torch.manual_seed(0)
    return Towers().cuda().eval()


def towers_for(kernels: str) -> tuple[Any, int]:
    """A model and its width: for ``"inductor"``, one with ops that are fused."""
    torch.manual_seed(0)
    model = SmoothTowers(256) if kernels == "inductor" else Towers(512)
    return model.cuda().eval(), 256 if kernels == "inductor" else 512


@torch.no_grad()
@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("kernels", TOLERANCE)
def test_outputs_are_those_of_eager_and_stay_valid(kernels: str, cuda_graph: bool) -> None:
    model, width = towers_for(kernels)
    xs = [torch.randn(64, width, device="cuda") for _ in range(5)]
    for policy, streams in (("sequential", 1), ("critical_path", 2), ("critical_path", 4), ("path_cover", 3)):
        options: dict[str, Any] = {"policy": policy, "streams": streams, "memory_budget": math.inf}
        fast = autostream.optimize(model, kernels=kernels, cuda_graph=cuda_graph, **options)
        outputs = [fast(x) for x in xs]
        torch.testing.assert_close(outputs, [model(x) for x in xs], **TOLERANCE[kernels])
        (report,) = fast.reports
        assert report.mode in (("cuda graph",) if cuda_graph else ("streams", "one stream"))
        if kernels == "inductor":
            assert not report.refusals
            assert fused_kernels(report)


@torch.no_grad()
@pytest.mark.parametrize("kernels", TOLERANCE)
def test_random_numbers_and_buffers_are_those_of_eager(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling changes neither, although Inductor generates random numbers, to time whether padding products pays."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5)).cuda().train()
    x = torch.randn(16, 32, device="cuda")
    functional, generated = inductor._functional, []

    def functional_and_random(program: Program) -> fx.GraphModule:
        generated.append(torch.rand(4, device="cuda"))
        return functional(program)

    monkeypatch.setattr(inductor, "_functional", functional_and_random)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fast = autostream.optimize(model, x, kernels=kernels)
    assert bool(generated) == (kernels == "inductor")
    torch.testing.assert_close((torch.get_rng_state(), torch.cuda.get_rng_state()), before, rtol=0, atol=0)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    seen = []
    for run in (fast, model):
        model.load_state_dict(state)
        torch.cuda.manual_seed(3)
        outputs = [run(x), run(x)]
        buffers = {name: value.clone() for name, value in model.state_dict().items()}
        seen.append((outputs, buffers, torch.cuda.get_rng_state()))
    torch.testing.assert_close(*seen, **TOLERANCE[kernels])
    assert "plain" not in [report.mode for report in fast.reports]


@torch.no_grad()
@pytest.mark.parametrize("kernels", TOLERANCE)
def test_weights_that_change_or_move_are_seen(kernels: str) -> None:
    """With fused kernels also those, and inputs, at addresses where no kernel may load 16 bytes at a time."""
    model, width = towers_for(kernels)
    fast, x = autostream.optimize(model, kernels=kernels), torch.randn(64, width, device="cuda")
    first, second = model.towers[0][0], model.towers[1][0]

    def check() -> None:
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x), **TOLERANCE[kernels])

    check()
    first.weight.mul_(2)
    check()
    second.weight.data = torch.randn(width, width, device="cuda")
    check()
    first.weight = nn.Parameter(first.weight / 2)
    check()
    if kernels == "inductor":
        second.weight.data = torch.randn(width * width + 1, device="cuda")[1:].view(width, width)
        check()
        memory = torch.randn(x.numel() + 8, device="cuda")
        for start in (0, 1, 3, 4):
            x = memory[start : start + x.numel()].view(x.shape)
            check()
    else:
        second.weight.data = second.weight.data.t()
        check()
        model.towers[2][2] = nn.Linear(width, width).cuda()
        check()
        model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)
        check()
        fast.half()
        torch.testing.assert_close(fast(x.half()), model(x.half()), rtol=0, atol=0)


def test_a_weight_that_moves_in_inference_mode_is_seen_by_all_modes(towers: Towers) -> None:
    fast, x = autostream.optimize(towers, cuda_graph=True), torch.randn(64, 512, device="cuda")
    with torch.inference_mode():
        fast(x)
        towers.towers[1][0].weight.data = torch.randn(512, 512, device="cuda")  # type: ignore[index]
        torch.testing.assert_close(fast(x), towers(x), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(fast(-x), towers(-x), rtol=0, atol=0)
    assert [report.mode for report in fast.reports] == ["cuda graph"]


def test_no_stream_that_a_user_may_be_on_is_captured(towers: Towers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring costs did so: the work of one thread in 32 was captured instead of run."""
    users = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    captured_streams: set[int] = set()
    begin = torch.cuda.CUDAGraph.capture_begin

    def noting(self: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
        captured_streams.add(torch.cuda.current_stream().cuda_stream)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", noting)
    autostream.optimize(towers, torch.randn(64, 512, device="cuda"), costs="measured", cuda_graph=True)
    assert captured_streams
    assert captured_streams.isdisjoint(users)


@torch.no_grad()
def test_graphs_replayed_side_by_side_do_not_share_workspaces() -> None:
    """Two captured models over the same side streams, on two streams at once, with products that split their sums."""
    torch.manual_seed(0)
    models = [Towers(width=1024).cuda().half().eval() for _ in range(2)]
    x = torch.randn(16, 1024, device="cuda", dtype=torch.float16)
    expected = [model(x) for model in models]
    options: dict[str, Any] = {"streams": 4, "policy": "critical_path", "memory_budget": math.inf}
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


@torch.no_grad()
def test_a_captured_baseline_never_writes_to_memory_that_was_freed() -> None:
    """Its products split their sums over a workspace of cuBLAS; a later capture frees all workspaces."""
    torch.manual_seed(0)
    model = nn.Linear(8192, 64, bias=False).cuda().half()
    x = torch.randn(16, 8192, device="cuda", dtype=torch.float16)
    call = captured(model, (x,))
    expected = call(x)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    # Blocks of a workspace's size, among them the one that was freed.
    others = [torch.full((size,), 7, device="cuda") for size in [4 * 2**20] * 12 + [2**20] * 8]
    for _ in range(5):
        assert torch.equal(call(x), expected)
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others)


@torch.no_grad()
def test_a_number_on_the_cpu_is_read_at_each_call() -> None:
    model, x = Model(lambda s, x, scale: torch.relu(x) * scale), torch.randn(64, device="cuda")
    fast = autostream.optimize(model)
    for value in (2.0, 3.0):
        assert torch.equal(fast(x, torch.tensor(value)), model(x, torch.tensor(value)))
    assert fast.reports[0].mode != "cuda graph"


@torch.no_grad()
def test_static_inputs_are_read_where_they_are(towers: Towers) -> None:
    fast, x = autostream.optimize(towers, cuda_graph=True), torch.randn(64, 512, device="cuda")
    (static,), _ = fast.static_inputs(x)
    assert static.data_ptr() != x.data_ptr()
    for value in (x, -x):
        static.copy_(value)
        torch.testing.assert_close(fast(static), towers(value), rtol=0, atol=0)


@torch.no_grad()
def test_padded_batches_share_a_captured_graph(towers: Towers) -> None:
    """Neither the padding of a call nor a longer call before it changes the next one's outputs."""
    fast = autostream.optimize(towers, dynamic={"x": {0: Bucket("batch", (16, 64))}})
    xs = [torch.randn(rows, 512, device="cuda") for rows in (13, 60, 3, 16, 33, 1, 64, 13)]
    outputs = [(fast(x), towers(x)) for x in xs]
    for ours, theirs in outputs:
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert [report.mode for report in fast.reports] == ["cuda graph", "cuda graph"]
    assert sorted(report.signature.partition(":")[0] for report in fast.reports) == ["16x512", "64x512"]


@torch.no_grad()
def test_inputs_are_mutated_and_outputs_alias_as_in_eager() -> None:
    model = Model(lambda s, x, y: (x.add_(1), x[1:], z := y * 2, z.t()))
    fast = autostream.optimize(model, cuda_graph=True)
    for _ in range(3):
        x, y = torch.randn(4, 4, device="cuda"), torch.randn(4, 4, device="cuda")
        expected_x = x.clone()
        expected = model(expected_x, y)
        outputs = fast(x, y)
        assert outputs[0] is x
        assert torch.equal(x, expected_x)
        assert outputs[1].data_ptr() == x[1:].data_ptr()
        assert outputs[2].data_ptr() == outputs[3].data_ptr()
        for ours, theirs in zip(outputs, expected, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()
    assert fast.reports[0].mode == "cuda graph"


@torch.no_grad()
def test_a_view_of_a_buffer_from_before_a_graph_break_shows_later_writes() -> None:
    """The buffer stays where it is, and the view is an input; what the second graph writes shows through both."""
    ours, theirs = Viewed().cuda(), Viewed().cuda()
    fast = autostream.optimize(ours)
    for _ in range(4):
        x = torch.randn(4, 4, device="cuda")
        torch.testing.assert_close(fast(x.clone()), theirs(x.clone()))
        torch.testing.assert_close(ours.state, theirs.state)
    assert captured_share(fast.reports[0])


class Noisy(nn.Module):
    """Adds noise that a generator of the model's own generates on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.generator = torch.Generator("cuda").manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + torch.rand(y.shape, generator=self.generator, device=y.device)


@pytest.mark.parametrize("dynamic", [None, {"x": {0: Bucket("batch", 8)}}])
@pytest.mark.parametrize("example", [False, True])
def test_a_generator_of_the_models_own_is_used_as_in_eager(dynamic: dict[str, Any] | None, example: bool) -> None:
    """Neither a trial of padding nor a capture takes any of its numbers."""
    torch.manual_seed(0)
    model, copied = Noisy().cuda(), Noisy().cuda()
    copied.load_state_dict(model.state_dict())
    x = torch.randn(16, 16, device="cuda")
    with torch.no_grad():
        fast = autostream.optimize(model, x[:8] if example else None, dynamic=dynamic)
        for rows in (8, 8, 8, 16, 8):  # none is padded: padding generates more numbers
            torch.testing.assert_close(fast(x[:rows]), copied(x[:rows]), rtol=0, atol=0)
    assert torch.equal(model.generator.get_state(), copied.generator.get_state())


@torch.no_grad()
def test_inputs_of_half_precision_complex_numbers_are_copied() -> None:
    """PyTorch has no kernel that copies several such tensors at once."""
    model = Model(lambda s, x, y: torch.view_as_real(x * y))
    fast = autostream.optimize(model, cuda_graph=True)
    for _ in range(3):
        x, y = (torch.view_as_complex(torch.randn(64, 2, device="cuda", dtype=torch.half)) for _ in range(2))
        torch.testing.assert_close(fast(x, y), model(x, y), rtol=0, atol=0)
    assert [report.mode for report in fast.reports] == ["cuda graph"]
