"""Models that no library has, after their papers, and parts of models of libraries."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

import autostream

EMBEDDING_STD = 0.1
"""Keeps products of embeddings in the range of the other terms, so that errors in any of them show."""


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with ReLU in between, and weights that keep the scale of activations."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def small_cnn(classes: int = 1000) -> nn.Sequential:
    """Four strided convolutions and a classifier: (N, 3, H, W) to (N, classes)."""
    blocks = (
        nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in pairwise((3, 32, 64, 128, 256))
    )
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, classes))


class Product(nn.Module):
    """``mm(block1(x), block2(x))``, the second one transposed: (rows, width) to (rows, rows)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block1, self.block2 = mlp(width, width, width), mlp(width, width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the outputs of the blocks."""
        return torch.mm(self.block1(x), self.block2(x).mT)


def parallel_product(width: int) -> nn.Module:
    """:class:`Product` by ``autostream.Parallel``."""
    blocks = (mlp(width, width, width) for _ in range(2))
    return autostream.Parallel(*blocks, reduce=lambda left, right: torch.mm(left, right.mT))


class Towers(nn.Module):
    """Modules that all read the same input: (…, width) to their outputs, concatenated in the last dimension."""

    def __init__(self, towers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the outputs."""
        return torch.cat([tower(x) for tower in self.towers], dim=-1)


class Ensemble(nn.Module):
    """The mean of the outputs of several modules for one input."""

    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """Average the outputs."""
        return _sum(member(x) for member in self.members) / len(self.members)


class Experts(nn.Module):
    """A mixture of experts with a dense gate: every expert runs on every input, so shapes are static.

    Outputs, of shape (…, width) like the inputs, are weighted by a softmax over the experts.
    """

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(mlp(width, hidden, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum of the experts' outputs."""
        shares = self.gate(x).softmax(-1).split(1, dim=-1)
        return _sum(share * expert(x) for share, expert in zip(shares, self.experts, strict=True))


class Dlrm(nn.Module):
    """The recommender of Naumov et al., "Deep Learning Recommendation Model for Personalization" (2019).

    Dense features go through an MLP, each categorical one through an embedding bag; products of all pairs of the
    resulting vectors, and the dense vector itself, go through another MLP to the logit of a click.
    """

    def __init__(self, dense: int, tables: int, rows: int, width: int = 64) -> None:
        super().__init__()
        self.bottom = nn.Sequential(mlp(dense, 512, 256, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        for table in self.tables:
            nn.init.normal_(table.weight, std=EMBEDDING_STD)  # type: ignore[arg-type]
        vectors = 1 + tables
        first, second = torch.tril_indices(vectors, vectors, offset=-1)
        self.pairs = nn.Buffer(first * vectors + second)
        self.top = mlp(width + len(self.pairs), 512, 256, 1)

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        """Dense features (N, dense) and rows of each table (N, tables, bag) to logits (N,)."""
        bottom = self.bottom(dense)
        bags = [table(rows) for table, rows in zip(self.tables, indices.unbind(1), strict=True)]
        products = self.interactions(torch.stack([bottom, *bags], dim=1))
        return self.top(torch.cat([bottom, products], dim=1)).squeeze(1)  # type: ignore[no-any-return]

    def interactions(self, vectors: Tensor) -> Tensor:
        """Dot products of the pairs i > j of vectors (N, vectors, width), in the order (1, 0), (2, 0), (2, 1), …"""
        return torch.bmm(vectors, vectors.mT).flatten(1).index_select(1, self.pairs)


class DeepFm(nn.Module):
    """Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (2017).

    A factorization machine and an MLP share the fields' embeddings; the sum of both is the logit of a click.
    """

    def __init__(self, fields: int, rows: int, width: int = 16) -> None:
        super().__init__()
        self.weights = nn.Embedding(fields * rows, 1)
        self.factors = nn.Embedding(fields * rows, width)
        for table in (self.weights, self.factors):
            nn.init.normal_(table.weight, std=EMBEDDING_STD)
        self.first_rows = nn.Buffer(rows * torch.arange(fields))
        self.deep = mlp(fields * width, 400, 400, 400, 1)

    def forward(self, fields: Tensor) -> Tensor:
        """The row of each field (N, fields) to logits (N,)."""
        rows = fields + self.first_rows
        factors = self.factors(rows)
        linear = self.weights(rows).sum((1, 2))
        # The sum of all pairs' products is half of (square of the sum - sum of squares).
        pairwise_products = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        return linear + pairwise_products + self.deep(factors.flatten(1)).squeeze(1)  # type: ignore[no-any-return]


class Proposals(nn.Module):
    """The part of a torchvision detector with static shapes: its backbone, and the head for proposals."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.rpn.head

    def forward(self, images: Tensor) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
        """Images (N, 3, H, W) to feature maps by level, and scores and boxes of each level's anchors."""
        features = self.backbone(images)
        scores, boxes = self.head(list(features.values()))
        return features, scores, boxes


class EncoderDecoder(nn.Module):
    """The encoder of a transformers model and one pass of its decoder, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor, start: Tensor) -> Tensor:
        """Words (N, length) to read and words (N, steps) already written to hidden states (N, steps, width)."""
        outputs = self.model(input_ids=words, decoder_input_ids=start, use_cache=False)
        return outputs.last_hidden_state  # type: ignore[no-any-return]


class Denoiser(nn.Module):
    """A denoiser of diffusers, whose outputs are tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, latents: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """Latents (N, C, H, W) at times (N), and texts (N, length, width) or classes (N), to noise (N, C, H, W)."""
        return self.model(latents, time, condition, return_dict=False)[0]  # type: ignore[no-any-return]


class Guided(nn.Module):
    """A denoiser with its prompt and without one: in one batch, or as two calls that may run side by side.

    After Ho and Salimans, "Classifier-Free Diffusion Guidance" (2022).
    """

    def __init__(self, denoiser: nn.Module, *, one_batch: bool) -> None:
        super().__init__()
        self.denoiser, self.one_batch = denoiser, one_batch

    def forward(self, latents: Tensor, time: Tensor, prompts: Tensor) -> Tensor:
        """Latents (N, C, H, W), times (N) and prompts (N, 2, length, width), empty ones first, to noise."""
        if self.one_batch:
            twice = [torch.cat([x, x]) for x in (latents, time)]
            without, noise = self.denoiser(*twice, prompts.transpose(0, 1).flatten(0, 1)).chunk(2)
        else:
            without, noise = (self.denoiser(latents, time, prompt) for prompt in prompts.unbind(1))
        return without + 7.5 * (noise - without)  # type: ignore[no-any-return]


class RandWire(nn.Module):
    """Xie et al., "Exploring Randomly Wired Neural Networks for Image Recognition" (2019), in the small regime.

    Images (N, 3, H, W) go through two convolutions and three stages whose wiring is a Watts-Strogatz graph, WS(4, 0.75)
    with 32 nodes, to logits (N, classes).
    """

    def __init__(self, channels: int = 78, nodes: int = 32, classes: int = 1000) -> None:
        super().__init__()
        half = channels // 2
        self.stem = nn.Sequential(
            nn.Conv2d(3, half, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(half),
            _unit(half, channels, stride=2),
        )
        widths = (channels, channels, 2 * channels, 4 * channels)
        self.stages = nn.Sequential(*(RandomStage(a, b, nodes, seed) for seed, (a, b) in enumerate(pairwise(widths))))
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv2d(widths[-1], 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """Classify the images."""
        return self.head(self.stages(self.stem(images)))  # type: ignore[no-any-return]


class RandomStage(nn.Module):
    """A randomly wired stage: (N, inputs, H, W) to (N, outputs, H/2, W/2).

    An edge leads from the node of lower number to that of higher number. Nodes without a predecessor read the stage's
    input, with stride 2; the mean of the nodes without a successor is its output.
    """

    def __init__(self, inputs: int, outputs: int, nodes: int, seed: int) -> None:
        super().__init__()
        graph = nx.connected_watts_strogatz_graph(nodes, k=4, p=0.75, seed=seed)
        self.sources = [sorted(other for other in graph[node] if other < node) for node in range(nodes)]
        self.sinks = [node for node in range(nodes) if max(graph[node]) < node]
        self.nodes = nn.ModuleList(
            RandomNode(len(sources), _unit(outputs, outputs)) if sources else _unit(inputs, outputs, stride=2)
            for sources in self.sources
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the nodes in their order."""
        values: list[Tensor] = []
        for node, sources in zip(self.nodes, self.sources, strict=True):
            values.append(node(*(values[source] for source in sources)) if sources else node(x))
        return _sum(values[sink] for sink in self.sinks) / len(self.sinks)


class RandomNode(nn.Module):
    """A sum of its inputs with learned positive weights, and what is made of it."""

    def __init__(self, inputs: int, unit: nn.Module) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(inputs))
        self.unit = unit

    def forward(self, *inputs: Tensor) -> Tensor:
        """Apply the unit to the weighted sum."""
        weights = self.weights.sigmoid().unbind()
        return self.unit(_sum(weight * x for weight, x in zip(weights, inputs, strict=True)))  # type: ignore[no-any-return]


def _unit(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """ReLU, a separable 3x3 convolution, batch norm."""
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(inputs, inputs, 3, stride=stride, padding=1, groups=inputs, bias=False),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
    )


def _sum(terms: Iterable[Tensor]) -> Tensor:
    """Unlike the built-in function, this adds nothing to zero first."""
    return functools.reduce(torch.add, terms)
