"""What a run found: figures with their targets, and the file that keeps them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Literal

import msgspec

from bench.measure import Pair, Spread

RESULTS = Path(__file__).parent / "results"

Better = Literal["lower", "higher"]


class Figure(msgspec.Struct, kw_only=True):
    """One ratio. `what` says of what, `better` which way is good."""

    group: str
    name: str
    what: str
    ratio: Spread
    better: Better = "lower"
    target: float | None = None
    base_us: float | None = None
    ours_us: float | None = None
    note: str = ""

    @property
    def meets(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        if self.better == "lower":
            return self.ratio.median <= self.target
        return self.ratio.median >= self.target


class Machine(msgspec.Struct):
    """Where and how the run took place."""

    processor: str
    cores: int
    torch: str
    python: str
    load_before: float
    load_after: float
    rounds: int
    quick: bool


class Missing(msgspec.Struct):
    """A peer that could not be measured."""

    name: str
    reason: str


class Run(msgspec.Struct):
    machine: Machine
    figures: list[Figure]
    missing: list[Missing]
    checks: dict[str, bool]  # statements about the run that are true or false

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @staticmethod
    def load(path: Path) -> Run:
        return msgspec.json.decode(path.read_bytes(), type=Run)


def number(value: float) -> str:
    """Three digits, without needless ones after large numbers."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def slowdown(group: str, name: str, pair: Pair, target: float | None, note: str = "") -> Figure:
    """shoal's time over local torch's."""
    return Figure(
        group=group,
        name=name,
        what="shoal / local time",
        ratio=pair.slowdown,
        target=target,
        base_us=pair.base.median * 1e6,
        ours_us=pair.ours.median * 1e6,
        note=note,
    )


def speed(
    group: str, name: str, pair: Pair, what: str, target: float | None, note: str = ""
) -> Figure:
    """How many times as fast as the base we are."""
    return Figure(
        group=group,
        name=name,
        what=what,
        ratio=pair.speedup,
        better="higher",
        target=target,
        base_us=pair.base.median * 1e6,
        ours_us=pair.ours.median * 1e6,
        note=note,
    )


def processor_name() -> str:
    """The processor's model, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def load() -> float:
    """Processes that ran or wanted to run in the last minute, on average."""
    return os.getloadavg()[0]
