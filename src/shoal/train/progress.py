"""The progress bar of `fit`: loss, samples a second, how busy the devices are, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shoal.train.report import WORK
from shoal.train.timeline import Timeline

WINDOW = 20  # steps over which speed is measured
LINE_EVERY_S = 10.0  # where there is no terminal


class ProgressBar:
    """A bar in a terminal or notebook; now and then a line elsewhere."""

    def __init__(self, total: int | None, timeline: Timeline, enabled: bool = True) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not enabled or not self._console.is_interactive,
        )
        self._task = self._bar.add_task("training", total=total, status="")
        self._timeline = timeline
        self._lines = enabled and not self._console.is_interactive
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._last_line = time.monotonic()

    def skip(self, steps: int) -> None:
        """Steps that an earlier run has done."""
        self._bar.update(self._task, completed=steps)

    def step(self, number: int, epoch: int, loss: float, samples: int) -> None:
        now = time.monotonic()
        self._recent.append((now, samples))
        status = f"loss {loss:.4g}  {self.samples_per_s:,.0f} samples/s"
        busy = self.busy()
        if busy:
            status += "  busy " + " ".join(f"{part * 100:.0f}%" for part in busy)
        self._bar.update(
            self._task, completed=number + 1, description=f"epoch {epoch}", status=status
        )
        if self._lines and now - self._last_line > LINE_EVERY_S:
            self._last_line = now
            self._console.print(f"epoch {epoch} step {number}: {status}", highlight=False)

    @property
    def samples_per_s(self) -> float:
        if len(self._recent) < 2:
            return 0.0
        seconds = self._recent[-1][0] - self._recent[0][0]
        return sum(n for _, n in list(self._recent)[1:]) / max(seconds, 1e-9)

    def busy(self) -> Sequence[float]:
        """The part of the last steps' time in which each device computed."""
        if len(self._recent) < 2:
            return []
        window = self._recent[-1][0] - self._recent[0][0]
        since = time.perf_counter() - window
        busy: dict[str, float] = {}
        for span in self._timeline.since(since):
            if span.kind in WORK:
                seconds = span.stop_s - max(span.start_s, since)
                busy[span.track] = busy.get(span.track, 0.0) + seconds
        return [min(1.0, busy[track] / max(window, 1e-9)) for track in sorted(busy)]

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bar.stop()
