"""The timeline of a training: spans of compute, exchange, loading and waiting."""

from __future__ import annotations

import bisect
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.train.group.devices import elapsed_s, record

SPANS_MAX = 100_000
STEPS_KEPT = 8  # whose times are not taken yet
PENDING_MAX = 10_000  # timings that are not collected yet


@dataclass(frozen=True, slots=True)
class Span:
    """Work on one track. Times are seconds of `time.perf_counter`.

    >>> shoal.train.Span("group 0", "forward", 2.0, 2.5, step=1).seconds
    0.5
    """

    track: str
    kind: str
    start_s: float
    stop_s: float
    step: int

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s


class Timeline:
    """The last spans of a training, from all its threads.

    >>> timeline = shoal.train.Timeline()
    >>> with timeline.span("loader", "read", step=1):
    ...     batch = next(iter(loader))
    >>> timeline.write_chrome_trace("trace.json")
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []  # by their end
        self._lock = threading.Lock()
        self._sources: list[Callable[[], None]] = []
        self.origin_s = time.perf_counter()

    def add_source(self, source: Callable[[], None]) -> None:
        """Call `source`, which adds its spans, whenever spans are read."""
        self._sources.append(source)

    def remove_source(self, source: Callable[[], None]) -> None:
        self._sources = [s for s in self._sources if s != source]

    def collect(self) -> None:
        """Let the sources add their spans; once a step is enough."""
        for source in self._sources:
            source()

    def add(self, span: Span) -> None:
        with self._lock:
            bisect.insort(self._spans, span, key=lambda s: s.stop_s)
            if len(self._spans) > 2 * SPANS_MAX:
                del self._spans[:SPANS_MAX]

    @property
    def spans(self) -> list[Span]:
        self.collect()
        with self._lock:
            return sorted(self._spans, key=lambda s: s.start_s)

    def since(self, start_s: float) -> list[Span]:
        """Return the spans that ended after `start_s`, newest first."""
        self.collect()
        found = []
        with self._lock:
            for span in reversed(self._spans):
                if span.stop_s < start_s:
                    break
                found.append(span)
        return found

    @contextmanager
    def span(self, track: str, kind: str, step: int) -> Iterator[None]:
        """Time the block.

        >>> with timeline.span("host", "loading", 3):
        ...     batch = next(batches)
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(Span(track, kind, start, time.perf_counter(), step))

    def write_chrome_trace(self, path: str | Path) -> None:
        """Write a file for chrome://tracing or ui.perfetto.dev."""
        spans = self.spans
        tracks = {name: i for i, name in enumerate(sorted({s.track for s in spans}))}
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": i, "args": {"name": name}}
            for name, i in tracks.items()
        ]
        events += [
            {
                "name": s.kind,
                "cat": s.kind,
                "ph": "X",
                "pid": 1,
                "tid": tracks[s.track],
                "ts": (s.start_s - self.origin_s) * 1e6,
                "dur": s.seconds * 1e6,
                "args": {"step": s.step},
            }
            for s in spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@dataclass(frozen=True, slots=True)
class _Pair:
    kind: str
    step: int
    start: torch.Event
    stop: torch.Event
    last: bool


class Stopwatch:
    """Times work on one device without a wait.

    `collect` takes in finished work. All times are the device's own; an event at which both clocks were
    read converts them to this program's clock.
    """

    def __init__(self, track: str, timeline: Timeline, device: torch.device) -> None:
        self.track = track
        self._timeline = timeline
        self._pending: deque[_Pair] = deque(maxlen=PENDING_MAX)
        self._first: _Pair | None = None  # of the present step
        self._took: dict[int, float] = {}  # seconds of the last steps
        self._lock = threading.Lock()
        self._anchor = record(device)
        self._anchor.synchronize()
        self._anchor_s = time.perf_counter()
        timeline.add_source(self.collect)

    def time(
        self, kind: str, step: int, start: torch.Event, stop: torch.Event, last: bool = True
    ) -> None:
        """Time from `start` to `stop`, both on this device; `last` ends the step's work."""
        self._pending.append(_Pair(kind, step, start, stop, last))

    def take(self, step: int) -> float | None:
        """Return the seconds from the step's first work on this device to its last, if known."""
        self.collect()
        with self._lock:
            return self._took.pop(step, None)

    def collect(self) -> None:
        """Take in the work that is done by now."""
        with self._lock:
            while self._pending:
                try:
                    if not self._pending[0].stop.query():
                        return
                    self._measure(self._pending[0])
                except (
                    RuntimeError
                ):  # lost, or an operator failed: whoever reads the result gets it
                    pass
                self._pending.popleft()

    def close(self) -> None:
        self.collect()
        self._timeline.remove_source(self.collect)

    def _measure(self, pair: _Pair) -> None:
        seconds, worked_s = elapsed_s(pair.start, pair.stop)
        stop_s = self._anchor_s + elapsed_s(self._anchor, pair.stop)[0]
        self._anchor, self._anchor_s = pair.stop, stop_s
        # A wait for others is a gap in computing, but belongs to the exchange.
        shown_s = seconds if pair.kind == "exchange" else worked_s
        self._timeline.add(Span(self.track, pair.kind, stop_s - shown_s, stop_s, pair.step))
        if self._first is None or self._first.step != pair.step:
            self._first = pair
        if pair.last:
            self._took[pair.step] = elapsed_s(self._first.start, pair.stop)[0]
            if len(self._took) > STEPS_KEPT:
                del self._took[next(iter(self._took))]
