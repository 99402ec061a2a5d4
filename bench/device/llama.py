"""A Llama-like decoder that writes one token after the other, with a KV cache that grows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        past: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        h = self.norm1(x)
        q, k, v = (self.split(part(h)) for part in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), (k, v)


class Llama(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, width: int, depth: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = RmsNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(context), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)


class Decoder:
    """Greedy generation. Every token is read by the host, as a program that prints it does."""

    def __init__(self, model: Llama, device: str) -> None:
        self.model = model.to(device).eval()
        self.device = device
        self.restart()

    def restart(self) -> None:
        self.past: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(self.model.layers)
        self.at = 0
        self.last = 1
        self.written: list[int] = []

    @torch.no_grad()
    def token(self) -> None:
        model = self.model
        x = model.token(torch.tensor([[self.last]], device=self.device))
        cos, sin = model.cos[self.at : self.at + 1], model.sin[self.at : self.at + 1]
        for i, layer in enumerate(model.layers):
            x, self.past[i] = layer(x, cos, sin, self.past[i])
        self.last = int(model.head(model.norm(x))[0, -1].argmax().item())
        self.at += 1
        self.written.append(self.last)
