"""One program on one device, in a process of its own, driven by lines: see `bench.memory`.

    python -m bench.memory.program training memory=64MiB,host=1GiB

A program has one lease, so programs whose bursts alternate are processes. Commands come on standard
input, answers go to standard output, one JSON value a line: `run N` answers the seconds that N steps
took, `count N LIMIT` what they moved, and what other pagers of LIMIT bytes would have moved; `peak`
the program's memory.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal import memory


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def training(device: str) -> Callable[[], None]:
    """One step of a residual network with AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(384) for _ in range(6)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x = torch.randn(64, 384).to(device)

    def step() -> None:
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def decoding(device: str) -> Callable[[], None]:
    """One token: every weight is read once, little is computed."""
    torch.manual_seed(0)
    layers = [torch.randn(512, 2048).to(device) for _ in range(24)]
    x = torch.randn(1, 512).to(device)

    def step() -> None:
        y = x
        for layer in layers:
            y = torch.tanh((y @ layer)[:, :512] * 0.05)
        y.sum().item()

    return step


PROGRAMS = {"training": training, "decoding": decoding}
WARM_STEPS = 4


@dataclass
class Counted:
    """Bytes between the device and swap space in some steps, and what others would have moved."""

    moved_bytes: int
    optimal_bytes: int  # Belady's rule: it knows every coming use
    clairvoyant_bytes: int  # the same, and it knows what will be freed
    stall_s: float
    peer_bytes: int


def timed(step: Callable[[], None], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - start


def count(step: Callable[[], None], steps: int, limit_bytes: int) -> Counted:
    before = memory.counters()
    with memory.record() as trace:
        for _ in range(steps):
            step()
    moved = memory.counters() - before
    best = memory.replay(trace, limit_bytes)
    return Counted(
        moved.swapped_in_bytes + moved.swapped_out_bytes,
        best.moved_bytes + best.dead_bytes,
        best.moved_bytes,
        moved.stall_s,
        moved.peer_bytes,
    )


def main(name: str, *devices: str) -> None:
    torch.set_num_threads(1)
    specs = [f"cpu,threads=1,disk=0,{device}" for device in devices]
    with shoal.up(specs) as pool, shoal.connect(pool.url, devices=len(specs)):
        step = PROGRAMS[name]("shoal")
        for _ in range(WARM_STEPS):
            step()
        gc.collect()
        gc.disable()
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            command, *arguments = line.split()
            numbers = [int(argument) for argument in arguments]
            if command == "run":
                answer: object = timed(step, *numbers)
            elif command == "count":
                answer = asdict(count(step, *numbers))
            elif command == "peak":
                answer = torch.shoal.max_memory_allocated()
            else:
                sys.exit(f"no such command: {line!r}")
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
