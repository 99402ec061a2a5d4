"""Why a session ended: one vocabulary for the client's error, `lease.end_reason` and the audit log."""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from shoal.pool.base import limits
from shoal.pool.wire.message_fields import SessionPart, Text

_CRASHES = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS,
}  # fmt: skip


class Why(enum.StrEnum):
    """What ended a session."""

    GIVEN_BACK = "given-back"
    EXPIRED = "expired"
    REVOKED = "revoked"
    CLIENT_ENDED = "client-ended"
    CLIENT_CLOSED = "client-closed"
    CLIENT_AWAY = "client-away"
    WORKER_KILLED = "worker-killed"
    WORKER_CRASHED = "worker-crashed"
    WORKER_FAILED = "worker-failed"
    WORKER_HUNG = "worker-hung"
    DEVICE_FAILED = "device-failed"
    SERVER_ENDED = "server-ended"
    AGENT_ENDED = "agent-ended"
    NODE_LOST = "node-lost"
    HEAD_ENDED = "head-ended"
    CUT = "cut"
    ORDERED = "ordered"
    NOT_GRANTED = "not-granted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


# What a person reads. `{}` is the detail.
_TEXTS = {
    Why.GIVEN_BACK: "given back",
    Why.EXPIRED: "the lease's time is over",
    Why.REVOKED: "{} was revoked by the pool's owner",
    Why.CLIENT_ENDED: "the client's process ended without giving the lease back",
    Why.CLIENT_CLOSED: "the client closed its connection to the device",
    Why.CLIENT_AWAY: f"the client has not come back to the head within {limits.RESUME_S:g} s",
    Why.WORKER_KILLED: "the worker process was killed by {}",
    Why.WORKER_CRASHED: "the worker process crashed with {}",
    Why.WORKER_FAILED: "the worker process ended the session: {}",
    Why.DEVICE_FAILED: "the device failed: {}",
    Why.WORKER_HUNG: f"the worker process gave no sign of life for {limits.SILENCE_S:g} s",
    Why.SERVER_ENDED: "{}",
    Why.AGENT_ENDED: "the agent of node {} ended, and all sessions there with it",
    Why.NODE_LOST: f"node {{}} has not been heard of for {limits.SILENCE_S:g} s",
    Why.HEAD_ENDED: "the pool's head ended, and its devices with it",
    Why.CUT: "the network between client and device went silent",
    Why.ORDERED: "the pool ended it",
    Why.NOT_GRANTED: "a device went away while it was granted",
    Why.REFUSED: "{}",
    Why.UNKNOWN: "the connection to the worker was closed, and the head has not said why",
}  # fmt: skip


class End(msgspec.Struct, frozen=True):
    """The end of a session.

    >>> End(Why.WORKER_KILLED, "SIGKILL").text
    'the worker process was killed by SIGKILL'
    """

    why: Why
    detail: Text = ""

    @property
    def text(self) -> str:
        return _TEXTS[self.why].format(self.detail)[: limits.TEXT_CHARS_MAX]

    def outranks(self, other: End) -> bool:
        """Whether this is nearer to the cause: a client that goes closes its connections, and the pool
        then ends what is left of it; but a worker that crashed did so before."""
        return _rank(self.why) > _rank(other.why)


def _rank(why: Why) -> int:
    order = {Why.ORDERED: 0, Why.UNKNOWN: 0, Why.CLIENT_CLOSED: 1, Why.CLIENT_AWAY: 1}
    return order.get(why, 2 if why in (Why.GIVEN_BACK, Why.CLIENT_ENDED) else 3)


def of_signal(number: int) -> End:
    """Return the end of a worker by a signal."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    return End(Why.WORKER_CRASHED if number in _CRASHES else Why.WORKER_KILLED, name)


# --- recent ends -----------------------------------------------------------------------------------


@dataclass
class Note:
    """An entry of the audit log about an end. Within limits.END_CORRECT_S its reason may improve."""

    at: float
    actor: str
    action: str
    what: str  # lease and sessions
    end: End
    row: int | None = None  # in the store; None: not written yet

    @property
    def detail(self) -> str:
        return f"{self.what}: {self.end.text}"


@dataclass
class EndedLease:
    """A lease that has ended, or lost devices, a moment ago."""

    epoch: int
    client: str
    secret: str  # a hash of what its client shows
    at: float  # monotonic
    parts: dict[SessionPart, End] = field(default_factory=dict)
    notes: dict[SessionPart, Note] = field(default_factory=dict)


class RecentEnds:
    """Remembers ends for a while. Pure: the caller has the clock."""

    def __init__(self) -> None:
        self._leases: dict[int, EndedLease] = {}  # by number, oldest first

    def add(
        self, lease: int, epoch: int, client: str, secret: str, now: float,
        parts: Iterable[SessionPart], note: Note,
    ) -> None:  # fmt: skip
        """Some parts of a lease have ended, as `note` says."""
        known = self._leases.pop(lease, None) or EndedLease(epoch, client, secret, now)
        self._leases[lease] = known
        known.at = now
        for part in parts:
            known.parts[part] = note.end
            known.notes[part] = note
        while len(self._leases) > limits.ENDS_KEPT_MAX:
            del self._leases[next(iter(self._leases))]

    def correct(
        self, lease: int | None, end: End, now: float, part: SessionPart | None = None
    ) -> list[Note]:
        """Take in a reason that came late, for one part or for all. Return the notes that change."""
        known = self._leases.get(lease) if lease is not None else None
        if known is None or now - known.at > limits.END_CORRECT_S:
            return []
        changed = {}
        for mine, note in known.notes.items():
            if part in (None, mine) and end.outranks(note.end):
                changed[id(note)] = note
                known.parts[mine] = end
        for note in changed.values():
            note.end = end
        return list(changed.values())

    def lease_of_epoch(self, epoch: int) -> int | None:
        return next((n for n, known in self._leases.items() if known.epoch == epoch), None)

    def of(self, lease: int) -> EndedLease | None:
        return self._leases.get(lease)

    def forget_old(self, now: float) -> None:
        for lease in [n for n, known in self._leases.items() if now - known.at > limits.END_KEEP_S]:
            del self._leases[lease]
