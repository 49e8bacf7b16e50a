"""Kernels that TorchInductor fused, scheduled and captured."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autostream
from autostream.analysis.dependencies import analyze
from autostream.cli import zoo
from autostream.frontend.trace import trace
from autostream.fusion.inductor import fuse
from autostream.scheduling.structure import width
from autostream.utils.kernels import Kernel
from tests.gpu.common import SmoothTowers, fused_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty"),  # Inductor's own
]


@pytest.fixture
def towers() -> Any:
    torch.manual_seed(0)
    return SmoothTowers().cuda().eval()


def close(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def assert_fused(fast: autostream.OptimizedModule) -> None:
    assert fast.reports
    for report in fast.reports:
        assert not report.refusals
        assert report.mode == "cuda graph"
        assert fused_kernels(report)


@torch.no_grad()
def test_by_default_the_faster_kernels_run(towers: Any) -> None:
    """Fused kernels for branches; for a single product, whichever measured faster, and the report says why."""
    fast, x = autostream.optimize(towers), torch.randn(64, 256, device="cuda")
    for _ in range(3):
        close(fast(x), towers(x))
    assert_fused(fast)

    big = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    product = autostream.optimize(lambda x: x @ x)
    torch.testing.assert_close(product(big), big @ big, rtol=1e-2, atol=1)
    (report,) = product.reports
    assert report.graph
    (target,) = (op.target for op in report.graph.ops.values())
    assert [refusal.choice for refusal in report.refusals] == ([] if target == "aten.mm.out" else ["not fused"])


@torch.no_grad()
def test_autotuned_templates_are_scheduled(towers: Any) -> None:
    settings = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    fast, x = autostream.optimize(towers, kernels="inductor", inductor_options=settings), torch.randn(64, 256).cuda()
    close(fast(x), towers(x))
    assert_fused(fast)
    assert any(name.startswith("triton_tem") for name in fused_kernels(fast.reports[0]))


@torch.no_grad()
def test_a_frozen_weight_that_changes_is_seen(towers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written in place, and then replaced; frozen kernels are taken, whatever is measured."""
    monkeypatch.setattr("autostream.tuning.tune.MARGIN", -100.0)
    fast = autostream.optimize(towers, kernels="inductor", inductor_options={"freezing": True})
    x = torch.randn(64, 256, device="cuda")
    first = towers.towers[0][0]

    def replace() -> None:
        first.weight = nn.Parameter(first.weight * 2)

    for change in (lambda: None, lambda: first.weight.mul_(2), replace):
        change()
        for _ in range(2):
            close(fast(x), towers(x))
        assert_fused(fast)


@torch.no_grad()
def test_a_row_times_a_matrix_is_fused_with_the_ops_after_it() -> None:
    layer = nn.Sequential(nn.Linear(512, 256), nn.GELU()).half().cuda()
    fast, x = autostream.optimize(layer, kernels="inductor"), torch.randn(1, 512, device="cuda", dtype=torch.float16)
    torch.testing.assert_close(fast(x), layer(x), rtol=1e-2, atol=1e-3)
    (report,) = fast.reports
    assert report.graph
    assert len(fused_kernels(report)) == len(report.graph.ops) == 1


class Bits(nn.Module):
    """Views an argument, a result of a kernel, and an input of a library call as tensors of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        bits = (x + 1).view(torch.bfloat16)
        return self.linear.bias.view(torch.int16), (x * 2).view(torch.int16), self.linear(bits), bits @ bits.t()


@torch.no_grad()
def test_views_of_another_dtype_are_fused() -> None:
    model, x = Bits(), torch.randn(16, 32, device="cuda", dtype=torch.float16)
    fast = autostream.optimize(model, x, kernels="inductor")
    torch.testing.assert_close(fast(x), model(x), rtol=0.02, atol=0.02)
    (report,) = fast.reports
    assert report.level == "inductor", report.refusals


class Branching(nn.Module):
    """Reads a number in a way that breaks the graph."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x + 1).relu() * 2
        if (x.sum() > 0).item():
            x = x.cos() + 1
        return x.exp() / 3


