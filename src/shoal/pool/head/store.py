"""What a head must not forget: clients, nodes, leases, codes and the audit log, in SQLite.

Every method that changes something queues the change and returns. A thread commits what has gathered
in one transaction (`Journal`). `await store.flushed()` returns when it is on the disk: the head calls
it before it answers, so what was acknowledged is never lost. Without a file (embedded pools) a change
is made at once and lives as long as the head.

What is a promise (a lease, a code, a member) is refused if it cannot be written. What has happened
already (an end, a revocation) must not fail for want of a disk: it is kept, and written when it can be.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import PoolError
from shoal.pool.access.codes import IssuedCode, Quota
from shoal.pool.base import limits
from shoal.pool.head import audit_log, migrations
from shoal.pool.head.journal import Journal, Pending, StoreError
from shoal.pool.head.leases import Granted, LeaseTable, Lost, Share
from shoal.pool.wire.end_reasons import End, Note
from shoal.tasks.forecast import ERRORS_KEPT

__all__ = ["Pending", "Store", "StoreError", "StoredClient", "StoredLease"]


@dataclass(frozen=True)
class StoredLease:
    granted: Granted
    secret: str  # a hash of what its client shows
    program: str
    since: float


@dataclass(frozen=True)
class StoredClient:
    name: str
    role: str
    serial: str
    joined: float
    expires: float
    revoked: float | None
    quota: Quota


class Store:
    """>>> store = Store(None)
    >>> store.write_audit(0.0, "head", "start", "")
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        try:
            # Reads on the caller's thread see what is committed; the journal writes.
            self._db = migrations.open_database(path)
            self._journal = Journal(self._db if path is None else None, path)
            # (node, name) -> number
            self._devices: dict[tuple[str, str], int] = {
                (node, name): number
                for number, node, name in self._db.execute("SELECT number, node, name FROM devices")
            }
        except sqlite3.Error as error:
            raise PoolError(
                f"the pool's state {path} cannot be used: {error}. Move it away to start an empty pool."
            ) from None
        self._next_device = max(self._devices.values(), default=-1) + 1
        self._numbers: dict[str, set[int]] = {}  # by node
        for (name, _), number in self._devices.items():
            self._numbers.setdefault(name, set()).add(number)

    def close(self) -> None:
        """Write what waits, and close."""
        self._journal.close()
        self._db.close()

    async def flushed(self, *promises: Pending) -> None:
        """Return when every change so far is on the disk, or is kept until there is room.

        Raise StoreError if one of `promises`, which are changes so far, could not be written.

        >>> lease = store.add_lease(stored, table)  # doctest: +SKIP
        >>> await store.flushed(lease)  # doctest: +SKIP
        """
        await self._journal.flushed(*promises)

    def flush(self, *promises: Pending) -> None:
        """Do as `flushed`, and block the calling thread meanwhile."""
        self._journal.flush(*promises)

    def change(self, write: Callable[[sqlite3.Connection], None], *, promise: bool) -> Pending:
        """Queue a change. A promise fails if it cannot be written; anything else waits for room."""
        return self._journal.add(write, promise=promise)

    @property
    def failed_writes(self) -> int:
        return self._journal.failed

    @property
    def error(self) -> str:
        """Return the error of the last write; empty: it went well."""
        return self._journal.error

    @property
    def unwritten(self) -> int:
        """Return how many changes wait for room on the disk."""
        return self._journal.kept

    def retry(self) -> None:
        """Write what waits. After a failure that nothing waits for, find out whether it is over."""
        if self._journal.error:
            self.change(_try, promise=True)

    def free_bytes(self) -> int | None:
        """Return the room on the disk; None for a store in memory."""
        if self._path is None:
            return None
        try:
            found = os.statvfs(self._path.parent)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize

    def read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query: of what is committed."""
        return self._db.execute(query, values).fetchall()

    # --- leases ------------------------------------------------------------------------------------

    def add_lease(self, stored: StoredLease, table: LeaseTable) -> Pending:
        """Promise a new lease, with the table's counters after it."""
        granted = stored.granted
        row = (granted.lease, granted.epoch, granted.client, stored.secret, stored.program)
        counters = (("epoch", table.epoch), ("next_session", table.next_session))

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO leases VALUES (?,?,?,?,?,?,?,?)",
                (*row, stored.since, granted.until, granted.owner),
            )
            db.executemany(
                "INSERT INTO shares VALUES (?,?,?,?,?)",
                [
                    (granted.lease, s.device, s.session, s.memory_bytes, s.limit_bytes)
                    for s in granted.shares
                ],
            )
            db.executemany("INSERT OR REPLACE INTO counters VALUES (?,?)", counters)
            detail = f"lease {granted.lease}: {_describe(granted.shares)}"
            audit_log.append(db, stored.since, granted.client, "grant", detail)

        return self.change(write, promise=True)

    def end_lease(self, lease: int, client: str, end: End, now: float) -> Note:
        """Write the end of a lease. Never fails."""
        note = Note(now, client, "end", f"lease {lease}", end)

        def write(db: sqlite3.Connection) -> None:
            if db.execute("DELETE FROM leases WHERE lease = ?", (lease,)).rowcount:
                self._note(db, note)

        self.change(write, promise=False)
        return note

    def lose(self, one: Lost, end: End, now: float) -> Note:
        """Write the loss of shares; it ends a lease without any left. Never fails."""
        what = f"lease {one.lease}: {_describe(one.shares)}"
        note = Note(now, "head", "end" if one.ended else "lose", what, end)

        def write(db: sqlite3.Connection) -> None:
            db.executemany(
                "DELETE FROM shares WHERE lease = ? AND device = ? AND session = ?",
                [(one.lease, *s.part) for s in one.shares],
            )
            if one.ended:
                db.execute("DELETE FROM leases WHERE lease = ?", (one.lease,))
            self._note(db, note)

        self.change(write, promise=False)
        return note

    def correct(self, note: Note) -> None:
        """Write the corrected reason of an end. Never fails."""

        def write(db: sqlite3.Connection) -> None:
            if note.row is not None:
                audit_log.correct(db, note.row, note.at, note.actor, note.action, note.detail)

        self.change(write, promise=False)  # behind the note itself, which has its row by then

    def leases(self) -> list[StoredLease]:
        shares: dict[int, list[Share]] = {}
        for lease, *share in self._db.execute(
            "SELECT lease, device, session, memory_bytes, limit_bytes FROM shares "
            "ORDER BY lease, device"
        ):
            shares.setdefault(lease, []).append(Share(*share))
        rows = self._db.execute(
            "SELECT lease, epoch, client, secret, program, since, until, owner FROM leases "
            "ORDER BY lease"
        )
        return [
            StoredLease(
                Granted(lease, epoch, tuple(shares.get(lease, ())), client, until, owner),
                secret, program, since,
            )
            for lease, epoch, client, secret, program, since, until, owner in rows
        ]  # fmt: skip

    def counter(self, name: str, default: int) -> int:
        row = self._db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else default

    # --- devices -----------------------------------------------------------------------------------

    def device_number(self, node: str, name: str) -> int:
        """Return the number of a device, the same whenever it comes back.

        The number of a new device is on the disk before any lease that has it, in the same order.
        """
        known = self._devices.get((node, name))
        if known is not None:
            return known
        number = self._next_device
        self._next_device += 1
        self._devices[node, name] = number
        self._numbers.setdefault(node, set()).add(number)

        def write(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO devices VALUES (?,?,?)", (number, node, name))

        self.change(write, promise=False)
        return number

    def numbers_of(self, node: str) -> set[int]:
        """Return the numbers of all devices that a node has ever had."""
        return self._numbers.get(node, set())

    def devices(self) -> dict[int, tuple[str, str]]:
        """number -> node, name."""
        return {number: key for key, number in self._devices.items()}

    # --- codes and clients -------------------------------------------------------------------------

    def add_code(self, code: IssuedCode, actor: str, now: float) -> Pending:
        quota = code.quota

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM codes WHERE expires <= ?", (now,))
            db.execute(
                "INSERT INTO codes VALUES (?,?,?,?,?,?)",
                (code.code_id, code.secret_hash, code.role, code.expires,
                 quota.devices, quota.memory_bytes),
            )  # fmt: skip
            audit_log.append(db, now, actor, "code", f"{code.code_id} for a {code.role}")

        return self.change(write, promise=True)

    def codes(self) -> list[IssuedCode]:
        rows = self._db.execute(
            "SELECT code_id, secret_hash, role, expires, devices_max, memory_bytes_max FROM codes"
        )
        return [
            IssuedCode(code_id, bytes(secret_hash), role, expires, Quota(devices, memory))
            for code_id, secret_hash, role, expires, devices, memory in rows
        ]

    def add_client(
        self, client: StoredClient, code_id: str | None, now: float, code: str = ""
    ) -> Pending:
        """Promise a client or node that joined, and delete its code in the same commit.

        If an event gave the code to a guest, the guest's grant is the newcomer's from then on.
        """
        quota = client.quota

        def write(db: sqlite3.Connection) -> None:
            if code_id is not None:
                db.execute("DELETE FROM codes WHERE code_id = ?", (code_id,))
            db.execute(
                "INSERT INTO clients VALUES (?,?,?,?,?,?,?,?)",
                (client.name, client.role, client.serial, client.joined, client.expires,
                 client.revoked, quota.devices, quota.memory_bytes),
            )  # fmt: skip
            if code:
                db.execute(
                    "UPDATE event_outcomes SET holder = ? WHERE join_code = ?", (client.name, code)
                )
            audit_log.append(db, now, client.name, "join", f"{client.role}, code {code_id}")

        return self.change(write, promise=True)

    def enrol_node(self, node: StoredClient, now: float) -> Pending:
        """Promise a node that an engine has started, with its new certificate."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "DELETE FROM clients WHERE name = ? AND role = ? AND revoked IS NULL",
                (node.name, node.role),
            )
            db.execute(
                "INSERT INTO clients VALUES (?,?,?,?,?,NULL,NULL,NULL)",
                (node.name, node.role, node.serial, node.joined, node.expires),
            )
            audit_log.append(db, now, node.name, "join", f"{node.role}, started by the engine")

        return self.change(write, promise=True)

    def revoke_client(self, name: str, actor: str, now: float) -> None:
        """Write that a client or node is revoked. Never fails."""

        def write(db: sqlite3.Connection) -> None:
            done = db.execute(
                "UPDATE clients SET revoked = ? WHERE name = ? AND revoked IS NULL", (now, name)
            ).rowcount
            if done:
                audit_log.append(db, now, actor, "revoke", name)

        self.change(write, promise=False)

    def clients(self) -> list[StoredClient]:
        rows = self._db.execute(
            "SELECT name, role, serial, joined, expires, revoked, devices_max, memory_bytes_max "
            "FROM clients ORDER BY joined"
        )
        return [
            StoredClient(name, role, serial, joined, expires, revoked, Quota(devices, memory))
            for name, role, serial, joined, expires, revoked, devices, memory in rows
        ]

    # --- admission ---------------------------------------------------------------------------------

    def uses(self) -> list[tuple[str, float, float]]:
        """Return what owners have used: owner, device seconds, and when that was."""
        return self._db.execute("SELECT owner, device_s, at FROM uses").fetchall()

    def save_uses(self, uses: Sequence[tuple[str, float]], now: float) -> None:
        rows = [(owner, device_s, now) for owner, device_s in uses]

        def write(db: sqlite3.Connection) -> None:
            db.executemany("INSERT OR REPLACE INTO uses VALUES (?,?,?)", rows)

        if rows and not self.error:  # the next ones say the same and more
            self.change(write, promise=False)

    def estimate_errors(self) -> list[float]:
        """Return how far the last estimates were off, oldest first."""
        query = "SELECT ratio FROM estimate_errors ORDER BY id DESC LIMIT ?"
        rows = self._db.execute(query, (ERRORS_KEPT,)).fetchall()
        return [ratio for (ratio,) in reversed(rows)]

    def add_estimate_error(self, ratio: float) -> None:
        def write(db: sqlite3.Connection) -> None:
            added = db.execute("INSERT INTO estimate_errors (ratio) VALUES (?)", (ratio,)).lastrowid
            db.execute("DELETE FROM estimate_errors WHERE id <= ?", ((added or 0) - ERRORS_KEPT,))

        if not self.error:
            self.change(write, promise=False)

    def learned(self, name: str) -> bytes:
        """Return what was kept under a name; empty: nothing."""
        rows = self._db.execute("SELECT document FROM learned WHERE name = ?", (name,)).fetchall()
        return bytes(rows[0][0]) if rows else b""

    def save_learned(self, name: str, document: bytes) -> None:
        def write(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO learned VALUES (?,?)", (name, document))

        if not self.error:  # the next one says the same and more
            self.change(write, promise=False)

    # --- audit -------------------------------------------------------------------------------------

    def write_audit(self, now: float, actor: str, action: str, detail: str) -> None:
        """Never fails."""

        def write(db: sqlite3.Connection) -> None:
            audit_log.append(db, now, actor, action, detail)

        if self.unwritten < limits.UNWRITTEN_NOTES_MAX:
            self.change(write, promise=False)

    def read_audit(self, count: int) -> list[audit_log.Entry]:
        """Return the newest entries that are written, oldest first."""
        return audit_log.read(self._db, count)

    def verify_audit(self, noted: str = "") -> audit_log.Verdict:
        """Recompute the chain of what is written."""
        return audit_log.verify(self._db, noted)

    # --- other parts of the head -------------------------------------------------------------------

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return what a part of the head has in tables of its own, as it was written."""
        return self._db.execute(query).fetchall()

    def _note(self, db: sqlite3.Connection, note: Note) -> None:
        note.row = audit_log.append(db, note.at, note.actor, note.action, note.detail)


def _try(db: sqlite3.Connection) -> None:
    db.execute("INSERT OR REPLACE INTO counters VALUES ('tried', 1)")


def _describe(shares: Iterable[Share]) -> str:
    return ", ".join(f"session {s.session} on device {s.device}" for s in shares)
