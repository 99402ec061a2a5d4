"""How many samples each group gets: a fitted cost t = a + b·samples, and its division. Pure.

The groups' times are made equal by minimising the slowest. Gradients are weighted by samples, so the
result is that of one large batch whatever the division.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

# Replayed on recorded times of steps (bench/train_shares.py): what is more nimble follows noise, what
# is less falls behind, and around these numbers neither matters much.
HISTORY = 12  # observations that a fit remembers
FORGET = 0.8  # weight of an observation against the one after it
PRIOR = 0.1  # weight of the belief that no samples cost nothing, against one observation
NEAR = 1.1  # sample counts within this factor of seen ones are told by the line
#: An observation off by this, and by more than noise, is a stall, or the device has changed. What is
#: less is learnt by and by: on a busy machine it comes and goes.
JUMP = 0.35
SURE = 4.0  # deviations that are more than noise
CHANGED = 2  # times in a row that are off to the same side: a single one is a stall
AGREE = 0.35  # times off by about the same tell the same
NOISE_START, NOISE_MIN = 0.1, 0.02  # relative deviation of one time: before it is known, at least
SURE_GAIN = 1.0  # deviations that a gain must be above zero
ROUNDING = 1e-9  # samples
SIZES = 16  # parts of a batch that shares are multiples of: each new size costs a warm-up


@dataclass(slots=True)
class CostFit:
    """Seconds of a group for n samples: `fixed_s + sample_s * n`, learnt while running."""

    fixed_s: float = 0.0
    sample_s: float = 1.0
    known: bool = False
    _seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _off: deque[float] = field(
        default_factory=lambda: deque(maxlen=HISTORY)
    )  # |time/predicted - 1|
    _odd: list[tuple[int, float]] = field(default_factory=list)  # far off, in a row, until now

    def predict(self, samples: int) -> float:
        """Seconds for so many samples; nothing to do costs nothing."""
        return self.fixed_s + self.sample_s * samples if samples > 0 else 0.0

    @property
    def noise(self) -> float:
        """How far one time is from the line, typically, as a part of it."""
        if len(self._off) < 4:
            return NOISE_START
        return max(NOISE_MIN, 1.5 * statistics.median(self._off))  # 1.5 medians: one deviation

    @property
    def error(self) -> float:
        """How far the line itself may be off: the more was seen, the less."""
        return self.noise / math.sqrt(max(1, len(self._seen)))

    def observe(self, samples: int, seconds: float) -> None:
        """Takes in that `samples` took `seconds`. What cannot be true is left out."""
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
                self._seen.extend(self._told_by_odd())
        self._odd.clear()
        self._seen.append((samples, seconds))
        self._fit()
        self.known = True

    def _rate(self, samples: int, seconds: float) -> float:
        """A time against what was predicted."""
        return seconds / self.predict(samples)

    def _told_by_odd(self) -> list[tuple[int, float]]:
        """What to believe of the times before the last one, when the device has changed. If they agree,
        nothing: the change came in the middle of the first."""
        rates = [self._rate(*odd) for odd in self._odd]
        return [] if max(rates) < min(rates) * (1 + AGREE) else self._odd[:-1]

    def _near(self, samples: int) -> bool:
        """Whether such a size was seen; elsewhere the line may be off without any change."""
        counts = [n for n, _ in self._seen]
        return min(counts) <= NEAR * samples and samples <= NEAR * max(counts)

    def _fit(self) -> None:
        """The nearest line, and the belief that it begins at zero: sizes that hardly differ would
        else let noise decide about the fixed cost."""
        seen = [(0, 0.0), *self._seen]
        weights = [PRIOR, *(FORGET**age for age in reversed(range(len(seen) - 1)))]
        total = sum(weights)
        mean_n = sum(w * n for w, (n, _) in zip(weights, seen, strict=True)) / total
        mean_t = sum(w * t for w, (_, t) in zip(weights, seen, strict=True)) / total
        pairs = list(zip(weights, seen, strict=True))
        spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in pairs)
        slope = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in pairs) / spread
        # Neither a fixed cost below zero nor samples that cost nothing: noise made those.
        slope = min(max(slope, 0.1 * mean_t / mean_n), mean_t / mean_n)
        self.sample_s, self.fixed_s = slope, max(0.0, mean_t - slope * mean_n)


def divide(
    total: int, fits: Sequence[CostFit], limits: Sequence[int | None] | None = None
) -> tuple[int, ...]:
    """Whole samples for each group with the smallest slowest time; a group may get none.

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
            f"a batch of {total} does not fit: the groups' memories hold {sum(caps)} samples; use a "
            "smaller batch or more micro_batches"
        )
    counts = _level(total, fits, caps)
    while sum(counts) < total:  # at most about one sample for each group is left
        open_groups = [i for i in range(len(fits)) if counts[i] < caps[i]]
        cheapest = min(open_groups, key=lambda i: (fits[i].predict(counts[i] + 1), i))
        counts[cheapest] += 1
    return tuple(counts)


