"""From kinds to devices: which device of its kind each assignment gets.

Tasks stay where they are when they can, because moving costs a restart; gangs come before single
tasks, because they need devices that lie together.
"""

from __future__ import annotations

from shoal.schedule.allocator.policy import Assignment
from shoal.schedule.model.entities import Kind, Pool

Placement = dict[int, tuple[int, ...]]  # Task id -> devices, as numbers within the pool.


def first_devices(pool: Pool) -> list[int]:
    """Return the number of the first device of each kind; devices are numbered kind by kind."""
    firsts = [0]
    for kind in pool.kinds:
        firsts.append(firsts[-1] + kind.count)
    return firsts


def place(
    pool: Pool, assignments: tuple[Assignment, ...], gangs: dict[int, int], before: Placement
) -> Placement:
    """Give each assignment devices of its kind.

    Args:
        gangs: Task id -> devices it needs.
        before: Placement of the last round.
    """
    firsts = first_devices(pool)
    after: Placement = {}
    for number, kind in enumerate(pool.kinds):
        mine = [a for a in assignments if a.kind == number]
        mine.sort(key=lambda a: (-gangs[a.tasks[0]], a.tasks))
        free = set(range(firsts[number], firsts[number + 1]))
        moving: list[Assignment] = []
        for assignment in mine:
            kept = _kept(assignment, before, free)
            if kept is None:
                moving.append(assignment)
            else:
                free.difference_update(kept)
                after.update(dict.fromkeys(assignment.tasks, kept))
        for assignment in moving:
            chosen = _together(free, gangs[assignment.tasks[0]], kind, firsts[number])
            free.difference_update(chosen)
            after.update(dict.fromkeys(assignment.tasks, chosen))
    return after


def _kept(assignment: Assignment, before: Placement, free: set[int]) -> tuple[int, ...] | None:
    """Return the free devices that a member already has."""
    for task in assignment.tasks:
        held = before.get(task)
        if held is not None and free.issuperset(held):
            return held
    return None


def _together(free: set[int], count: int, kind: Kind, first: int) -> tuple[int, ...]:
    """Return `count` free devices on as few nodes as possible; the fullest node that suffices first."""
    assert len(free) >= count, "a plan never asks for more devices than its kind has"
    if kind.node_devices == 1 and not kind.nodes:
        return tuple(sorted(free)[:count])
    nodes: dict[int, list[int]] = {}
    for device in sorted(free):
        nodes.setdefault(kind.node_of(device - first), []).append(device)
    enough = [node for node in nodes.values() if len(node) >= count]
    if enough:
        return tuple(min(enough, key=lambda node: (len(node), node))[:count])
    chosen: list[int] = []
    for node in sorted(nodes.values(), key=lambda node: (-len(node), node)):
        chosen += node[: count - len(chosen)]
    return tuple(sorted(chosen))
