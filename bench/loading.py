"""How long a device waits for data that lies on the disk: our loader, torch's, and reading in the loop.

The same CNN trains on the same mapped file of pictures; the time between two steps in which the
program waits for the next batch is added up. The file's pages are dropped from memory before each
run where the system allows it.

    python -m bench.loading [--mib 512] [--steps 30]
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

import shoal
import shoal.train
from bench.models import Cnn

SIDE, BATCH = 64, 64
Batches = Callable[[shoal.train.Trainer], Iterator[Any]]


class Mapped(Dataset[Any]):
    """What people write by hand for a large array."""

    def __init__(self, path: Path) -> None:
        self._pictures = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, i: int) -> Any:
        return normalised((torch.from_numpy(self._pictures[i].copy()), i % 10))


def normalised(batch: Any) -> Any:
    pictures, classes = batch
    return pictures.float() / 255, classes


def draw(path: Path, mebibytes: int) -> None:
    """Random pictures, written in pieces."""
    count = mebibytes * 2**20 // (3 * SIDE * SIDE)
    pictures = np.lib.format.open_memmap(path, "w+", np.uint8, (count, 3, SIDE, SIDE))
    rng = np.random.default_rng(0)
    for start in range(0, count, 4096):
        piece = pictures[start : start + 4096]
        piece[:] = rng.integers(0, 256, piece.shape, np.uint8)
    pictures.flush()


def forget(path: Path) -> None:
    """Drops the file's pages from memory, so that the disk is read."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ours(path: Path) -> Batches:
    count = len(np.load(path, mmap_mode="r"))
    loader = shoal.train.load((path, np.arange(count) % 10), BATCH, transform=normalised)
    return lambda trainer: iter(shoal.train.Feed(loader, trainer.prepare))


def torch_loader(path: Path, workers: int) -> Batches:
    loader = DataLoader(
        Mapped(path), BATCH, shuffle=True, num_workers=workers, multiprocessing_context="spawn"
        if workers
        else None,
    )  # fmt: skip
    return lambda trainer: iter(loader)


def waited(batches: Batches, steps: int) -> tuple[float, float]:
    """The part of the time in which the program waits for data, and milliseconds a step."""
    model = Cnn(32, 6, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    with shoal.train.worker_groups(1) as groups:
        with shoal.train.Trainer(model, F.cross_entropy, optimizer, groups) as trainer:
            stream = batches(trainer)
            for _ in range(3):
                trainer.step(next(stream))
            begin, waiting = time.perf_counter(), 0.0
            for _ in range(steps):
                start = time.perf_counter()
                batch = next(stream)
                waiting += time.perf_counter() - start
                trainer.step(batch)
            trainer.synchronize()
            whole = time.perf_counter() - begin
    return waiting / whole, whole / steps * 1e3


@click.command()
@click.option("--mib", default=512, help="Size of the data.")
@click.option("--steps", default=30)
def main(mib: int, steps: int) -> None:
    """Prints the part of the time that training waits for data."""
    table = Table(title="waiting for data (aim: under 2 %)", title_justify="left")
    for heading in ("", "waiting", "ms a step"):
        table.add_column(heading)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pictures.npy"
        draw(path, mib)
        with shoal.up(["cpu,threads=1,memory=3GiB"]) as pool, shoal.connect(pool.url):
            contestants = {
                "shoal.train.load": ours(path),
                "DataLoader, 1 worker": torch_loader(path, 1),
                "DataLoader in the loop": torch_loader(path, 0),
            }
            for name, batches in contestants.items():
                forget(path)
                part, step_ms = waited(batches, steps)
                table.add_row(name, f"{part * 100:.1f} %", f"{step_ms:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
