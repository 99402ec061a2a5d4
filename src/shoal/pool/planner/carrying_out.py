"""From a plan to orders: which tasks start, are suspended and go on. Pure.

A task that has started stays on its devices; a plan may suspend it there and let it go on there. A
task is suspended only if another one takes its devices, and only that task waits until it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Placed:
    """A task that has started."""

    devices: tuple[int, ...]
    running: bool  # False: it is suspended


@dataclass
class Orders:
    start: dict[int, tuple[int, ...]] = field(default_factory=dict)  # task: devices
    suspend: list[int] = field(default_factory=list)
    resume: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)  # start when others are suspended


def orders(
    assignments: Sequence[tuple[int, Sequence[int]]],
    kinds: Sequence[Sequence[int]],
    placed: Mapping[int, Placed],
    gangs: Mapping[int, int],
) -> Orders:
    """Return what brings the pool closer to a plan.

    Args:
        assignments: of the plan: a kind, and the tasks that share one set of devices of it.
        kinds: the devices of each kind.
        placed: the tasks that have started.
        gangs: how many devices each task of the plan needs.

    >>> orders([(0, [7])], [[3]], {5: Placed((3,), True)}, {7: 1})
    Orders(start={}, suspend=[5], resume=[], later=[7])
    >>> orders([(0, [7])], [[3]], {5: Placed((3,), False)}, {7: 1})
    Orders(start={7: (3,)}, suspend=[], resume=[], later=[])
    """
    found = Orders()
    taken: dict[int, set[int]] = {}  # by device: the tasks that the plan wants there
    groups = [(kind, list(tasks)) for kind, tasks in assignments]
    # Those that run already have their devices first, then those that go on, then new ones.
    groups.sort(key=lambda one: (not _any(one[1], placed, running=True),
                                 not _any(one[1], placed, running=False)))  # fmt: skip
    for kind, tasks in groups:
        devices = _devices(kinds[kind], tasks, placed, gangs, taken)
        if devices is None:
            continue
        members = [t for t in tasks if t not in placed or placed[t].devices == devices]
        for number in devices:
            taken[number] = set(members)
        for task in members:
            if task not in placed:
                found.start[task] = devices
            elif not placed[task].running:
                found.resume.append(task)
    for task, place in sorted(placed.items()):
        others = [taken[d] for d in place.devices if d in taken]
        if place.running and others and all(task not in members for members in others):
            found.suspend.append(task)
    _wait_for(found, placed)
    return found


def _any(tasks: Sequence[int], placed: Mapping[int, Placed], *, running: bool) -> bool:
    return any(t in placed and placed[t].running is running for t in tasks)


def _devices(
    kind: Sequence[int],
    tasks: Sequence[int],
    placed: Mapping[int, Placed],
    gangs: Mapping[int, int],
    taken: Mapping[int, set[int]],
) -> tuple[int, ...] | None:
    """Return where a group runs: at a member's place, else on devices that nobody wants."""
    anchors = sorted((not placed[t].running, placed[t].devices) for t in tasks if t in placed)
    for _, devices in anchors:
        if not any(number in taken for number in devices):
            return devices
    if anchors:
        return None
    count = max(gangs.get(task, 1) for task in tasks)
    busy = {d for place in placed.values() if place.running for d in place.devices}
    free = sorted((d in busy, d) for d in kind if d not in taken)
    chosen = tuple(sorted(d for _, d in free[:count]))
    return chosen if len(chosen) == count else None


def _wait_for(found: Orders, placed: Mapping[int, Placed]) -> None:
    """Leave for the next round what needs the devices of tasks that are suspended only now."""
    clearing = {d for task in found.suspend for d in placed[task].devices}
    found.later = [t for t, d in found.start.items() if clearing & set(d)]
    found.start = {t: d for t, d in found.start.items() if t not in found.later}
    found.resume = [t for t in found.resume if not clearing & set(placed[t].devices)]


def alone_again(placed: Mapping[int, Placed]) -> list[int]:
    """Return the suspended tasks whose devices nobody uses: they go on where there is no plan."""
    busy = {d for place in placed.values() if place.running for d in place.devices}
    found = []
    for task, place in sorted(placed.items()):
        if not place.running and not busy & set(place.devices):
            found.append(task)
            busy |= set(place.devices)
    return found
