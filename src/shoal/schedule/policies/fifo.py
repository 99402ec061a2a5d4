"""First come, first served: no task overtakes another."""

from __future__ import annotations

from typing import ClassVar

from shoal.schedule.allocator.policy import Plan, Policy, Room, View


class Fifo(Policy):
    """Blind to speed: a task takes the kind with the most free devices and keeps it to its end.

    Who does not fit blocks all behind it, as in a plain batch queue.
    """

    name: ClassVar[str] = "fifo"
    summary: ClassVar[str] = "order of arrival, whatever kind is free, never moved"

    def decide(self, view: View) -> Plan:
        room = Room(view)
        for state in view.tasks:
            if state.kind is not None:
                room.take([state], state.kind)
        for state in view.tasks:
            if state.kind is None:
                most_free = sorted(range(len(room.free)), key=lambda kind: -room.free[kind])
                if not any(room.take([state], kind) for kind in most_free):
                    break
        return Plan(tuple(room.assignments))


class FifoFast(Policy):
    """Aware of speed: in order of arrival, each round on the fastest kind that has room."""

    name: ClassVar[str] = "fifo-fast"
    summary: ClassVar[str] = "order of arrival, fastest kind that has room"

    def decide(self, view: View) -> Plan:
        room = Room(view)
        speeds = view.table.alone
        for state in view.tasks:
            fastest = sorted(range(len(room.free)), key=lambda kind: -speeds[state.row, kind])
            if not any(room.take([state], kind) for kind in fastest):
                break
        return Plan(tuple(room.assignments))
