"""How often something took how long, as Prometheus wants it: counts of all up to each bound."""

from __future__ import annotations

from bisect import bisect_left

#: Seconds, from half a millisecond to a day.
BUCKET_BOUNDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    300.0, 1800.0, 3600.0, 21600.0, 86400.0,
)  # fmt: skip


class Histogram:
    """
    >>> waits = Histogram((1.0, 10.0))
    >>> for seconds in (0.5, 1.0, 7.0, 20.0):
    ...     waits.add(seconds)
    >>> waits.buckets(), waits.count, waits.sum_s
    ([('1.0', 2), ('10.0', 3), ('+Inf', 4)], 4, 28.5)
    """

    def __init__(self, bounds_s: tuple[float, ...] = BUCKET_BOUNDS) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, int]]:
        """Return how many were at most as long as each bound."""
        names = [*(repr(bound) for bound in self._bounds_s), "+Inf"]
        return [(name, sum(self._counts[: n + 1])) for n, name in enumerate(names)]
