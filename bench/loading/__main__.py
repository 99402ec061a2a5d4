"""How long a device waits for data that lies on the disk: our loader beside torch's DataLoader.

A small CNN trains for one epoch on pictures of which only a share may be in memory: the files'
pages are dropped before the epoch and whenever more than the share is cached, so that every byte
comes from the disk. Each format is read by our loader and by a DataLoader with two workers, pinned
memory and prefetching, on the same device with the same model.

Idle time is the device's own count; what it is idle with a batch that it holds already is measured
in the same process before and after, and is not the loader's doing.

    python -m bench.loading [--format npy] [--mib 640] [--share-mib 256] [--rounds 3]
                            [--output bench/results/loading.json]
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from bench.loading import data, report
from bench.loading.report import Case, Reader, Results

MiB = 2**20
LOOK_EVERY_S = 0.05
LOOK_AT_MANY_EVERY_S = 0.5  # at thousands of files: looking must not be work
READ_BYTES = MiB
_CACHESTAT = 451  # a system call of Linux 6.5 without a function of its own
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Share:
    """Keeps the files' pages in memory below a share, and notes the most that there were."""

    def __init__(self, files: Sequence[Path], share_bytes: int) -> None:
        self._fds = [os.open(path, os.O_RDONLY) for path in files]
        self._share_bytes = share_bytes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._stop = threading.Event()
        self.most_bytes = 0

    def cached(self) -> int:
        """Bytes of the files that are in the page cache."""
        whole = (ctypes.c_uint64 * 2)(0, 0)  # offset 0, to the end
        found = (ctypes.c_uint64 * 5)()  # the first is the number of cached pages
        total = 0
        for fd in self._fds:
            if self._libc.syscall(_CACHESTAT, fd, whole, found, 0):
                raise OSError(ctypes.get_errno(), "cachestat")
            total += found[0] * _PAGE
        return total

    def drop(self) -> None:
        for fd in self._fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _run(self) -> None:
        every_s = LOOK_EVERY_S if len(self._fds) < 100 else LOOK_AT_MANY_EVERY_S
        while not self._stop.wait(every_s):
            now = self.cached()
            self.most_bytes = max(self.most_bytes, now)
            if now > self._share_bytes / 2:  # the rest is for what comes until the next look
                self.drop()

    def __enter__(self) -> Share:
        self.drop()
        if self.cached() > self._share_bytes / 10:
            raise click.ClickException("the data could not be dropped from memory")
        self.most_bytes = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for fd in self._fds:
            os.close(fd)


def disk_mib_per_s(files: Sequence[Path]) -> float:
    """Reads all files once, in order, from the disk."""
    with Share(files, sum(f.stat().st_size for f in files) * 2):
        start, total = time.perf_counter(), 0
        for path in files:
            with path.open("rb", buffering=0) as file:
                while piece := file.read(READ_BYTES):
                    total += len(piece)
        return total / MiB / (time.perf_counter() - start)


def run(folder: Path, kind: str, who: str, share_bytes: int) -> tuple[dict[str, Any], int]:
    """One training in a process of its own, and the most bytes of the data that were cached."""
    with Share(data.files(folder), share_bytes) as share:
        done = subprocess.run(
            [sys.executable, "-m", "bench.loading.program", str(folder), kind, who],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
        )
    return json.loads(done.stdout), share.most_bytes


def summary(runs: Sequence[tuple[dict[str, Any], int]]) -> Reader:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    resident = [side for found, _ in runs for side in found["resident"]]
    loading = [found["loading"] for found, _ in runs]
    return Reader(
        idle=median([one["idle"] for one in loading]),
        resident_idle=median([one["idle"] for one in resident]),
        waiting=median([one["waiting"] for one in loading]),
        step_ms=median([one["step_ms"] for one in loading]),
        resident_step_ms=median([one["step_ms"] for one in resident]),
        most_cached_mib=max(most for _, most in runs) / MiB,
    )


def measure(kind: str, mib: int, share_mib: int, rounds: int) -> Case:
    with tempfile.TemporaryDirectory(dir=os.environ.get("SHOAL_BENCH_DATA")) as made:
        folder = Path(made)
        data.write(folder, kind, mib * MiB // data.PICTURE_BYTES)
        os.sync()
        files = data.files(folder)
        size_mib = sum(f.stat().st_size for f in files) / MiB
        speed = disk_mib_per_s(files)
        runs: dict[str, list[tuple[dict[str, Any], int]]] = {"ours": [], "torch": []}
        for _ in range(rounds):
            for who, found in runs.items():
                found.append(run(folder, kind, who, share_mib * MiB))
    return Case(kind, size_mib, speed, summary(runs["ours"]), summary(runs["torch"]))


@click.command()
@click.option("--format", "kinds", multiple=True, type=click.Choice(data.FORMATS))
@click.option("--mib", default=640, help="Pixels of the data.")
@click.option("--share-mib", default=256, help="Of the data that may be in memory.")
@click.option("--rounds", default=3)
@click.option("--output", type=click.Path(path_type=Path), help="Adds to what is there.")
def main(
    kinds: tuple[str, ...], mib: int, share_mib: int, rounds: int, output: Path | None
) -> None:
    """Prints how much of the time devices are idle for data."""
    results = Results(share_mib, rounds, [])
    if output is not None and output.exists():
        results = report.load(output)
    for kind in kinds or data.FORMATS:
        case = measure(kind, mib, share_mib, rounds)
        results.cases = [c for c in results.cases if c.format != kind] + [case]
        results.cases.sort(key=lambda c: data.FORMATS.index(c.format))
        results.share_mib, results.rounds = share_mib, rounds
        Console().print(msgspec.to_builtins(case))
        if output is not None:
            text = msgspec.json.format(msgspec.json.encode(results), indent=1)
            output.write_bytes(text + b"\n")
    print("\n".join(report.lines(results)))


if __name__ == "__main__":
    main()