@torch.no_grad()
def test_each_graph_between_graph_breaks_is_fused() -> None:
    fast, x = autostream.optimize(Branching(), kernels="inductor"), torch.randn(64, 64, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(fast(x), Branching()(x))
    (report,) = fast.reports
    assert len(report.parts) >= 2
    assert [(part.mode, part.refusals) for part in report.parts] == [("cuda graph", ())] * len(report.parts)
    assert all(fused_kernels(part) for part in report.parts)


@torch.no_grad()
def test_autocast_applies_to_the_calls_inside_it_only(towers: Any) -> None:
    """Kernels fused under autocast contain its casts."""
    fast, x = autostream.optimize(towers, kernels="inductor"), torch.randn(64, 256, device="cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            ours, theirs = fast(x), towers(x)
        torch.testing.assert_close(ours, theirs, rtol=8 * torch.finfo(torch.bfloat16).eps, atol=0)
        plain = fast(x)
        close(plain, towers(x))
        assert not torch.equal(ours.float(), plain)
        x = torch.randn(64, 256, device="cuda")
    assert [(report.mode, report.refusals) for report in fast.reports] == [("cuda graph", ())] * 2
    assert all(fused_kernels(report) for report in fast.reports)


@torch.library.custom_op("autostream_tests::add_to", mutates_args=["x"])
def add_to(x: Tensor, y: Tensor) -> None:
    """An operator of the user's that returns nothing."""
    x += y


class Added(nn.Module):
    """Reads a tensor before and after the user's operator writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.before(x)
        read = self.after(y).relu()
        add_to(y, x)
        return read, self.after(y)


@torch.no_grad()
def test_a_users_operator_that_mutates_is_scheduled_between_fused_kernels() -> None:
    torch.manual_seed(0)
    model = Added().cuda()
    fast = autostream.optimize(model, kernels="inductor", policy="critical_path", streams=3, memory_budget=math.inf)
    for _ in range(3):
        x = torch.randn(33, 64, device="cuda")
        close(fast(x), model(x))
    (report,) = fast.reports
    assert (report.mode, report.level, report.refusals) == ("cuda graph", "inductor", ())
    assert report.graph
    assert any("add_to" in op.target for op in report.graph.ops.values())


@torch.no_grad()
def test_a_triton_kernel_of_the_user_prevents_fusion() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def triple(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        places = tl.program_id(0) * block + tl.arange(0, block)
        inside = places < count
        tl.store(target + places, 3 * tl.load(source + places, mask=inside), mask=inside)

    class Tripled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x).relu()
            y = torch.empty_like(x)
            triple[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), 256)
            return self.after(y).relu()

    torch.manual_seed(0)
    model = Tripled().cuda()
    fast = autostream.optimize(model, kernels="inductor")
    for _ in range(3):
        x = torch.randn(33, 64, device="cuda")
        close(fast(x), model.after(3 * model.before(x).relu()).relu())
    (report,) = fast.reports
    assert "which the user wrote: what it writes is not known" in report.refusals[0].reason


@torch.no_grad()
def test_fused_kernels_write_what_they_say_and_share_no_buffers_between_branches(towers: Any) -> None:
    """Inductor's own reuse of buffers would put branches into a chain."""
    x = torch.randn(64, 256, device="cuda")
    program = fuse(trace(towers, [x]).program)
    kernels = [node.target for node in program.module.graph.nodes if isinstance(node.target, Kernel)]
    assert kernels
    assert all(kernel.written == kernel.overwritten for kernel in kernels)
    assert width(analyze(program)) >= len(towers.towers)

    launched = 0

    class Watching(fx.Interpreter):
        def call_function(self, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            nonlocal launched
            if not isinstance(target, Kernel):
                return super().call_function(target, args, kwargs)  # type: ignore[arg-type]
            launched += 1
            tensors = {at: arg for at, arg in enumerate(args) if isinstance(arg, Tensor)}
            before = {at: tensor.clone() for at, tensor in tensors.items()}
            target(*args)
            for at, tensor in tensors.items():
                same = torch.equal(before[at], tensor)
                assert same or at in target.written, f"{target} writes argument {at}"
            return None

    state = dict(towers.named_parameters())
    (result,) = Watching(program.module).run(*(state.get(each.target, x) for each in program.placeholders))
    close(result, towers(x))
    assert launched


# Kernels that are cached on disk


class Learning(nn.Module):
    """A norm that updates statistics, dropout, and products that a library computes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return y.softmax(-1), y.sum(0)


CACHED: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "towers": lambda: (SmoothTowers().eval(), torch.randn(64, 256)),
    "rows": lambda: (SmoothTowers().half().eval(), torch.randn(1, 256).half()),
    "learning": lambda: (Learning().train(), torch.randn(32, 64)),
    "attention": lambda: (nn.TransformerEncoderLayer(64, 4, batch_first=True).eval(), torch.randn(2, 16, 64)),
    "googlenet": lambda: (zoo.build("googlenet")[0].half().eval(), torch.randn(1, 3, 224, 224).half()),
}


def run_and_save(names: Sequence[str], options: dict[str, Any], path: str) -> None:
    """Run models in this process; saves outputs and states, and prints stages, ops and refusals of each."""
    results, facts = [], []
    for name in names:
        torch.manual_seed(0)
        model, x = CACHED[name]()
        model, x = model.cuda(), x.cuda()
        with torch.no_grad():
            fast = autostream.optimize(model, x, kernels="inductor", inductor_options=options)
            torch.cuda.manual_seed(5)
            results.append(([fast(x), fast(x * 2)], dict(model.state_dict())))
        (report,) = fast.reports
        assert report.graph
        ops = [(op.target, op.source) for op in report.graph.ops.values()]
        facts.append([list(report.seconds), ops, [refusal.choice for refusal in report.refusals]])
    torch.save(results, path)
    print(json.dumps(facts))


@pytest.mark.parametrize(("names", "options"), [(list(CACHED), {}), (["towers"], {"max_autotune": True})], ids=str)
def test_a_second_process_loads_fused_kernels_and_computes_the_same(
    names: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    folders = {f"{owner}_CACHE_DIR": str(tmp_path / owner) for owner in ("AUTOSTREAM", "TORCHINDUCTOR", "TRITON")}

    def run(path: Path) -> tuple[Any, Any]:
        program = f"from tests.gpu.test_fusion import run_and_save; run_and_save({names!r}, {options!r}, {str(path)!r})"
        command, root = [sys.executable, "-W", "ignore", "-c", program], Path(__file__).parents[2]
        done = subprocess.run(command, env={**os.environ, **folders}, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads(done.stdout.splitlines()[-1]), torch.load(path, weights_only=False)

    facts, results = run(tmp_path / "first.pt")
    facts_again, results_again = run(tmp_path / "second.pt")
    for (stages, ops, refusals), (stages_again, ops_again, refusals_again) in zip(facts, facts_again, strict=True):
        assert "fuse" in stages
        assert "load" in stages_again
        assert "fuse" not in stages_again  # whether it searches again depends on what is measured
        assert refusals == refusals_again == []
        assert ops_again == ops
    torch.testing.assert_close(results_again, results, rtol=1e-5, atol=1e-6)


def test_the_counters_of_a_step_share_kernels() -> None:
    """Adam counts the steps of each of 30 parameters, a norm its batches; the same is computed with one kernel each.

    Layers have no bias: a norm takes it away again, so its gradient is rounding error, and Adam makes steps of that.
    """

    def trained(**inductor_options: Any) -> tuple[nn.Module, int]:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(10))
        model = nn.Sequential(*layers).cuda()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options: dict[str, Any] = {"kernels": "inductor", "inductor_options": inductor_options}
        step = autostream.train_step(model, adam, nn.MSELoss(), **options)
        for _ in range(5):
            step(x, y)
        (report,) = step.reports
        assert report.graph
        assert report.level == "inductor"
        return model, len(report.graph.ops)

    x, y = torch.randn(8, 16, device="cuda"), torch.randn(8, 16, device="cuda")
    (ours, few), (theirs, many) = trained(), trained(combo_kernels=False)
    assert many - few == 30 - 2 + 10 - 1
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-3, atol=1e-4)
