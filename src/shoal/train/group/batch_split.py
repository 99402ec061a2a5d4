"""How many samples each group gets: a fitted cost t = a + b·samples, and the batch split. Pure.

The split minimizes the slowest group's time. Gradients are weighted by samples, so every split gives
the result of one large batch.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

# Tuned on recorded times of steps (bench/train/shares.py). A fit that adapts faster follows noise, and
# a slower one falls behind; near these numbers neither matters much.
HISTORY = 12  # observations that a fit remembers
FORGET = 0.8  # weight of an observation against the one after it
PRIOR = 0.1  # weight of the prior that zero samples take no time, against one observation
NEAR = 1.1  # the line holds for sample counts within this factor of observed ones
#: An observation that deviates by this, and by more than noise, is a stall, or the device has changed.
#: The fit learns smaller deviations slowly: on a busy machine they come and go.
JUMP = 0.35
SURE = 4.0  # standard deviations that are more than noise
CHANGED = 2  # outliers in a row on the same side: a single one is a stall
AGREE = 0.35  # outliers within this factor agree
NOISE_START, NOISE_MIN = 0.1, 0.02  # relative deviation of one time: before it is known, at least
SURE_GAIN = 1.0  # standard deviations by which a gain must exceed zero
ROUNDING = 1e-9  # samples
SIZES = 16  # sub-batches are multiples of 1/16 of the batch: each new size costs a warm-up


@dataclass(slots=True)
class CostFit:
    """Seconds of a group for n samples: `fixed_s + sample_s * n`, learned from its steps."""

    fixed_s: float = 0.0
    sample_s: float = 1.0
    known: bool = False
    _seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _off: deque[float] = field(
        default_factory=lambda: deque(maxlen=HISTORY)
    )  # |time/predicted - 1|
    _odd: list[tuple[int, float]] = field(default_factory=list)  # the last outliers in a row

    def predict(self, samples: int) -> float:
        """Return the seconds for so many samples; no samples take no time."""
        return self.fixed_s + self.sample_s * samples if samples > 0 else 0.0

    @property
    def noise(self) -> float:
        """The typical deviation of one time from the line, relative to it."""
        if len(self._off) < 4:
            return NOISE_START
        return max(
            NOISE_MIN, 1.5 * statistics.median(self._off)
        )  # 1.5 medians: one standard deviation

    @property
    def error(self) -> float:
        """The standard error of the line."""
        return self.noise / math.sqrt(max(1, len(self._seen)))

    def observe(self, samples: int, seconds: float) -> None:
        """Learn that `samples` took `seconds`. Ignore impossible values."""
        if samples < 1 or not math.isfinite(seconds) or seconds <= 0:
            return
        near = self.known and self._near(samples)
        if near:
            off = seconds / self.predict(samples) - 1
            limit = max(JUMP, SURE * self.noise)
            self._off.append(abs(off))
            if abs(off) > limit:
                self._odd = [o for o in self._odd if (self._rate(*o) > 1) == (off > 0)]
                self._odd.append((samples, seconds))
                if len(self._odd) < CHANGED:
                    return
                self._seen.clear()
                self._seen.extend(self._kept_outliers())
        self._odd.clear()
        self._seen.append((samples, seconds))
        self._fit()
        self.known = True

    def _rate(self, samples: int, seconds: float) -> float:
        """Return a time relative to the prediction."""
        return seconds / self.predict(samples)

    def _kept_outliers(self) -> list[tuple[int, float]]:
        """Return the outliers before the last one that describe a changed device. If they agree, none:
        the change came in the middle of the first."""
        rates = [self._rate(*odd) for odd in self._odd]
        return [] if max(rates) < min(rates) * (1 + AGREE) else self._odd[:-1]

    def _near(self, samples: int) -> bool:
        """Return whether a similar size was observed. For others the line may be wrong."""
        counts = [n for n, _ in self._seen]
        return min(counts) <= NEAR * samples and samples <= NEAR * max(counts)

    def _fit(self) -> None:
        """Fit a line with a prior through zero: for sizes that hardly differ, noise would decide the
        fixed cost otherwise."""
        seen = [(0, 0.0), *self._seen]
        weights = [PRIOR, *(FORGET**age for age in reversed(range(len(seen) - 1)))]
        total = sum(weights)
        mean_n = sum(w * n for w, (n, _) in zip(weights, seen, strict=True)) / total
        mean_t = sum(w * t for w, (_, t) in zip(weights, seen, strict=True)) / total
        pairs = list(zip(weights, seen, strict=True))
        spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in pairs)
        slope = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in pairs) / spread
        # A negative fixed cost, or samples that take no time, come from noise.
        slope = min(max(slope, 0.1 * mean_t / mean_n), mean_t / mean_n)
        self.sample_s, self.fixed_s = slope, max(0.0, mean_t - slope * mean_n)


def divide(
    total: int, fits: Sequence[CostFit], limits: Sequence[int | None] | None = None
) -> tuple[int, ...]:
    """Split `total` samples so that the slowest group is fastest. A group may get none.

    Args:
        limits: the most samples of each group (its memory); None is no limit.

    >>> divide(30, [CostFit(0.0, 1.0), CostFit(0.0, 2.0)])
    (20, 10)
    """
    caps = [total if c is None else c for c in (limits or [None] * len(fits))]
    if len(caps) != len(fits) or total < 0:
        raise ValueError(f"{total} samples, {len(fits)} groups, {len(caps)} limits")
    if sum(caps) < total:
        raise ValueError(
            f"a batch of {total} does not fit: the groups' memories hold {sum(caps)} samples. Use a "
            "smaller batch or more micro_batches"
        )
    counts = _level(total, fits, caps)
    while sum(counts) < total:  # at most about one sample for each group is left
        open_groups = [i for i in range(len(fits)) if counts[i] < caps[i]]
        cheapest = min(open_groups, key=lambda i: (fits[i].predict(counts[i] + 1), i))
        counts[cheapest] += 1
    return tuple(counts)


def _level(total: int, fits: Sequence[CostFit], caps: Sequence[int]) -> list[int]:
    """Return the most whole samples that all groups finish within the same time, at most `total`.

    The samples done by a time are a piecewise linear function. It bends where a group begins (its fixed
    cost is over) and where it is full. The time lies on the segment that reaches `total`.
    """
    bends = [(fit.fixed_s, 1 / fit.sample_s) for fit, cap in zip(fits, caps, strict=True) if cap]
    bends += [
        (fit.fixed_s + cap * fit.sample_s, -1 / fit.sample_s)
        for fit, cap in zip(fits, caps, strict=True)
        if cap
    ]
    seconds = done = rate = 0.0
    for at, change in sorted(bends):
        if rate > 0 and done + rate * (at - seconds) >= total:
            break
        done += rate * (at - seconds)
        seconds, rate = at, rate + change
    if rate > 0:
        seconds += (total - done) / rate
    counts = [
        max(0, min(cap, math.floor((seconds - fit.fixed_s) / fit.sample_s + ROUNDING)))
        for fit, cap in zip(fits, caps, strict=True)
    ]
    while sum(counts) > total:  # rounding took a sample too many
        counts[max(range(len(counts)), key=lambda i: counts[i])] -= 1
    return counts


@dataclass(slots=True)
class Divider:
    """Splits every batch, learns from the times, and changes the split when that pays.

    >>> divider = Divider(2)
    >>> divider.split(16)
    (8, 8)
    >>> for _ in range(2):  # the first step with new shapes does not count
    ...     divider.observe((8, 8), (0.1, 0.3))
    >>> divider.split(16)
    (12, 4)
    """

    groups: int
    limits: tuple[int | None, ...] | None = None
    gain_min: float = 0.04  # that a new split must promise
    gain_new_min: float = 0.06  # the same for a split with new sizes: they cost a warm-up
    probe_every: int = 20  # steps after which a group without samples gets one
    least: int = 0  # samples that every group gets (batch normalization needs two)
    speeds: tuple[float, ...] | None = None  # the assumption before the first observation
    fits: list[CostFit] = field(default_factory=list)
    _current: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _warm: set[tuple[int, int]] = field(default_factory=set)  # (group, samples) seen before
    _steps: int = 0

    def __post_init__(self) -> None:
        if not self.fits:
            self.fits = [CostFit() for _ in range(self.groups)]

    def split(self, total: int) -> tuple[int, ...]:
        """Split the next batch of `total` samples."""
        if self.groups == 1:
            return divide(total, self.fits, self.limits)
        self._steps += 1
        current = self._current.get(total)
        if not all(fit.known for fit in self.fits):
            speeds = self.speeds or (1.0,) * self.groups
            best = divide(total, [CostFit(0.0, 1 / speed) for speed in speeds], self.limits)
            best = self._keep_half(self._coarse(best), None) if self.speeds else best
        else:
            best = self._coarse(divide(total, self.fits, self.limits))
            best = self._keep_half(best, current)
            if current is not None and not self._pays(best, current):
                best = current
        self._current[total] = best
        if self._steps % self.probe_every == 0 and 0 in best and total >= self.groups:
            return self._probe(best)
        return best

    def _pays(self, best: tuple[int, ...], current: tuple[int, ...]) -> bool:
        """Return whether to change the split: the gain must be worth a warm-up and exceed noise."""
        gain = 1 - self.slowest(best) / self.slowest(current)
        # The slowest group exceeds the others by about twice the gain of a level split.
        errors = sorted((fit.error for fit in self.fits), reverse=True)[:2]
        warm = all((group, n) in self._warm for group, n in enumerate(best) if n > 0)
        least = self.gain_min if warm else self.gain_new_min
        return gain >= max(least, SURE_GAIN / 2 * math.hypot(*errors))

    def slowest(self, counts: Sequence[int]) -> float:
        """Return the predicted seconds of a split."""
        return max(fit.predict(n) for fit, n in zip(self.fits, counts, strict=True))

    def observe(self, counts: Sequence[int], seconds: Sequence[float | None]) -> None:
        """Learn the times of a split; None for groups that were not measured.

        A group's first step with a new number of samples does not count: it prepares calls for new
        shapes. A slowdown of all groups says nothing about the split.
        """
        common = self._common(counts, seconds)
        for group, (fit, n, s) in enumerate(zip(self.fits, counts, seconds, strict=True)):
            if s is None:
                continue
            if (group, n) in self._warm:
                fit.observe(n, s / common)
            self._warm.add((group, n))

    def _common(self, counts: Sequence[int], seconds: Sequence[float | None]) -> float:
        """Return the factor by which every group was slower than predicted, at least."""
        ratios = [
            s / fit.predict(n) if s is not None and fit.known else 0.0
            for fit, n, s in zip(self.fits, counts, seconds, strict=True)
            if n > 0
        ]
        return max(1.0, min(ratios, default=1.0))

    def without(self, group: int) -> Divider:
        """Return the divider of the remaining groups when one is lost."""
        keep = [i for i in range(self.groups) if i != group]
        limits = tuple(self.limits[i] for i in keep) if self.limits is not None else None
        speeds = tuple(self.speeds[i] for i in keep) if self.speeds is not None else None
        return replace(
            self,
            groups=len(keep),
            limits=limits,
            speeds=speeds,
            fits=[self.fits[i] for i in keep],
            _current={},
            _warm=set(),
        )

    def _coarse(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Round to few different sizes, so that repeated ones are warm; the largest takes the rest."""
        quantum = sum(counts) // SIZES
        if quantum < 2:
            return counts
        largest = max(range(self.groups), key=lambda i: counts[i])
        changed = [round(n / quantum) * quantum or n for n in counts]
        changed[largest] = 0
        changed[largest] = sum(counts) - sum(changed)
        limits = self.limits or (None,) * self.groups
        fits = all(c is None or n <= c for n, c in zip(changed, limits, strict=True))
        return tuple(changed) if fits and changed[largest] > 0 else counts

    def _keep_half(
        self, counts: tuple[int, ...], current: tuple[int, ...] | None
    ) -> tuple[int, ...]:
        """Let no group lose more than half of its samples at once. One outlier must not remove a group,
        and smaller changes separate the fixed cost from the cost per sample."""
        least = min(self.least, sum(counts) // self.groups)
        floors = [max(least, n // 2) for n in current or counts]
        changed = [max(n, floor) for n, floor in zip(counts, floors, strict=True)]
        while sum(changed) > sum(counts):
            most = max(range(self.groups), key=lambda i: changed[i] - floors[i])
            changed[most] -= 1
        return tuple(changed)

    def _probe(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        changed = list(counts)
        for i, n in enumerate(counts):
            if n == 0:
                changed[i] = 1
                changed[max(range(len(changed)), key=lambda j: changed[j])] -= 1
        return tuple(changed)


def weights(counts: Sequence[int | float]) -> tuple[float, ...]:
    """Return the weight of each sub-batch's mean in the mean of the whole batch; the sum is one."""
    total = sum(counts)
    if total <= 0:
        raise ValueError("a batch without samples has no mean")
    return tuple(n / total for n in counts)


def chunk_sizes(samples: int, chunks: int) -> tuple[int, ...]:
    """Return the sizes of micro-batches: as equal as whole samples allow, none empty.

    >>> chunk_sizes(7, 3)
    (3, 2, 2)
    """
    chunks = min(chunks, samples)
    if chunks < 1:
        return ()
    base, more = divmod(samples, chunks)
    return tuple(base + (1 if i < more else 0) for i in range(chunks))
