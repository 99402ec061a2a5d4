"""What the head learns of tasks while they run: their types, steps, memory and speeds."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.pool.base import limits
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.nodes import Nodes
from shoal.pool.head.session_reports import SessionReports
from shoal.pool.head.tasks.lifecycle import TaskLifecycle
from shoal.pool.head.tasks.rows import Entry
from shoal.pool.planner import learned
from shoal.pool.planner.facts import WATCH_STEPS, Knowledge
from shoal.pool.planner.learned import Learned
from shoal.pool.planner.watching import Sample, Watch
from shoal.schedule.model.device_profile import DeviceProfile
from shoal.schedule.model.predictor import Predictor
from shoal.tasks.states import State

#: What a device is taken to do in a second until it is measured; times its declared speed.
_GUESSED = 1e10
#: Names of tasks whose last run is remembered.
_NAMES_KEPT = 10_000


class Observing:
    """A task that has not run is taken for what its owner's last task of that name was."""

    def __init__(
        self, lifecycle: TaskLifecycle, table: LeaseTable, nodes: Nodes, reports: SessionReports
    ) -> None:
        self.knowledge = Knowledge(Predictor([]))
        self.profiles: dict[int, DeviceProfile] = {}  # of present devices, named by kind
        self._index = lifecycle.index
        self._table = table
        self._nodes = nodes
        self._reports = reports
        self._watch = Watch(self.knowledge)
        self._samples: dict[int, Sample] = {}  # by task
        self._used_bytes: dict[int, int] = {}
        self._running: dict[int, Entry] = {}
        self._types: dict[tuple[str, str], str] = {}  # by owner and name
        self._totals: dict[tuple[str, str], float] = {}  # steps of a run that succeeded
        self._lasted_s: dict[tuple[str, str], float] = {}  # seconds of that run

    def look(self, is_running: Callable[[Entry], bool | None]) -> bool:
        """Take in what was reported. Return whether that asks for a new plan: a task was measured for
        the first time, or tasks that share a device lose by it."""
        self.look_at_devices()
        for entry in [self._running[n] for n in self._running.keys() - self._index.active]:
            self._note_end(entry)
        known = set(self._samples)
        on_device: dict[int, set[int]] = {}
        for number in self._index.active:
            entry = self._index.tasks[number]
            self._running[number] = entry
            self._sample(entry)
            if entry.task.state is State.SUSPENDED:
                continue
            for device in entry.shares:
                on_device.setdefault(device, set()).add(number)
        running = {
            device: frozenset(tasks)
            for device, tasks in on_device.items()
            if all(is_running(self._index.tasks[n]) and n in self._samples for n in tasks)
        }
        loses = self._watch.look(running, self._samples, self.profiles)
        return loses or not known.issuperset(self._samples)

    def state(self) -> Learned:
        """Return what a later head should know, without the policy's memory."""
        found = learned.of_knowledge(self.knowledge)
        names = [(*key, type_) for key, type_ in self._types.items()][-limits.LEARNED_NAMES_MAX :]
        totals = [(*key, steps) for key, steps in self._totals.items()][-limits.LEARNED_NAMES_MAX :]
        lasted = [(*key, s) for key, s in self._lasted_s.items()][-limits.LEARNED_NAMES_MAX :]
        return msgspec.structs.replace(found, names=names, totals=totals, lasted=lasted)

    def restore(self, before: Learned) -> None:
        """Take in what an earlier head has learned."""
        learned.restore(self.knowledge, before)
        self._types |= {(owner, name): type_ for owner, name, type_ in before.names}
        self._totals |= {(owner, name): steps for owner, name, steps in before.totals}
        self._lasted_s |= {(owner, name): seconds for owner, name, seconds in before.lasted}

    def look_at_devices(self) -> None:
        """Take in which devices are there, and what was measured of them."""
        self.profiles = {
            number: self._profile(number)
            for number, device in self._table.devices.items()
            if device.present
        }
        self.knowledge.predictor.know(self.profiles.values())

    def _sample(self, entry: Entry) -> None:
        granted = self._table.leases.get(entry.lease) if entry.lease is not None else None
        if granted is None:
            return
        report = self._reports.of(granted.shares[0], granted.epoch)
        if report is None:
            return
        self._used_bytes[entry.number] = report.used_bytes
        heard = self._reports.heard_at(granted.shares[0])
        before = self._samples.get(entry.number)
        if not report.task_type or (before is not None and before.at == heard):
            return
        self.knowledge.learn(report)
        self._samples[entry.number] = Sample(heard, report.task_type, report.steps)
        self._types[entry.owner, entry.name] = report.task_type
        while len(self._types) > _NAMES_KEPT:
            del self._types[next(iter(self._types))]

    def _note_end(self, entry: Entry) -> None:
        del self._running[entry.number]
        self._used_bytes.pop(entry.number, None)
        sample = self._samples.pop(entry.number, None)
        task, key = entry.task, (entry.owner, entry.name)
        if (
            task.state is State.SUCCEEDED
            and task.ended_at is not None
            and task.attempt_at is not None
        ):
            self._lasted_s.pop(key, None)
            self._lasted_s[key] = max(0.0, task.ended_at - task.attempt_at)
            while len(self._lasted_s) > _NAMES_KEPT:
                del self._lasted_s[next(iter(self._lasted_s))]
        if sample is not None and task.state is State.SUCCEEDED:
            self._totals[key] = float(sample.steps)
            while len(self._totals) > _NAMES_KEPT:
                del self._totals[next(iter(self._totals))]

    def _profile(self, number: int) -> DeviceProfile:
        """Return a device's profile under the name of its kind: equal for devices that are alike."""
        device, node = self._table.devices[number], self._nodes.of_device(number)
        speed = node.devices[number].speed if node is not None else 1.0
        threads = node.devices[number].threads if node is not None else 1
        kind = f"{device.kind[:24]} {speed:g}/{threads} {device.memory_bytes >> 20} MiB"
        measured = self._nodes.profiles.get(number)
        if measured is not None and measured.flops_per_s and max(measured.flops_per_s.values()) > 0:
            return msgspec.structs.replace(measured, kind=kind)
        rate = _GUESSED * speed * max(1, threads)
        return DeviceProfile(kind, "", device.memory_bytes, {"float32": rate}, rate, 1e-5 / speed)

    # --- what is known of a task -------------------------------------------------------------------

    def type_of(self, entry: Entry) -> str:
        sample = self._samples.get(entry.number)
        return sample.type if sample else self._types.get((entry.owner, entry.name), "")

    def steps_of(self, entry: Entry) -> float:
        sample = self._samples.get(entry.number)
        return float(sample.steps) if sample is not None else 0.0

    def total_of(self, entry: Entry) -> float | None:
        """Return the steps that its owner declared, or those of the last run of that name."""
        if entry.steps is not None:
            return float(entry.steps)
        return self._totals.get((entry.owner, entry.name))

    def lasts_s(self, entry: Entry) -> float | None:
        """Return how long a task of that name ran last; None: it never succeeded."""
        return self._lasted_s.get((entry.owner, entry.name))

    def ends_at(self, entry: Entry, now: float) -> float | None:
        """Return when a running task will probably end: by its steps, else by its last run."""
        begun, total = entry.task.attempt_at, self.total_of(entry)
        if entry.task.state is not State.RUNNING or begun is None:
            return None
        steps = self.steps_of(entry)
        if total is not None and steps >= WATCH_STEPS:
            return begun + (now - begun) * max(1.0, total / steps)
        lasts_s = self.lasts_s(entry)
        return None if lasts_s is None else begun + lasts_s

    def used_bytes(self, entry: Entry) -> int:
        return self._used_bytes.get(entry.number, 0)