def _level(total: int, fits: Sequence[CostFit], caps: Sequence[int]) -> list[int]:
    """The most whole samples that every group finishes within the same time, not more than `total`.

    Samples done by a time are a line that bends where a group begins (its fixed cost is over) and
    where it is full: the time is found on the piece on which the line reaches `total`.
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
    """Divides every batch, learns from the times, and changes the division when it pays.

    >>> divider = Divider(2)
    >>> divider.shares(16)
    (8, 8)
    >>> for _ in range(2):  # the first step with new shapes does not count
    ...     divider.observe((8, 8), (0.1, 0.3))
    >>> divider.shares(16)
    (12, 4)
    """

    groups: int
    limits: tuple[int | None, ...] | None = None
    gain_min: float = 0.04  # that a new division must promise
    gain_new_min: float = 0.06  # the same if it has sizes that were not seen: they cost a warm-up
    probe_every: int = 20  # steps after which a group without samples is tried again
    least: int = 0  # samples that every group gets (batch normalisation needs two)
    speeds: tuple[float, ...] | None = None  # what is believed before anything was seen
    fits: list[CostFit] = field(default_factory=list)
    _current: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _warm: set[tuple[int, int]] = field(default_factory=set)  # (group, samples) seen before
    _steps: int = 0

    def __post_init__(self) -> None:
        if not self.fits:
            self.fits = [CostFit() for _ in range(self.groups)]

    def shares(self, total: int) -> tuple[int, ...]:
        """The division of the next batch of `total` samples."""
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
        """Whether to change the division: the gain must be worth a warm-up, and more than noise
        promises."""
        gain = 1 - self.slowest(best) / self.slowest(current)
        # The slowest group is above the others by about twice what levelling them gains.
        errors = sorted((fit.error for fit in self.fits), reverse=True)[:2]
        warm = all((group, n) in self._warm for group, n in enumerate(best) if n > 0)
        least = self.gain_min if warm else self.gain_new_min
        return gain >= max(least, SURE_GAIN / 2 * math.hypot(*errors))

    def slowest(self, counts: Sequence[int]) -> float:
        """Predicted seconds of a division."""
        return max(fit.predict(n) for fit, n in zip(self.fits, counts, strict=True))

    def observe(self, counts: Sequence[int], seconds: Sequence[float | None]) -> None:
        """Takes in what a division really took; None for groups that were not measured.

        A group's first step with a new number of samples does not count: it prepares calls for
        shapes that were not seen before. What slows all groups alike says nothing about shares.
        """
        common = self._common(counts, seconds)
        for group, (fit, n, s) in enumerate(zip(self.fits, counts, seconds, strict=True)):
            if s is None:
                continue
            if (group, n) in self._warm:
                fit.observe(n, s / common)
            self._warm.add((group, n))

    def _common(self, counts: Sequence[int], seconds: Sequence[float | None]) -> float:
        """How much slower than predicted every group was, at least."""
        ratios = [
            s / fit.predict(n) if s is not None and fit.known else 0.0
            for fit, n, s in zip(self.fits, counts, seconds, strict=True)
            if n > 0
        ]
        return max(1.0, min(ratios, default=1.0))

    def without(self, group: int) -> Divider:
        """The divider of the groups that are left when one is lost."""
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
        """Few different sizes, so that those that come again are warm; the largest takes the rest."""
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
        """Lets no group lose more than half of its samples at once: one odd measurement must not
        throw a group out, and smaller steps tell the fixed cost from the cost by sample."""
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
    """What each part's mean counts in the mean of the whole batch; the sum is one."""
    total = sum(counts)
    if total <= 0:
        raise ValueError("a batch without samples has no mean")
    return tuple(n / total for n in counts)


def chunk_sizes(samples: int, parts: int) -> tuple[int, ...]:
    """Sizes of micro-batches: as equal as whole samples allow, none empty.

    >>> chunk_sizes(7, 3)
    (3, 2, 2)
    """
    parts = min(parts, samples)
    if parts < 1:
        return ()
    base, more = divmod(samples, parts)
    return tuple(base + (1 if i < more else 0) for i in range(parts))
