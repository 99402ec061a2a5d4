"""Make the table of docs/figures.md about loading. Measures nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.figures import RESULTS

NAMES = {
    "npy": "`.npy`",
    "safetensors": "safetensors",
    "parquet": "Parquet",
    "tar": "tar shards",
    "folder": "folder of PPM images",
}


class Reader(msgspec.Struct):
    """A training that reads from the disk. Parts of the whole time, medians over the rounds."""

    idle: float  # the device did nothing
    resident_idle: float  # the same, in this process, with a batch that is on the device already
    waiting: float  # the program waited for its next batch
    step_ms: float
    resident_step_ms: float
    most_cached_mib: float  # of the data, in the system's page cache

    @property
    def idle_for_data(self) -> float:
        """Idle time that a batch on the device already would have saved."""
        return self.idle - self.resident_idle


class Case(msgspec.Struct):
    format: str
    data_mib: float
    disk_mib_per_s: float  # the same files read alone, in order, by 1 MiB
    ours: Reader
    torch: Reader


class Results(msgspec.Struct):
    share_mib: float  # of the data that may be in memory
    rounds: int
    cases: list[Case]


def percent(value: float) -> str:
    return f"{value * 100:.1f} %"


def row(case: Case) -> str:
    cells = [NAMES[case.format], f"{case.data_mib:.0f} MiB", f"{case.disk_mib_per_s:.0f} MiB/s"]
    for reader in (case.ours, case.torch):
        cells += [percent(reader.idle_for_data), percent(reader.waiting), f"{reader.step_ms:.1f}"]
    return f"| {' | '.join(cells)} |"


def lines(results: Results) -> list[str]:
    """Return the table of docs/figures.md."""
    return [
        "| data | size | disk alone | **Shoal**: device idle for data | program waits | ms per step "
        "| `DataLoader`: device idle for data | program waits | ms per step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *map(row, results.cases),
    ]


def load(path: Path = RESULTS / "loading.json") -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)
