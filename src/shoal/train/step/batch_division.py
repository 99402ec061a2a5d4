"""A batch divided over the groups: shares that follow their times, and pieces that fit their memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.train.data import batches
from shoal.train.group import batch_split
from shoal.train.group.errors import GroupError, TrainError
from shoal.train.model.replicas import Part, Replica
from shoal.train.step.micro_batches import Pieces

_log = logging.getLogger("shoal.train")
#: Speeds that differ by less are taken for equal until steps were timed: they are measured in a moment.
UNEQUAL = 1.25
MEASURES_KEPT = 4  # steps after which a time that is still unknown is given up


@dataclass(slots=True)
class Prepared:
    """A batch whose parts are on their way to the devices."""

    batch: Any  # in host memory: kept until the step is done, for a group may be lost
    samples: int
    counts: tuple[int, ...] = ()
    parts: list[list[Part]] = field(default_factory=list)
    groups: tuple[int, ...] = ()  # the groups that it was divided for


class Division:
    """Divides batches, and learns from the steps how.

    Args:
        weigh: what a part of a batch counts in the mean.
        balance: whether shares follow the groups' times.
        limits: the most samples of each group; None is no limit.
        micro_batches: how many a group of so many stages has, if memory is no matter.
    """

    def __init__(
        self,
        weigh: Callable[[Any], Any],
        balance: bool,
        limits: tuple[int | None, ...] | None,
        micro_batches: Callable[[int], int],
    ) -> None:
        self.weigh = weigh
        self._balance = balance
        self._limits = limits
        self._micro_batches = micro_batches
        self._divider = batch_split.Divider(1)
        self._pieces = Pieces()
        # Steps whose times are not known yet: shares and times by group.
        self._measured: dict[int, tuple[tuple[int, ...], list[float | None]]] = {}
        self._lock = threading.Lock()  # batches are divided ahead of their steps, in another thread

    def begin(self, speeds: Sequence[float], least: int) -> None:
        """There are groups of these speeds, as far as is known; each gets at least `least` samples."""
        believed = tuple(speeds) if max(speeds) > UNEQUAL * min(speeds) else None
        self._divider = batch_split.Divider(len(speeds), self._limits, least=least, speeds=believed)

    def drop(self, slot: int) -> None:
        """One of the groups is lost."""
        self._measured.clear()
        with self._lock:
            self._divider = self._divider.without(slot)

    # --- a batch ---

    def share_out(self, ready: Prepared, replicas: Sequence[Replica]) -> None:
        ready.counts = self._divide(ready.samples)
        wanted = [self._micro_batches(replica.stages) for replica in replicas]
        self._cut(ready, replicas, wanted)

    def share_out_by_speed(self, ready: Prepared, replicas: Sequence[Replica]) -> None:
        """For what is computed without gradients: nothing is learnt of it, and pieces are as few as
        memory allows."""
        ready.counts = batch_split.divide(ready.samples, self._divider.fits)
        self._cut(ready, replicas, [1] * len(replicas))

    def _divide(self, samples: int) -> tuple[int, ...]:
        with self._lock:
            divider = self._divider
            if not self._balance:
                return batch_split.divide(
                    samples, [batch_split.CostFit()] * divider.groups, divider.limits
                )
            return divider.shares(samples)

    def _cut(self, ready: Prepared, replicas: Sequence[Replica], wanted: Sequence[int]) -> None:
        """Micro-batches of each group with their weights in the whole batch."""
        pieces: list[list[Any]] = []
        parts = batches.split(ready.batch, ready.counts)
        for part, count, replica, n in zip(parts, ready.counts, replicas, wanted, strict=True):
            sizes = batch_split.chunk_sizes(count, self._pieces.of(replica.group.index, n))
            pieces.append(batches.split(part, sizes))
        measures = [float(self.weigh(piece)) for group in pieces for piece in group]
        try:
            weights = iter(batch_split.weights(measures))
        except ValueError:
            raise TrainError(f"weigh=… says that this batch counts {sum(measures)}") from None
        ready.parts = [[Part(piece, next(weights)) for piece in group] for group in pieces]
        ready.groups = tuple(replica.group.index for replica in replicas)

    # --- what steps teach ---

    def committed(self, step: int, ready: Prepared, replicas: Sequence[Replica]) -> None:
        """A step counts: its times will be known later, its memory is known now."""
        self._measured[step] = ready.counts, [None] * len(ready.counts)
        for replica, pieces in zip(replicas, ready.parts, strict=True):
            if pieces:
                self._fit_into_memory(step, replica, len(pieces))

    def learn(self, steps: int, replicas: Sequence[Replica]) -> None:
        """Takes in the groups' times that are known by now, after so many steps."""
        for number, (counts, times) in list(self._measured.items()):
            for slot, replica in enumerate(replicas):
                if times[slot] is None and counts[slot] > 0:
                    times[slot] = replica.seconds(number)
            whole = all(t is not None for t, n in zip(times, counts, strict=True) if n > 0)
            if whole or number < steps - MEASURES_KEPT:
                del self._measured[number]
                with self._lock:
                    self._divider.observe(counts, times)

    def _fit_into_memory(self, step: int, replica: Replica, pieces: int) -> None:
        """A part that was more than its device's memory is computed in pieces from now on: that
        costs less than moving it out and in again."""
        group = replica.group
        used = replica.used_bytes, replica.fixed_bytes, replica.used_members[0].memory_bytes
        if self._pieces.fit(group.index, pieces, *used):
            _log.warning(
                "shoal: group %d (%s): step %d used %.0f MiB of %.0f: computes its part in %d pieces",
                group.index, replica.used_members[0], step, used[0] / 2**20, used[2] / 2**20,
                self._pieces.of(group.index, 1),
            )  # fmt: skip

    def in_more_pieces(self, error: GroupError, ready: Prepared) -> bool:
        """After a step that failed: whether it lacked memory and is done again, in more pieces."""
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            return False
        slot = ready.groups.index(error.group)
        if not self._pieces.double(error.group, len(ready.parts[slot]), ready.counts[slot]):
            return False
        _log.warning(
            "shoal: group %d (%s): too little memory for its part in step %s: computes it in %d pieces",
            error.group, ", ".join(error.devices), error.step, self._pieces.of(error.group, 1),
        )  # fmt: skip
        ready.groups = ()  # to be divided again
        return True
