"""Kernels that TorchInductor fused, scheduled and captured: what only a GPU can show."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autostream
from autostream.analysis.dependencies import analyze
from autostream.cli import zoo
from autostream.dispatch.dispatcher import Dispatcher
from autostream.fusion import inductor
from autostream.ir import Program
from autostream.reporting.report import Report
from autostream.scheduling.structure import width
from autostream.tuning import tune as tuning
from autostream.tuning.tune import Tuned
from autostream.utils.kernels import Kernel
from tests.threads import in_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty"),  # Inductor's own
]


class Towers(nn.Module):
    """Branches that meet."""

    def __init__(self, width: int = 256, towers: int = 4) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.ReLU()) for _ in range(towers)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], -1).softmax(-1)


@pytest.fixture
def towers() -> Towers:
    torch.manual_seed(0)
    return Towers().cuda().eval()


def kernels_of(report: Report) -> list[str]:
    assert report.graph
    return [op.target for op in report.graph.ops.values() if op.target.startswith("triton_")]


def assert_fused(fast: autostream.OptimizedModule) -> None:
    assert fast.reports
    for report in fast.reports:
        assert not report.refusals
        assert report.mode == "cuda graph"
        assert kernels_of(report)


@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize(("policy", "streams"), [("sequential", 1), ("critical_path", 4), ("path_cover", 3)])
def test_values_are_the_models(towers: Towers, policy: str, streams: int, cuda_graph: bool) -> None:
    options = {"policy": policy, "streams": streams, "memory_budget": math.inf}
    fast = autostream.optimize(towers, kernels="inductor", cuda_graph=cuda_graph, **options)
    with torch.no_grad():
        for seed in range(5):
            x = torch.randn(64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
            torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)
    (report,) = fast.reports
    assert not report.refusals
    assert kernels_of(report)


@torch.no_grad()
def test_by_default_the_faster_level_runs(towers: Towers) -> None:
    """Fused kernels where they win; where they do not, which for a single product is chance, the reason is told."""
    fast, x = autostream.optimize(towers), torch.randn(64, 256, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)
    assert_fused(fast)

    big = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    product = autostream.optimize(lambda x: x @ x)
    torch.testing.assert_close(product(big), big @ big, rtol=1e-2, atol=1)
    (report,) = product.reports
    assert report.graph
    (target,) = (op.target for op in report.graph.ops.values())
    assert [refusal.choice for refusal in report.refusals] == ([] if target == "aten.mm.out" else ["not fused"])


@torch.no_grad()
def test_templates_that_inductor_tunes_are_scheduled_too(towers: Towers) -> None:
    settings = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    fast, x = autostream.optimize(towers, kernels="inductor", inductor_options=settings), torch.randn(64, 256).cuda()
    torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)
    assert_fused(fast)
    assert any(name.startswith("triton_tem") for name in kernels_of(fast.reports[0]))


@torch.no_grad()
def test_a_frozen_weight_that_changes_is_seen(towers: Towers) -> None:
    """Written in place, and then replaced."""
    fast = autostream.optimize(towers, kernels="inductor", inductor_options={"freezing": True})
    x = torch.randn(64, 256, device="cuda")
    first: nn.Linear = towers.towers[0][0]  # type: ignore[index, assignment]

    def replace() -> None:
        first.weight = nn.Parameter(first.weight * 2)

    for change in (lambda: None, lambda: first.weight.mul_(2), replace):
        change()
        for _ in range(2):
            torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)
        assert_fused(fast)


@torch.no_grad()
def test_a_row_times_a_matrix_is_one_kernel_with_what_follows() -> None:
    layer = nn.Sequential(nn.Linear(512, 256), nn.GELU()).half().cuda()
    fast, x = autostream.optimize(layer, kernels="inductor"), torch.randn(1, 512, device="cuda", dtype=torch.float16)
    torch.testing.assert_close(fast(x), layer(x), rtol=1e-2, atol=1e-3)
    (report,) = fast.reports
    assert report.graph
    assert len(kernels_of(report)) == len(report.graph.ops) == 1


@torch.no_grad()
def test_the_short_way_on_a_gpu(towers: Towers, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any stream, with weights that change and move; and only where nothing else has changed."""
    fast, x = autostream.optimize(towers), torch.randn(64, 256, device="cuda")
    fast(x)
    long: list[object] = []
    dispatched = Dispatcher._dispatched
    monkeypatch.setattr(Dispatcher, "_dispatched", lambda *args: (long.append(args), dispatched(*args))[1])
    outputs = []
    for _ in range(20):
        y, stream = torch.randn(64, 256, device="cuda"), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs.append((y, fast(y)))
        torch.cuda.current_stream().wait_stream(stream)
    assert not long
    for y, output in outputs:
        torch.testing.assert_close(output, towers(y), rtol=1e-4, atol=1e-5)
    first: nn.Linear = towers.towers[0][0]  # type: ignore[index, assignment]
    first.weight.mul_(2)
    torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)
    assert not long
    first.weight.data = torch.randn_like(first.weight)
    torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)
    assert len(long) == 1
    torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)
    assert len(long) == 1


