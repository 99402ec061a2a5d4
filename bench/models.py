"""The programs that are measured: four kinds of model, each in a small and a medium size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Mlp(nn.Module):
    """Residual blocks of linear layers."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.head(x)


class Cnn(nn.Module):
    """Convolutions with batch normalisation; every second one halves the picture."""

    def __init__(self, channels: int, depth: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for i in range(depth):
            stride = 2 if i % 2 else 1
            out = channels * (2 if i >= depth // 2 else 1)
            layers += [nn.Conv2d(width, out, 3, stride, 1), nn.BatchNorm2d(out), nn.ReLU()]
            width = out
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Lstm(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.token(tokens))[0])


@dataclass(frozen=True)
class Program:
    """A model with the data that it trains on."""

    kind: str
    size: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]

    @property
    def name(self) -> str:
        return f"{self.kind} {self.size}"


def _pictures(batch: int, side: int) -> Batch:
    return torch.randn(batch, 3, side, side), torch.randint(10, (batch,))


def _vectors(batch: int, width: int) -> Batch:
    return torch.randn(batch, width), torch.randint(10, (batch,))


def _tokens(batch: int, time: int, vocabulary: int) -> Batch:
    text = torch.randint(vocabulary, (batch, time + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


PROGRAMS = (
    Program("MLP", "small", lambda: Mlp(64, 8, 10), lambda: _vectors(32, 64)),
    Program("MLP", "medium", lambda: Mlp(512, 8, 10), lambda: _vectors(64, 512)),
    Program("CNN", "small", lambda: Cnn(8, 4, 10), lambda: _pictures(8, 16)),
    Program("CNN", "medium", lambda: Cnn(32, 6, 10), lambda: _pictures(16, 32)),
    Program("GPT", "small", lambda: Gpt(64, 2, 4, 64, 32), lambda: _tokens(8, 32, 64)),
    Program("GPT", "medium", lambda: Gpt(256, 4, 8, 256, 128), lambda: _tokens(4, 128, 256)),
    Program("LSTM", "small", lambda: Lstm(64, 1, 64), lambda: _tokens(16, 32, 64)),
    Program("LSTM", "medium", lambda: Lstm(256, 2, 128), lambda: _tokens(16, 64, 128)),
)


class Trainer:
    """Training steps as people write them: torch's default AdamW, the batch comes from the host."""

    def __init__(self, model: nn.Module, batch: Batch, device: str) -> None:
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = batch
        self.device = device
        self.loss = torch.zeros(())

    def step(self) -> None:
        x, target = (part.to(self.device) for part in self.batch)
        self.optimizer.zero_grad()
        logits = self.model(x)
        loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def read_loss(self) -> float:
        return self.loss.item()
