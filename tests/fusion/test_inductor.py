"""Fusing by Inductor, as far as it can be tested without a GPU; the rest is in ``tests/gpu/test_fusion.py``."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
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
from torch._inductor import compile_fx, config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ForeachKernelSchedulerNode
from torch._subclasses import FakeTensorMode

from autostream.errors import FusionError, OptionError
from autostream.frontend.aten import program_of as aten_program_of
from autostream.fusion import cache as fusion
from autostream.fusion import fingerprint, inductor, kernel_graph
from autostream.fusion.combo_kernels import groups
from autostream.fusion.inductor import NEEDED, check_level, check_settings, fuse, obstacle
from autostream.ir import Program, Role
from tests.runtime.programs import Case, case_of

aten = torch.ops.aten


def program_of(model: nn.Module | Callable[..., object], *inputs: Tensor, device: str = "cpu") -> Program:
    return replace(case_of(model, *inputs).program, device=device)


# The functional graph that Inductor gets


def learning(x: Tensor, mean: Tensor) -> Tensor:
    mean.mul_(0.9).add_(x.mean(0))
    return (x - mean).relu_().view(-1)


@pytest.mark.parametrize("autotuned", [True, False])
def test_autotuned_products_are_not_kept_in_place(autotuned: bool) -> None:
    """A template of Inductor's may be faster."""
    case = case_of(lambda x, y: (x @ y).addmm_(y, x), torch.randn(4, 4), torch.randn(4, 4))
    with inductor.with_settings({"max_autotune": autotuned}):
        module = inductor._functional(case.program)
    targets = [node.target for node in module.graph.nodes]
    assert (torch.ops.higher_order.auto_functionalized_v2 in targets) != autotuned
    assert (aten.addmm.default in targets) == autotuned


def test_a_functional_graph_computes_the_same_and_mutates_arguments_at_the_end() -> None:
    x, mean = torch.randn(4, 6), torch.randn(6)
    case = case_of(learning, x, mean)
    module = inductor._functional(case.program)
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    assert [node.target._schema.is_mutable for node in calls] == [False] * (len(calls) - 1) + [True]  # type: ignore[union-attr]
    relu = next(node for node in calls if node.target is aten.relu.default)
    assert "return (x - mean).relu_()" in relu.stack_trace
    actual, expected = mean.clone(), mean.clone()
    # Dynamo's versions order inputs differently.
    (result,) = module(*(actual if tensor.shape == mean.shape else x for tensor in case.tensors))
    torch.testing.assert_close(result, learning(x, expected))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "product", [nn.functional.linear, lambda rows, matrix, *bias: rows @ matrix.t()], ids=["linear", "matmul"]
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_batch_of_rows_that_are_not_contiguous_is_one_product_with_a_matrix(product: Any, bias: bool) -> None:
    rows, matrix, extra = torch.randn(5, 3, 8), torch.randn(6, 8), [torch.randn(6)] * bias

    def projected(rows: Tensor, matrix: Tensor, *bias: Tensor) -> Tensor:
        return product(rows.transpose(0, 1), matrix, *bias)

    case = case_of(projected, rows, matrix, *extra)
    module = inductor._functional(case.program)
    assert not module.graph.find_nodes(op="call_function", target=aten.bmm.default)
    (result,) = module(*case.tensors)
    expected = projected(rows, matrix, *extra)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()


# Fusing, with stand-ins for Inductor


