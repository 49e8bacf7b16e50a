"""The benchmarks' workloads: complete, alike each time, and such that a wrong result shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autostream.frontend.tree import flatten
from benchmarks.harness.inference import Subject
from benchmarks.harness.training import TrainingSubject
from benchmarks.zoo import (
    INFERENCE,
    OPTIMIZERS,
    PARALLEL,
    SMALLEST,
    TRAINING,
    TrainingWorkload,
    Workload,
    prepare,
    prepare_training,
)

pytestmark = pytest.mark.usefixtures("one_thread_for_each_op")

CPU = torch.device("cpu")
HEAVY = ("inception_v4", "nasnetalarge", "pnasnet5large", "mask_rcnn_backbone", "mm_large")


class Reader(nn.Module):
    """Embeddings of words, normalized in batches, plus a dense input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, words: Tensor, dense: Tensor) -> Tensor:
        return self.dropout(self.norm(self.embedding(words)) + dense)


def reader_inputs(batch: int) -> tuple[Tensor, ...]:
    return torch.randint(10, (batch,)), torch.randn(batch, 3)


def reader_data(batch: int) -> tuple[Tensor, ...]:
    return *reader_inputs(batch), torch.randn(batch, 3)


def squares(model: nn.Module, words: Tensor, dense: Tensor, target: Tensor) -> Tensor:
    return (model(words, dense) - target).square().mean()


READER = Workload("reader", Reader, reader_inputs)
TRAIN_READER = TrainingWorkload("train_reader", Reader, reader_data, squares)


