"""Trains a CNN on a folder of images. One device, two groups or two stages: change the marked line.

python examples/train/cnn_images.py [a folder with a folder of images for each class]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import shoal.train

# Two groups: {"groups": 2, "devices": 1}. Two stages: {"groups": 1, "devices": 2}.
LAYOUT = {"groups": 1, "devices": 1}  # ← the line to change

SIDE = 24


def draw(folder: Path, count: int = 120) -> None:
    """Pictures of discs and of squares, for those who bring none."""
    rng = np.random.default_rng(0)
    ys, xs = np.mgrid[:SIDE, :SIDE]
    for kind in ("disc", "square"):
        (folder / kind).mkdir()
        for i in range(count):
            cx, cy, r = *rng.integers(8, SIDE - 8, 2), rng.integers(4, 8)
            inside = np.maximum(abs(xs - cx), abs(ys - cy)) < r
            if kind == "disc":
                inside = (xs - cx) ** 2 + (ys - cy) ** 2 < r * r
            picture = rng.integers(0, 90, (SIDE, SIDE, 3)) + 150 * inside[..., None]
            header = f"P6 {SIDE} {SIDE} 255\n".encode()
            (folder / kind / f"{i}.ppm").write_bytes(header + picture.astype(np.uint8).tobytes())


def model_of(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for i, (inside, outside) in enumerate([(3, 16), (16, 16), (16, 32), (32, 32)]):
        layers += [nn.Conv2d(inside, outside, 3, 1 + i % 2, 1), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(made)
        if len(sys.argv) < 2:
            draw(folder)
        model = model_of(sum(p.is_dir() for p in folder.iterdir()))
        data = shoal.train.load(
            folder, batch_size=32, sample_transform=lambda image: image.float() / 127 - 1
        )
        history = shoal.train.fit(
            model,
            F.cross_entropy,
            torch.optim.AdamW(model.parameters(), lr=2e-3),
            data,
            **LAYOUT,
            epochs=6,
            micro_batches=2,  # batch normalisation sees these: few, so that each is large
        )
        print(f"loss {history.losses[0]:.3f} → {history.losses[-1]:.3f} on {history.layout}")