@pytest.mark.parametrize("name", ["googlenet", "resnet18", "mobilenet_v2", "squeezenet1_1", "vit_b_32"])
def test_real_models(name: str) -> None:
    model, (image,) = zoo.build(name)
    model, image = model.cuda().half(), image.cuda().half()
    with torch.no_grad():
        expected = model.float()(image.float())
        model.half()
        plain = (model(image) - expected).norm() / expected.norm()
        fast = autostream.optimize(model, image, kernels="inductor")
        ours = (fast(image) - expected).norm() / expected.norm()
    assert_fused(fast)
    assert ours <= max(2 * plain, 2e-3)


def test_weights_that_change_or_move_are_seen(towers: Towers) -> None:
    x = torch.randn(64, 256, device="cuda")
    fast = autostream.optimize(towers, kernels="inductor")
    with torch.no_grad():
        fast(x)
        towers.towers[0][0].weight.mul_(2)
        torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)
        towers.towers[1][0].weight.data = torch.randn(256, 256, device="cuda")
        torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)
        odd = torch.randn(256 * 256 + 1, device="cuda")[1:].view(256, 256)  # no kernel may load 16 bytes at a time here
        towers.towers[1][0].weight.data = odd
        torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)


def test_inputs_at_any_address(towers: Towers) -> None:
    fast = autostream.optimize(towers, kernels="inductor")
    memory = torch.randn(64 * 256 + 8, device="cuda")
    with torch.no_grad():
        for start in (0, 1, 3, 4):
            x = memory[start : start + 64 * 256].view(64, 256)
            torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)


def test_batch_norms_that_learn() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()).cuda().train()
    x = torch.randn(16, 32, device="cuda")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fast = autostream.optimize(model, x, kernels="inductor")
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    with torch.no_grad():
        ours = [fast(x), fast(x)]
        learnt = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        theirs = [model(x), model(x)]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(learnt, dict(model.state_dict()), rtol=1e-4, atol=1e-5)


def test_dropout_draws_as_the_model_does() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)).cuda().train()
    x = torch.randn(16, 32, device="cuda")
    fast = autostream.optimize(model, x, kernels="inductor")
    with torch.no_grad():
        torch.cuda.manual_seed(5)
        ours = fast(x)
        torch.cuda.manual_seed(5)
        torch.testing.assert_close(ours, model(x), rtol=1e-4, atol=1e-5)


