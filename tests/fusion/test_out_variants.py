"""Convolutions that write into given memory: which ones do, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from autostream.analysis.dependencies import analyze
from autostream.fusion import out_variants
from autostream.fusion.kernel_values import evaluate
from autostream.fusion.out_variants import use_out_variants
from tests.kernel_graphs.recordings import program_of, read

aten = torch.ops.aten


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch that has cuDNN for every convolution."""
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_, **__: torch._C._ConvBackend.Cudnn)
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", lambda *_, **__: torch.contiguous_format)


def convolving(*args: Any, shape: tuple[int, ...] = (2, 4, 8, 8), weight: tuple[int, ...] = (6, 4, 3, 3)) -> Any:
    """A convolution with these arguments behind input and weight, then a relu; on fake tensors."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    conv = graph.call_function(aten.convolution.default, (x, w, *args))
    graph.output((graph.call_function(aten.relu.default, (conv,)),))
    module = fx.GraphModule(nn.Module(), graph)
    with FakeTensorMode() as mode:
        evaluate(module, [mode.from_tensor(torch.ones(size)) for size in (shape, weight)])
    return module


PLAIN = (None, [2, 1], [1, 0], [1, 1], False, [0, 0], 1)


def convolutions(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if "convolution" in str(node.target)]


@pytest.mark.usefixtures("cudnn")
def test_memory_is_taken_and_written() -> None:
    module = convolving(*PLAIN)
    (before,) = module.graph.find_nodes(op="call_function", target=aten.convolution.default)
    name, value = before.name, before.meta["val"]
    use_out_variants(module)
    module.graph.lint()
    assert convolutions(module) == ["aten.cudnn_convolution.out"]
    (memory,) = module.graph.find_nodes(op="call_function", target=aten.empty_strided.default)
    assert (memory.name, memory.meta["val"]) == (name, value)
    assert memory.args == ([2, 6, 4, 6], [144, 24, 6, 1])
    (call,) = memory.users.keys() - set(module.graph.find_nodes(op="call_function", target=aten.relu.default))
    x, w = module.graph.find_nodes(op="placeholder")
    assert call.args == (x, w, [1, 0], [2, 1], [1, 1], 1, False, False, torch.backends.cudnn.allow_tf32)
    assert call.kwargs == {"out": memory}
    assert call.meta["val"] is value


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("groups", [1, 2])
def test_the_same_is_computed(groups: int) -> None:
    """With a stand-in for cuDNN that takes the same arguments."""
    module = convolving(*PLAIN[:-1], groups, weight=(6, 4 // groups, 3, 3))
    x, w = torch.randn(2, 4, 8, 8), torch.randn(6, 4 // groups, 3, 3)
    (expected,) = module(x, w)
    use_out_variants(module)

    def stand_in(
        x: Tensor, w: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, *settings: bool, out: Tensor
    ) -> Tensor:
        return out.copy_(torch.conv2d(x, w, None, stride, padding, dilation, groups))

    for node in module.graph.find_nodes(op="call_function", target=aten.cudnn_convolution.out):
        node.target = stand_in
    module.recompile()
    assert torch.equal(module(x, w)[0], expected)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    "build",
    [
        lambda: convolving(None, [1], [0], [1], False, [0], 1, shape=(2, 4, 8), weight=(6, 4, 3)),
        lambda: convolving(None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1, weight=(4, 6, 3, 3)),
        lambda: convolving(*PLAIN, shape=(0, 4, 8, 8)),
    ],
    ids=["one dimension", "transposed", "empty"],
)
def test_others_stay(build: Callable[[], fx.GraphModule]) -> None:
    module = build()
    code = module.code
    use_out_variants(module)
    assert module.code == code


@pytest.mark.usefixtures("cudnn")
def test_one_with_a_bias_stays() -> None:
    module = convolving(*PLAIN)
    (conv,) = module.graph.find_nodes(op="call_function", target=aten.convolution.default)
    conv.args = (*conv.args[:2], conv.args[1], *conv.args[3:])
    use_out_variants(module)
    assert convolutions(module) == ["aten.convolution.default"]


def test_what_another_library_computes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_, **__: torch._C._ConvBackend.CudaDepthwise2d)
    module = convolving(*PLAIN)
    use_out_variants(module)
    assert convolutions(module) == ["aten.convolution.default"]


@pytest.mark.usefixtures("cudnn")
def test_a_result_in_another_format_than_cudnn_s_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", lambda *_, **__: torch.channels_last)
    module = convolving(*PLAIN)
    use_out_variants(module)
    assert convolutions(module) == ["aten.convolution.default"]


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("name", ["_select_conv_backend", "_conv_determine_backend_memory_format", "_ConvBackend"])
def test_where_pytorch_lacks_what_is_private_all_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = convolving(*PLAIN)
    monkeypatch.delattr(torch._C, name)
    use_out_variants(module)
    assert convolutions(module) == ["aten.convolution.default"]


@pytest.mark.usefixtures("cudnn")
def test_cudnn_is_asked_for_what_is_set_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_variants, "_cudnn_settings", lambda: (True, True, False))
    module = convolving(*PLAIN)
    use_out_variants(module)
    (call,) = module.graph.find_nodes(op="call_function", target=aten.cudnn_convolution.out)
    assert call.args[-3:] == (True, True, False)


@pytest.mark.usefixtures("cudnn")
def test_where_the_settings_contradict_each_other_all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_variants, "_cudnn_settings", lambda: None)
    module = convolving(*PLAIN)
    use_out_variants(module)
    assert convolutions(module) == ["aten.convolution.default"]


def test_deterministic_algorithms_are_asked_for_either_way() -> None:
    benchmark, deterministic, allow_tf32 = out_variants._cudnn_settings() or (None, None, None)
    assert (benchmark, deterministic) == (torch.backends.cudnn.benchmark, False)
    assert allow_tf32 == torch.backends.cudnn.allow_tf32
    with torch.backends.cudnn.flags(benchmark=True, deterministic=True):
        assert (out_variants._cudnn_settings() or ())[:2] == (True, True)


def test_all_convolutions_of_a_recorded_model_write_where_the_schedule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_, **__: torch._C._ConvBackend.Cudnn)
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", lambda *_, **__: torch.channels_last)
    program = program_of(read("inception"))
    before = analyze(program)
    use_out_variants(program.module)
    after = analyze(program)
    assert {str(op.target) for op in after.ops.values()} >= {"aten.cudnn_convolution.out"}
    inner = {name for name, storage in after.storages.items() if storage.role.value == "intermediate"}
    assert all(after.storages[name].placeable for name in inner)
    assert not all(before.storages[name].placeable for name in inner)
    assert [op.flops for op in after.ops.values()] == [op.flops for op in before.ops.values()]
    assert {n: s.bytes for n, s in after.storages.items()} == {n: s.bytes for n, s in before.storages.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("channels_last", [True, False])
def test_cudnn_computes_the_same_into_given_memory(dtype: torch.dtype, channels_last: bool) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 16, 28, 28, device="cuda", dtype=dtype).to(memory_format=layout)
    w = torch.randn(32, 16, 3, 3, device="cuda", dtype=dtype).to(memory_format=layout)
    graph = fx.Graph()
    given = graph.placeholder("x"), graph.placeholder("w")
    graph.output((graph.call_function(aten.convolution.default, (*given, *PLAIN)),))
    module = fx.GraphModule(nn.Module(), graph)
    with FakeTensorMode() as mode:
        evaluate(module, [mode.from_tensor(tensor) for tensor in (x, w)])
    (expected,) = module(x, w)
    use_out_variants(module)
    assert convolutions(module) == ["aten.cudnn_convolution.out"]
    (result,) = module(x, w)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()
