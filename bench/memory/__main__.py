"""Memory beyond the device, in one run: `python -m bench.memory`.

Training and token-by-token decoding on a device with too little memory: time over that of a device
with enough, and bytes moved over those of an optimal pager (Belady's rule on the recorded accesses),
for our pager and for plain least-recently-used demand paging of the same program. Then the same
decoding on two devices, where operators go to their weights; and peer copies against memcpy.

The three run at once, and their bursts alternate: what else the machine does hits all alike.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import click
import msgspec
import torch
from rich.console import Console

import shoal
from bench.figures import RESULTS, load
from bench.measure import Spread
from bench.memory import report
from bench.memory.report import Case, Results

MiB = 2**20
ENOUGH = "memory=512MiB"
FACTORS = {"training": (1.5, 2.0), "decoding": (1.25, 2.0)}
COUNTED_STEPS = 24
COPIED = 64 * MiB  # between a wait and the next
BURST_S = 0.25  # of the program with enough memory


class Program:
    """A process that runs `bench.memory.program`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to: IO[str] = process.stdin
        self._from: IO[str] = process.stdout

    def ask(self, command: str) -> Any:
        self._to.write(command + "\n")
        self._to.flush()
        return self.answer()

    def answer(self) -> Any:
        line = self._from.readline()
        if not line:
            raise click.ClickException("a measured program ended: see above")
        return json.loads(line)


@contextmanager
def started(name: str, *devices: str) -> Iterator[Program]:
    command = [sys.executable, "-m", "bench.memory.program", name, *devices]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        program = Program(process)
        if program.answer() != "ready":
            raise click.ClickException("a measured program did not start: see above")
        yield program


def measure(name: str, factor: float, peak_bytes: int, rounds: int) -> Case:
    limit = int(peak_bytes / factor)
    with ExitStack() as stack:
        enough, ours, lru = (
            stack.enter_context(started(name, device))
            for device in (
                ENOUGH,
                f"memory={limit},host=1GiB",
                f"memory={limit},host=1GiB,paging=lru",
            )
        )
        steps = max(2, round(BURST_S / (enough.ask("run 3") / 3)))
        times = [
            [program.ask(f"run {steps}") / steps for program in (enough, ours, lru)]
            for _ in range(rounds)
        ]
        counted = [program.ask(f"count {COUNTED_STEPS} {limit}") for program in (ours, lru)]
    return Case(
        program=name,
        factor=factor,
        peak_bytes=peak_bytes,
        limit_bytes=limit,
        enough_ms=Spread.of([a * 1e3 for a, _, _ in times]),
        time=Spread.of([b / a for a, b, _ in times]),
        lru_time=Spread.of([c / a for a, _, c in times]),
        over_lru_time=Spread.of([b / c for _, b, c in times]),
        over_optimal=counted[0]["moved_bytes"] / max(1, counted[0]["optimal_bytes"]),
        over_clairvoyant=counted[0]["moved_bytes"] / max(1, counted[0]["clairvoyant_bytes"]),
        lru_over_optimal=counted[1]["moved_bytes"] / max(1, counted[1]["optimal_bytes"]),
        lru_over_ours=counted[1]["moved_bytes"] / max(1, counted[0]["moved_bytes"]),
        stall_ms=counted[0]["stall_s"] / COUNTED_STEPS * 1e3,
        lru_stall_ms=counted[1]["stall_s"] / COUNTED_STEPS * 1e3,
    )


def peak_bytes(name: str) -> int:
    with started(name, ENOUGH) as program:
        return int(program.ask("peak"))


def two_devices(peak: int) -> tuple[float, float]:
    """Decoding on two devices that hold the weights together: KiB a step, by peers and swapped."""
    each = f"memory={int(peak * 0.6)},host=1GiB"
    with started("decoding", each, each) as program:
        counted = program.ask(f"count {COUNTED_STEPS} {int(peak * 1.2)}")
    return counted["peer_bytes"] / COUNTED_STEPS / 1024, counted[
        "moved_bytes"
    ] / COUNTED_STEPS / 1024


def peer_copies(rounds: int) -> dict[str, Spread]:
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
            for _ in range(rounds):
                start = time.perf_counter()
                for _ in range(COPIED // size):
                    local[1].copy_(local[0])
                middle = time.perf_counter()
                for _ in range(COPIED // size):
                    there.copy_(here)
                torch.shoal.synchronize(2)
                found.append((middle - start) / (time.perf_counter() - middle))
            ratios[f"{size // MiB} MiB"] = Spread.of(found)
    return ratios


def parse(only: Sequence[str]) -> list[tuple[str, float]]:
    cases = [(name, factor) for name, factors in FACTORS.items() for factor in factors]
    return [c for c in cases if not only or c[0] in only or f"{c[0]} {c[1]}" in only]


@click.command()
@click.option("--rounds", default=9, show_default=True, help="Bursts of each program.")
@click.option("--only", multiple=True, help="A program, or a case ('training 1.5'); may repeat.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON, and only them.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=RESULTS,
    help="Folder for memory.json (memory-partial.json with --only).",
)
def main(rounds: int, only: tuple[str, ...], as_json: bool, output: Path) -> None:
    """Measures paging against an optimal pager, LRU, and enough memory."""
    torch.set_num_threads(1)
    console = Console(stderr=as_json)
    before = load()
    cases = []
    with console.status("…") as status:
        peaks = {name: peak_bytes(name) for name in FACTORS}
        for name, factor in parse(only):
            status.update(f"{name}, {factor} x the memory")
            cases.append(measure(name, factor, peaks[name], rounds))
        status.update("two devices")
        peer_kib, swapped_kib = two_devices(peaks["decoding"])
        copies = peer_copies(2 * rounds)
    results = Results(cases, peer_kib, swapped_kib, copies, rounds, before)
    output.mkdir(parents=True, exist_ok=True)
    path = output / ("memory-partial.json" if only else "memory.json")
    encoded = msgspec.json.format(msgspec.json.encode(results), indent=1)
    path.write_bytes(encoded + b"\n")
    if as_json:
        print(encoded.decode())
    else:
        console.print(f"load average at start: {before:.2f}", highlight=False)
        for table in report.tables(results).values():
            for line in (*table, ""):
                console.print(line, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
