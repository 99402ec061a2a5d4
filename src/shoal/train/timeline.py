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

SPANS_MAX = 100_000
KINDS = ("forward", "backward", "compute", "exchange", "optimizer", "loading", "checkpoint")


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
class _Pair:
    kind: str
    step: int
    start: torch.Event
    stop: torch.Event


class Stopwatch:
    """Times work on one device without making the thread that issues it wait.

    A thread of its own waits for the events and reads this program's clock.
    """

    def __init__(self, track: str, timeline: Timeline) -> None:
        self.track = track
        self._timeline = timeline
        self._queue: SimpleQueue[_Pair | None] = SimpleQueue()
        self._took: dict[int, tuple[float, float]] = {}  # step -> first start, last stop
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"shoal-time-{track}", daemon=True)
        self._thread.start()

    def time(self, kind: str, step: int, start: torch.Event, stop: torch.Event) -> None:
        self._queue.put(_Pair(kind, step, start, stop))

    def take(self, step: int) -> float | None:
        """Seconds from the step's first work to its last on this device, if known already."""
        with self._lock:
            for old in [s for s in self._took if s < step - 8]:
                del self._took[old]
            found = self._took.pop(step, None)
        return found[1] - found[0] if found is not None else None

    def close(self, wait: bool = True) -> None:
        self._queue.put(None)
        if wait:
            self._thread.join(5)

    def _run(self) -> None:
        while (pair := self._queue.get()) is not None:
            try:
                pair.start.synchronize()
                start = time.perf_counter()
                pair.stop.synchronize()
            except RuntimeError:  # lost, or an operator failed: whoever uses the result is told
                continue
            stop = time.perf_counter()
            self._timeline.add(Span(self.track, pair.kind, start, stop, pair.step))
            with self._lock:
                first, last = self._took.get(pair.step, (start, stop))
                self._took[pair.step] = min(first, start), max(last, stop)
