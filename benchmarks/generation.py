"""Tokens a second of ``generate`` with a static cache, batch 1, the host's share included.

    python -m benchmarks.generation gpt2 llama_1b --seconds 280 --out benchmarks/results/latest

Each model, of the shape that its name says, with random weights and as many layers as the table says, runs in a process
of its own. A static cache of :data:`CACHE` tokens is filled but for the last :data:`TOKENS`, which ``generate`` of
transformers makes, greedily. The modes take turns:

eager            the model as it is
autostream       ``autostream.optimize_(model)``, with ``disable_compile=True``
reduce_overhead  what transformers does with a static cache: ``torch.compile(mode="reduce-overhead")``

Tokens that differ from eager's are counted: equal scores of random weights may be told apart by rounding.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import autostream
from autostream.cli.arguments import positive
from autostream.cli.zoo import import_without_compiled_ops
from autostream.errors import first_line
from autostream.explaining import reports_of
from autostream.reporting.report import Report
from autostream.runtime.clock import order
from benchmarks.stamp import save, saving_parser, stamp

CACHE, TOKENS, ROUNDS = 512, 64, 9
_LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": CACHE}

ROWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("GPT2", {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": CACHE}),
    "llama_1b": (
        "Llama",
        {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256, "num_hidden_layers": 16},
    ),
    "mixtral_small": (
        "Mixtral",
        {**_LLAMA, "hidden_size": 1024, "intermediate_size": 3584, "vocab_size": 32000, "num_hidden_layers": 4}
        | {"num_attention_heads": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "llama_8b": (
        "Llama",
        {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 4},
    ),
}
"""For each model, its class in transformers and its sizes."""

OURS, BASELINE = "autostream", "reduce_overhead"


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = saving_parser("generation", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {' '.join(ROWS)}")
    parser.add_argument("--seconds", type=positive, default=280.0, help="for all; what is not measured then is named")
    options = parser.parse_args(argv)
    if unknown := set(options.models) - set(ROWS):
        parser.error(f"{min(unknown)}: use {', '.join(ROWS)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here: transformers compiles nothing on a CPU")
    end, rows = time.time() + options.seconds, list[dict[str, Any]]()
    result = {"schema": 1, "stamp": stamp(), "cache": CACHE, "tokens": TOKENS, "dtype": "bfloat16", "rows": rows}
    for name in options.models or ROWS:
        rows.append(_in_a_process(name, end - time.time()))
        save("generation", result, table(rows), options.out)  # after each row, in case the process is killed
    return 0


def _in_a_process(name: str, seconds: float) -> dict[str, Any]:
    row, start = {"model": name, "layers": _layers(ROWS[name][1])}, time.time()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        program = f"from benchmarks.generation import write; write({name!r}, {str(file)!r})"
        try:
            code = subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=max(seconds, 0.1)).returncode
            row |= {"failed": f"its process ended with {code}"} if code else json.loads(file.read_text())
        except subprocess.TimeoutExpired:
            row["failed"] = "no time was left"
    return row | {"seconds": round(time.time() - start, 1)}


def write(name: str, file: str) -> None:
    """Measure a model in this process, and write the row as JSON."""
    import_without_compiled_ops("torchvision")
    Path(file).write_text(json.dumps(measured(*ROWS[name], torch.device("cuda"))))


def measured(kind: str, sizes: Mapping[str, Any], device: torch.device, tokens: int = TOKENS) -> dict[str, Any]:
    """Tokens a second by mode, and what else is known of a model.

    Args:
        kind: of the model, as in the names of transformers' classes.
        sizes: of its configuration.
        device: on which to run.
        tokens: to generate in each round.
    """
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    with device:
        model = getattr(transformers, head)(config).to(torch.bfloat16).eval()
    prompt = torch.randint(config.vocab_size, (1, config.max_position_embeddings - tokens), device=device)
    ours, compiled = copy.copy(model), copy.copy(model)  # which share its weights
    autostream.optimize_(ours)
    runs: dict[str, Callable[[], Tensor]] = {
        "eager": generation(model, model, prompt, tokens, disable_compile=True),
        OURS: generation(ours, model, prompt, tokens, disable_compile=True),
        BASELINE: generation(compiled, model, prompt, tokens),
    }
    expected, modes, rates = runs["eager"](), dict[str, dict[str, Any]](), dict[str, list[float]]()
    for mode, run in runs.items():
        try:
            start = time.perf_counter()
            run()
            modes[mode] = {"first_s": round(time.perf_counter() - start, 1)}
            modes[mode]["differing"] = int((run() != expected).sum())
        except Exception as failure:
            modes[mode] = {"failed": first_line(failure)}
    for turn in range(ROUNDS):
        for mode in order([mode for mode in runs if "failed" not in modes[mode]], turn):
            start = time.perf_counter()
            runs[mode]().tolist()  # waits for the device
            rates.setdefault(mode, []).append(tokens / (time.perf_counter() - start))
    for mode, all_rates in rates.items():
        low, middle, high = quantiles(all_rates, n=4)
        modes[mode] |= {"tokens_per_s": round(middle, 1), "q1": round(low, 1), "q3": round(high, 1)}
    return {"device": _name(device), "modes": modes, "schedules": [*map(_schedule, reports_of(ours))]}


def generation(model: Any, plain: Any, prompt: Tensor, tokens: int, **options: Any) -> Callable[[], Tensor]:
    """Generates so many tokens after a prompt that is in the cache already.

    Args:
        model: to generate with.
        plain: the same as it is, which fills the cache.
        prompt: tokens.
        tokens: how many.
        **options: of ``generate``.
    """
    from transformers import StaticCache

    known = prompt.shape[1] - 1  # the last one has to be computed with
    cache: Any = StaticCache(config=model.config, max_cache_len=known + 1 + tokens)
    with torch.no_grad():
        plain(prompt[:, :known], past_key_values=cache)

    def run() -> Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(known)
        found: Tensor = model.generate(prompt, past_key_values=cache, max_new_tokens=tokens, do_sample=False, **options)
        return found[:, prompt.shape[1] :]

    return run


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens a second by model and mode, and autostream's as a ratio to the baseline's."""
    lines = []
    for row in rows:
        modes = row.get("modes", {})
        rate = {mode: modes.get(mode, {}).get("tokens_per_s") for mode in ("eager", BASELINE, OURS)}
        ratio = rate[OURS] / rate[BASELINE] if rate[OURS] and rate[BASELINE] else None
        differing = "/".join(str(modes.get(mode, {}).get("differing", "–")) for mode in (BASELINE, OURS))
        lines.append([row["model"], row["layers"], *rate.values(), ratio, differing, row.get("failed", "")])
    headers = ["model", "layers", "eager", BASELINE, OURS, "ratio", "differing tokens", "failed"]
    return tabulate(lines, headers, tablefmt="github", floatfmt=".2f")


def _schedule(report: Report) -> dict[str, Any]:
    chosen = report.chosen
    return {
        "signature": report.signature,
        "mode": report.mode,
        "level": report.level,
        "streams": chosen.schedule.streams if chosen else None,
        "measured_us": chosen.measured_us if chosen else None,
        "refusals": [refusal.reason for refusal in report.refusals],
    }


def _layers(sizes: Mapping[str, Any]) -> int:
    return int(sizes.get("n_layer") or sizes["num_hidden_layers"])


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


if __name__ == "__main__":
    raise SystemExit(main())
