"""One training of `bench.loading`, in a process of its own: prints what it measured as JSON.

python -m bench.loading.program FOLDER FORMAT ours|torch [STEPS]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shoal
import shoal.train
from bench.loading import data
from shoal import _core

WARM = 5
RESIDENT_STEPS = 40
DEVICE = 1


class Pictures(nn.Module):
    """A small CNN that takes pictures as they lie on the disk."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside, stride in ((3, 24, 4), (24, 48, 2), (48, 64, 2)):
            layers += [
                nn.Conv2d(inside, outside, 3, stride, 1),
                nn.BatchNorm2d(outside),
                nn.ReLU(),
            ]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(64, data.CLASSES)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(pixels.float() / 127 - 1).mean(dim=(2, 3)))


def measured(trainer: shoal.train.Trainer, stream: Iterator[Any], steps: int) -> dict[str, float]:
    """How much of the time the device did nothing, and the program waited for its next batch."""
    trainer.synchronize()
    busy = _core.worker_stats(DEVICE)["busy_ns"]
    begin, waiting, done = time.perf_counter(), 0.0, 0
    while done < steps:
        start = time.perf_counter()
        batch = next(stream, None)
        waiting += time.perf_counter() - start
        if batch is None:
            break
        trainer.step(batch)
        done += 1
    trainer.synchronize()
    whole = time.perf_counter() - begin
    busy = _core.worker_stats(DEVICE)["busy_ns"] - busy
    return {
        "idle": 1 - busy / 1e9 / whole,
        "waiting": waiting / whole,
        "step_ms": whole / done * 1e3,
        "steps": done,
    }


def resident(trainer: shoal.train.Trainer) -> Iterator[Any]:
    """The same batch for ever, on the device already: nothing to wait for."""
    pixels = torch.randint(256, (data.BATCH, 3, data.SIDE, data.SIDE))
    classes = torch.randint(data.CLASSES, (data.BATCH,))
    device = trainer.groups[0].device
    batch = pixels.to(torch.uint8).to(device), classes.to(device)
    while True:
        yield batch


def main(folder: Path, kind: str, who: str, steps: int) -> None:
    torch.set_num_threads(1)
    model = Pictures()
    optimizer = torch.optim.AdamW(model.parameters())
    with shoal.up(["cpu,threads=1,memory=1GiB"]) as pool, shoal.connect(pool.url):
        with shoal.train.worker_groups(1) as groups:
            with shoal.train.Trainer(model, F.cross_entropy, optimizer, groups) as trainer:
                first = resident(trainer)
                for _ in range(WARM):
                    trainer.step(next(first))
                before = measured(trainer, first, RESIDENT_STEPS)
                stream: Iterator[Any]
                if who == "ours":
                    loader = data.ours(folder, kind)
                    stream = iter(shoal.train.Feed(loader, trainer.prepare))
                else:
                    stream = data.torchs(folder, kind, workers=2)
                for _ in range(WARM):
                    trainer.step(next(stream))
                found = measured(trainer, stream, steps)
                after = measured(trainer, first, RESIDENT_STEPS)
    print(json.dumps({"loading": found, "resident": [before, after]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]) if sys.argv[4:] else 10**9)