class Function(nn.Module):
    """A function with a parameter."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.scale, x)


def two_numbers(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 2),)


def all_tensors(subject: Subject | TrainingSubject) -> list[Tensor]:
    inputs = (*subject.args, *subject.others) if isinstance(subject, Subject) else subject.data
    return [*subject.model.state_dict().values(), *inputs]


def test_all_workloads_are_there() -> None:
    assert list(INFERENCE) == [
        "googlenet", "inception_v3", "inception_v4", "nasnetalarge", "pnasnet5large", "randwire", "squeezenet1_1",
        "mobilenet_v2", "efficientnet_b0", "resnet50", "densenet121", "resnet50_fpn", "mask_rcnn_backbone", "vit_b_16",
        "bert_base", "t5_small", "clip", "dlrm", "deepfm", "moe8", "towers8", "ensemble4", "bilstm", "mm_small",
        "mm_medium", "mm_large",
    ]  # fmt: skip
    assert [name.removeprefix("train_") for name in TRAINING] == [
        "mlp12", "encoder6", "bert_base", "resnet50", "googlenet", "dlrm",
    ]  # fmt: skip
    assert list(OPTIMIZERS) == ["sgd", "adamw"]


def test_eight_workloads_are_measured_at_three_batch_sizes() -> None:
    batches = [workload.batches for workload in INFERENCE.values()]
    assert batches.count((1, 8, 32)) == 8
    assert batches.count((1,)) == len(batches) - 8


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in HEAVY else ()) for name in INFERENCE]
)
def test_an_inference_workload_passes_its_own_checks(name: str) -> None:
    subject = prepare(INFERENCE[name], 1, CPU, torch.float32)
    assert not subject.model.training
    assert {tensor.device for tensor in all_tensors(subject)} == {CPU}


def test_one_layer_passes_the_checks_of_a_workload() -> None:
    assert prepare(SMALLEST["linear"], 1, CPU, torch.float32).args[0].shape == (1, 1024)


def test_parallel_products_are_the_products() -> None:
    parallel, product = (
        prepare(each, 1, CPU, torch.float32) for each in (PARALLEL["parallel_small"], INFERENCE["mm_small"])
    )
    assert [name.rpartition("_")[2] for name in PARALLEL] == ["small", "medium", "large"]
    torch.testing.assert_close(parallel.model(*parallel.args), product.model(*product.args), rtol=0, atol=0)


@pytest.mark.parametrize("name", [*HEAVY, "bert_base", "t5_small", "clip", "dlrm", "resnet50_fpn"])
def test_a_workload_takes_any_batch_size(name: str) -> None:
    """On a device without numbers, where also the heavy ones are light; but BERT looks at its mask's."""
    with torch.device("cpu" if name == "bert_base" else "meta"):
        model = INFERENCE[name].model().eval()
        outputs = [flatten(model(*INFERENCE[name].inputs(batch)))[0] for batch in (1, 2)]
    for one, two in zip(*outputs, strict=True):
        assert one.dim() == two.dim()
        assert one.numel() < two.numel()


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_workload_passes_its_own_checks_and_its_loss_is_no_matter_of_chance(name: str) -> None:
    subject = prepare_training(TRAINING[name], TRAINING[name].batches[0], "sgd", CPU, torch.float32)
    assert subject.model.training
    losses = [subject.loss(subject.model, *subject.data) for _ in range(2)]
    assert losses[0].dtype == torch.float32
    assert torch.equal(*losses)
    assert all(parameter.grad is None for parameter in subject.model.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_lowers_the_loss(optimizer: str) -> None:
    subject = prepare_training(TRAINING["train_mlp12"], 64, optimizer, CPU, torch.float32)
    losses = []
    for _ in range(3):
        loss = subject.loss(subject.model, *subject.data)
        subject.optimizer.zero_grad()
        loss.backward()
        subject.optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < losses[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: prepare(READER, 5, CPU, torch.float32),
        lambda: prepare_training(TRAIN_READER, 4, "sgd", CPU, torch.float32),
    ],
)
def test_weights_and_inputs_are_the_same_each_time_and_the_random_state_stays(
    make: Callable[[], Subject | TrainingSubject],
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(map(torch.equal, all_tensors(first), all_tensors(make())))


def test_neither_weights_nor_statistics_depend_on_the_batch_size() -> None:
    one, five = (prepare(READER, batch, CPU, torch.float32) for batch in (1, 5))
    assert [len(arg) for arg in (*five.args, *five.others)] == [5] * 4
    assert all(map(torch.equal, one.model.state_dict().values(), five.model.state_dict().values()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_floating_point_is_cast_and_integers_are_not(dtype: torch.dtype) -> None:
    subject = prepare(READER, 2, CPU, dtype)
    assert [arg.dtype for arg in (*subject.args, *subject.others)] == [torch.int64, dtype] * 2
    assert {parameter.dtype for parameter in subject.model.parameters()} == {dtype}
    training = prepare_training(TRAIN_READER, 4, "sgd", CPU, dtype)
    assert [x.dtype for x in training.data] == [torch.int64, dtype, dtype]
    assert {parameter.dtype for parameter in training.model.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda scale, x: x / 0, "output 0 has values that are not finite"),
        (lambda scale, x: scale.expand_as(x), "output 0 hardly depends on the inputs"),
        (lambda scale, x: 1e3 + x, "output 0 hardly depends on the inputs"),
        (lambda scale, x: (x, torch.zeros_like(x)), "output 1 hardly depends on the inputs"),
    ],
)
def test_outputs_in_which_errors_would_not_show_are_refused(
    function: Callable[[Tensor, Tensor], Tensor], message: str
) -> None:
    workload = Workload("broken", lambda: Function(function), two_numbers)
    with pytest.raises(ValueError, match=f"^broken in torch.float64: {message}"):
        prepare(workload, 1, CPU, torch.float64)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda scale, x: scale * x / 0, "the loss has values that are not finite"),
        (lambda scale, x: (scale - 1).sqrt(), "the gradient of scale has values that are not finite"),
        (lambda scale, x: x.clone().requires_grad_(), "the loss does not depend on scale"),
    ],
)
def test_losses_that_teach_nothing_are_refused(function: Callable[[Tensor, Tensor], Tensor], message: str) -> None:
    workload = TrainingWorkload(
        "broken", lambda: Function(function), two_numbers, lambda model, x: model(x).square().sum() + model(x).sum()
    )
    with pytest.raises(ValueError, match=f"^broken in torch.float32: {message}"):
        prepare_training(workload, 4, "sgd", CPU, torch.float32)
