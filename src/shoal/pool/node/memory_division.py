"""How the sessions of a device divide its memory: a pure function, called at each change.

Every session gets what it booked. What nobody booked goes to elastic sessions: first to calls that
wait for it, then to what programs use, then to all of them alike. A session that has to shrink does
so between two calls, by moving segments to the host; only then does another one grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.pool.base.limits import MEMORY_HEADROOM_BYTES


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """A session on the device, as its device server sees it."""

    session: int
    booked_bytes: int  # 0 while it is suspended
    most_bytes: int  # it never grows beyond this; equal to `booked_bytes` if it is not elastic
    limit_bytes: int  # that it has now
    used_bytes: int = 0  # of the device
    away_bytes: int = 0  # in swap space only
    wanted_bytes: int = 0  # a call waits until the limit is this
    waits_s: float = 0.0  # so long


@dataclass(frozen=True, slots=True)
class Division:
    """By session: the limit from now on, and the most that it could come to."""

    limits_bytes: dict[int, int]
    ceilings_bytes: dict[int, int]


def divide(device_bytes: int, sessions: Sequence[SessionMemory], patience_s: float) -> Division:
    """Return new limits. Together they, and what is in use beyond them, fit the device.

    A call that waits longer than `patience_s` for memory of another call that waits is refused: its
    ceiling comes down to its limit. Of two calls that wait for each other, that is the later one.

    >>> one = SessionMemory(1, 256, 1024, 0)
    >>> divide(1024, [one], 30).limits_bytes
    {1: 1024}
    """
    targets = _targets(device_bytes, sessions)
    held = {s.session: max(min(s.limit_bytes, targets[s.session]), s.used_bytes) for s in sessions}
    limits = {s.session: min(s.limit_bytes, targets[s.session]) for s in sessions}
    left_bytes = device_bytes - sum(held.values())
    for one in _by_urgency(sessions):
        # What it uses beyond its limit is counted already.
        more_bytes = min(targets[one.session] - held[one.session], left_bytes)
        if more_bytes > 0:
            limits[one.session] = held[one.session] + more_bytes
            left_bytes -= more_bytes
    return Division(limits, _ceilings(device_bytes, sessions, limits, patience_s))


def _by_urgency(sessions: Sequence[SessionMemory]) -> list[SessionMemory]:
    """Those below what they booked first, then those that wait, longest first."""
    return sorted(
        sessions,
        key=lambda s: (s.limit_bytes >= s.booked_bytes, s.wanted_bytes == 0, -s.waits_s, s.session),
    )


def _targets(device_bytes: int, sessions: Sequence[SessionMemory]) -> dict[int, int]:
    targets = {s.session: s.booked_bytes for s in sessions}
    free_bytes = device_bytes - sum(targets.values())
    elastic = [s for s in sessions if s.most_bytes > s.booked_bytes]
    for one in _by_urgency([s for s in elastic if s.wanted_bytes > 0]):
        more_bytes = min(one.wanted_bytes, one.most_bytes) - targets[one.session]
        if 0 < more_bytes <= free_bytes:
            targets[one.session] += more_bytes
            free_bytes -= more_bytes
    needs = {}
    for one in elastic:
        need_bytes = one.used_bytes + one.away_bytes
        needs[one.session] = min(
            need_bytes + need_bytes // 8 + MEMORY_HEADROOM_BYTES, one.most_bytes
        )
    free_bytes -= _fill(targets, needs, free_bytes)
    _fill(targets, {s.session: s.most_bytes for s in elastic}, free_bytes)
    return targets


def _fill(targets: dict[int, int], goals: dict[int, int], free_bytes: int) -> int:
    """Raise targets towards their goals, by equal amounts. Return the bytes given."""
    given_bytes = 0
    open_goals = {session: goal for session, goal in goals.items() if goal > targets[session]}
    while open_goals and free_bytes - given_bytes >= len(open_goals):
        each_bytes = (free_bytes - given_bytes) // len(open_goals)
        for session, goal in list(open_goals.items()):
            more_bytes = min(each_bytes, goal - targets[session])
            targets[session] += more_bytes
            given_bytes += more_bytes
            if targets[session] >= goal:
                del open_goals[session]
    return given_bytes


def _ceilings(
    device_bytes: int,
    sessions: Sequence[SessionMemory],
    limits: dict[int, int],
    patience_s: float,
) -> dict[int, int]:
    booked_bytes = sum(s.booked_bytes for s in sessions)
    ceilings = {
        s.session: max(
            limits[s.session],
            min(s.most_bytes, device_bytes - booked_bytes + s.booked_bytes),
        )
        for s in sessions
    }
    waiting = [s for s in _by_urgency(sessions) if s.wanted_bytes > limits[s.session]]
    for late in waiting[1:]:
        if late.waits_s > patience_s:
            ceilings[late.session] = limits[late.session]
    return ceilings
