"""From what a pool knows of its devices and tasks to the view that its policy sees: pure.

Tasks are known by what their workers counted. A task that was measured on one kind of device is
predicted for the others. Tasks of unknown memory do not share a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.pool.base import limits
from shoal.pool.wire.profile_messages import SessionProfile
from shoal.schedule.formats.records import TableFields, TaskFields, ViewFields
from shoal.schedule.model.device_profile import DeviceProfile
from shoal.schedule.model.entities import Kind, Task
from shoal.schedule.model.predictor import Operators, Predictor, TaskProfile, busy_shares

#: A task's grant: the most that it was seen to need, and this much more.
MEMORY_MARGIN = 1.1
#: A speed counts after so many steps.
WATCH_STEPS = 10
#: Weight of a new measurement of a pair against all older ones.
PAIR_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class LiveDevice:
    number: int
    kind: str  # equal for devices that are alike: of one kind, speed and memory
    node: str
    memory_bytes: int  # that leases of programs leave to tasks
    profile: DeviceProfile
    free: bool = True  # False: its tasks can be neither moved nor suspended now


@dataclass(frozen=True, slots=True)
class LiveTask:
    """A task that waits, runs or is suspended."""

    id: int
    name: str
    owner: str
    arrival_s: float  # in the clock of the view
    devices: int = 1
    kinds: frozenset[str] | None = None  # of `LiveDevice.kind`
    weight: float = 1.0
    deadline_s: float | None = None
    memory_bytes: int = 0  # declared; 0: not
    limit_s: float | None = None
    type: str = ""  # as its worker reported it, or as that of an earlier run; "": not known yet
    steps_done: float = 0.0
    steps_total: float | None = None  # declared, or of earlier runs
    kind: str | None = None  # where it runs
    started: bool = False
    used_bytes: int = 0  # that move when it is suspended


@dataclass
class Knowledge:
    """What a pool has learned of types of tasks."""

    predictor: Predictor
    types: dict[str, TaskProfile] = field(default_factory=dict)
    #: (kind, types in order) -> steps/s of each, together on one device.
    pairs: dict[tuple[str, tuple[str, ...]], tuple[float, ...]] = field(default_factory=dict)

    def learn(self, report: SessionProfile) -> None:
        """Take in what a worker has counted: operators and peak memory of its type."""
        if not report.task_type or report.steps < 1:
            return
        known = self.types.get(report.task_type)
        peak_bytes = max(report.peak_bytes, known.memory_bytes() if known is not None else 0)
        operators = [
            Operators(
                one.name,
                one.dtype,
                max(1, round(one.calls / report.steps)),
                one.flops / report.steps,
                one.bytes / report.steps,
            )
            for one in report.operators
        ]
        operators = operators or (known.operators if known is not None else [])
        if operators:
            self.types[report.task_type] = TaskProfile(
                report.task_type, 1, peak_bytes, 0, 0, operators
            )

    def alone(self, type_: str, device: DeviceProfile, steps: float, seconds: float) -> None:
        """Take in the speed of a task that had a device for itself."""
        known = self.types.get(type_)
        if known is not None and steps >= WATCH_STEPS and seconds > 0:
            self.predictor.observe(known, device, steps / seconds)

    def together(
        self, kind: str, members: Sequence[tuple[str, float]], seconds: float
    ) -> float | None:
        """Take in the steps that co-located tasks made. Return their gain over taking turns.

        A pair that was measured is never predicted again: one that does not gain ends with the
        round in which that was seen, and does not come back.
        """
        if seconds < limits.WATCH_S or any(type_ not in self.types for type_, _ in members):
            return None
        ordered = sorted(members)
        key = kind, tuple(type_ for type_, _ in ordered)
        rates = [steps / seconds for _, steps in ordered]
        before = self.pairs.get(key)
        if before is not None:
            rates = [b + PAIR_WEIGHT * (r - b) for b, r in zip(before, rates, strict=True)]
        self.pairs[key] = tuple(rates)
        device = self.predictor.device(kind)
        if device is None:
            return None
        return sum(
            rate / self.predictor.predict(self.types[type_], device).steps_per_s
            for rate, type_ in zip(rates, key[1], strict=True)
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """A view, and which device each of its numbers means."""

    view: ViewFields
    devices: tuple[tuple[int, ...], ...]  # by kind: numbers in the pool of those that are free


def facts(
    now_s: float,
    devices: Sequence[LiveDevice],
    tasks: Sequence[LiveTask],
    knowledge: Knowledge,
    quotas: dict[str, int],
    *,
    round_s: float = 60.0,
    host_bytes_per_s: float = 1e9,
    together_max: int = 2,
) -> Facts:
    """Return what the policy may know."""
    by_kind: dict[str, list[LiveDevice]] = {}
    for device in sorted(devices, key=lambda d: d.number):
        by_kind.setdefault(device.kind, []).append(device)
    nodes = {node: place for place, node in enumerate(sorted({d.node for d in devices}))}
    kinds = [
        Kind(
            name,
            sum(d.free for d in members),
            min(d.memory_bytes for d in members),
            nodes=tuple(nodes[d.node] for d in members if d.free),
        )
        for name, members in by_kind.items()
    ]
    profiles = [members[0].profile for members in by_kind.values()]
    rows: dict[_Row, int] = {}
    for task in tasks:
        rows.setdefault(_row(task, knowledge), len(rows))
    numbers = {name: place for place, name in enumerate(by_kind)}
    left = {task.id: steps_left(task, knowledge, profiles) for task in tasks}
    states = [
        TaskFields(
            task.id,
            Task(
                task.name,
                _row(task, knowledge).name,
                task.steps_done + left[task.id],
                task.arrival_s,
                task.devices,
                task.weight,
                task.deadline_s,
                task.kinds,
                task.owner,
            ),
            rows[_row(task, knowledge)],
            left[task.id],
            numbers.get(task.kind) if task.kind is not None else None,
            task.started,
            2 * task.used_bytes / host_bytes_per_s,  # out and back
        )
        for task in sorted(tasks, key=lambda t: t.id)
    ]
    table = _table(kinds, list(rows), profiles, knowledge)
    view = ViewFields(now_s, round_s, 0.0, together_max, kinds, dict(quotas), table, states)
    free = (tuple(d.number for d in members if d.free) for members in by_kind.values())
    return Facts(view, tuple(free))


class _Row(NamedTuple):
    """What is alike of tasks that have a row of the table in common."""

    type: str  # "": not known
    memory_bytes: int  # declared; 0: not
    devices: int

    @property
    def name(self) -> str:
        declared = f"+{self.memory_bytes}" if self.memory_bytes else ""
        return f"{self.type or 'unknown'}{declared}"


def _row(task: LiveTask, knowledge: Knowledge) -> _Row:
    return _Row(task.type if task.type in knowledge.types else "", task.memory_bytes, task.devices)


def steps_left(task: LiveTask, knowledge: Knowledge, profiles: Sequence[DeviceProfile]) -> float:
    """Return the declared rest; else as much as was done so far; else a fixed time's work."""
    unknown_s = min(limits.UNKNOWN_WORK_S, task.limit_s or limits.UNKNOWN_WORK_S)
    known = knowledge.types.get(task.type)
    if known is None:
        return unknown_s  # its speed on the fastest device is 1
    if task.steps_total is not None:
        return max(1.0, task.steps_total - task.steps_done)
    if task.steps_done > 0:
        return task.steps_done
    fastest = max((knowledge.predictor.predict(known, p).steps_per_s for p in profiles), default=1)
    return max(1.0, unknown_s * fastest)


