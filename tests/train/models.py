"""Small models of the three kinds, and what one device computes with them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shoal.train.data import batches
from shoal.train.group import batch_split

Batch = Any


class Cnn(nn.Module):
    """Convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return x + self.mlp(x)


class Gpt(nn.Module):
    """A decoder whose head shares the embedding's weights, with a skip over all blocks."""

    def __init__(self, width: int = 16, depth: int = 4, vocabulary: int = 31) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(12, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = self.token(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + 0.1 * first))


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=20,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config).train()


def pictures(step: int, samples: int) -> Batch:
    g = torch.Generator().manual_seed(step)
    return torch.randn(samples, 3, 8, 8, generator=g), torch.randint(5, (samples,), generator=g)


def tokens(step: int, samples: int) -> Batch:
    text = torch.randint(31, (samples, 13), generator=torch.Generator().manual_seed(step))
    return text[:, :-1], text[:, 1:]


def sentences(step: int, samples: int) -> Batch:
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 50, (samples, 9), generator=g)
    lengths = torch.randint(3, 10, (samples, 1), generator=g)
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(9) < lengths).long(),
        "labels": torch.randint(3, (samples,), generator=g),
    }


#: name -> model, loss, batch of a step
KINDS: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[int, int], Batch]]] = {
    "cnn": (Cnn, F.cross_entropy, pictures),
    "gpt": (Gpt, token_loss, tokens),
    "bert": (bert, None, sentences),
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return KINDS[kind][0]()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def one_device(
    kind: str,
    samples: int,
    steps: int,
    parts: Callable[[int], Sequence[Sequence[int]]] = lambda n: [[n]],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    after_backward: Callable[[nn.Module], object] = lambda m: None,
) -> tuple[list[float], nn.Module]:
    """The same training on the local CPU, with the batch in one piece or in the parts that groups
    and micro-batches make of it (which batch normalisation sees)."""
    model = copy.deepcopy(made(kind))
    _, loss, batch_of = KINDS[kind]
    optim = optimizer(model)
    losses = []
    for step in range(steps):
        groups = parts(samples)
        sizes = [n for group in groups for n in group]
        pieces = iter(
            zip(
                batches.split(batch_of(step, samples), sizes),
                batch_split.weights(sizes),
                strict=True,
            )
        )
        total = 0.0
        sums: list[list[torch.Tensor]] = []
        for group in groups:
            for _ in group:
                piece, weight = next(pieces)
                output, target = batches.call(model, piece)
                value = batches.loss_of(loss, output, target)
                (value * weight).backward()
                total += value.item() * weight
            sums.append([p.grad for p in model.parameters() if p.grad is not None])
            optim.zero_grad()
        for parameter, *grads in zip(model.parameters(), *sums, strict=True):
            parameter.grad = functools.reduce(torch.add, grads)
        after_backward(model)
        optim.step()
        optim.zero_grad()
        losses.append(total)
    return losses, model


def largest_difference(a: nn.Module, b: nn.Module, buffers: bool = False) -> float:
    pairs = list(zip(a.parameters(), b.parameters(), strict=True))
    if buffers:
        pairs += list(zip(a.buffers(), b.buffers(), strict=True))
    return max(
        (x.detach().cpu().double() - y.detach().cpu().double()).abs().max().item() for x, y in pairs
    )
