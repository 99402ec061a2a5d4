"""Prepares batches: divides them over the groups by time and memory, and sends the micro-batches."""

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
from shoal.train.model.replicas import MicroBatch, Replica
from shoal.train.step.micro_batches import MicroBatchCounts
from shoal.units import show_bytes

_log = logging.getLogger("shoal.train")
#: Speeds that differ by less count as equal until steps are timed: the measurement is a short one.
UNEQUAL = 1.25
MEASURES_KEPT = 4  # steps after which a group's time that is still unknown is ignored


@dataclass(slots=True)
class Prepared:
    """A batch whose micro-batches are on their way to the devices.

    >>> prepared = trainer.prepare(batch)
    >>> print(trainer.step(prepared).loss)
    """

    batch: Any  # in host memory: kept until the step is done: a group may be lost
    samples: int
    counts: tuple[int, ...] = ()
    micro_batches: list[list[MicroBatch]] = field(default_factory=list)  # by group
    groups: tuple[int, ...] = ()  # the indices of the groups that it is divided for


class BatchPreparer:
    """Divides batches, and learns from the steps' times and memory how.

    Args:
        weigh: returns the weight of a micro-batch in the mean.
        balance: whether the batch split follows the groups' times.
        limits: the most samples of each group; None is no limit.
        micro_batches: returns their number for a group of so many stages, if memory does not matter.
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
        self._counts = MicroBatchCounts()
        # Steps whose times are not known yet: samples and times by group.
        self._measured: dict[int, tuple[tuple[int, ...], list[float | None]]] = {}
        self._lock = threading.Lock()  # another thread divides batches ahead of their steps

    def begin(self, speeds: Sequence[float], least: int) -> None:
        """Begin with groups of these speeds, each of which gets at least `least` samples."""
        believed = tuple(speeds) if max(speeds) > UNEQUAL * min(speeds) else None
        self._divider = batch_split.Divider(len(speeds), self._limits, least=least, speeds=believed)

    def drop(self, slot: int) -> None:
        """Leave out a group that is lost."""
        self._measured.clear()
        with self._lock:
            self._divider = self._divider.without(slot)

    # --- a batch ---

    def divide(self, ready: Prepared, replicas: Sequence[Replica]) -> None:
        ready.counts = self._split(ready.samples)
        wanted = [self._micro_batches(replica.stages) for replica in replicas]
        self._cut(ready, replicas, wanted)

    def divide_by_speed(self, ready: Prepared, replicas: Sequence[Replica]) -> None:
        """Divide a batch that needs no gradients: into as few micro-batches as memory allows. Steps
        learn nothing from it."""
        ready.counts = batch_split.divide(ready.samples, self._divider.fits)
        self._cut(ready, replicas, [1] * len(replicas))

    def _split(self, samples: int) -> tuple[int, ...]:
        with self._lock:
            divider = self._divider
            if not self._balance:
                return batch_split.divide(
                    samples, [batch_split.CostFit()] * divider.groups, divider.limits
                )
            return divider.split(samples)

    def _cut(self, ready: Prepared, replicas: Sequence[Replica], wanted: Sequence[int]) -> None:
        """Cut each group's sub-batch into micro-batches with their weights in the whole batch."""
        by_group: list[list[Any]] = []
        subs = batches.split(ready.batch, ready.counts)
        for sub, count, replica, n in zip(subs, ready.counts, replicas, wanted, strict=True):
            sizes = batch_split.chunk_sizes(count, self._counts.of(replica.group.index, n))
            by_group.append(batches.split(sub, sizes))
        measures = [float(self.weigh(batch)) for group in by_group for batch in group]
        try:
            weights = iter(batch_split.weights(measures))
        except ValueError:
            raise TrainError(
                f"weigh=… returned {sum(measures)} for the whole batch; it must be above zero"
            ) from None
        ready.micro_batches = [
            [MicroBatch(batch, next(weights)) for batch in group] for group in by_group
        ]
        ready.groups = tuple(replica.group.index for replica in replicas)

    # --- what steps teach ---

    def committed(self, step: int, ready: Prepared, replicas: Sequence[Replica]) -> None:
        """Learn from a step that counts: its memory now, its times later."""
        self._measured[step] = ready.counts, [None] * len(ready.counts)
        for replica, micro_batches in zip(replicas, ready.micro_batches, strict=True):
            if micro_batches:
                self._fit_into_memory(step, replica, len(micro_batches))

    def learn(self, steps: int, replicas: Sequence[Replica]) -> None:
        """Take in the groups' times that are known by now, after so many steps."""
        for number, (counts, times) in list(self._measured.items()):
            for slot, replica in enumerate(replicas):
                if times[slot] is None and counts[slot] > 0:
                    times[slot] = replica.seconds(number)
            whole = all(t is not None for t, n in zip(times, counts, strict=True) if n > 0)
            if whole or number < steps - MEASURES_KEPT:
                del self._measured[number]
                with self._lock:
                    self._divider.observe(counts, times)

    def _fit_into_memory(self, step: int, replica: Replica, micro_batches: int) -> None:
        """Use more micro-batches after a step that exceeded its device's memory: that costs less than
        moving tensors out and in again."""
        group = replica.group
        used = replica.used_bytes, replica.fixed_bytes, replica.used_members[0].memory_bytes
        if self._counts.fit(group.index, micro_batches, *used):
            _log.warning(
                "shoal: group %d (%s): step %d used %s of %s; the next steps have %d micro-batches",
                group.index, replica.used_members[0], step, show_bytes(used[0]),
                show_bytes(used[2]), self._counts.of(group.index, 1),
            )  # fmt: skip

    def cut_finer(self, error: GroupError, ready: Prepared) -> bool:
        """Return whether a failed step lacked memory and can be repeated in more micro-batches."""
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            return False
        slot = ready.groups.index(error.group)
        micro_batches = len(ready.micro_batches[slot])
        if not self._counts.double(error.group, micro_batches, ready.counts[slot]):
            return False
        _log.warning(
            "shoal: group %d (%s): out of memory in step %s; repeats it in %d micro-batches",
            error.group, ", ".join(error.devices), error.step, self._counts.of(error.group, 1),
        )  # fmt: skip
        ready.groups = ()  # divide it again
        return True
