"""Tasks as people see them: their own whole, those of others without what is private."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.tasks.rows import Entry
from shoal.pool.wire.roles import Principal, Role
from shoal.pool.wire.task_messages import TaskInfo, TaskReason
from shoal.tasks.states import ACTIVE, FINAL


def may_see(entry: Entry, who: Principal) -> bool:
    """Return whether someone may see a task whole, and change it."""
    return who.owner == entry.owner or who.may(Role.ADMIN)


def info(
    entry: Entry,
    who: Principal,
    table: LeaseTable,
    reasons: Callable[[Entry], list[TaskReason]],
    position: Callable[[Entry], int | None],
) -> TaskInfo:
    task = entry.task
    if not may_see(entry, who):
        return TaskInfo(
            entry.id, None, entry.name, entry.owner, task.state.value, None,
            device_names(entry, table), [], None, None, None, None, None, None, None,
        )  # fmt: skip
    over = task.state in FINAL
    return TaskInfo(
        id=entry.id,
        key=entry.key,
        name=entry.name,
        owner=entry.owner,
        state=task.state.value,
        needs=entry.needs,
        devices=device_names(entry, table),
        reasons=[] if over else reasons(entry),
        position=None if over else position(entry),
        attempt=task.attempt,
        exit_code=task.exit_code,
        end_reason=task.end_reason if over else None,
        submitted_at=iso(task.submitted_at),
        started_at=iso(task.started_at),
        ended_at=iso(task.ended_at),
    )


def device_names(entry: Entry, table: LeaseTable) -> list[str]:
    """Return the names of the devices that a task holds now: planned for it, and not lost since."""
    if entry.task.state not in ACTIVE:
        return []
    held = set(entry.shares)
    lease = table.leases.get(entry.lease) if entry.lease is not None else None
    if lease is not None:
        held = {share.device for share in lease.shares}
    return [table.devices[d].name for d in sorted(held) if d in table.devices]


def iso(at: float | None) -> str | None:
    """Return a Unix time as ISO 8601 in UTC.

    >>> iso(0.0)
    '1970-01-01T00:00:00.000Z'
    """
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