def _table(
    kinds: list[Kind], rows: list[_Row], profiles: list[DeviceProfile], knowledge: Knowledge
) -> TableFields:
    fastest = max((max(p.flops_per_s.values()) for p in profiles), default=1.0)
    alone: list[list[float]] = []
    memory: list[list[float]] = []
    busy: list[list[tuple[float | None, float | None]]] = []
    for row in rows:
        known = knowledge.types.get(row.type)
        memory.append(_memory(row, known, kinds))
        if known is None:
            alone.append([max(p.flops_per_s.values()) / fastest for p in profiles])
            busy.append([(None, None)] * len(profiles))
            continue
        alone.append([knowledge.predictor.predict(known, p).steps_per_s for p in profiles])
        busy.append([busy_shares(known, p) for p in profiles])
    names = [kind.name for kind in kinds]
    named = [(row.name, row.devices) for row in rows]
    return TableFields(
        names, named, alone, memory, busy, _measured(names, rows, knowledge), unknown_shares=False
    )


def _memory(row: _Row, known: TaskProfile | None, kinds: list[Kind]) -> list[float]:
    """Return what tasks of a row take of each kind. One that fits nowhere pages on the largest."""
    peak_bytes = int(known.memory_bytes() * MEMORY_MARGIN) if known is not None else 0
    wanted_bytes = float(max(row.memory_bytes, peak_bytes))
    largest_bytes = max((kind.memory_bytes for kind in kinds), default=0)
    if row.memory_bytes <= largest_bytes < wanted_bytes:
        wanted_bytes = float(largest_bytes)
    return [wanted_bytes] * len(kinds)


def _measured(
    kinds: list[str], rows: list[_Row], knowledge: Knowledge
) -> list[tuple[int, list[int], list[float]]]:
    found = []
    rows_of: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if row.devices == 1:
            rows_of.setdefault(row.type, []).append(number)
    for (kind, types), rates in sorted(knowledge.pairs.items()):
        if kind not in kinds:
            continue
        for members in itertools.product(*(rows_of.get(type_, ()) for type_ in types)):
            pairs = sorted(zip(members, rates, strict=True))
            found.append((kinds.index(kind), [r for r, _ in pairs], [v for _, v in pairs]))
    return found
