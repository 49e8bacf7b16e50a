"""What can be tested of the way to Inductor's kernels without a GPU; the rest is in ``tests/gpu/test_fusion.py``."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import compile_fx, freezing
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.wrapper_fxir import FxConverter, WrapperFxCodegen
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode

from autostream.analysis.dependencies import analyze
from autostream.errors import FusionError, OptionError
from autostream.frontend.aten import program_of as aten_program_of
from autostream.fusion import cache as fusion
from autostream.fusion import fingerprint, inductor, kernel_graph
from autostream.fusion.inductor import NEEDED, check_level, check_settings, fuse, obstacle
from autostream.ir import Program, Role
from tests.runtime.programs import Case, case_of, fused_case

aten = torch.ops.aten


def program_of(model: nn.Module | Callable[..., object], *inputs: Tensor) -> Program:
    return case_of(model, *inputs).program


# The functional graph that Inductor is given


def learning(x: Tensor, mean: Tensor) -> Tensor:
    mean.mul_(0.9).add_(x.mean(0))
    return (x - mean).relu_().view(-1)


def test_a_functional_graph_writes_to_its_arguments_at_the_end_only() -> None:
    module = inductor._functional(program_of(learning, torch.randn(4, 6), torch.randn(6)))
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    written = [node.target._schema.is_mutable for node in calls]  # type: ignore[union-attr]
    assert written == [False] * (len(calls) - 1) + [True]
    assert calls[-1].target is aten.copy_.default


def test_a_functional_graph_computes_the_same() -> None:
    x, mean = torch.randn(4, 6), torch.randn(6)
    module = inductor._functional(program_of(learning, x, mean))
    ours, theirs = mean.clone(), mean.clone()
    (result,) = module(ours, x)  # in the order in which they are used first
    torch.testing.assert_close(result, learning(x, theirs))
    torch.testing.assert_close(ours, theirs)


def test_a_functional_graph_keeps_the_users_lines() -> None:
    module = inductor._functional(program_of(learning, torch.randn(4, 6), torch.randn(6)))
    relu = next(node for node in module.graph.nodes if node.target is aten.relu.default)
    assert "return (x - mean).relu_()" in relu.stack_trace


def test_composites_become_what_inductor_lowers() -> None:
    program = program_of(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout()).eval(), torch.randn(1, 1, 5, 5)
    )
    targets = {str(node.target) for node in inductor._functional(program).graph.nodes if node.op == "call_function"}
    assert "aten.convolution.default" in targets
    assert not targets & {"aten.conv2d.default", "aten.batch_norm.default", "aten.dropout.default"}


# What is fused


@pytest.fixture
def program() -> Program:
    return program_of(lambda x: x.relu() + 1, torch.ones(3))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if there were a GPU and Triton; what happens."""
    happened: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(AsyncCompile, "wakeup", lambda: happened.append("processes start"))
    return happened


@pytest.fixture
def on_gpu(program: Program, triton: list[str]) -> Program:
    return replace(program, device="cuda:0")