@pytest.fixture
def program() -> Program:
    return program_of(lambda x: x.relu() + 1, torch.ones(3))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if Triton were installed; a log of events."""
    events: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(AsyncCompile, "wakeup", lambda: events.append("worker processes start"))
    return events


@pytest.fixture
def on_gpu(program: Program, triton: list[str]) -> Program:
    return replace(program, device="cuda:0")


def test_worker_processes_start_first_and_random_states_are_restored(
    on_gpu: Program, triton: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def functional(program: Program) -> fx.GraphModule:
        triton.append("work begins")
        torch.rand(4)
        return program.module

    monkeypatch.setattr(inductor, "_functional", functional)
    monkeypatch.setattr(inductor, "_compiled", lambda module, *args: module)
    before = torch.get_rng_state()
    assert fuse(on_gpu).level == "inductor"
    assert triton == ["worker processes start", "work begins"]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{}, {"combo_kernels": True}, {"combo_kernels": False}])
def test_kernels_are_combined_as_inductor_does_it_if_the_user_says_so(
    on_gpu: Program, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    """Else small ones alone are."""

    def compiled(module: fx.GraphModule, *args: object) -> fx.GraphModule:
        assert config.combo_kernels is options.get("combo_kernels", True)
        assert (ForeachKernelSchedulerNode.group_nodes_for_combo_kernels is groups) is (not options)
        return module

    monkeypatch.setattr(inductor, "_functional", lambda program: program.module)
    monkeypatch.setattr(inductor, "_compiled", compiled)
    assert fuse(on_gpu, options).level == "inductor"
    assert ForeachKernelSchedulerNode.group_nodes_for_combo_kernels is not groups


def refusal(program: Program) -> str:
    """Why a program is not fused, which must be known before any work is done."""

    def work(program: Program) -> fx.GraphModule:
        raise AssertionError("it began")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "_functional", work)
        with pytest.raises(FusionError) as refused:
            fuse(program)
    return str(refused.value)


def test_a_program_on_the_cpu_or_without_triton_is_not_fused(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(program) == (
        'TorchInductor fuses ops into kernels of a GPU, and this program runs on the CPU: use kernels="eager"; '
        "ops stay those of ATen"
    )
    on_gpu = replace(program, device="cuda:0")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "in Triton, which is not installed: install it, or use" in refusal(on_gpu)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))  # a module without a spec
    assert "Triton, which is not installed" in obstacle("cuda")


def test_this_version_of_pytorch_has_all_private_interfaces() -> None:
    assert list(inductor._missing()) == []


@pytest.mark.parametrize(
    "name",
    [
        "torch._inductor.fx_passes.joint_graph.joint_graph_passes",
        "torch._inductor.codegen.common.DeviceCodegen.fx_wrapper_codegen",
        "torch._inductor.codegen.wrapper_fxir",
        "torch._inductor.codegen.wrapper_fxir.FxConverter._lookup_args",
    ],
)
def test_a_missing_private_interface_is_named(on_gpu: Program, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name in NEEDED:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    else:
        monkeypatch.delattr(name)
    assert refusal(on_gpu) == (
        f'torch {torch.__version__} has no {name}, as 2.11 and 2.13 have for fusing: use kernels="eager"; '
        "ops stay those of ATen"
    )


def test_an_import_that_fails_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("a library of its is too old\nand more")

    monkeypatch.setattr(inductor, "_installed", lambda package: True)
    monkeypatch.setattr(inductor.importlib, "import_module", broken)
    assert re.search(r"has no torch\S+ that could be imported \(.*too old.*\).*kernels=\"eager\"", obstacle("cuda"))


@pytest.mark.parametrize("path", [module.__file__ for module in (inductor, kernel_graph, fingerprint, fusion)])
def test_all_private_imports_are_in_needed(path: str) -> None:
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


def test_an_error_of_inductor_is_reported_in_one_line(on_gpu: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> fx.GraphModule:
        raise RuntimeError("no kernel\nfor pages")

    before = on_gpu.module.code
    monkeypatch.setattr(inductor, "_compiled", fails)
    with pytest.raises(FusionError, match=r"^TorchInductor cannot fuse it: RuntimeError: no kernel$"):
        fuse(on_gpu)
    assert on_gpu.module.code == before


# Outputs


@pytest.mark.usefixtures("triton")
def test_a_program_whose_outputs_would_alias_or_look_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(*args: object) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output((graph.call_function(aten.clone.default, (graph.placeholder("a"),)),))
        return fx.GraphModule(nn.Module(), graph)

    monkeypatch.setattr(inductor, "_compiled", copies)
    assert fuse(program_of(lambda x: x + 1, torch.ones(3), device="cuda:0")).level == "inductor"
    for model, x, match in (
        (lambda x: x[1:], torch.ones(3), "outputs would share other memory"),
        (lambda x: x > 1, torch.ones(3), "outputs would have other types"),
        (lambda x: (x + 1).t(), torch.ones(3, 3), "types, shapes or strides"),
    ):
        with pytest.raises(FusionError, match=match):
            fuse(program_of(model, x, device="cuda:0"))
    # The stride of a dimension of size 1 does not matter.
    fuse(program_of(lambda x: (x + 1).as_strided((1, 3), (1, 1)), torch.ones(1, 3), device="cuda:0"))


class Convolutions(nn.Module):
    """Two convolutions, both of which are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return y, self.second(y)


def test_outputs_keep_their_strides_even_if_inductor_prefers_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    strides: list[list[int]] = []

    class Lowered(Exception):  # noqa: N818 - the next stage needs Triton
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
def test_outputs_are_the_same_tensor_exactly_where_the_model_returns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor makes a view for each output, except of a whole argument or for one that it has returned already.

    a ──┬── a ───────▶ first, a view         a ──┬── alias ─▶ first
        ├── a ───────▶ second, a itself          ├──────────▶ second
        ├── [:2] ────▶ third                     └── [:2] ──┬──────────▶ third and fourth
        ├── [:2] ────▶ fourth, the third                    └── alias ─▶ fifth
        └── [:2] ────▶ fifth, another view
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
    # Traced without Dynamo, whose graphs return each tensor once.
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
    assert inductor.restore_fused(program, fused.module).outputs == fused.outputs