def test_fusing_draws_nothing(towers: Towers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor does: it times products of random numbers, to see whether it pays to pad them."""
    functional, drawn = inductor._functional, []

    def drawing(program: Program) -> fx.GraphModule:
        drawn.append(torch.rand(4, device="cuda"))
        return functional(program)

    monkeypatch.setattr(inductor, "_functional", drawing)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    fast = autostream.optimize(towers, torch.ones(1, 256, device="cuda"), kernels="inductor")
    assert drawn
    assert fast.reports
    torch.testing.assert_close((torch.get_rng_state(), torch.cuda.get_rng_state()), before, rtol=0, atol=0)


def test_the_same_bits_as_another_type() -> None:
    """Of an argument, of what a kernel writes, and given to a library, that goes by the type of what it is given."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32, device="cuda", dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            bits = (x + 1).view(torch.bfloat16)
            return self.linear.bias.view(torch.int16), (x * 2).view(torch.int16), self.linear(bits), bits @ bits.t()

    model, x = Reads(), torch.randn(16, 32, device="cuda", dtype=torch.float16)
    fast = autostream.optimize(model, x, kernels="inductor")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=0.02, atol=0.02)
    (report,) = fast.reports
    assert report.level == "inductor", report.refusals


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x[1:], x + 1),
        lambda x: (y := x * 2, y.t(), y),
        lambda x: x.mul_(2)[1:],
        lambda x: (x.sort().values, x.sum().item()),
        lambda x: x[x > 0],
    ],
    ids=["a view of the input", "views of an output", "a written input", "a number", "a shape that depends on data"],
)
def test_what_cannot_be_fused_still_runs(function: Callable[[Tensor], object]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> object:
            return function(x)

    fast, x = autostream.optimize(Model(), kernels="inductor"), torch.randn(8, 8, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            ours, theirs = x.clone(), x.clone()
            # Python's numbers are compared as doubles unless told otherwise, and this one is a float32 sum.
            torch.testing.assert_close(fast(ours), function(theirs), rtol=1.3e-6, atol=1e-5)
            torch.testing.assert_close(ours, theirs)


def test_graph_breaks_make_several_graphs_of_kernels() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = (x + 1).relu() * 2
            if (x.sum() > 0).item():  # asked like this, it is split at graph breaks
                x = x.cos() + 1
            return x.exp() / 3

    fast, x = autostream.optimize(Branches(), kernels="inductor"), torch.randn(64, 64, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), Branches()(x))
    (report,) = fast.reports
    assert len(report.parts) >= 2
    assert [(part.mode, part.refusals) for part in report.parts] == [("cuda graph", ())] * len(report.parts)
    assert all(kernels_of(part) for part in report.parts)


def test_many_threads(towers: Towers) -> None:
    fast = autostream.optimize(towers, kernels="inductor")
    xs = [torch.randn(64, 256, device="cuda") for _ in range(10)]
    with torch.no_grad():
        expected = [towers(x) for x in xs]
    torch.cuda.synchronize()

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for turn in range(40):
                at = (seed * 7 + turn) % len(xs)
                torch.testing.assert_close(fast(xs[at]), expected[at], rtol=1e-4, atol=1e-5)

    in_threads(12, work)


def test_settings_of_inductor_pass_through(towers: Towers) -> None:
    x = torch.randn(64, 256, device="cuda")
    fast = autostream.optimize(towers, kernels="inductor", inductor_options={"epilogue_fusion": False})
    with torch.no_grad():
        torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)
    assert_fused(fast)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_around_a_call(towers: Towers, dtype: torch.dtype) -> None:
    """What is fused under autocast has its casts inside, and serves no call without it."""
    fast, x = autostream.optimize(towers, kernels="inductor"), torch.randn(64, 256, device="cuda")
    rounded = 8 * torch.finfo(dtype).eps
    for _ in range(2):
        with torch.autocast("cuda", dtype=dtype):
            ours, theirs = fast(x), towers(x)
        torch.testing.assert_close(ours, theirs, rtol=rounded, atol=0)
        plain = fast(x)
        torch.testing.assert_close(plain, towers(x), rtol=1e-4, atol=1e-5)
        assert not torch.equal(ours.float(), plain)
        x = torch.randn(64, 256, device="cuda")
    assert [(report.mode, report.refusals) for report in fast.reports] == [("cuda graph", ())] * 2
    assert all(kernels_of(report) for report in fast.reports)


@torch.no_grad()
def test_a_users_operator_that_only_writes_is_one_of_the_kernels() -> None:
    """It comes behind who reads what it writes, and before who reads that next."""

    @torch.library.custom_op("autostream_tests::add_to", mutates_args=["x"])
    def add_to(x: Tensor, y: Tensor) -> None:
        x += y

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.before(x)
            read = self.after(y).relu()
            add_to(y, x)
            return read, self.after(y)

    torch.manual_seed(0)
    model = Added().cuda()
    fast = autostream.optimize(model, kernels="inductor", policy="critical_path", streams=3, memory_budget=math.inf)
    for _ in range(3):
        x = torch.randn(33, 64, device="cuda")
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    (report,) = fast.reports
    assert (report.mode, report.level, report.refusals) == ("cuda graph", "inductor", ())
    assert any("add_to" in op.target for op in report.graph.ops.values())  # type: ignore[union-attr]


@torch.no_grad()
def test_a_users_own_triton_kernel_runs_as_it_is_for_a_reason() -> None:
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
        expected = model.after(3 * model.before(x).relu()).relu()
        torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)
    (report,) = fast.reports
    assert "which the user wrote: what it writes is not known" in report.refusals[0].reason


