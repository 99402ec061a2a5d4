"""The progress bar of `fit`: loss, samples a second, how busy the devices are, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shoal.train.group.timeline import Timeline
from shoal.train.run.report import WORK

WINDOW = 20  # steps over which speed is measured
LINE_EVERY_S = 10.0  # without a terminal; the first line comes when there is a speed


class ProgressBar:
    """A bar in a terminal or notebook, or a line now and then. At the end always one line."""

    def __init__(
        self,
        total: int | None,
        timeline: Timeline,
        enabled: bool = True,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._enabled = enabled
        self._total = total
        self._skipped = 0
        self._done: list[tuple[float, int]] = []  # the first and the last step: loss, steps so far
        self._samples = 0
        self._started = time.monotonic()
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
        self._last_line = -LINE_EVERY_S

    def skip(self, steps: int) -> None:
        """Skip the steps of an earlier run."""
        self._skipped = steps
        self._bar.update(self._task, completed=steps)
        if steps and self._lines:
            self._console.print(f"resumes after step {steps}", highlight=False)

    def step(self, number: int, epoch: int, loss: float, samples: int) -> None:
        """Show that step `number` is done, counted from the first run on."""
        now = time.perf_counter()  # the clock of the timeline's spans
        self._recent.append((now, samples))
        self._samples += samples
        self._done = [*self._done[:1], (loss, number + 1)]
        status = f"loss {loss:.4g}  {self.samples_per_s:,.0f} samples/s"
        busy = self.busy()
        if busy:
            status += "  devices busy " + " ".join(f"{fraction * 100:.0f}%" for fraction in busy)
        done = number + 1
        self._bar.update(self._task, completed=done, description=f"epoch {epoch}", status=status)
        if self._lines and len(self._recent) > 1 and now - self._last_line > LINE_EVERY_S:
            self._last_line = now
            of = f"/{self._total}" if self._total else ""
            left = self._left(done)
            self._console.print(
                f"epoch {epoch} step {done}{of}: {status}" + (f"  {left} left" if left else ""),
                highlight=False,
                soft_wrap=True,
            )

    def _left(self, done: int) -> str:
        """Return the time that the remaining steps will take, by the speed of the last ones."""
        if not self._total or len(self._recent) < 2:
            return ""
        step_s = (self._recent[-1][0] - self._recent[0][0]) / (len(self._recent) - 1)
        return str(timedelta(seconds=round((self._total - done) * step_s)))

    def _summary(self) -> str:
        seconds = time.monotonic() - self._started
        (first, _), (last, done) = self._done[0], self._done[-1]
        return (
            f"{done - self._skipped} steps in {timedelta(seconds=round(seconds))}: "
            f"loss {first:.4g} → {last:.4g}, {self._samples / max(seconds, 1e-9):,.0f} samples/s"
        )

    @property
    def samples_per_s(self) -> float:
        if len(self._recent) < 2:
            return 0.0
        seconds = self._recent[-1][0] - self._recent[0][0]
        return sum(n for _, n in list(self._recent)[1:]) / max(seconds, 1e-9)

    def busy(self) -> Sequence[float]:
        """Return the fraction of the last steps' time in which each device computed."""
        if len(self._recent) < 2:
            return []
        since, until = self._recent[0][0], self._recent[-1][0]
        busy: dict[str, float] = {}
        for span in self._timeline.since(since):
            if span.kind in WORK:
                seconds = min(span.stop_s, until) - max(span.start_s, since)
                busy[span.track] = busy.get(span.track, 0.0) + max(0.0, seconds)
        return [min(1.0, busy[track] / max(until - since, 1e-9)) for track in sorted(busy)]

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._enabled and self._done:
            self._console.print(self._summary(), highlight=False, soft_wrap=True)
