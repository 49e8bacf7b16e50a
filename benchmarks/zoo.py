"""Workloads of the benchmarks: models with random weights and inputs, equal in every process.

Example:
    >>> subject = prepare(INFERENCE["squeezenet1_1"], 1, torch.device("cpu"), torch.float32)
    >>> tuple(subject.model(*subject.args).shape)
    (1, 1000)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from autostream.cli import zoo
from autostream.frontend.tree import flatten
from benchmarks import nets
from benchmarks.harness.inference import Subject
from benchmarks.harness.training import TrainingSubject

SEED = zoo.SEED + 1
"""Not the seed of ``zoo.build``, else weights and inputs would be the same random numbers."""

ALL_BATCHES = (1, 8, 32)
CALIBRATION_BATCH = 4
WORDS = 30_522
"""BERT's vocabulary; those of T5 and CLIP are larger."""
DENSE, TABLES, ROWS, BAG = 13, 26, 10_000, 4
"""Numbers of Criteo's dense and categorical features, rows of each table, and indices in a bag."""

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """An inference workload.

    Attributes:
        name: one word.
        model: makes the model, in float32 on the CPU.
        inputs: makes random inputs for a batch size; floating-point ones are cast to the measured dtype.
        batches: batch sizes of the full suite.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensors]
    batches: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class TrainingWorkload:
    """A training workload.

    Attributes:
        name: one word.
        model: makes the model, in float32 on the CPU.
        data: makes random inputs and targets for a batch size.
        loss: ``loss(model, *data)``, a float32 scalar.
        batches: batch sizes of the full suite.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Tensors]
    loss: Callable[..., Tensor]
    batches: tuple[int, ...] = (4,)


def prepare(workload: Workload, batch: int, device: torch.device, dtype: torch.dtype) -> Subject:
    """Make a workload's model and inputs: equal ones each time, without a change of the global random state.

    Raises:
        ValueError: an output has values that are not finite, or hardly depends on the inputs.
    """
    with seeded():
        model = workload.model().eval()
        samples, args, others = map(workload.inputs, (CALIBRATION_BATCH, batch, batch))
    model = zoo.calibrated(model.to(device), moved(samples, device, torch.float32)).to(dtype)
    args, others = moved(args, device, dtype), moved(others, device, dtype)
    with torch.no_grad():
        _check_outputs(f"{workload.name} in {dtype}", model(*args), model(*others))
    return Subject(model, args, others)


def prepare_training(
    workload: TrainingWorkload, batch: int, optimizer: str, device: torch.device, dtype: torch.dtype
) -> TrainingSubject:
    """Make a model to train, as :func:`prepare`; ``optimizer`` is a key of :data:`OPTIMIZERS`.

    Dropout is disabled, so that losses can be compared.

    Raises:
        ValueError: the loss or a gradient has values that are not finite, or a parameter has no influence on the loss.
    """
    with seeded():
        model = workload.model().train()
        data = moved(workload.data(batch), device, dtype)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.to(device, dtype)
    _check_gradients(f"{workload.name} in {dtype}", model, workload.loss(model, *data))
    return TrainingSubject(model, OPTIMIZERS[optimizer](model), data, workload.loss)


@contextmanager
def seeded() -> Iterator[None]:
    """Seed the CPU's generator; no other is used."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        yield


def moved(tensors: Tensors, device: torch.device, dtype: torch.dtype) -> Tensors:
    """Tensors on a device; those with floating-point numbers in this dtype."""
    return tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in tensors)


def _check_outputs(what: str, outputs: object, others: object) -> None:
    for index, (output, other) in enumerate(zip(flatten(outputs)[0], flatten(others)[0], strict=True)):
        _check_finite(f"{what}: output {index}", output)
        if not (output.double() - other.double()).norm() > 1e-2 * output.double().norm():
            raise ValueError(f"{what}: output {index} hardly depends on the inputs: a wrong result would not show")


def _check_gradients(what: str, model: nn.Module, loss: Tensor) -> None:
    _check_finite(f"{what}: the loss", loss)
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise ValueError(f"{what}: the loss does not depend on {name}")
        _check_finite(f"{what}: the gradient of {name}", parameter.grad)
    model.zero_grad()


def _check_finite(what: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise ValueError(f"{what} has values that are not finite")


# Inputs, as functions of the batch size.


def _normal(*shape: int) -> Callable[[int], Tensors]:
    return lambda batch: (torch.randn(batch, *shape),)


def _pairs(*shape: int) -> Callable[[int], Tensors]:
    return lambda batch: (torch.randn(batch, *shape), torch.randn(batch, *shape))


def _classified_images(batch: int) -> Tensors:
    return torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))


def _padded_words(batch: int) -> Tensors:
    """Texts of several lengths: BERT checks a mask for padding and drops one without, but not in a capture."""
    lengths = torch.randint(64, 128, (batch, 1))
    return torch.randint(WORDS, (batch, 128)), (torch.arange(128) < lengths).long()


def _words_twice(batch: int) -> Tensors:
    return torch.randint(WORDS, (batch, 128)), torch.randint(WORDS, (batch, 128))


def _words_and_start(batch: int) -> Tensors:
    """Words for T5's encoder, and constant ones for its decoder, so that outputs differ by the encoder only."""
    return torch.randint(WORDS, (batch, 128)), torch.arange(32).repeat(batch, 1)