@torch.no_grad()
def test_what_is_fused_stays_where_there_is_no_memory_to_compare_it(
    towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = tuning._planned

    def scarce(program: Program, *args: Any) -> Tuned:
        if program.level == "aten":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return planned(program, *args)

    monkeypatch.setattr(tuning, "_planned", scarce)
    fast = autostream.optimize(towers)
    for _ in range(3):
        x = torch.randn(64, 256, device="cuda")
        torch.testing.assert_close(fast(x), towers(x), rtol=1e-4, atol=1e-5)
    (report,) = fast.reports
    assert report.mode == "cuda graph"
    assert kernels_of(report)
    (decision,) = report.refusals
    assert decision.choice == "fused"
    assert "could not be measured beside it: OutOfMemoryError: CUDA out of memory" in decision.reason


def test_a_kernel_says_what_it_writes(towers: Towers) -> None:
    """By poisoning: whatever a kernel is not said to write stays as it was."""
    from autostream.frontend.trace import trace
    from autostream.fusion.inductor import fuse

    x = torch.randn(64, 256, device="cuda")
    program = fuse(trace(towers, [x]).program)
    state = dict(towers.named_parameters())
    arguments = [state.get(p.target, x) for p in program.placeholders]
    launched = 0

    class Watching(torch.fx.Interpreter):
        def call_function(self, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            nonlocal launched
            if not isinstance(target, Kernel):
                return super().call_function(target, args, kwargs)  # type: ignore[arg-type]
            launched += 1
            kept = {at: arg.clone() for at, arg in enumerate(args) if isinstance(arg, Tensor)}
            target(*args)
            for at, before in kept.items():
                same = torch.equal(before, args[at])  # type: ignore[arg-type]
                assert same or at in target.written, f"{target} writes argument {at}"
            return None

    with torch.no_grad():
        (result,) = Watching(program.module).run(*arguments)
        torch.testing.assert_close(result, towers(x), rtol=1e-4, atol=1e-5)
    assert launched


def test_branches_share_no_buffer_and_no_kernel_writes_where_it_reads(towers: Towers) -> None:
    """Inductor's own reuse would make a chain of them."""
    from autostream.frontend.trace import trace
    from autostream.fusion.inductor import fuse

    program = fuse(trace(towers, [torch.randn(64, 256, device="cuda")]).program)
    kernels = [node.target for node in program.module.graph.nodes if isinstance(node.target, Kernel)]
    assert kernels
    assert all(kernel.written == kernel.overwritten for kernel in kernels)
    assert width(analyze(program)) >= len(towers.towers)


# Kept between processes


class Learning(nn.Module):
    """A norm that learns, draws that are random, and a product that a library computes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return y.softmax(-1), y.sum(0)


KEPT: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "towers": lambda: (Towers().eval(), torch.randn(64, 256)),
    "rows": lambda: (Towers().half().eval(), torch.randn(1, 256).half()),
    "learning": lambda: (Learning().train(), torch.randn(32, 64)),
    "attention": lambda: (nn.TransformerEncoderLayer(64, 4, batch_first=True).eval(), torch.randn(2, 16, 64)),
    "googlenet": lambda: (zoo.build("googlenet")[0].half().eval(), torch.randn(1, 3, 224, 224).half()),
}


def run_kept(name: str, options: str, path: str) -> None:
    """What a process does that may find fused kernels on disk: it says which stages it went through."""
    torch.manual_seed(0)
    model, x = KEPT[name]()
    model, x = model.cuda(), x.cuda()
    with torch.no_grad():
        fast = autostream.optimize(model, x, kernels="inductor", inductor_options=json.loads(options))
        torch.cuda.manual_seed(5)
        outputs = [fast(x), fast(x * 2)]
    reports = fast.reports
    assert len(reports) == 1, [
        (report.signature, report.refusals, list(fast._autostream._admission.entries)) for report in reports
    ]
    (report,) = reports
    torch.save((outputs, dict(model.state_dict())), path)
    operations = [] if report.graph is None else [(op.target, op.source) for op in report.graph.ops.values()]
    print(json.dumps([list(report.seconds), operations, [refusal.choice for refusal in report.refusals]]))


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in KEPT), ("towers", {"max_autotune": True})], ids=str
)
def test_a_second_process_fuses_nothing_and_computes_the_same(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folders = {f"{whose}_CACHE_DIR": str(tmp_path / whose) for whose in ("AUTOSTREAM", "TORCHINDUCTOR", "TRITON")}

    def run(path: Path) -> Any:
        call = f"run_kept({name!r}, {json.dumps(options)!r}, {str(path)!r})"
        command = [sys.executable, "-W", "ignore", "-c", f"from tests.gpu.test_fusion import run_kept; {call}"]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, env={**os.environ, **folders}, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6000:]
        return *json.loads(done.stdout.splitlines()[-1]), torch.load(path, weights_only=False)

    stages, operations, refusals, results = run(tmp_path / "first.pt")
    assert "fuse" in stages
    assert refusals == []
    stages, again, refusals, results_again = run(tmp_path / "second.pt")
    assert "load" in stages
    assert "fuse" not in stages  # whether it searches again is a matter of what the clock says this time
    assert refusals == []
    assert again == operations
    torch.testing.assert_close(results_again, results, rtol=1e-5, atol=1e-6)
