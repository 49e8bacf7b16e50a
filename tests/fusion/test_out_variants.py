"""Convolutions that are replaced by variants with ``out=``: which ones are, and that nothing else changes."""

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
    """A PyTorch in which cuDNN computes every convolution."""
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_, **__: torch._C._ConvBackend.Cudnn)
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", lambda *_, **__: torch.contiguous_format)


PLAIN = (None, [2, 1], [1, 0], [1, 1], False, [0, 0], 1)


def convolving(
    *args: Any, shape: tuple[int, ...] = (2, 4, 8, 8), weight: tuple[int, ...] = (6, 4, 3, 3)
) -> fx.GraphModule:
    """A convolution with these arguments behind input and weight, then a relu, with fake values."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    conv = graph.call_function(aten.convolution.default, (x, w, *(args or PLAIN)))
    graph.output((graph.call_function(aten.relu.default, (conv,)),))
    module = fx.GraphModule(nn.Module(), graph)
    with FakeTensorMode() as mode:
        evaluate(module, [mode.from_tensor(torch.ones(size)) for size in (shape, weight)])
    return module


def with_bias() -> fx.GraphModule:
    module = convolving()
    (conv,) = module.graph.find_nodes(op="call_function", target=aten.convolution.default)
    conv.args = (*conv.args[:2], conv.args[1], *conv.args[3:])
    module.recompile()
    return module


def stand_in(
    x: Tensor, w: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, *settings: bool, out: Tensor
) -> Tensor:
    """Computes what ``cudnn_convolution.out`` does, on the CPU."""
    return out.copy_(torch.conv2d(x, w, None, stride, padding, dilation, groups))


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_becomes_an_allocation_and_a_call_that_computes_the_same(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_variants, "_cudnn_settings", lambda: (True, False, True))
    module = convolving(*PLAIN[:-1], groups, weight=(6, 4 // groups, 3, 3))
    x, w = torch.randn(2, 4, 8, 8), torch.randn(6, 4 // groups, 3, 3)
    (expected,) = module(x, w)
    use_out_variants(module)
    module.graph.lint()
    (memory,) = module.graph.find_nodes(op="call_function", target=aten.empty_strided.default)
    (call,) = module.graph.find_nodes(op="call_function", target=aten.cudnn_convolution.out)
    assert not module.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert memory.name == "convolution_default"
    assert memory.meta["val"] is call.meta["val"]
    assert call.args[6:] == (True, False, True)
    call.target = stand_in
    module.recompile()
    assert torch.equal(module(x, w)[0], expected)


def select(backend: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(torch._C, "_select_conv_backend", lambda *_, **__: backend)


def other_format(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch._C, "_conv_determine_backend_memory_format", lambda *_, **__: torch.channels_last)


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.delattr(torch._C, name)


def contradictory(patch: pytest.MonkeyPatch) -> None:
    """Precisions that were set by both the old and the new interface."""
    patch.setattr(out_variants, "_cudnn_settings", lambda: None)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("build", "change"),
    [
        (lambda: convolving(None, [1], [0], [1], False, [0], 1, shape=(2, 4, 8), weight=(6, 4, 3)), None),
        (lambda: convolving(None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1, weight=(4, 6, 3, 3)), None),
        (lambda: convolving(shape=(0, 4, 8, 8)), None),
        (with_bias, None),
        (convolving, select(torch._C._ConvBackend.CudaDepthwise2d)),
        (convolving, other_format),
        (convolving, without("_select_conv_backend")),
        (convolving, without("_conv_determine_backend_memory_format")),
        (convolving, without("_ConvBackend")),
        (convolving, contradictory),
    ],
)
def test_other_convolutions_stay(
    build: Callable[[], fx.GraphModule], change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build()
    code = module.code
    if change is not None:
        change(monkeypatch)
    use_out_variants(module)
    assert module.code == code


def test_the_settings_of_cudnn_are_those_of_the_process() -> None:
    benchmark, deterministic, allow_tf32 = out_variants._cudnn_settings() or (None, None, None)
    assert (benchmark, deterministic) == (torch.backends.cudnn.benchmark, False)
    assert allow_tf32 == torch.backends.cudnn.allow_tf32
    with torch.backends.cudnn.flags(benchmark=True, deterministic=True):
        assert (out_variants._cudnn_settings() or ())[:2] == (True, True)


def test_a_schedule_can_place_all_results_of_a_convolutional_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_, **__: torch._C._ConvBackend.Cudnn)
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", lambda *_, **__: torch.channels_last)
    program = program_of(read("inception"))
    before = analyze(program)
    use_out_variants(program.module)
    after = analyze(program)
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
    assert module.graph.find_nodes(op="call_function", target=aten.cudnn_convolution.out)
    (result,) = module(x, w)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()
