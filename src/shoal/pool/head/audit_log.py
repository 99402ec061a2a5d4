"""The audit log as a chain: each entry has the hash of the one before it.

Whoever holds a copy of a later hash notices when an earlier entry changes. The pool's owner can write
a whole chain anew; only a copy that somebody else holds shows that.
"""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import dataclass

import msgspec

from shoal.pool.base import limits

Entry = tuple[float, str, str, str, int, str]  # at, actor, action, detail, number, hash


def _hash(before: str, *entry: float | str | int | None) -> str:
    return hashlib.sha256(msgspec.json.encode([before, *entry])).hexdigest()


def append(
    db: sqlite3.Connection,
    now: float,
    actor: str,
    action: str,
    detail: str,
    corrects: int | None = None,
) -> int | None:
    """Add an entry and return its number. `corrects` is an earlier one whose detail it replaces."""
    before = db.execute("SELECT hash FROM audit ORDER BY id DESC LIMIT 1").fetchone()
    entry = (
        now,
        actor[: limits.AUDIT_ACTOR_CHARS_MAX],
        action,
        detail[: limits.AUDIT_DETAIL_CHARS_MAX],
        corrects,
    )
    added = db.execute(
        "INSERT INTO audit (at, actor, action, detail, corrects, hash) VALUES (?,?,?,?,?,?)",
        (*entry, _hash(before[0] if before else "", *entry)),
    )
    if added.lastrowid is not None and added.lastrowid % 1000 == 0:  # bounded, and rarely at work
        oldest = added.lastrowid - limits.AUDIT_ENTRIES_MAX
        db.execute("DELETE FROM audit WHERE id <= ?", (oldest,))
    return added.lastrowid


def correct(
    db: sqlite3.Connection, row: int, now: float, actor: str, action: str, detail: str
) -> None:
    """Give an entry another detail. It stays, and another entry says what corrects it."""
    short = detail[: limits.AUDIT_DETAIL_CHARS_MAX]
    if not db.execute("SELECT 1 FROM audit WHERE id = ? AND detail = ?", (row, short)).fetchone():
        append(db, now, actor, action, short, row)


def read(db: sqlite3.Connection, count: int) -> list[Entry]:
    """Return the newest entries, oldest first, each with its newest detail."""
    rows = db.execute(
        "SELECT at, actor, action, COALESCE((SELECT c.detail FROM audit c WHERE c.corrects = a.id "
        "ORDER BY c.id DESC LIMIT 1), a.detail), id, hash FROM audit a WHERE corrects IS NULL "
        "ORDER BY id DESC LIMIT ?",
        (count,),
    ).fetchall()
    return list(reversed(rows))


@dataclass(frozen=True, slots=True)
class Verdict:
    entries: int  # of the chain
    unchained: int  # from before there was a chain
    wrong: int | None  # number of the first entry whose hash is not right
    last_hash: str
    noted_found: bool  # whether the hash that the asker noted is in the chain


def verify(db: sqlite3.Connection, noted: str = "") -> Verdict:
    """Recompute the chain. The oldest entry that is kept is taken as it is."""
    before: str | None = None
    chained = unchained = 0
    last = ""
    found = False
    for number, at, actor, action, detail, corrects, own in db.execute(
        "SELECT id, at, actor, action, detail, corrects, hash FROM audit ORDER BY id"
    ):
        if not own and not chained:
            unchained, before = unchained + 1, ""
            continue
        right = own if before is None and number != 1 else _hash(
            before or "", at, actor, action, detail, corrects
        )  # fmt: skip
        if own != right:
            return Verdict(chained, unchained, number, last, found)
        chained, before, last = chained + 1, own, own
        found = found or own == noted
    return Verdict(chained, unchained, None, last, found)
