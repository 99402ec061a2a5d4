"""Timing by alternating bursts, A B A B …: what else the machine does hits both sides alike."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Runs `count` iterations and returns the seconds that they took.
Burst = Callable[[int], float]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of one quantity over the rounds."""

    median: float
    q1: float
    q3: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return Spread(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, q1, q3)


@dataclass(frozen=True)
class Pair:
    """Seconds per iteration of both sides, and their ratio taken round by round."""

    base: Spread
    ours: Spread
    ratios: tuple[float, ...]  # ours / base
    iterations: int  # per burst

    @staticmethod
    def of(base: Sequence[float], ours: Sequence[float], iterations: int) -> Pair:
        ratios = tuple(o / b for o, b in zip(ours, base, strict=True))
        return Pair(Spread.of(base), Spread.of(ours), ratios, iterations)

    @property
    def slowdown(self) -> Spread:
        """Our time over the base's."""
        return Spread.of(self.ratios)

    @property
    def speedup(self) -> Spread:
        """The base's time over ours."""
        return Spread.of([1 / ratio for ratio in self.ratios])


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    rounds: int = 15
    burst_s: float = 0.25  # how long a burst of the base should take

    def count(self, seconds_per_iteration: float, least: int, most: int) -> int:
        """Iterations that fill a burst."""
        wanted = math.ceil(self.burst_s / max(seconds_per_iteration, 1e-9))
        return max(least, min(most, wanted))


def nothing() -> None:
    """Stands where there is nothing to wait for."""


def loop(
    body: Callable[[], object], finish: Callable[[], object], timed_finish: bool = True
) -> Burst:
    """A burst of `body`. `finish` waits for the device, inside the measured time or after it."""

    def burst(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            body()
        if not timed_finish:
            end = time.perf_counter()
            finish()
            return end - start
        finish()
        return time.perf_counter() - start

    return burst


def compare(
    base: Burst,
    ours: Burst,
    plan: Plan,
    *,
    least: int = 3,
    most: int = 100_000,
    warm: int = 3,
    count: int | None = None,
    ours_count: int | None = None,
) -> Pair:
    """Alternates bursts of both sides; the garbage collector rests meanwhile.

    Both run the same number of iterations, unless `ours_count` says otherwise (peers that are a
    hundred times slower would else take minutes).
    """
    base(warm)
    ours(warm)
    if count is None:
        count = plan.count(base(least) / least, least, most)
    ours_count = ours_count or count
    base_times, our_times = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(plan.rounds):
            base_times.append(base(count) / count)
            our_times.append(ours(ours_count) / ours_count)
    finally:
        gc.enable()
    return Pair.of(base_times, our_times, count)


def rotate(
    bursts: dict[str, Burst], plan: Plan, *, least: int, most: int, warm: int = 2
) -> tuple[dict[str, list[float]], int]:
    """Bursts of several sides by turns, so that each can be compared with each of the others.

    Returns the seconds per iteration of each round, and the iterations of a burst.
    """
    for burst in bursts.values():
        burst(warm)
    count = plan.count(next(iter(bursts.values()))(least) / least, least, most)
    times: dict[str, list[float]] = {name: [] for name in bursts}
    gc.collect()
    gc.disable()
    try:
        for _ in range(plan.rounds):
            for name, burst in bursts.items():
                times[name].append(burst(count) / count)
    finally:
        gc.enable()
    return times, count


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))
