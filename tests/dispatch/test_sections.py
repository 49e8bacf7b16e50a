"""Programs that run in sections: what is captured and reported, and that results are the model's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autostream import optimize
from autostream.costs.device import profile_named
from autostream.dispatch import compiled_graph, sections
from autostream.dispatch.dispatcher import Dispatcher
from autostream.dispatch.sections import sections_of
from autostream.frontend.trace import trace
from autostream.ir import Op, OpGraph, Program
from autostream.options import Options
from autostream.reporting.text import render
from autostream.utils.stopwatch import Stopwatch
from tests.cuts import REFUSED, let_be_cut, let_be_placed, moved, over_devices, placed
from tests.random_modules import CALL_SEQUENCES, RandomModule, check, random_modules
from tests.semantics import Model, check_same, same, t


def nothing(op: Op) -> bool:
    """Refuses no op; ops that depend on numbers read from the device are refused anyway."""
    return False


def asks(s: Model, x: Tensor) -> Tensor:
    """Branches, a number read from the device, branches."""
    top = (x @ s.w).sin() + (x @ s.w).cos()
    scaled = top * top.max().item()
    return scaled.exp() - scaled.tanh()


def model() -> Model:
    return Model(asks, w=nn.Parameter(t(4, 4)))


def program_of(module: nn.Module, *args: Tensor, device: str | None = "cuda:0") -> Program:
    return trace(module, args, device=device).program


def cut_up(program: Program, **options: Any) -> sections.Sections | None:
    bound = [True] * len(program.placeholders)
    return sections_of(program, bound, Options(**options), lambda *_: Unmade(), Stopwatch())


class Unmade:
    reports = ()

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError


def large(s: Model, x: Tensor) -> Tensor:
    """So many ops that both parts are worth a graph."""
    for _ in range(3):
        x = (x @ s.w).sin() + x.cos()
    x = x * x.max().item()
    for _ in range(3):
        x = (x @ s.w).sin() + x.cos()
    return x


@pytest.mark.parametrize("options", [{}, {"streams": 2}])
def test_ops_that_cannot_be_captured_are_between_sections(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autostream.tuning.pricing.profile_here", lambda device: (profile_named("h200"), ()))
    found = cut_up(program_of(Model(large, w=nn.Parameter(t(4, 4))), t(4, 4)), **options)
    assert found is not None
    names = [name for name, _ in found.module.named_children()]
    assert names == ["part_0", "part_1", "part_2"]
    assert [node.name for node in found.module.part_1.graph.nodes if node.op == "call_function"] == ["item", "mul"]


def test_nothing_is_cut_without_reason() -> None:
    whole = Model(large, w=nn.Parameter(t(4, 4)))
    assert cut_up(program_of(whole, t(4, 4), device=None)) is None
    assert cut_up(program_of(whole, t(4, 4)), cuda_graph=False) is None
    assert cut_up(program_of(Model(lambda s, x: (x.sin() + x.cos()).exp().tanh()), t(4))) is None
    assert cut_up(program_of(Model(lambda s, x: x.sin() * x.max().item()), t(4))) is None


@torch.no_grad()
def test_the_report_lists_the_parts_and_why_each_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_cut(monkeypatch, nothing)
    fast = optimize(model())
    fast(t(4, 4))
    (report,) = fast.reports
    assert (report.model, report.mode) == ("Model", "sections")
    assert [part.mode for part in report.parts] == ["one stream"] * 3
    assert [list(part.graph.ops) for part in report.parts] == [
        ["matmul", "sin", "matmul_1", "cos", "add", "max_1"], ["item", "mul"], ["exp", "tanh", "sub"]
    ]  # fmt: skip
    assert [refusal.op for refusal in report.refusals] == ["item", "mul"]
    number, follows, returns = (part.ended for part in report.parts)
    assert re.fullmatch(rf"aten.item.default: {REFUSED} \(.*test_sections.py:\d+: scaled = .*\)", number)
    assert (follows, returns) == ("what follows fits into a CUDA graph", "")
    assert all("test_sections.py" in op.source for part in report.parts for op in part.graph.ops.values())
    assert report.parts[1].chosen.measured_us is None
    text = render(report)
    assert "runs as      CUDA graphs, and between them the ops that none can hold" in text
    assert "Part 2\n" in text
    assert [part["ended"] for part in json.loads(report.to_json())["parts"]] == [number, follows, returns]
    assert "CUDA graphs, and between them" in report.to_html()
    lowered = fast.lowered(t(4, 4))
    assert "self.part_1(" in lowered.code
    assert "aten.item" in lowered.part_1.code
    watched = fast._autostream.watched(t(4, 4))
    assert watched.refusals[-1].choice == "not watched"


@torch.no_grad()
def test_prepare_compiles_all_sections_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_cut(monkeypatch, nothing)

    def writes(s: Model, x: Tensor) -> Tensor:
        x.mul_(s.norm(x).max().item())
        s.count.add_(1)
        return nn.functional.dropout(x, 0.5, True)

    module = Model(writes, norm=nn.BatchNorm1d(4), count=nn.Buffer(torch.zeros(1)))
    fast, x, before = optimize(module), t(3, 4), {n: v.clone() for n, v in module.state_dict().items()}
    generator = torch.get_rng_state()
    fast.prepare(x)
    assert [part.ended != "" for part in fast.reports[0].parts] == [True, True, False]
    same(dict(module.state_dict()), before)
    same(x, t(3, 4))
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(
    "function",
    [
        asks,
        lambda s, x: (x.add_(x.sin().max().item()), x.cos(), x.t()),
        lambda s, x: s.w.mul_(x.mean().item()).sin() + s.w.cos() + s.w,
        lambda s, x: x[x.sin().nonzero()[:, 0]].cos().sum() + x.exp(),
        lambda s, x: (torch.rand_like(x) * x.max().item() + torch.rand_like(x)).cos(),
        lambda s, x: ([x.sin(), {"twice": x.sin() * x.max().item()}], x),
    ],
    ids=["number", "input", "state", "shape", "random", "nested"],
)
def test_results_and_side_effects_are_the_models(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_cut(monkeypatch, nothing)
    plain = Model(function, w=nn.Buffer(t(4, 4)))
    fast = check_same(plain, ((t(4, 4),), {}), {})
    assert "sections" in [report.mode for report in fast.reports]


@pytest.mark.parametrize("recorded", [False, True])
def test_numbers_are_those_of_the_call(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where gradients are enabled and nothing requires any; each section is compiled once."""
    let_be_cut(monkeypatch, nothing)
    plain = Model(asks, w=t(4, 4))
    fast = optimize(plain)
    with torch.set_grad_enabled(recorded):
        for seed in range(6):
            same(fast(t(4, 4, seed=seed)), plain(t(4, 4, seed=seed)))
    assert [(report.mode, len(report.parts)) for report in fast.reports] == [("sections", 3)]


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.w.mul_(2),
        lambda model: setattr(model.w, "data", t(4, 4, seed=9)),
        lambda model: setattr(model, "w", nn.Parameter(t(4, 4, seed=9))),
        lambda model: setattr(model, "w", nn.Parameter(t(4, 4, seed=9).double())),
        lambda model: setattr(model, "w", nn.Parameter(t(4, 4, seed=9).t())),
    ],
)
def test_weights_may_change_between_calls(change: Callable[[Model], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_cut(monkeypatch, nothing)
    plain = Model(lambda s, x: asks(s, x.to(s.w.dtype)), w=nn.Parameter(t(4, 4)))
    fast = optimize(plain)
    for _ in range(3):
        same(fast(t(4, 4)), plain(t(4, 4)))
    change(plain)
    for _ in range(2):
        same(fast(t(4, 4)), plain(t(4, 4)))


@torch.no_grad()
def test_graphs_between_graph_breaks_are_cut_as_well(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_cut(monkeypatch, lambda op: "cumsum" in op.target)

    def breaks(s: Model, x: Tensor) -> Tensor:
        y = x.sin().cumsum(0).cos()
        return y + 1 if y.sum() > 0 else y - 1

    fast = optimize(Model(breaks))
    for seed in range(3):
        same(fast(t(4, seed=seed)), breaks(Model(breaks), t(4, seed=seed)))
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    assert [part.mode for part in report.parts][:1] == ["sections"]
    assert len(report.parts[0].parts) == 3


def test_a_forward_and_a_backward_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_cut(monkeypatch, lambda op: "tanh" in op.target)
    plain = Model(lambda s, x: (x @ s.w).sin().tanh() @ s.w, w=nn.Parameter(t(4, 4)))
    fast = check_same(plain, ((t(4, 4),), {}), {"policy": "sequential"}, (torch.enable_grad,) * 3)
    (report,) = fast.reports
    assert [(part.half, part.mode) for part in report.parts] == [("forward", "sections"), ("backward", "sections")]
    assert len(report.parts[0].parts) == 3, "each was made once"


@torch.no_grad()
def test_an_input_may_alias_a_buffer_that_the_model_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a call has a signature of its own."""
    let_be_cut(monkeypatch, nothing)

    def writes(s: Model, x: Tensor) -> Tensor:
        s.w.add_(x.max().item())
        return x.sin().cos()

    plain = Model(writes, w=nn.Buffer(t(4)))
    fast = optimize(plain)
    fast(t(2))
    for _ in range(3):
        expected = plain.w + plain.w[:2].max()
        same(fast(plain.w[:2]), expected[:2].sin().cos())
        same(plain.w.clone(), expected)
    assert {report.mode for report in fast.reports} == {"sections"}


def second_half(s: Model, x: Tensor) -> Tensor:
    """Two stages on two devices, with a skip connection between them."""
    skip = (x @ s.w).sin()
    top = moved(skip.cos().exp())
    return (top @ s.far).tanh() + moved(skip)


@torch.no_grad()
def test_each_device_has_parts_and_copies_between_them_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_placed(monkeypatch)
    plain = Model(second_half, w=nn.Parameter(t(4, 4)), far=nn.Parameter(t(4, 4, seed=1)))
    fast = optimize(plain)
    for seed in range(4):
        same(fast(t(4, 4, seed=seed)), plain(t(4, 4, seed=seed)))
    (report,) = fast.reports
    assert report.mode == "sections"
    assert [list(part.graph.ops) for part in report.parts] == [
        ["matmul", "sin", "cos", "exp"], ["to", "to_1"], ["matmul", "tanh", "add"]
    ]  # fmt: skip
    copied, follows, returns = (part.ended for part in report.parts)
    assert re.fullmatch(r"aten.to.dtype: copies from cuda:0 to cuda:1 \(.*\)", copied)
    assert (follows, returns) == ("what follows fits into a CUDA graph", "")


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: (x.add_(x.sin()), moved(x).cos().mul_(s.far), x.t()),
        lambda s, x: (s.far.mul_(moved(x.sin())), moved(s.far).cos() + s.w.add_(1), s.far.t()),
        lambda s, x: moved(torch.rand_like(x).exp()) * torch.rand_like(s.far) + torch.rand_like(s.far),
        lambda s, x: (s.far.sin(), s.w.sin() * x),
        lambda s, x: (x.sin(), (flat := s.far.reshape(-1)).cos(), s.far.add_(1), flat.exp()),
        lambda s, x: moved(moved(x.sin()).cos() @ s.far) + x.exp(),
    ],
    ids=["input", "state", "random", "apart", "views", "to and fro"],
)
def test_results_over_two_devices_are_the_models(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_placed(monkeypatch)
    plain = Model(function, w=nn.Buffer(t(4, 4)), far=nn.Buffer(t(4, 4, seed=1)))
    fast = check_same(plain, ((t(4, 4),), {}), {})
    assert "sections" in [report.mode for report in fast.reports]


def over_two(function: Callable[..., Any]) -> Program:
    module = Model(function, w=nn.Parameter(t(4, 4)), far=nn.Parameter(t(4, 4)))
    return placed(program_of(module, t(4, 4), device=None))


def test_a_program_over_two_devices_is_cut_though_a_graph_could_hold_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autostream.tuning.pricing.profile_here", lambda device: (profile_named("h200"), ()))
    program = over_two(lambda s, x: (x.sin().cos().exp().tanh(), s.far.sin().cos().exp().tanh()))
    found = cut_up(program)
    assert found is not None
    assert [name for name, _ in found.module.named_children()] == ["part_0", "part_1"]
    assert found._endings == ["what follows runs on cuda:1", ""]
    alone = cut_up(over_two(lambda s, x: (x.sin().cos().exp().tanh(), s.far)))
    assert alone is not None, "as a whole, it would be given a tensor of another device"
    assert [name for name, _ in alone.module.named_children()] == ["part_0"]
    assert cut_up(over_two(lambda s, x: moved(x.sin()) @ s.far)) is None, "no part is worth a graph"


@torch.no_grad()
@pytest.mark.parametrize("options", [{"cuda_graph": False}, {}], ids=["no graph is wanted", "no part is worth one"])
def test_a_program_over_two_devices_that_is_not_cut_runs_eagerly(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiled_graph.program_of

    def over_two_devices(*given: Any) -> Any:
        program, constants = made(*given)
        return placed(program), constants

    monkeypatch.setattr(compiled_graph, "program_of", over_two_devices)
    monkeypatch.setattr("autostream.tuning.pricing.profile_here", lambda device: (profile_named("h200"), ()))
    plain = Model(lambda s, x: moved(x.sin()) @ s.far, far=nn.Parameter(t(4, 4)))
    run = Dispatcher(plain, Options(**options))
    same(run(t(4, 4)), plain(t(4, 4)))
    assert run.reports[0].mode == "plain"
    assert "several devices (cuda:0, cuda:1)" in run.reports[0].refusals[0].reason


def number(op: Op) -> int:
    """As good as random, and the same each time."""
    return sum(op.name.encode())


@pytest.mark.parametrize("several", [False, True], ids=["one device", "several"])
@settings(max_examples=10, derandomize=True, suppress_health_check=list(HealthCheck))
@given(module=random_modules(), turns=st.sampled_from(list(CALL_SEQUENCES)), one_in=st.sampled_from([2, 3, 5]))
def test_random_modules_are_the_same_however_they_are_cut(
    several: bool, module: RandomModule, turns: str, one_in: int
) -> None:
    def scattered(graph: OpGraph) -> OpGraph:
        return over_devices(graph, lambda op: f"cuda:{number(op) // 7 % 3}", lambda op: number(op) % one_in == 0)

    with pytest.MonkeyPatch.context() as patch:
        if several:
            let_be_cut(patch, lambda op: number(op) % 11 == 0, scattered)
        else:
            let_be_cut(patch, lambda op: number(op) % one_in == 0)
        check(module, {}, CALL_SEQUENCES[turns])