def _words_and_images(batch: int) -> Tensors:
    """CLIP's text embedding is that at the end token."""
    words, end = torch.randint(WORDS, (batch, 76)), 49_407
    return F.pad(words, (0, 1), value=end), torch.randn(batch, 3, 224, 224)


def _visits(batch: int) -> Tensors:
    return torch.randn(batch, DENSE), torch.randint(ROWS, (batch, TABLES, BAG))


def _clicks(batch: int) -> Tensors:
    return *_visits(batch), torch.randint(2, (batch,))


def _latents(batch: int) -> Tensors:
    return torch.randn(batch, 4, 64, 64), torch.randint(1000, (batch,)), torch.randn(batch, 77, 768)


def _latents_and_prompts(batch: int) -> Tensors:
    latents, time, _ = _latents(batch)
    return latents, time, torch.randn(batch, 2, 77, 768)


def _latents_and_classes(batch: int) -> Tensors:
    return torch.randn(batch, 4, 32, 32), torch.randint(1000, (batch,)), torch.randint(1000, (batch,))


def _fields(batch: int) -> Tensors:
    """DeepFM bins dense features, so that all fields are categorical."""
    return (torch.randint(ROWS, (batch, DENSE + TABLES)),)


# Models.


def _torchvision() -> Any:
    return zoo.import_without_compiled_ops("torchvision")


def _transformers() -> Any:
    _torchvision()  # transformers imports it too, and fails without its compiled ops
    return importlib.import_module("transformers")


def _resnet50_fpn() -> nn.Module:
    backbones = _torchvision().models.detection.backbone_utils
    return backbones.resnet_fpn_backbone(backbone_name="resnet50", weights=None)  # type: ignore[no-any-return]


def _mask_rcnn_backbone() -> nn.Module:
    return nets.Proposals(zoo.build("maskrcnn_resnet50_fpn_v2")[0])


def _bert() -> nn.Module:
    transformers = _transformers()
    return transformers.BertModel(transformers.BertConfig())  # type: ignore[no-any-return]


def _bert_for_words() -> nn.Module:
    transformers = _transformers()
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config)  # type: ignore[no-any-return]


def _t5() -> nn.Module:
    transformers = _transformers()
    return nets.EncoderDecoder(transformers.T5Model(transformers.T5Config()))


def _clip() -> nn.Module:
    transformers = _transformers()
    return transformers.CLIPModel(transformers.CLIPConfig())  # type: ignore[no-any-return]


def _diffusers() -> Any:
    _torchvision()  # diffusers imports it too
    return importlib.import_module("diffusers")


def _unet() -> nn.Module:
    """That of Stable Diffusion 1.5."""
    return nets.Denoiser(_diffusers().UNet2DConditionModel(sample_size=64, cross_attention_dim=768))


def _dit() -> nn.Module:
    """DiT-XL/2 for images of 256 x 256."""
    return nets.Denoiser(_diffusers().DiTTransformer2DModel(out_channels=8))


def _dlrm() -> nn.Module:
    return nets.Dlrm(DENSE, TABLES, ROWS)


def _deepfm() -> nn.Module:
    return nets.DeepFm(DENSE + TABLES, ROWS)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, nhead=8, dim_feedforward=2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=6)


# Losses, as functions of the model, its inputs and the target.


def _difference(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), target.float())


