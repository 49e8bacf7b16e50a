"""Tokens a second of ``generate``: what is run, and what is said of it. Only a GPU is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autostream.cli.zoo import import_without_compiled_ops
from benchmarks import generation
from benchmarks.generation import BASELINE, OURS, ROWS, main, measured, table

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*past_key_values. is deprecated:FutureWarning"),  # from transformers 5.24
]


def test_all_modes_generate_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU transformers compiles nothing."""
    import_without_compiled_ops("torchvision")
    monkeypatch.setattr(generation, "ROUNDS", 2)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "max_position_embeddings": 16}
    sizes |= {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
    row = measured("Llama", sizes, torch.device("cpu"), tokens=4)
    assert set(row["modes"]) == {"eager", OURS, BASELINE}
    for mode in row["modes"].values():
        assert mode["tokens_per_s"] > 0
    assert row["modes"][BASELINE]["differing"] == 0
    assert len(row["schedules"]) == 1


def test_the_table_has_the_ratio_to_what_transformers_compiles() -> None:
    rates = {mode: {"tokens_per_s": rate, "differing": 0} for mode, rate in [("eager", 10.0), (BASELINE, 20.0)]}
    row: dict[str, Any] = {"model": "gpt2", "layers": 12, "modes": rates | {OURS: {"tokens_per_s": 25.0}}}
    assert "1.25" in table([row])
    assert "no time was left" in table([{"model": "gpt2", "layers": 12, "failed": "no time was left"}])


def test_unknown_models_and_missing_gpus_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, why in (["gpt5"], f"gpt5: use {', '.join(ROWS)}"), ([], "no CUDA device"):
        with pytest.raises(SystemExit):
            main(arguments)
        assert why in capsys.readouterr().err
