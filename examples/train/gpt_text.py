"""Trains a small GPT on a text. One device, two groups or two stages: change the marked line.

python examples/train/gpt_text.py [a text file]
"""

import sys
import textwrap
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import shoal.train

# Two groups: {"groups": 2, "devices": 1}. Two stages: {"groups": 1, "devices": 2}.
LAYOUT = {"groups": 1, "devices": 1}  # ← the line to change

CONTEXT, WIDTH = 64, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.05)
        self.head.weight = self.token.weight  # tied: also across two stages

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def windows(path: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Every run of `CONTEXT` characters, and the same one character later."""
    text = path.read_text()
    letters = sorted(set(text))
    numbers = np.array([letters.index(c) for c in text])
    count = (len(numbers) - 1) // CONTEXT
    x = numbers[: count * CONTEXT].reshape(count, CONTEXT)
    y = numbers[1 : count * CONTEXT + 1].reshape(count, CONTEXT)
    return x, y, letters


if __name__ == "__main__":
    torch.manual_seed(0)
    text = sys.argv[1] if len(sys.argv) > 1 else textwrap.__file__  # a text that every Python has
    x, y, letters = windows(Path(text))
    model = Gpt(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    history = shoal.train.fit(
        model,
        lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        optimizer,
        (x, y),
        **LAYOUT,
        epochs=8,
        batch_size=16,
        clip_norm=1.0,
    )
    print(f"loss {history.losses[0]:.3f} → {history.losses[-1]:.3f} on {history.layout}")