def _class_entropy(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(model(images).float(), classes)


def _word_entropy(model: nn.Module, words: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(words).logits.float().flatten(0, 1), targets.flatten())


def _click_entropy(model: nn.Module, dense: Tensor, indices: Tensor, clicks: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(dense, indices).float(), clicks.float())


# The workloads.


def _images(name: str, size: int = 224, batches: tuple[int, ...] = (1,)) -> Workload:
    return Workload(name, lambda: zoo.build(name)[0], _normal(3, size, size), batches)


def _product(name: str, width: int) -> Workload:
    return Workload(name, lambda: nets.Product(width), lambda batch: (torch.randn(batch * width, width),))


def _parallel(name: str, width: int) -> Workload:
    return replace(_product(name, width), model=partial(nets.parallel_product, width))


INFERENCE: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        _images("googlenet", batches=ALL_BATCHES),
        _images("inception_v3", 299, ALL_BATCHES),
        _images("inception_v4", 299),
        _images("nasnetalarge", 331),
        _images("pnasnet5large", 331),
        Workload("randwire", nets.RandWire, _normal(3, 224, 224)),
        _images("squeezenet1_1", batches=ALL_BATCHES),
        _images("mobilenet_v2", batches=ALL_BATCHES),
        _images("efficientnet_b0"),
        _images("resnet50", batches=ALL_BATCHES),
        _images("densenet121"),
        Workload("resnet50_fpn", _resnet50_fpn, _normal(3, 224, 224)),
        Workload("mask_rcnn_backbone", _mask_rcnn_backbone, _normal(3, 800, 800)),
        _images("vit_b_16", batches=ALL_BATCHES),
        Workload("bert_base", _bert, _padded_words, ALL_BATCHES),
        Workload("t5_small", _t5, _words_and_start),
        Workload("clip", _clip, _words_and_images),
        Workload("dlrm", _dlrm, _visits, ALL_BATCHES),
        Workload("deepfm", _deepfm, _fields),
        Workload("moe8", lambda: nets.Experts(8, 512, 2048), _normal(32, 512)),
        Workload("towers8", lambda: nets.Towers(nets.mlp(512, 512, 512, 512) for _ in range(8)), _normal(512)),
        Workload("ensemble4", lambda: nets.Ensemble(nets.small_cnn() for _ in range(4)), _normal(3, 64, 64)),
        Workload("bilstm", lambda: nn.LSTM(256, 256, 2, batch_first=True, bidirectional=True), _normal(32, 256)),
        _product("mm_small", 128),
        _product("mm_medium", 1024),
        _product("mm_large", 4096),
    )
}
"""Inference workloads by name."""

PARALLEL: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        _parallel("parallel_small", 128),
        _parallel("parallel_medium", 1024),
        _parallel("parallel_large", 4096),
    )
}
"""The products of :data:`INFERENCE` with ``autostream.Parallel``."""

DIFFUSION: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("unet", _unet, _latents, (2,)),
        Workload("dit", _dit, _latents_and_classes, (2,)),
        Workload("guided_batch", lambda: nets.Guided(_unet(), one_batch=True), _latents_and_prompts),
        Workload("guided_sides", lambda: nets.Guided(_unet(), one_batch=False), _latents_and_prompts),
    )
}
"""Denoising steps by name, which need diffusers."""

SMALLEST: Mapping[str, Workload] = {"linear": Workload("linear", lambda: nn.Linear(1024, 1024), _normal(1024))}
"""One op: its time is the overhead of a call."""

TRAINING: Mapping[str, TrainingWorkload] = {
    workload.name: workload
    for workload in (
        TrainingWorkload("train_mlp12", lambda: nets.mlp(*[1024] * 13), _pairs(1024), _difference, (64,)),
        TrainingWorkload("train_encoder6", _encoder, _pairs(128, 512), _difference),
        TrainingWorkload("train_bert_base", _bert_for_words, _words_twice, _word_entropy, (4, 32)),
        TrainingWorkload("train_resnet50", lambda: zoo.build("resnet50")[0], _classified_images, _class_entropy),
        TrainingWorkload("train_googlenet", lambda: zoo.build("googlenet")[0], _classified_images, _class_entropy),
        TrainingWorkload("train_dlrm", _dlrm, _clicks, _click_entropy, (64,)),
    )
}
"""Training workloads by name."""

OPTIMIZERS: Mapping[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True),
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-4, fused=True),
}
"""Optimizers by name, with fused kernels, the fastest of PyTorch."""
