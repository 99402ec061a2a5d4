"""A task's program shows a ticket, and its lease is what was planned for the task."""

from __future__ import annotations

import hashlib

from shoal.pool.head.leases import LeaseRefused, Request
from shoal.pool.head.tasks.rows import Entry
from shoal.pool.wire import messages
from shoal.pool.wire.roles import Principal, Role


class NotPlanned(LeaseRefused):
    """The program of a task asks for what its task was not planned with."""

    final = True


def reservation(number: int) -> str:
    """Return the key under which the lease table keeps a task's devices."""
    return f"task {number}"


def hash_ticket(ticket: str) -> str:
    return hashlib.sha256(b"shoal ticket " + ticket.encode()).hexdigest()


def may_lease(entry: Entry, who: Principal) -> bool:
    """Return whether a program may lease what was planned for a task: one of its owner's, or with the
    certificate of its current attempt."""
    return who.may(Role.USER) or who.name == f"task.{entry.number}.{entry.task.attempt}"


def planned_request(entry: Entry, who: Principal, ask: messages.AskLease) -> Request:
    """Return what was planned for a task, or the smaller part of it that its program asks for.

    A task that named no memory has its devices to itself: its program may book what is free there.
    """
    named, count = entry.needs.memory_bytes is not None, len(entry.shares)
    memory_bytes = min(entry.shares.values()) if named else None
    problems = []
    if ask.devices is not None and ask.devices > count:
        problems.append(f"devices={ask.devices} was asked for; {count} were planned")
    wanted_bytes = ask.memory_bytes or 0
    if memory_bytes is not None and wanted_bytes > memory_bytes:
        problems.append(
            f"memory={ask.memory_bytes} was asked for; {memory_bytes} bytes were planned"
        )
    if problems:
        raise NotPlanned(
            f"{entry.id} was planned with less than this.", problems,
            ["asking for it when the task is submitted: shoal submit --devices --memory"],
        )  # fmt: skip
    return Request(
        count=ask.devices or count,
        memory_bytes=ask.memory_bytes or (memory_bytes if ask.fraction is None else None),
        fraction=ask.fraction,
        client=who.name,
        owner=entry.owner,
        avoid=frozenset(ask.sessions_in_use),
        only=frozenset(entry.shares),
        reservation=reservation(entry.number),
    )