# Options


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_autotun": True}, r"has no setting 'max_autotun' \(did you mean 'max_autotune'\?\)"),
        ({"triton.multi_kernel": 1}, "'triton.multi_kernel' is autostream's to choose: leave it out"),
        ({"freezing": "False"}, "'freezing' is a switch: use True or False, not 'False'"),
        ({"max_autotune": None}, "'max_autotune' is a switch: use True or False, not None"),
    ],
)
def test_unknown_and_reserved_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    check_settings({})
    check_settings({"max_autotune": True, "freezing": False, "triton.unique_kernel_names": True, "compile_threads": 4})
    with pytest.raises(OptionError, match=f"inductor_options: .*{message}"):
        check_settings(settings)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_fusing_cannot_be_required_of_a_model_on_the_cpu(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is on the CPU if all of its tensors are."""
    with FakeTensorMode():
        host, device = torch.ones(2), torch.ones(2, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(inductor, "_installed", lambda package: True)
    for tensors, refused in ([], not on_gpu), ([host], True), ([host, device], not on_gpu), ([device], not on_gpu):
        check_level("auto", tensors)
        check_level("eager", tensors)
        with pytest.raises(OptionError, match="runs on the CPU") if refused else nullcontext():
            check_level("inductor", tensors)


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
    """The names of the tensors that may become constants."""
    functional = inductor._functional(case.program)
    constants = inductor._freezable(case.program, functional, tensors or case.tensors)
    assert all(constants[at] is (tensors or case.tensors)[at] for at in constants)
    return [case.program.placeholders[at].target for at in constants]


class Written(nn.Module):
    """One parameter that is only read, one that is returned as a view, and a buffer that is mutated."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.returned = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.register_buffer("written", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.written.add_(x)
        return x * self.read + self.written + self.returned, self.returned[1:]


def test_weights_become_constants_unless_they_may_change_unseen(normed: Case) -> None:
    """Inputs, tensors that are mutated or returned, and inference tensors, which have no version counter, do not."""
    weights = [item.target for item in normed.program.placeholders if item.role is not Role.INPUT]
    assert "body.1.running_var" in weights
    assert freezable(normed) == weights
    assert freezable(case_of(Written(), torch.ones(4))) == ["read"]
    with torch.inference_mode():
        tensors = [tensor.clone() for tensor in normed.tensors]
    assert freezable(normed, *tensors[:2], *normed.tensors[2:]) == weights[2:]


@torch.no_grad()
def test_a_frozen_graph_reads_inputs_alone_and_the_original_holds_no_constants(normed: Case) -> None:
    functional = inductor._functional(normed.program)
    before = str(functional.graph)
    with torch.inference_mode():  # constants are ordinary tensors all the same
        module = inductor._frozen(functional, inductor._freezable(normed.program, functional, normed.tensors))
    *weights, x = normed.tensors
    expected = normed.program.module(*normed.tensors)
    actual = module(*map(torch.full_like, weights, [torch.nan] * len(weights)), x)
    torch.testing.assert_close(actual, expected)
    assert [result.stride() for result in actual] == [result.stride() for result in expected]
    names = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    assert not [name for name in names if "batch_norm" in name or "sqrt" in name or "permute" in name]
    assert not any(tensor.is_inference() for tensor in module.buffers())
    assert str(functional.graph) == before
    assert (len(list(functional.buffers())), len(list(module.buffers())) > 0) == (0, True)


@pytest.mark.usefixtures("triton")
def test_an_output_that_is_a_constant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may write to it."""

    def returns_a_constant(module: fx.GraphModule, *args: object) -> fx.GraphModule:
        module.register_buffer("constant", torch.ones(3))
        with module.graph.inserting_before(module.graph.output_node()):
            constant = module.graph.get_attr("constant")
            module.graph.output_node().args = ((module.graph.call_function(aten.view.default, (constant, [3])),),)
        return module

    monkeypatch.setattr(inductor, "_compiled", returns_a_constant)
    with pytest.raises(FusionError, match=r"frozen, an output would be a constant, .*: leave 'freezing' out"):
        fuse(program_of(lambda x: x + 1, torch.ones(3), device="cuda:0"))


@pytest.mark.parametrize(
    "message", ["TypedStorage is deprecated. It will be", "Attempted to insert a get_attr Node with no"]
)
def test_warnings_that_inductor_causes_are_ignored(
    message: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If warnings are errors, autotuning and freezing would fail."""

    @contextmanager
    def graphs(device: torch.device) -> Iterator[list[fx.GraphModule]]:
        yield [program.module]

    def compiles(*args: object, **kwargs: object) -> None:
        warnings.warn(f"{message} …", UserWarning, stacklevel=1)

    monkeypatch.setattr(kernel_graph, "capture_kernel_graphs", graphs)
    monkeypatch.setattr(compile_fx, "compile_fx_inner", compiles)
    assert inductor._compiled(inductor._functional(program), torch.device("cpu"), {}) is program.module
    with pytest.raises(UserWarning, match=message):
        compiles()
