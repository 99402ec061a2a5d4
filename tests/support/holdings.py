"""What processes hold of the machine: descriptors, threads and memory, read from /proc."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Holdings:
    """What one process has, or several together."""

    descriptors: int
    threads: int
    memory_bytes: int  # private: what would be free if the process ended

    def __add__(self, other: Holdings) -> Holdings:
        return Holdings(
            self.descriptors + other.descriptors,
            self.threads + other.threads,
            self.memory_bytes + other.memory_bytes,
        )

    def __str__(self) -> str:
        return (
            f"{self.descriptors} descriptors, {self.threads} threads, "
            f"{self.memory_bytes / 2**20:.1f} MiB"
        )

    def growth_since(
        self, before: Holdings, memory_bytes_max: int, descriptors_max: int = 0
    ) -> list[str]:
        """Return what is more than it was; empty if all is flat. Memory may grow a little:
        allocators keep what they have."""
        found = []
        if self.descriptors > before.descriptors + descriptors_max:
            found.append(f"descriptors grew from {before.descriptors} to {self.descriptors}")
        if self.threads > before.threads:
            found.append(f"threads grew from {before.threads} to {self.threads}")
        grown = self.memory_bytes - before.memory_bytes
        if grown > memory_bytes_max:
            found.append(
                f"memory grew by {grown / 2**20:.1f} MiB from {before.memory_bytes / 2**20:.1f} MiB"
            )
        return found


def of(pid: int) -> Holdings:
    """Return what a process holds now."""
    directory = Path(f"/proc/{pid}")
    rollup = dict(
        line.split(":", 1)
        for line in (directory / "smaps_rollup").read_text().splitlines()[1:]
        if ":" in line
    )
    private_kib = sum(int(rollup[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    return Holdings(
        len(os.listdir(directory / "fd")), len(os.listdir(directory / "task")), private_kib * 1024
    )


def files(pid: int) -> str:
    """Return what the descriptors of a process lead to, each kind with its number."""
    kinds: Counter[str] = Counter()
    directory = Path(f"/proc/{pid}/fd")
    for name in os.listdir(directory):
        with suppress(FileNotFoundError):  # closed since: the listing's own, for one
            kinds[os.readlink(directory / name).partition(":[")[0]] += 1
    return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))


def of_all(pids: Iterable[int]) -> Holdings:
    """Return what several processes hold together."""
    total = Holdings(0, 0, 0)
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total += of(pid)
    return total
