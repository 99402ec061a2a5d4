"""Keeps events in the head's store: one row for each event, entrant and request.

A change is one transaction, and nobody hears of it before it is on the disk. So a head that ends at any
moment, also between the close and the result, finds one state, and everybody sees the same result.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from shoal.people.draw import Entry, StruckOut
from shoal.people.event import Entrant, Event, Outcome, Request, Settings
from shoal.pool.head import audit_log
from shoal.pool.head.store import Store


class _Listed(msgspec.Struct):
    """What the close fixed."""

    entries: list[tuple[str, int, str]]
    struck_out: list[tuple[str, str]]
    order: list[str]


@dataclass(frozen=True, slots=True)
class Grant:
    """What an entrant has of the pool."""

    holder: str  # the member; for a guest, who joined with its code
    until: float | None = None  # Unix time; None: it waits for devices
    shares: Mapping[int, int] = field(default_factory=dict)  # bytes by device, kept for the holder


@dataclass(slots=True)
class Kept:
    """An event and what only the head knows of it."""

    event: Event
    secret: bytes  # of its screen's codes
    joins: dict[str, str] = field(default_factory=dict)  # a guest's join code, by name
    grants: dict[str, Grant] = field(default_factory=dict)  # by the entrant's name
    _version: str = ""  # as far as it was asked for

    @property
    def version(self) -> str:
        """Changes with the state, the people and their requests."""
        if not self._version:
            event = self.event
            people = sorted((e.name, e.standing, e.tickets) for e in event.entrants.values())
            asked = sorted((r.name, r.own, r.minutes) for r in event.requests.values())
            seen = msgspec.msgpack.encode((event.state, people, asked))
            self._version = hashlib.sha256(seen).hexdigest()[:16]
        return self._version

    def revoke(self, name: str) -> None:
        """Strike out a member who lost the right to the pool."""
        self.event.revoke(name)
        self._version = ""

    def copy(self) -> Kept:
        """Return one whose tables can change without the other's."""
        event = replace(
            self.event,
            entrants=dict(self.event.entrants),
            requests=dict(self.event.requests),
            outcomes=dict(self.event.outcomes),
        )
        return replace(
            self, event=event, joins=dict(self.joins), grants=dict(self.grants), _version=""
        )


def _settings(event: Event) -> bytes:
    return msgspec.msgpack.encode(event.settings)


def _listed(event: Event) -> bytes | None:
    if event.closed_at is None:
        return None
    return msgspec.msgpack.encode(
        _Listed(
            [(e.member, e.tickets, e.own) for e in event.entries],
            [(s.member, s.reason) for s in event.struck_out],
            list(event.order),
        )
    )


def _rows(kept: Kept) -> dict[str, dict[str, tuple[object, ...]]]:
    """Return the rows of an event's tables, by table and name."""
    event = kept.event
    return {
        "event_entrants": {
            e.name: (int(e.member), e.standing, e.tickets, e.enrolled_at)
            for e in event.entrants.values()
        },
        "event_requests": {r.name: (r.own, r.asked_at, r.minutes) for r in event.requests.values()},
        "event_outcomes": {
            o.name: (
                o.ended, o.reason, o.rank, kept.joins.get(o.name, ""),
                *_grant_row(kept.grants.get(o.name)),
            )
            for o in event.outcomes.values()
        },
    }  # fmt: skip


def _grant_row(grant: Grant | None) -> tuple[float | None, str, bytes | None]:
    if grant is None:
        return None, "", None
    shares = msgspec.msgpack.encode(dict(grant.shares)) if grant.shares else None
    return grant.until, grant.holder, shares


class EventStore:
    def __init__(self, store: Store) -> None:
        self._store = store

    def load(self) -> dict[str, Kept]:
        """Return all events, the oldest first."""
        found: dict[str, Kept] = {}
        for event, settings, seed, secret, state, listed, at, by, wrong in self._store.rows(
            "SELECT event, settings, seed, secret, state, listed, closed_at, closed_by, wrong_codes "
            "FROM events ORDER BY rowid"
        ):
            fixed = msgspec.msgpack.decode(listed, type=_Listed) if listed else _Listed([], [], [])
            made = Event(
                msgspec.msgpack.decode(settings, type=Settings), seed, state,
                entries=tuple(Entry(*e) for e in fixed.entries),
                struck_out=tuple(StruckOut(*s) for s in fixed.struck_out),
                order=tuple(fixed.order), closed_at=at, closed_by=by, wrong_codes=wrong,
            )  # fmt: skip
            found[event] = Kept(made, secret)
        self._load_people(found)
        return found

    def _load_people(self, found: Mapping[str, Kept]) -> None:
        for event, name, member, standing, tickets, at in self._store.rows(
            "SELECT event, name, member, standing, tickets, at FROM event_entrants ORDER BY at, name"
        ):
            entrant = Entrant(name, bool(member), standing, tickets, at)
            found[event].event.entrants[name] = entrant
        for event, name, own, at, minutes in self._store.rows(
            "SELECT event, name, own, at, minutes FROM event_requests ORDER BY at, name"
        ):
            found[event].event.requests[name] = Request(name, own, at, minutes)
        for event, name, ended, reason, rank, join, until, holder, shares in self._store.rows(
            "SELECT event, name, ended, reason, rank, join_code, until, holder, shares "
            "FROM event_outcomes"
        ):
            kept = found[event]
            kept.event.outcomes[name] = Outcome(name, ended, reason, rank)
            if join:
                kept.joins[name] = join
            if holder:
                found_shares = msgspec.msgpack.decode(shares, type=dict[int, int]) if shares else {}
                kept.grants[name] = Grant(holder, until, found_shares)

    async def save(self, before: Kept | None, after: Kept, actor: str, action: str, detail: str,
                   now: float) -> None:  # fmt: skip
        """Write what differs, with a row of the audit log. Raise StoreError if that fails."""
        event = after.event
        name = event.settings.event
        head_row = (
            name, _settings(event), event.seed, after.secret, event.state, _listed(event),
            event.closed_at, event.closed_by, event.wrong_codes,
        )  # fmt: skip
        old = _rows(before) if before is not None else {}
        new = _rows(after)

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO events (event, settings, seed, secret, state, listed, closed_at, "
                "closed_by, wrong_codes) VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT (event) DO UPDATE SET "
                "state = excluded.state, listed = excluded.listed, closed_at = excluded.closed_at, "
                "closed_by = excluded.closed_by, wrong_codes = excluded.wrong_codes",
                head_row,
            )
            for table, rows in new.items():
                known = old.get(table, {})
                gone = [(name, one) for one in known.keys() - rows.keys()]
                db.executemany(f"DELETE FROM {table} WHERE event = ? AND name = ?", gone)
                changed = [(name, one, *row) for one, row in rows.items() if known.get(one) != row]
                if changed:
                    marks = ",".join("?" * len(changed[0]))
                    db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", changed)
            if action:
                audit_log.append(db, now, actor, action, detail)

        await self._store.flushed(self._store.change(write, promise=True))

    async def forget(self, event: str) -> None:
        """Delete an event that is over."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM events WHERE event = ?", (event,))

        await self._store.flushed(self._store.change(write, promise=True))
