"""The versions of the head's database, and how a file of an older one becomes a new one.

A migration is a script that runs once, in one transaction with the number of its version. Before the
first of them touches a file, the file is copied to `NAME.vN`, N being the version that it has. Add a
version at the end of MIGRATIONS; never change one that was released.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from shoal.errors import PoolError
from shoal.pool.base import limits

_FIRST = """
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

# A client is a user, unless its code said more. What owners have used, and how good estimates were.
_ROLES_AND_USE = """
UPDATE clients SET role = 'user' WHERE role = 'client';
UPDATE codes SET role = 'user' WHERE role = 'client';
ALTER TABLE leases ADD COLUMN owner TEXT NOT NULL DEFAULT '';
CREATE TABLE uses (owner TEXT PRIMARY KEY, device_s REAL NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE estimate_errors (id INTEGER PRIMARY KEY AUTOINCREMENT, ratio REAL NOT NULL);
"""

# Programs that the pool runs: see tasks/rows.py. `row` is msgpack of what only the head reads.
_TASKS = """
CREATE TABLE tasks (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, key TEXT NOT NULL, request BLOB NOT NULL,
    name TEXT NOT NULL, state TEXT NOT NULL, ended INTEGER NOT NULL, row BLOB NOT NULL,
    ended_at REAL, UNIQUE (owner, key));
CREATE INDEX tasks_unfinished ON tasks (number) WHERE ended = 0;
CREATE INDEX tasks_ended ON tasks (ended_at) WHERE ended = 1;
CREATE INDEX tasks_named ON tasks (owner, name);
CREATE TABLE task_specs (
    number INTEGER PRIMARY KEY REFERENCES tasks ON DELETE CASCADE, spec BLOB NOT NULL);
"""

# What a share may grow to.
_ELASTIC = """
ALTER TABLE shares ADD COLUMN limit_bytes INTEGER NOT NULL DEFAULT 0;
"""

# Events of people, and the tokens of browsers and programs. Each entry of the audit log has the hash of
# the entry before it; `corrects` is the entry whose detail it replaces.
_PEOPLE = """
CREATE TABLE events (
    event TEXT PRIMARY KEY, settings BLOB NOT NULL, seed TEXT NOT NULL, secret BLOB NOT NULL,
    state TEXT NOT NULL, listed BLOB, closed_at REAL, closed_by TEXT NOT NULL,
    wrong_codes INTEGER NOT NULL);
CREATE TABLE event_entrants (
    event TEXT NOT NULL REFERENCES events ON DELETE CASCADE, name TEXT NOT NULL,
    member INTEGER NOT NULL, standing TEXT NOT NULL, tickets INTEGER NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (event, name)) WITHOUT ROWID;
CREATE TABLE event_requests (
    event TEXT NOT NULL REFERENCES events ON DELETE CASCADE, name TEXT NOT NULL,
    own TEXT NOT NULL, at REAL NOT NULL, minutes REAL NOT NULL,
    PRIMARY KEY (event, name)) WITHOUT ROWID;
CREATE TABLE event_outcomes (
    event TEXT NOT NULL REFERENCES events ON DELETE CASCADE, name TEXT NOT NULL, ended TEXT NOT NULL,
    reason TEXT NOT NULL, rank INTEGER NOT NULL, join_code TEXT NOT NULL, until REAL,
    PRIMARY KEY (event, name)) WITHOUT ROWID;
CREATE TABLE tokens (
    hash BLOB PRIMARY KEY, token_id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, event TEXT NOT NULL,
    kind TEXT NOT NULL, scope TEXT NOT NULL, label TEXT NOT NULL, made REAL NOT NULL,
    expires REAL NOT NULL) WITHOUT ROWID;
ALTER TABLE audit ADD COLUMN hash TEXT NOT NULL DEFAULT '';
ALTER TABLE audit ADD COLUMN corrects INTEGER;
"""

# Who holds the grant of an event, and the devices that are kept for it.
_GRANTS = """
ALTER TABLE event_outcomes ADD COLUMN holder TEXT NOT NULL DEFAULT '';
ALTER TABLE event_outcomes ADD COLUMN shares BLOB;
UPDATE event_outcomes SET holder = name WHERE until IS NOT NULL;
"""

# What the planner has learned: one document under each name.
_LEARNED = """
CREATE TABLE learned (name TEXT PRIMARY KEY, document BLOB NOT NULL) WITHOUT ROWID;
"""

#: The script of each version, from 1.
MIGRATIONS: tuple[str, ...] = (
    _FIRST, _ROLES_AND_USE, _TASKS, _ELASTIC, _PEOPLE, _GRANTS, _LEARNED,
)  # fmt: skip


def open_database(path: Path | None) -> sqlite3.Connection:
    """Open the state, make an empty one, or bring one of an older Shoal up to date."""
    database = connect(path)
    try:
        if path is not None:
            path.chmod(0o600)
        database.execute("PRAGMA journal_mode = WAL")
        _migrate(database, path)
    except BaseException:
        database.close()
        raise
    return database


def connect(path: Path | None) -> sqlite3.Connection:
    """Open a connection that commits to the disk. `check_same_thread`: one thread at a time uses it."""
    database = sqlite3.connect(
        path or ":memory:",
        isolation_level=None,
        timeout=limits.STORE_BUSY_S,
        check_same_thread=False,
    )
    database.execute("PRAGMA synchronous = FULL")
    database.execute("PRAGMA foreign_keys = ON")
    return database


def _migrate(database: sqlite3.Connection, path: Path | None) -> None:
    found = int(database.execute("PRAGMA user_version").fetchone()[0])
    if found > len(MIGRATIONS):
        raise PoolError(
            f"the pool's state is of version {found}, this Shoal knows {len(MIGRATIONS)}. "
            "Use the version of Shoal that wrote it, or move the state away."
        )
    if path is not None and 0 < found < len(MIGRATIONS):
        _copy(database, path.with_name(f"{path.name}.v{found}"))
    for version, script in enumerate(MIGRATIONS[found:], found + 1):
        try:
            database.executescript(
                f"BEGIN IMMEDIATE;{script}PRAGMA user_version = {version};COMMIT;"
            )
        except sqlite3.Error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise


def _copy(database: sqlite3.Connection, target: Path) -> None:
    """Copy the database to a file that only its user reads. One from a failed attempt is replaced."""
    temporary = target.with_name(f"{target.name}.part")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.close(descriptor)
    copy = sqlite3.connect(temporary, isolation_level=None)
    try:
        database.backup(copy)
    finally:
        copy.close()
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
