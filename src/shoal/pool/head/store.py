"""What a head must not forget: clients, nodes, leases, codes and the audit log, in SQLite.

Every method is one transaction. With a file it is on the disk when the method returns, so what was
acknowledged after it is never lost; without one (embedded pools) it lives as long as the head.

What is a promise (a lease, a code, a member) is refused if it cannot be written. What has happened
already (an end, a revocation) must not fail for want of a disk: it is kept, and written when it can be.
"""

from __future__ import annotations

import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import PoolError
from shoal.pool.access.codes import IssuedCode, Quota
from shoal.pool.base import limits
from shoal.pool.head.leases import Granted, LeaseTable, Lost, Share
from shoal.pool.wire.end_reasons import End, Note

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE clients (
    name TEXT PRIMARY KEY, role TEXT NOT NULL, serial TEXT NOT NULL UNIQUE,
    joined REAL NOT NULL, expires REAL NOT NULL, revoked REAL,
    devices_max INTEGER, memory_bytes_max INTEGER);
CREATE TABLE codes (
    code_id TEXT PRIMARY KEY, secret_hash BLOB NOT NULL, role TEXT NOT NULL, expires REAL NOT NULL,
    devices_max INTEGER, memory_bytes_max INTEGER);
CREATE TABLE devices (
    number INTEGER PRIMARY KEY, node TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (node, name));
CREATE TABLE leases (
    lease INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, client TEXT NOT NULL, secret TEXT NOT NULL,
    program TEXT NOT NULL, since REAL NOT NULL, until REAL);
CREATE TABLE shares (
    lease INTEGER NOT NULL REFERENCES leases ON DELETE CASCADE, device INTEGER NOT NULL,
    session INTEGER NOT NULL, memory_bytes INTEGER NOT NULL, PRIMARY KEY (lease, device),
    UNIQUE (device, session));
CREATE TABLE audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, actor TEXT NOT NULL,
    action TEXT NOT NULL, detail TEXT NOT NULL);
