"""When which device did what: spans of compute, exchange, loading and waiting."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from shoal.train.devices import elapsed_s

SPANS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one track. Times are seconds of `time.perf_counter`."""

    track: str
    kind: str
    start_s: float
    stop_s: float
    step: int

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s


class Timeline:
    """The last spans of a training, from all its threads."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=SPANS_MAX)
        self._lock = threading.Lock()
        self.origin_s = time.perf_counter()

    def add(self, span: Span) -> None:
        with self._lock:
            self._spans.append(span)

    @property
    def spans(self) -> list[Span]:
        with self._lock:
            return sorted(self._spans, key=lambda s: s.start_s)

    def since(self, start_s: float) -> list[Span]:
        """Spans that ended after `start_s`, newest first; looks at no older ones."""
        found = []
        with self._lock:
            for span in reversed(self._spans):
                if span.stop_s < start_s:
                    break
                found.append(span)
        return found

    @contextmanager
    def span(self, track: str, kind: str, step: int) -> Iterator[None]:
        """Records what runs in the block.

        >>> with timeline.span("host", "loading", 3):
        ...     batch = next(batches)
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(Span(track, kind, start, time.perf_counter(), step))

    def write_chrome_trace(self, path: str | Path) -> None:
        """Writes a file for chrome://tracing or ui.perfetto.dev."""
        tracks = {name: i for i, name in enumerate(sorted({s.track for s in self.spans}))}
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
            for s in self.spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@dataclass(frozen=True, slots=True)
class Took:
    """How long a device was busy with a step."""

    worked_s: float  # without waiting for other devices
    whole_s: float  # from the first work to the end of the last


@dataclass(frozen=True, slots=True)
class _Pair:
    kind: str
    step: int
    start: torch.Event
    stop: torch.Event
    last: bool


class Stopwatch:
    """Times work on one device without making the thread that issues it wait.

    A thread of its own waits for the events. How long something took is the device's own time; when
    it was is this program's clock, which may be read a little late.
    """

    def __init__(self, track: str, timeline: Timeline) -> None:
        self.track = track
        self._timeline = timeline
        self._queue: SimpleQueue[_Pair | None] = SimpleQueue()
        self._first: _Pair | None = None  # of the step that is timed now
        self._worked_s = 0.0
        self._took: dict[int, Took] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"shoal-time-{track}", daemon=True)
        self._thread.start()

    def time(
        self, kind: str, step: int, start: torch.Event, stop: torch.Event, last: bool = True
    ) -> None:
        """Times from `start` to `stop`, both on this device; `last` ends the step's work."""
        self._queue.put(_Pair(kind, step, start, stop, last))

    def take(self, step: int) -> Took | None:
        """How long the step took this device, if it is known already."""
        with self._lock:
            for old in [s for s in self._took if s < step - 8]:
                del self._took[old]
            return self._took.pop(step, None)

    def close(self, wait: bool = True) -> None:
        self._queue.put(None)
        if wait:
            self._thread.join(5)

    def _run(self) -> None:
        while (pair := self._queue.get()) is not None:
            try:
                self._measure(pair)
            except RuntimeError:  # lost, or an operator failed: whoever uses the result is told
                continue

    def _measure(self, pair: _Pair) -> None:
        pair.stop.synchronize()
        stop_s = time.perf_counter()
        seconds, worked_s = elapsed_s(pair.start, pair.stop)
        # Waiting for others is a gap between computing, but a part of the exchange.
        shown_s = seconds if pair.kind == "exchange" else worked_s
        self._timeline.add(Span(self.track, pair.kind, stop_s - shown_s, stop_s, pair.step))
        if self._first is None or self._first.step != pair.step:
            self._first, self._worked_s = pair, 0.0
        self._worked_s += worked_s
        if pair.last:
            whole_s = elapsed_s(self._first.start, pair.stop)[0]
            with self._lock:
                self._took[pair.step] = Took(self._worked_s, whole_s)
