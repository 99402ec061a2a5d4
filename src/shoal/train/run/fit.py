"""`shoal.train.fit`: a whole training in one call."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.train.data import batches
from shoal.train.data.loading import Feed, Loader, StreamLoader, load
from shoal.train.group.errors import CheckpointError, GroupLostError, TrainError
from shoal.train.group.groups import WorkerGroups, worker_groups
from shoal.train.group.timeline import Span
from shoal.train.run.checkpoint import Checkpoints, Snapshot, restore, snapshot
from shoal.train.run.progress import ProgressBar
from shoal.train.run.report import write_html
from shoal.train.step.trainer import Trainer


@dataclass(slots=True)
class History:
    """The results of a training.

    >>> history = shoal.train.fit(model, loss, optimizer, ("x.npy", "y.npy"), groups=2)
    >>> print(history.steps, history.losses[-1], history.stopped)
    """

    losses: list[float] = field(default_factory=list)  # of each step
    validation: list[tuple[int, float]] = field(default_factory=list)  # steps done, loss
    stopped: str = "the epochs are done"
    layout: list[list[str]] = field(default_factory=list)  # devices of each group at the end
    samples_per_s: float = 0.0

    @property
    def steps(self) -> int:
        return len(self.losses)


@dataclass(slots=True)
class _Plan:
    """The arguments of `fit` that its loop uses."""

    epochs: int
    validation: Loader | StreamLoader | None
    scheduler: Any
    checkpoints: Checkpoints | None
    checkpoint_every: int | None
    early_stop: int | None
    seconds_max: float | None


def fit(
    model: nn.Module,
    loss: batches.Loss | None,
    optimizer: Optimizer,
    data: Any,
    *,
    groups: WorkerGroups | int | Literal["auto"] | Sequence[Sequence[int]] = 1,
    devices: int | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    seed: int = 0,
    validation: Any = None,
    scheduler: Any = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    resume: bool = True,
    early_stop: int | None = None,
    seconds_max: float | None = None,
    report: str | Path | None = None,
    trace: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> History:
    """Train a model on worker groups, from data to checkpoints.

    Args:
        model, loss, optimizer: as for `Trainer`.
        data: as for `load`, or a loader; `batch_size` is over all groups.
        groups, devices: as for `worker_groups`, or groups made by it.
        validation: data whose loss is computed after each epoch.
        scheduler: a learning-rate schedule of `optimizer`; steps once a training step, and
            `ReduceLROnPlateau` once an epoch.
        checkpoint: a folder. A training that finds a checkpoint there resumes from it, also in the
            middle of an epoch, unless `resume=False`.
        checkpoint_every: steps between checkpoints; by default once an epoch.
        early_stop: epochs without a better validation loss (or training loss) before fit ends.
        seconds_max: fit ends after the step that exceeds this time.
        report, trace: files for a page with plots, and for a Chrome trace.
        options: of `Trainer`: micro_batches, clip_norm, autocast, on_lost, …

    When a group is lost, `on_lost="continue"` goes on with the others. `"save"`, the default with a
    checkpoint folder, writes the last whole step there, if there is another group, and raises.
    `"stop"`, the default without one, raises.

    >>> shoal.train.fit(model, F.cross_entropy, optimizer, ("x.npy", "y.npy"), groups=2, epochs=3)
    """
    with ExitStack() as stack:
        if isinstance(groups, WorkerGroups):
            formed = groups
        else:
            formed = stack.enter_context(worker_groups(groups, devices))
        loader = load(data, batch_size, seed=seed) if not _is_loader(data) else data
        check = load(validation, batch_size, shuffle=False) if validation is not None else None
        checkpoints = Checkpoints(checkpoint, keep) if checkpoint is not None else None
        plan = _Plan(
            epochs, check, scheduler, checkpoints, checkpoint_every, early_stop, seconds_max
        )
        options.setdefault("on_lost", "save" if checkpoints is not None else "stop")
        trainer = stack.enter_context(Trainer(model, loss, optimizer, formed, **options))
        run = _Fit(trainer, loader, plan)
        if checkpoints is not None and resume:
            run.resume(checkpoints.latest())
        return run.train(progress, report, trace)


def _is_loader(data: Any) -> bool:
    return isinstance(data, (Loader, StreamLoader))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream does not know its length
        return None


class _Fit:
    """The loop of `fit`."""

    def __init__(self, trainer: Trainer, loader: Loader | StreamLoader, plan: _Plan) -> None:
        self.trainer = trainer
        self.loader = loader
        self.plan = plan
        self.history = History()
        self._position = loader.state_dict()  # of the last trained batch
        self._best = math.inf
        self._waited = 0  # epochs since the best loss
        self._started = time.monotonic()

    def resume(self, saved: Snapshot | None) -> None:
        """Resume from a checkpoint."""
        if saved is None:
            return
        try:
            extra = saved.extra
            restore(saved, self.trainer.model, self.trainer.optimizer)
            self.loader.load_state_dict(extra["loader"])
            self.trainer.steps = saved.step
            self.history.losses = [float(x) for x in extra["losses"]]
            self.history.validation = [(int(i), float(x)) for i, x in extra["validation"]]
            self._best, self._waited = float(extra["best"]), int(extra["waited"])
            self._position = self.loader.state_dict()
            if self.plan.scheduler is not None and extra["scheduler"] is not None:
                self.plan.scheduler.load_state_dict(extra["scheduler"])
            torch.set_rng_state(torch.tensor(extra["rng"], dtype=torch.uint8))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint of step {saved.step} does not come from fit: {error!r}"
            ) from None

    def train(self, progress: bool, report: str | Path | None, trace: str | Path | None) -> History:
        """Train, and write the report and the trace also after an error."""
        total, timeline = _length(self.loader), self.trainer.timeline
        bar = ProgressBar(total * self.plan.epochs if total else None, timeline, progress)
        try:
            with bar:
                self._epochs(bar)
        finally:
            self.history.layout = self.trainer.layout
            if report is not None:
                write_html(report, self.history.losses, self.history.validation, timeline.spans)
            if trace is not None:
                timeline.write_chrome_trace(trace)
        return self.history

    def _epochs(self, bar: ProgressBar) -> None:
        bar.skip(self.history.steps)
        try:
            while self.loader.epoch < self.plan.epochs and self._epoch(bar):
                pass
        except GroupLostError as error:
            self._rescue(error)
            raise
        if self.plan.checkpoints is not None:
            self._save()
            self.plan.checkpoints.wait()

    def _epoch(self, bar: ProgressBar) -> bool:
        """Train the rest of an epoch. Return whether another may follow."""
        epoch = self.loader.epoch
        sums = [0.0, 0.0]
        for batch, position in self._batches():
            step = self.trainer.step(batch)
            self._position = position
            self.history.losses.append(step.loss)
            sums = [sums[0] + step.loss * step.samples, sums[1] + step.samples]
            bar.step(step.number, epoch, step.loss, step.samples)
            self.history.samples_per_s = bar.samples_per_s
            if self.plan.scheduler is not None and not _wants_loss(self.plan.scheduler):
                self.plan.scheduler.step()
            every = self.plan.checkpoint_every
            if every is not None and self.history.steps % every == 0:
                self._save()
            limit = self.plan.seconds_max
            if limit is not None and time.monotonic() - self._started > limit:
                self.history.stopped = f"{limit:g} s have passed"
                return False
        self._position = self.loader.state_dict()
        mean = sums[0] / sums[1] if sums[1] else math.nan
        return self._after_epoch(mean)

    def _batches(self) -> Iterator[tuple[Any, dict[str, int]]]:
        """Yield batches on their way to the devices, each with the loader's position after it."""

        def read() -> Iterator[tuple[Any, dict[str, int]]]:
            for batch in self.loader:
                yield batch, self.loader.state_dict()

        feed = Feed(read(), lambda pair: (self.trainer.prepare(pair[0]), pair[1]))
        batches_ahead = iter(feed)
        while True:
            start = time.perf_counter()
            found = next(batches_ahead, None)
            stop = time.perf_counter()
            self.trainer.timeline.add(
                Span("waiting for data", "loading", start, stop, self.trainer.steps)
            )
            if found is None:
                return
            yield found

    def _after_epoch(self, mean: float) -> bool:
        value = mean
        if self.plan.validation is not None:
            value = self._validate()
            self.history.validation.append((self.history.steps, value))
        if self.plan.scheduler is not None and _wants_loss(self.plan.scheduler):
            self.plan.scheduler.step(value)
        self._waited = 0 if value < self._best else self._waited + 1
        self._best = min(self._best, value)
        if self.plan.checkpoints is not None and self.plan.checkpoint_every is None:
            self._save()
        if self.plan.early_stop is not None and self._waited >= self.plan.early_stop:
            self.history.stopped = f"no better loss for {self._waited} epochs"
            return False
        return True

    def _validate(self) -> float:
        assert self.plan.validation is not None
        total = count = 0.0
        for batch in self.plan.validation:
            samples = batches.size(batches.as_tensors(batch))
            total += self.trainer.evaluate(batch) * samples
            count += samples
        return total / count if count else math.nan

    def _save(self) -> None:
        checkpoints = self.plan.checkpoints
        if checkpoints is None:
            return
        scheduler = self.plan.scheduler
        extra = {
            "loader": self._position,
            "losses": self.history.losses,
            "validation": self.history.validation,
            "best": self._best,
            "waited": self._waited,
            "scheduler": _plain(scheduler.state_dict()) if scheduler is not None else None,
            "rng": torch.get_rng_state().tolist(),
        }
        with self.trainer.timeline.span("checkpoint", "checkpoint", self.trainer.steps):
            taken = snapshot(self.trainer.model, self.trainer.optimizer, self.history.steps, extra)
            checkpoints.save(taken)

    def _rescue(self, error: GroupLostError) -> None:
        """Write the last whole step, which the other groups still hold."""
        if self.plan.checkpoints is None or not self.trainer.drop(error.group):
            return
        self._save()
        self.plan.checkpoints.wait()
        error.add_note(
            f"the last whole step is saved in {self.plan.checkpoints.folder}; call fit again to go on"
        )


def _wants_loss(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return a schedule's state without functions, which JSON cannot hold and the program has."""
    plain = {}
    for key, value in state.items():
        if isinstance(value, (bool, int, float, str, type(None), list, tuple)):
            plain[key] = value
    if not plain:
        raise TrainError("the learning-rate schedule has no state that a checkpoint can hold")
    return plain