"""


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


Write = Callable[[sqlite3.Connection], None]


class StoreError(PoolError):
    """The state could not be written; nothing of the change was kept."""


class Store:
    """>>> store = Store(None)
    >>> store.write_audit(0.0, "head", "start", "")
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._unwritten: deque[Write] = deque()  # in their order
        self.failed_writes = 0
        self.error = ""  # of the last write; empty: it went well
        try:
            self._db = sqlite3.connect(
                path or ":memory:", isolation_level=None, timeout=limits.STORE_BUSY_S
            )
            if path is not None:
                path.chmod(0o600)
            self._prepare()
        except sqlite3.Error as error:
            raise PoolError(
                f"the pool's state {path} cannot be used: {error}. Move it away to start an empty pool."
            ) from None

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
        elif version != SCHEMA_VERSION:
            raise PoolError(
                f"the pool's state is of version {version}, this Shoal knows {SCHEMA_VERSION}. "
                "Use the version of Shoal that wrote it, or move the state away."
            )

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit a change to disk, behind all that waited. Raise StoreError if that fails."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for write in self._unwritten:
                    write(self._db)
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.IntegrityError as error:  # the change itself is wrong, not the disk
            raise StoreError(f"the head's state does not allow this: {error}") from None
        except sqlite3.Error as error:
            self.failed_writes += 1
            self.error = str(error)
            raise StoreError(
                f"the head cannot write its state: {error}. Is the disk full? Check with: df"
            ) from None
        self._unwritten.clear()
        self.error = ""

    def _write(self, write: Write) -> None:
        """Note what has happened: now, or as soon as that is possible."""
        try:
            with self._transaction() as db:
                write(db)
        except StoreError:
            self._unwritten.append(write)

    @property
    def unwritten(self) -> int:
        """Changes that wait for room on the disk."""
        return len(self._unwritten)

    def retry(self) -> None:
        """Write what waits. After a failure that nothing waits for, find out whether it is over."""
        if not self._unwritten and not self.error:
            return
        with suppress(StoreError), self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO counters VALUES ('tried', 1)")

    def free_bytes(self) -> int | None:
        """Return the room on the disk; None for a store in memory."""
        if self._path is None:
            return None
        try:
            found = os.statvfs(self._path.parent)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize

    # --- leases ------------------------------------------------------------------------------------

    def add_lease(self, stored: StoredLease, table: LeaseTable) -> None:
        """Write a new lease, with the table's counters after it."""
        granted = stored.granted
        row = (granted.lease, granted.epoch, granted.client, stored.secret, stored.program)
        with self._transaction() as db:
            db.execute(
                "INSERT INTO leases VALUES (?,?,?,?,?,?,?)", (*row, stored.since, granted.until)
            )
            db.executemany(
                "INSERT INTO shares VALUES (?,?,?,?)",
                [(granted.lease, s.device, s.session, s.memory_bytes) for s in granted.shares],
            )
            counters = (("epoch", table.epoch), ("next_session", table.next_session))
            db.executemany("INSERT OR REPLACE INTO counters VALUES (?,?)", counters)
            detail = f"lease {granted.lease}: {_describe(granted.shares)}"
            self._audit(db, stored.since, granted.client, "grant", detail)

    def end_lease(self, lease: int, client: str, end: End, now: float) -> Note:
        """Write the end of a lease. Never fails: see _write."""
        note = Note(now, client, "end", f"lease {lease}", end)

        def write(db: sqlite3.Connection) -> None:
            if db.execute("DELETE FROM leases WHERE lease = ?", (lease,)).rowcount:
                self._note(db, note)

        self._write(write)
        return note

    def lose(self, one: Lost, end: End, now: float) -> Note:
        """Write the loss of shares; it ends a lease without any left. Never fails: see _write."""
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

        self._write(write)
        return note

    def correct(self, note: Note) -> None:
        """Write the corrected reason of an end. Never fails: see _write."""

        def write(db: sqlite3.Connection) -> None:
            row = (_short(note.detail), note.row)
            db.execute("UPDATE audit SET detail = ? WHERE id = ?", row)

        if note.row is not None:  # else it is written with its new reason
            self._write(write)

    def leases(self) -> list[StoredLease]:
        shares: dict[int, list[Share]] = {}
        for lease, device, session, memory in self._db.execute(
            "SELECT lease, device, session, memory_bytes FROM shares ORDER BY lease, device"
        ):
            shares.setdefault(lease, []).append(Share(device, session, memory))
        rows = self._db.execute(
            "SELECT lease, epoch, client, secret, program, since, until FROM leases ORDER BY lease"
        )
        return [
            StoredLease(
                Granted(lease, epoch, tuple(shares.get(lease, ())), client, until),
                secret, program, since,
            )
            for lease, epoch, client, secret, program, since, until in rows
        ]  # fmt: skip

    def counter(self, name: str, default: int) -> int:
        row = self._db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else default

    # --- devices -----------------------------------------------------------------------------------

    def device_number(self, node: str, name: str) -> int:
        """Return the number of a device, the same whenever it comes back."""
        with self._transaction() as db:
            found = db.execute(
                "SELECT number FROM devices WHERE node = ? AND name = ?", (node, name)
            ).fetchone()
            if found is not None:
                return int(found[0])
            last = db.execute("SELECT COALESCE(MAX(number), -1) FROM devices").fetchone()[0]
            db.execute("INSERT INTO devices VALUES (?,?,?)", (last + 1, node, name))
            return int(last) + 1

    def devices(self) -> dict[int, tuple[str, str]]:
        """number -> node, name."""
        rows = self._db.execute("SELECT number, node, name FROM devices")
        return {number: (node, name) for number, node, name in rows}

    # --- codes and clients -------------------------------------------------------------------------

    def add_code(self, code: IssuedCode, now: float) -> None:
        quota = code.quota
        with self._transaction() as db:
            db.execute("DELETE FROM codes WHERE expires <= ?", (now,))
            db.execute(
                "INSERT INTO codes VALUES (?,?,?,?,?,?)",
                (code.code_id, code.secret_hash, code.role, code.expires,
                 quota.devices, quota.memory_bytes),
            )  # fmt: skip
            self._audit(db, now, "owner", "code", f"{code.code_id} for a {code.role}")

    def codes(self) -> list[IssuedCode]:
        rows = self._db.execute(
            "SELECT code_id, secret_hash, role, expires, devices_max, memory_bytes_max FROM codes"
        )
        return [
            IssuedCode(code_id, bytes(secret_hash), role, expires, Quota(devices, memory))
            for code_id, secret_hash, role, expires, devices, memory in rows
        ]

    def add_client(self, client: StoredClient, code_id: str | None, now: float) -> None:
        """Write a client or node that joined, and delete its code in the same commit."""
        quota = client.quota
        with self._transaction() as db:
            if code_id is not None:
                db.execute("DELETE FROM codes WHERE code_id = ?", (code_id,))
            db.execute(
                "INSERT INTO clients VALUES (?,?,?,?,?,?,?,?)",
                (client.name, client.role, client.serial, client.joined, client.expires,
                 client.revoked, quota.devices, quota.memory_bytes),
            )  # fmt: skip
            self._audit(db, now, client.name, "join", f"{client.role}, code {code_id}")

    def revoke_client(self, name: str, now: float) -> None:
        """Write that a client or node is revoked. Never fails: see _write."""

        def write(db: sqlite3.Connection) -> None:
            done = db.execute(
                "UPDATE clients SET revoked = ? WHERE name = ? AND revoked IS NULL", (now, name)
            ).rowcount
            if done:
                self._audit(db, now, "owner", "revoke", name)

        self._write(write)

    def clients(self) -> list[StoredClient]:
        rows = self._db.execute(
            "SELECT name, role, serial, joined, expires, revoked, devices_max, memory_bytes_max "
            "FROM clients ORDER BY joined"
        )
        return [
            StoredClient(name, role, serial, joined, expires, revoked, Quota(devices, memory))
            for name, role, serial, joined, expires, revoked, devices, memory in rows
        ]

    # --- audit -------------------------------------------------------------------------------------

    def write_audit(self, now: float, actor: str, action: str, detail: str) -> None:
        """Never fails: see _write."""

        def write(db: sqlite3.Connection) -> None:
            self._audit(db, now, actor, action, detail)

        if len(self._unwritten) < limits.UNWRITTEN_NOTES_MAX:
            self._write(write)

    def read_audit(self, count: int) -> list[tuple[float, str, str, str]]:
        """Return the newest entries, oldest first."""
        rows = self._db.execute(
            "SELECT at, actor, action, detail FROM audit ORDER BY id DESC LIMIT ?", (count,)
        ).fetchall()
        return list(reversed(rows))

    def _note(self, db: sqlite3.Connection, note: Note) -> None:
        note.row = self._audit(db, note.at, note.actor, note.action, note.detail)

    def _audit(
        self, db: sqlite3.Connection, now: float, actor: str, action: str, detail: str
    ) -> int | None:
        """Return the entry's row."""
        added = db.execute(
            "INSERT INTO audit (at, actor, action, detail) VALUES (?,?,?,?)",
            (now, actor[:64], action, _short(detail)),
        )
        if (
            added.lastrowid is not None and added.lastrowid % 1000 == 0
        ):  # bounded, and rarely at work
            oldest = added.lastrowid - limits.AUDIT_ENTRIES_MAX
            db.execute("DELETE FROM audit WHERE id <= ?", (oldest,))
        return added.lastrowid


def _short(detail: str) -> str:
    return detail[:500]


def _describe(shares: Iterable[Share]) -> str:
    return ", ".join(f"session {s.session} on device {s.device}" for s in shares)
