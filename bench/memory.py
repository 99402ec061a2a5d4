"""Memory beyond the device, in one run: `python -m bench.memory`.

Training and token-by-token decoding on a device with too little memory: time over that of a device
with enough, and bytes moved over those of an optimal pager (Belady's rule on the recorded accesses),
for our pager and for plain least-recently-used demand paging in the same program. Then the same
decoding on two devices, where operators go to their weights; and peer copies against memcpy.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import shoal
from shoal import memory

MiB = 2**20
RESULTS = Path(__file__).parent / "results"
ENOUGH = 512 * MiB


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
FACTORS = {"training": (1.5, 2.0), "decoding": (1.25, 2.0)}


@dataclass
class Run:
    """What one program did on one device."""

    step_s: float
    moved_bytes: int
    optimal_bytes: int
    lru_bytes: int
    stall_s: float
    disk_bytes: int


def measure(name: str, memory_bytes: int, paging: str, steps: int) -> Run:
    spec = f"cpu,memory={memory_bytes},host=1GiB,disk=0,threads=1,paging={paging}"
    with shoal.up([spec]) as pool, shoal.connect(pool.url):
        step = PROGRAMS[name]("shoal")
        for _ in range(3):
            step()
        before = memory.counters()
        times = []
        with memory.record() as trace:
            for _ in range(steps):
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
        after = memory.counters()
        moved = (
            after.swapped_in_bytes
            + after.swapped_out_bytes
            - before.swapped_in_bytes
            - before.swapped_out_bytes
        )
        return Run(
            statistics.median(times),
            moved,
            memory.replay(trace, memory_bytes).moved_bytes,
            memory.replay(trace, memory_bytes, "lru").moved_bytes,
            after.stall_s - before.stall_s,
            after.disk_bytes - before.disk_bytes,
        )


def peak_bytes(name: str) -> int:
    with shoal.up([f"cpu,memory={ENOUGH},threads=1"]) as pool, shoal.connect(pool.url):
        step = PROGRAMS[name]("shoal")
        for _ in range(2):
            step()
        return torch.shoal.max_memory_allocated()


def two_devices(peak: int, steps: int) -> tuple[float, int, int]:
    """Decoding on two devices that hold the weights together: time, peer bytes, swapped bytes."""
    each = int(peak * 0.6)
    with (
        shoal.up([f"cpu,memory={each},host=1GiB,disk=0,threads=1"] * 2) as pool,
        shoal.connect(pool.url, devices=2),
    ):
        step = decoding("shoal")
        for _ in range(3):
            step()
        before = memory.counters()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        after = memory.counters()
        swapped = after.swapped_in_bytes - before.swapped_in_bytes
        return statistics.median(times), (after.peer_bytes - before.peer_bytes), swapped


def peer_copies() -> dict[str, float]:
    """Speed of copies between two devices of a host over that of a memcpy of the same size."""
    ratios = {}
    with (
        shoal.up(["cpu,memory=1GiB,threads=1"] * 2) as pool,
        shoal.connect(pool.url, devices=2),
    ):
        for size in (MiB, 16 * MiB, 64 * MiB):
            local = [torch.ones(size // 4), torch.zeros(size // 4)]
            here = torch.ones(size // 4, device="shoal:1")
            there = torch.zeros(size // 4, device="shoal:2")
            torch.shoal.synchronize()
            found = []
            for _ in range(15):
                start = time.perf_counter()
                for _ in range(4):
                    local[1].copy_(local[0])
                middle = time.perf_counter()
                for _ in range(4):
                    there.copy_(here)
                torch.shoal.synchronize(2)
                found.append((middle - start) / (time.perf_counter() - middle))
            ratios[f"{size // MiB} MiB"] = statistics.median(found)
    return ratios


@click.command()
@click.option("--steps", default=12, show_default=True, help="Measured steps of each program.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON, and only them.")
def main(steps: int, as_json: bool) -> None:
    """Measures paging against an optimal pager, LRU, and unlimited memory."""
    torch.set_num_threads(1)
    console = Console(quiet=as_json)
    results: dict[str, object] = {}
    table = Table(
        "program", "memory", "time / enough", "LRU's", "bytes / Belady", "LRU's", "LRU / ours"
    )
    with console.status("measuring"):
        for name, factors in FACTORS.items():
            peak = peak_bytes(name)
            enough = measure(name, ENOUGH, "next-use", steps)
            for factor in factors:
                limit = int(peak / factor)
                ours = measure(name, limit, "next-use", steps)
                lru = measure(name, limit, "lru", steps)
                results[f"{name} {factor}"] = {
                    "enough": asdict(enough),
                    "ours": asdict(ours),
                    "lru": asdict(lru),
                }
                table.add_row(
                    name,
                    f"{peak / MiB:.0f} MiB in {limit / MiB:.0f}",
                    f"{ours.step_s / enough.step_s:.2f}",
                    f"{lru.step_s / enough.step_s:.2f}",
                    f"{ours.moved_bytes / max(1, ours.optimal_bytes):.2f}",
                    f"{lru.moved_bytes / max(1, lru.optimal_bytes):.2f}",
                    f"{lru.moved_bytes / max(1, ours.moved_bytes):.2f}",
                )
        peak = peak_bytes("decoding")
        seconds, peer, swapped = two_devices(peak, steps)
        results["two devices"] = {"step_s": seconds, "peer_bytes": peer, "swapped_bytes": swapped}
        results["peer copies"] = peer_copies()
    console.print(table)
    console.print(
        f"decoding on two devices: {peer / steps / 1024:.0f} KiB from device to device and "
        f"{swapped / steps / 1024:.0f} KiB swapped, a step"
    )
    console.print(f"peer copies over memcpy: {results['peer copies']}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory.json").write_text(json.dumps(results, indent=1) + "\n")
    if as_json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
