"""Real architectures with random weights: equal to eager over several streams, in the worst orders of ops."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.cli import zoo
from autostream.ir import Candidate
from autostream.runtime.emulator import run_interleaved
from autostream.runtime.lower import lower
from autostream.tuning import select
from tests.semantics import same, tensors_in

SEEDS = range(3)
"""Each lets another one of up to three streams run ahead as far as its waits allow."""

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


TOWER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def image(size: int) -> Tensor:
    return torch.randn(1, 3, size, size)


def vision(name: str) -> Callable[[], Made]:
    return lambda: (zoo.build(name)[0], (image(64),), {})


def vision_transformer() -> Made:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**TOWER, image_size=32)), (image(32),), {}


def bert() -> Made:
    from transformers import BertConfig, BertModel

    tokens = torch.randint(99, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    return BertModel(BertConfig(**TOWER, vocab_size=99)), (tokens,), {"attention_mask": mask}


def t5() -> Made:
    from transformers import T5Config, T5Model

    tokens = torch.randint(99, (2, 7))
    model = T5Model(T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2, vocab_size=99))
    return model, (), {"input_ids": tokens, "decoder_input_ids": tokens[:, :3], "use_cache": False}


def clip() -> Made:
    """Two towers that are independent until the end."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    text = CLIPTextConfig(**TOWER, vocab_size=99, max_position_embeddings=16, eos_token_id=98)
    config = CLIPConfig(
        text_config=text.to_dict(),
        vision_config=CLIPVisionConfig(**TOWER, image_size=32, patch_size=8).to_dict(),
        projection_dim=16,
    )
    tokens = torch.randint(98, (2, 7))
    tokens[:, -1] = 98
    return CLIPModel(config), (), {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 32, 32)}


MODELS: Mapping[str, Callable[[], Made]] = {
    "googlenet": vision("googlenet"),
    "vit": vision_transformer,
    "bert": bert,
    "t5": t5,
    "clip": clip,
    "lstm": lambda: (nn.LSTM(8, 8, 2, bidirectional=True, batch_first=True), (torch.randn(2, 5, 8),), {}),
}

WIDE = {"googlenet", "bert", "t5", "clip"}
"""Those that are spread over several streams."""


@pytest.fixture(scope="module", autouse=True)
def _torchvision() -> None:
    """Import it as the zoo does, for transformers imports it too, and fails where its compiled ops cannot load."""
    zoo.build("squeezenet1_1")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Program, graph, candidate and arguments of all that is built; the last candidate is the fastest."""
    calls: list[tuple[Any, ...]] = []
    real = select.build

    def spy(program: Any, graph: Any, candidate: Candidate, tensors: Sequence[Tensor], *rest: Any) -> Any:
        calls.append((program, graph, candidate, tensors))
        return real(program, graph, candidate, tensors, *rest)

    monkeypatch.setattr(select, "build", spy)
    monkeypatch.setattr(select, "interleaved", lambda timers, *_: [1.0, 0.5][: len(timers)])
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_the_same_in_every_order(name: str, built: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    model.eval()
    fast = autostream.optimize(model, streams=3, memory_budget=math.inf, strict=True)
    with torch.inference_mode():
        expected = model(*args, **kwargs)
        assert all(tensor.isfinite().all() for tensor in tensors_in(expected) if tensor.is_floating_point())
        for _ in range(2):
            same(fast(*args, **kwargs), expected)
    (report,) = fast.reports
    assert report.mode in ("one stream", "threads")
    assert report.mode == "threads" or name not in WIDE
    with torch.no_grad():
        for program, graph, candidate, tensors in built:
            reference = program.module(*copy.deepcopy(tensors))
            lowered = lower(program, graph, candidate.schedule)
            for seed in SEEDS if candidate.schedule.streams > 1 else ():
                same(list(run_interleaved(lowered, copy.deepcopy(tensors), seed)), [r.clone() for r in reference])


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "mobilenet_v2"])
def test_in_train_mode_statistics_and_random_numbers_are_the_same(name: str, built: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(0)
    model, args, _ = vision(name)()
    model.train()
    twin = copy.deepcopy(model)
    fast = autostream.optimize(model, torch.cat(args * 2), streams=2, memory_budget=math.inf, strict=True)
    with torch.no_grad():
        for seed in range(2):
            torch.manual_seed(seed)
            ours, state = fast(torch.cat(args * 2)), torch.get_rng_state()
            torch.manual_seed(seed)
            same(ours, twin(torch.cat(args * 2)))
            assert torch.equal(state, torch.get_rng_state())
            same(dict(model.state_dict()), dict(twin.state_dict()))


@torch.inference_mode()
def test_fused_encoder_layers_agree_closely(built: list[tuple[Any, ...]]) -> None:
    """Eagerly, ``nn.TransformerEncoder`` calls a fused op, which rounds differently; it is not traced."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(
        autostream.optimize(model, x, streams=2, memory_budget=math.inf, strict=True)(x), model(x)
    )
