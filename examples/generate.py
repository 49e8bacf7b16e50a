"""Generation with transformers: each token is one graph, which writes a static cache where it lies.

python examples/generate.py --device cpu
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import autostream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 32


def rate(model: Any, prompt: Tensor, **options: Any) -> tuple[Tensor, float]:
    """The tokens of the second generation, as the first one compiles, and how many there are in a second."""
    cache: Any = StaticCache(config=model.config, max_cache_len=64)  # the same for all: nothing is captured anew
    heads = model.config.num_key_value_heads
    cache.early_initialization(len(prompt), heads, model.config.head_dim, model.dtype, model.device)
    tokens, seconds = prompt, 0.0
    for _ in range(2):
        cache.reset()
        start = time.perf_counter()
        tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=TOKENS, do_sample=False, **options)
        tokens.tolist()  # waits for the device
        seconds = time.perf_counter() - start
    return tokens, TOKENS / seconds


def main() -> None:
    """Generate with the model as it is, scheduled, and on a GPU as transformers compiles it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default=DEVICE)
    device = parser.parse_args().device
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).to(device).eval()
    prompt = torch.randint(256, (1, 8), device=device)
    expected, eager = rate(model, prompt, disable_compile=True)
    print(f"eager        {eager:8.0f} tokens a second")
    autostream.optimize_(model, tuning_seconds=1.0)
    tokens, ours = rate(model, prompt, disable_compile=True)  # or transformers would compile the calls itself
    print(f"autostream   {ours:8.0f} tokens a second")
    print(autostream.explain(model, ops=5))
    assert torch.equal(tokens, expected)
    autostream.restore(model)
    if device != "cpu":
        print(f"transformers {rate(model, prompt)[1]:8.0f} tokens a second")


if __name__ == "__main__":
    main()
