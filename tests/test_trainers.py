"""Trainers of others: transformers', Lightning's, and accelerate's loop train a model that was optimized in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autostream
from autostream.cli.zoo import import_without_compiled_ops
from autostream.explaining import reports_of

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]

STREAMS: dict[str, Any] = {"policy": "critical_path", "streams": 2}
"""On a CPU, gradients are scheduled if a policy is chosen."""


@pytest.fixture(autouse=True)
def imports() -> None:
    import_without_compiled_ops("torchvision")


def unchanged(model: Any) -> Any:
    return model


def in_place(model: Any) -> Any:
    return autostream.optimize_(model, **STREAMS)


def beside(model: Any) -> Any:
    return autostream.optimize(model, **STREAMS)


def test_the_trainer_of_transformers_trains_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, logging

    logging.set_verbosity_error()
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    config = BertConfig(**sizes, intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ids = torch.arange(64).reshape(8, 8) % 32
    data: Any = [{"input_ids": row, "unused": 1, "labels": torch.tensor(at % 2)} for at, row in enumerate(ids)]
    losses, saved = [], []
    for wrap in (unchanged, in_place, beside):
        torch.manual_seed(0)
        model = wrap(BertForSequenceClassification(config))
        options: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 3, "use_cpu": True, "seed": 0}
        quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
        arguments = TrainingArguments(output_dir=str(tmp_path), **options, **quiet)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
        losses += [[trainer.train().training_loss, trainer.evaluate()["eval_loss"]]]
        if wrap is not unchanged:
            modes = [report.mode for report in reports_of(model)]
            assert "forward and backward" in modes
            assert "plain" not in modes
        place = tmp_path / wrap.__name__
        trainer.save_model(str(place))
        saved.append({path.name for path in place.iterdir()})
        if wrap is in_place:
            again = BertForSequenceClassification.from_pretrained(place)
            torch.testing.assert_close(again.state_dict(), model.state_dict())
    torch.testing.assert_close(losses[1:], losses[:1] * 2)
    assert saved[1] == saved[0]
    assert saved[0] - saved[2] == {"config.json"}, "of what optimize returned, the trainer saves the weights alone"


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_prepares_it_as_it_is(precision: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    losses = []
    for wrap in (unchanged, in_place):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        prepared, sgd = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert prepared is model
        for _ in range(3):
            loss = prepared(torch.ones(4, 4)).square().mean()
            accelerator.backward(loss)
            sgd.step()
            sgd.zero_grad()
            losses.append(loss.detach())
        assert accelerator.unwrap_model(prepared) is model
    torch.testing.assert_close(losses[:3], losses[3:])
    assert [report.mode for report in reports_of(model)] == ["forward and backward"]
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("what", ["its calls", "its training step"])
@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_a_lightning_module_trains(automatic: bool, what: str) -> None:
    """Adam counts its steps, and makes its state in the first: a run too many would be seen.

    Each of the batches has another number, which no step reads.
    """
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    base: Any = lightning.LightningModule

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            self.automatic_optimization = automatic
            self.losses: list[Tensor] = []

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            x, y = batch
            loss = F.mse_loss(self(x), y)
            if not automatic:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def on_train_batch_end(self, outputs: dict[str, Tensor], batch: Any, index: int) -> None:
            self.losses.append(outputs["loss"].detach().clone())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    def step(model: Any) -> Any:
        model.training_step = autostream.optimize(model.training_step, **STREAMS)
        return model

    losses, states = [], []
    wraps: list[Callable[[Any], Any]] = [unchanged, in_place if what == "its calls" else step]
    for wrap in wraps:
        torch.manual_seed(0)
        model = wrap(Module())
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **off)
        trainer.fit(model, DataLoader(TensorDataset(torch.ones(12, 4), torch.zeros(12, 1)), 2))
        losses.append(model.losses)
        states.append((model.state_dict(), trainer.optimizers[0].state_dict()["state"]))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*states)
    assert losses[0][0] > losses[0][-1]
    reports = reports_of(model if what == "its calls" else model.training_step)
    modes = {report.mode for report in reports}
    assert modes & {"forward and backward", "graph breaks"}
    assert "plain" not in modes or (what == "its training step" and not automatic)
