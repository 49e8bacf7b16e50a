"""Generation on a GPU: a decode step is a CUDA graph that reads and writes the cache where it lies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import autostream
from autostream.explaining import reports_of
from autostream.runtime import graphs_by_address

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("aten_ops", "fresh_dynamo")]

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}


@pytest.fixture
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    return model.cuda().eval()


def tokens(seed: int) -> Tensor:
    return torch.randint(3, 60, (1, 8), generator=torch.Generator().manual_seed(seed)).cuda()


def test_a_cache_that_stays_is_captured_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import StaticCache

    again: list[int] = []
    add = graphs_by_address.GraphsByAddress.add
    monkeypatch.setattr(graphs_by_address.GraphsByAddress, "add", lambda *task: (again.append(1), add(*task))[1])
    expected = copy.deepcopy(model)
    autostream.optimize_(model, tuning_seconds=1.0)
    cache: Any = StaticCache(config=model.config, max_cache_len=32)
    cache.early_initialization(1, 2, 16, model.dtype, model.device)
    for seed in range(3):
        found = model.generate(tokens(seed), past_key_values=cache, disable_compile=True, **GREEDY)
        cache.reset()
        assert torch.equal(found, expected.generate(tokens(seed), **GREEDY))
    assert [report.mode for report in reports_of(model)] == ["cuda graph", "cuda graph"]
    assert not again
    _, kwargs = model._compiled_call_impl.static_inputs(tokens(0)[:, :1], past_key_values=cache)
    assert kwargs["past_key_values"] is cache


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_for_each_call_needs_few_captures(mode: Any, model: Any) -> None:
    expected = copy.deepcopy(model)
    autostream.optimize_(model, tuning_seconds=1.0)
    options = {**GREEDY, "cache_implementation": "static", "disable_compile": True}
    for seed in range(4):
        with mode():
            found = model.generate(tokens(seed), **options)
        assert torch.equal(found, expected.generate(tokens(seed), **GREEDY))
    first, decode = sorted(reports_of(model), key=lambda report: report.signature, reverse=True)
    assert decode.mode == "cuda graph", first.refusals