def test_processes_that_compile_start_before_there_is_anything_to_compile(
    on_gpu: Program, triton: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def functional(program: Program) -> fx.GraphModule:
        triton.append("work begins")
        return program.module

    monkeypatch.setattr(inductor, "_functional", functional)
    monkeypatch.setattr(inductor, "_compiled", lambda module, *args: module)
    assert fuse(on_gpu).level == "inductor"
    assert triton == ["processes start", "work begins"]


def test_fusing_draws_nothing(on_gpu: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def functional(program: Program) -> fx.GraphModule:
        drawn.append(torch.rand(4))
        return program.module

    monkeypatch.setattr(inductor, "_functional", functional)
    monkeypatch.setattr(inductor, "_compiled", lambda module, *args: module)
    before = torch.get_rng_state()
    fuse(on_gpu)
    assert drawn
    assert torch.equal(torch.get_rng_state(), before)


# What cannot be fused


def refusal(program: Program) -> str:
    """Why a program is not fused, which must show before any work is done."""

    def work(program: Program) -> fx.GraphModule:
        raise AssertionError("it began")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "_functional", work)
        with pytest.raises(FusionError) as refused:
            fuse(program)
    return str(refused.value)


def test_a_program_of_the_cpu_is_told_what_to_use(program: Program) -> None:
    assert refusal(program) == (
        'TorchInductor fuses ops into kernels of a GPU, and this program runs on the CPU: use kernels="eager"; '
        "ops stay those of ATen"
    )


def test_a_machine_without_triton_is_told_so(on_gpu: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "in Triton, which is not installed: install it, or use" in refusal(on_gpu)


def test_this_pytorch_has_all_that_is_needed() -> None:
    assert list(inductor._missing()) == []


@pytest.mark.parametrize(
    "name",
    [
        "torch._inductor.fx_passes.joint_graph.joint_graph_passes",
        "torch._inductor.codegen.common.DeviceCodegen.fx_wrapper_codegen",
        "torch._inductor.codegen.wrapper_fxir.FxConverter",
        "torch._inductor.codegen.wrapper_fxir.FxConverter._lookup_args",
    ],
)
def test_a_pytorch_that_lacks_something_is_told_what(
    on_gpu: Program, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(name)
    assert refusal(on_gpu).startswith(f"torch {torch.__version__} has no {name}")


def test_a_pytorch_without_the_converter_is_told_so(on_gpu: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "torch._inductor.codegen.wrapper_fxir"
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    assert refusal(on_gpu) == (
        f'torch {torch.__version__} has no {module}, as 2.11 and 2.13 have for fusing: use kernels="eager"; '
        "ops stay those of ATen"
    )


@pytest.mark.parametrize("path", [module.__file__ for module in (inductor, kernel_graph, fingerprint, fusion)])
def test_all_that_is_imported_of_pytorchs_compiler_is_looked_for(path: str) -> None:
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    imported = [
        (f"{node.module}.{alias.name}", node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch._inductor", "torch._functorch"))
        for alias in node.names
    ]
    assert imported
    for full, module, name in imported:
        assert full in NEEDED or name in {each.partition(".")[0] for each in NEEDED[module or ""]}, full


@pytest.mark.parametrize(
    ("ours", "theirs"), [(kernel_graph.Converter, FxConverter), (kernel_graph.Wrapper, WrapperFxCodegen)]
)
def test_all_methods_that_are_overridden_or_called_are_looked_for(ours: type, theirs: type) -> None:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(ours))).body
    attributes = [node for node in ast.walk(body) if isinstance(node, ast.Attribute)]
    named = {node.attr for node in attributes if ast.unparse(node.value) in ("self", "wrapper")}
    named |= {node.name for node in ast.walk(body) if isinstance(node, ast.FunctionDef)}
    used = {name for name in named if hasattr(theirs, name)}
    listed = {each.partition(".")[2] for each in NEEDED[theirs.__module__] if each.startswith(f"{theirs.__name__}.")}
    assert used
    assert used <= listed


def test_what_inductor_fails_at_is_said_in_one_line_and_the_program_stays_as_it_is(
    on_gpu: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> fx.GraphModule:
        raise RuntimeError("no kernel\nfor pages")

    before = on_gpu.module.code
    monkeypatch.setattr(inductor, "_compiled", fails)
    with pytest.raises(FusionError, match=r"^TorchInductor cannot fuse it: RuntimeError: no kernel$"):
        fuse(on_gpu)
    assert on_gpu.module.code == before


@pytest.mark.usefixtures("triton")
def test_a_program_whose_outputs_would_lie_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(*args: object) -> fx.GraphModule:
        graph = fx.Graph()
        result = graph.call_function(aten.clone.default, (graph.placeholder("a"),))
        graph.output((result,))
        return fx.GraphModule(nn.Module(), graph)

    monkeypatch.setattr(inductor, "_compiled", copies)
    assert fuse(replace(program_of(lambda x: x + 1, torch.ones(3)), device="cuda:0")).level == "inductor"
    with pytest.raises(FusionError, match="outputs would share other memory"):
        fuse(replace(program_of(lambda x: x[1:], torch.ones(3)), device="cuda:0"))
    with pytest.raises(FusionError, match="outputs would have other types"):
        fuse(replace(program_of(lambda x: x > 1, torch.ones(3)), device="cuda:0"))
    with pytest.raises(FusionError, match="types, shapes or strides"):
        fuse(replace(program_of(lambda x: (x + 1).t(), torch.ones(3, 3)), device="cuda:0"))
    # Strides that no element is found by may be any.
    fuse(replace(program_of(lambda x: (x + 1).as_strided((1, 3), (1, 1)), torch.ones(1, 3)), device="cuda:0"))


class Convolutions(nn.Module):
    """Two, both of which are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return y, self.second(y)


def test_outputs_lie_as_the_models_where_inductor_would_rather_have_them_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a convolution writes it leaves channels-last, but for outputs that it was told a user sees."""
    strides: list[list[int]] = []

    class Lowered(Exception):  # noqa: N818 - what follows takes Triton
        pass

    def codegen(graph: GraphLowering) -> None:
        strides.extend(list(output.get_stride()) for output in graph.graph_outputs)
        raise Lowered

    monkeypatch.setattr(GraphLowering, "decide_layout_opt", staticmethod(lambda module, is_inference: True))
    monkeypatch.setattr(GraphLowering, "codegen", codegen)
    functional = inductor._functional(program_of(Convolutions().eval(), torch.ones(1, 8, 9, 9)))
    with inductor.with_settings({}), pytest.raises(Exception, match="Lowered"):
        inductor._compiled(functional, torch.device("cpu"), {})
    assert strides == [[8 * 7 * 7, 7 * 7, 7, 1], [8 * 5 * 5, 5 * 5, 5, 1]]


@pytest.mark.usefixtures("triton")
def test_the_tensors_that_are_returned_are_one_or_several_as_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor looks at memory anew for each output, but for what is all of an argument or of what it has returned.

    a ──┬── a ───────▶ first, a view         a ──┬── alias ─▶ first
        ├── a ───────▶ second, a as its type     ├──────────▶ second
        ├── [:2] ────▶ third                     └── [:2] ──┬──────────▶ third, and fourth, which is the same
        ├── [:2] ────▶ fourth, the third                    └── alias ─▶ fifth
        └── [:2] ────▶ fifth, another
    """

    def views(*args: object) -> fx.GraphModule:
        graph = fx.Graph()
        a = graph.placeholder("a")
        third, fourth = (graph.call_function(aten.as_strided.default, (a, [2], [1])) for _ in range(2))
        graph.output((a, a, third, fourth, third))
        return fx.GraphModule(nn.Module(), graph)

    def model(x: Tensor) -> tuple[Tensor, ...]:
        view, other = x[:2], x[:2]
        return x.view(-1), x.float(), view, view, other

    monkeypatch.setattr(inductor, "_compiled", views)
    # Dynamo's graphs return each tensor once.
    traced, _ = aten_program_of(fx.symbolic_trace(model), [(Role.INPUT, "0", torch.ones(3))])
    program = replace(traced, device="cuda:0")
    fused = fuse(program)
    assert [fused.outputs.index(name) for name in fused.outputs] == [0, 1, 2, 2, 4]
    x = torch.ones(3)
    first, second, third, fourth, fifth = fused.module(x)
    assert first is not x
    assert second is x
    assert third is fourth is not fifth
    assert {tensor.untyped_storage()._cdata for tensor in (first, third, fifth)} == {x.untyped_storage()._cdata}
    again = inductor.restore_fused(program, fused.module)
    assert again.outputs == fused.outputs


@pytest.mark.usefixtures("triton")
def test_a_fused_program_has_the_names_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    case = fused_case()
    monkeypatch.setattr(inductor, "_compiled", lambda *args: renamed(case.program.module))
    fused = fuse(replace(case.program, device="cuda:0"))
    assert fused.placeholders == case.program.placeholders
    assert [node.name for node in fused.module.graph.find_nodes(op="placeholder")] == ["x", "w", "v", "mean"]
    assert analyze(replace(fused, device="cpu")).ops.keys() == case.graph.ops.keys()
    assert [p.role for p in fused.placeholders] == [Role.INPUT, Role.PARAMETER, Role.PARAMETER, Role.BUFFER]


def renamed(module: fx.GraphModule) -> fx.GraphModule:
    """As Inductor calls placeholders."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for at, node in enumerate(module.graph.nodes):
        values[node] = graph.node_copy(node, values.__getitem__)
        if node.op == "placeholder":
            values[node].name = values[node].target = f"arg{at}_1"
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_autotun": True}, r"has no setting 'max_autotun' \(did you mean 'max_autotune'\?\)"),
        ({"inplace_buffers": True}, "'inplace_buffers' is autostream's to choose: leave it out"),
        ({"triton.multi_kernel": 1}, "'triton.multi_kernel' is autostream's to choose: leave it out"),
        (
            {"freezing_discard_parameters": True},
            "'freezing_discard_parameters' is autostream's to choose: leave it out",
        ),
        ({"freezing": "False"}, "'freezing' is a switch: use True or False, not 'False'"),
        ({"max_autotune": None}, "'max_autotune' is a switch: use True or False, not None"),
    ],
)
def test_settings_that_inductor_does_not_have_or_cannot_use_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=f"inductor_options: .*{message}"):
        check_settings(settings)


def test_settings_that_inductor_has_pass() -> None:
    check_settings({})
    check_settings({"max_autotune": True, "freezing": False, "triton.unique_kernel_names": True, "compile_threads": 4})


# Freezing


class Normed(nn.Module):
    """Convolutions with norms, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return self.head(y.mean((2, 3))), y


@pytest.fixture
def normed() -> Case:
    torch.manual_seed(0)
    model = Normed().eval()
    model.body[1].running_mean.normal_()
    model.body[1].running_var.uniform_(0.5, 2.0)
    return case_of(model, torch.randn(2, 3, 8, 8))


def freezable(case: Case, *tensors: Tensor) -> list[str]:
    """What a program may hold on to, by what the model calls it."""
    functional = inductor._functional(case.program)
    found = inductor._freezable(case.program, functional, tensors or case.tensors)
    assert all(found[at] is (tensors or case.tensors)[at] for at in found)
    return [case.program.placeholders[at].target for at in found]


def test_weights_and_buffers_may_be_held_but_for_inputs(normed: Case) -> None:
    held = [item.target for item in normed.program.placeholders if item.role is not Role.INPUT]
    assert "body.1.running_var" in held
    assert freezable(normed) == held


class Kept(nn.Module):
    """Tensors that are read, written, and returned as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.returned = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.register_buffer("written", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.written.add_(x)
        return x * self.read + self.written + self.returned, self.returned[1:]


def test_what_is_written_or_returned_is_not_held() -> None:
    assert freezable(case_of(Kept(), torch.ones(4))) == ["read"]


def test_what_was_made_in_inference_mode_is_not_held(normed: Case) -> None:
    """Nobody can tell whether it has been changed."""
    with torch.inference_mode():
        tensors = [tensor.clone() for tensor in normed.tensors]
    assert freezable(normed, *tensors[:2], *normed.tensors[2:]) == freezable(normed)[2:]


def frozen(case: Case) -> fx.GraphModule:
    functional = inductor._functional(case.program)
    return inductor._frozen(functional, inductor._freezable(case.program, functional, case.tensors))


@torch.no_grad()
def test_a_frozen_graph_takes_and_returns_the_same_and_reads_inputs_alone(normed: Case) -> None:
    module = frozen(normed)
    *held, x = normed.tensors
    expected = normed.program.module(*normed.tensors)
    results = module(*map(torch.full_like, held, [torch.nan] * len(held)), x)
    torch.testing.assert_close(results, expected)
    assert [result.stride() for result in results] == [result.stride() for result in expected]


def test_the_graph_that_is_frozen_stays_without_constants(normed: Case) -> None:
    """PyTorch keeps what was exported until the next is."""
    functional = inductor._functional(normed.program)
    before = str(functional.graph)
    module = inductor._frozen(functional, inductor._freezable(normed.program, functional, normed.tensors))
    assert str(functional.graph) == before
    assert (len(list(functional.buffers())), len(list(module.buffers())) > 0) == (0, True)


def test_what_follows_from_weights_alone_is_computed_once(normed: Case) -> None:
    names = {str(node.target) for node in frozen(normed).graph.nodes if node.op == "call_function"}
    assert not [name for name in names if "batch_norm" in name or "sqrt" in name or "permute" in name]


@pytest.mark.parametrize("better", [True, False])
def test_weights_of_convolutions_lie_as_inductor_likes_them_best(
    better: bool, normed: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[fx.GraphModule] = []
    monkeypatch.setattr(GraphLowering, "decide_layout_opt", lambda module, is_inference: better)
    monkeypatch.setattr(freezing, "convert_conv_weights_to_channels_last", converted.append)
    frozen(normed)
    assert len(converted) == better


def test_constants_are_ordinary_tensors_even_in_inference_mode(normed: Case) -> None:
    with torch.inference_mode():
        module = frozen(normed)
    assert not any(tensor.is_inference() for tensor in module.buffers())


@pytest.mark.usefixtures("triton")
def test_a_program_says_what_it_holds(normed: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[int, Tensor]] = []
    monkeypatch.setattr(inductor, "_compiled", lambda module, device, constants: asked.append(constants) or module)
    program = replace(normed.program, device="cuda:0")
    assert fuse(program, {"freezing": True}, normed.tensors).frozen == set(range(len(normed.tensors) - 1))
    assert fuse(program, {"freezing": False}, normed.tensors).frozen == set()
    assert fuse(program, {}, normed.tensors).frozen == set()
    assert [len(constants) for constants in asked] == [len(normed.tensors) - 1, 0, 0]


@pytest.mark.usefixtures("triton")
def test_an_output_that_is_a_constant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is given it may write to it."""

    def returns_a_constant(module: fx.GraphModule, *args: object) -> fx.GraphModule:
        module.register_buffer("constant", torch.ones(3))
        with module.graph.inserting_before(module.graph.output_node()):
            constant = module.graph.get_attr("constant")
            module.graph.output_node().args = ((module.graph.call_function(aten.view.default, (constant, [3])),),)
        return module

    monkeypatch.setattr(inductor, "_compiled", returns_a_constant)
    program = replace(program_of(lambda x: x + 1, torch.ones(3)), device="cuda:0")
    with pytest.raises(FusionError, match=r"frozen, an output would be a constant, .*: leave 'freezing' out"):
        fuse(program)


# Autotuning


@pytest.mark.parametrize(
    "told", ["TypedStorage is deprecated. It will be", "Attempted to insert a get_attr Node with no"]
)
def test_a_slip_of_inductors_is_not_taken_for_the_users(
    told: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where warnings are errors, autotuning and freezing would fail with it."""

    @contextmanager
    def graphs(device: torch.device) -> Iterator[list[fx.GraphModule]]:
        yield [program.module]

    def compiles(*args: object, **kwargs: object) -> None:
        warnings.warn(f"{told} …", UserWarning, stacklevel=1)

    monkeypatch.setattr(kernel_graph, "capture_kernel_graphs", graphs)
    monkeypatch.setattr(compile_fx, "compile_fx_inner", compiles)
    assert inductor._compiled(inductor._functional(program), torch.device("cpu"), {}) is program.module
    with pytest.raises(UserWarning, match=told):
        compiles()


def test_a_package_that_is_broken_is_an_obstacle_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("a library of its is too old\nand more")

    monkeypatch.setattr(inductor, "_installed", lambda package: True)
    monkeypatch.setattr(inductor.importlib, "import_module", broken)
    assert re.search(r"has no torch\S+ that could be imported \(.*too old.*\).*kernels=\"eager\"", obstacle("cuda"))


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_level_is_refused_where_a_model_lies_on_the_cpu(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it: parts of a model on the GPU may lie there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(inductor, "_installed", lambda package: True)
    with FakeTensorMode():
        here, there = torch.ones(2), torch.ones(2, device="cuda")
    for tensors, refused in ([], not on_gpu), ([here], True), ([here, there], not on_gpu), ([there], not on_gpu):
        check_level("auto", tensors)
        check_level("eager", tensors)
        with pytest.raises(OptionError, match="runs on the CPU") if refused else nullcontext():
            check_level("inductor", tensors)


def test_something_else_under_tritons_name_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    assert "Triton, which is not installed" in obstacle("cuda")
