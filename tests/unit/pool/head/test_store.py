"""What a head must not forget is there when the next one opens the file, however the first died."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import PoolError
from shoal.pool.access import codes
from shoal.pool.access.codes import Quota
from shoal.pool.head import migrations
from shoal.pool.head.leases import Granted, LeaseTable, Request, Share
from shoal.pool.head.store import Store, StoredClient, StoredLease, StoreError
from shoal.pool.wire.end_reasons import End, Why
from tests.support import programs


def table() -> LeaseTable:
    made = LeaseTable()
    for number in range(2):
        made.add_device(number, f"d{number}", 100)
    return made


def lend(store: Store, leases: LeaseTable, count: int = 1) -> StoredLease:
    granted = leases.grant(Request(count, 10, client="ana", until=5.0))
    stored = StoredLease(granted, "hash", "train.py", 1.0)
    store.flush(store.add_lease(stored, leases))
    return stored


def test_leases_come_back_as_they_were(tmp_path: Path) -> None:
    store, leases = Store(tmp_path / "db"), table()
    kept, ended, halved = lend(store, leases), lend(store, leases), lend(store, leases, 2)
    leases.release(ended.granted.lease)
    store.end_lease(ended.granted.lease, "ana", End(Why.GIVEN_BACK), 2.0)
    lost = leases.lose([halved.granted.shares[0]])
    store.lose(lost[0], End(Why.WORKER_KILLED, "SIGKILL"), 3.0)
    store.close()

    again = Store(tmp_path / "db")
    assert [s.granted for s in again.leases()] == list(leases.leases.values())
    assert again.leases()[0] == kept
    restored = LeaseTable()
    restored.restore(
        [s.granted for s in again.leases()],
        again.counter("epoch", 0),
        again.counter("next_session", 1),
    )
    assert (restored.epoch, restored.next_session) == (leases.epoch, leases.next_session)
    actions = [action for _, _, action, *_ in again.read_audit(10)]
    assert actions == ["grant", "grant", "grant", "end", "lose"]


def test_a_lease_that_loses_all_its_devices_is_gone(tmp_path: Path) -> None:
    store, leases = Store(None), table()
    lend(store, leases, 2)
    for lost in leases.lose([*leases.shares_of(0), *leases.shares_of(1)]):
        store.lose(lost, End(Why.NODE_LOST, "n1"), 2.0)
    assert store.leases() == []


def test_device_numbers_stay(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    assert [store.device_number(*key) for key in (("n", "a"), ("n", "b"), ("m", "a"))] == [0, 1, 2]
    store.close()
    again = Store(tmp_path / "db")
    assert again.device_number("n", "b") == 1
    assert again.device_number("k", "c") == 3
    assert again.devices()[2] == ("m", "a")


def test_a_code_goes_with_the_client_that_used_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    code = codes.IssuedCode("AAA", codes.hash_secret("x"), "client", 100.0, Quota(2, 50))
    store.flush(store.add_code(code, "owner", 0.0))
    assert store.codes() == [code]
    ana = StoredClient("ana", "client", "1F", 1.0, 99.0, None, Quota(2, 50))
    store.flush(store.add_client(ana, "AAA", 1.0))
    assert store.codes() == []
    assert store.clients() == [ana]
    with pytest.raises(StoreError):
        store.flush(
            store.add_client(ana, None, 2.0)
        )  # no two of a name, and nothing of the second is kept
    assert store.clients() == [ana]
    for now, name in ((5.0, "ana"), (6.0, "ana"), (6.0, "bob")):
        store.revoke_client(name, "owner", now)
    store.flush()
    assert store.clients()[0].revoked == 5.0


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    """A process is killed while it writes; every lease that it told of is in the file."""
    source = """
        import sys
        from pathlib import Path
        from shoal.pool.head.store import Store
        from tests.unit.pool.head.test_store import lend, table
        store, leases = Store(Path(sys.argv[1])), table()
        while True:
            lease = lend(store, leases).granted.lease
            print(lease, flush=True)
            leases.release(lease)
    """
    for number in range(3):
        path = tmp_path / f"db{number}"
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(source), str(path)],
            stdout=subprocess.PIPE, text=True, env=programs.environment(),
        )  # fmt: skip
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(10 + 7 * number)]
        os.kill(writer.pid, signal.SIGKILL)
        told += [int(line) for line in writer.communicate()[0].splitlines()]
        store = Store(path)
        found = {s.granted.lease for s in store.leases()}
        assert set(told) <= found
        assert len(found - set(told)) <= 1  # written, and not told yet
        assert store.counter("epoch", 0) == max(found)


def test_a_file_that_is_no_state_is_refused_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"nonsense" * 1000)
    with pytest.raises(PoolError, match="cannot be used"):
        Store(broken)
    newer = tmp_path / "newer"
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(PoolError, match="version 99"):
        Store(newer)


def test_the_audit_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.pool.base.limits.AUDIT_ENTRIES_MAX", 500)
    store = Store(None)
    for i in range(2500):
        store.write_audit(float(i), "x" * 100, "test", "y" * 1000)
    entries = store.read_audit(5000)
    assert 500 <= len(entries) <= 1500
    assert entries[-1][0] == 2499.0
    assert len(entries[0][1]) <= 64


# --- versions --------------------------------------------------------------------------------------


def first_version(path: Path) -> None:
    """A file as the first version of Shoal wrote it."""
    with sqlite3.connect(path) as db:
        db.executescript(f"BEGIN;{migrations.MIGRATIONS[0]}PRAGMA user_version = 1;COMMIT;")
        db.execute("INSERT INTO clients VALUES ('ana','client','1F',1,99,NULL,2,50)")
        db.execute("INSERT INTO leases VALUES (7,7,'ana','hash','train.py',1,NULL)")
        db.execute("INSERT INTO shares VALUES (7,0,3,10)")
    db.close()


def test_a_file_of_the_first_version_is_brought_up_to_date_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "pool.db"
    first_version(path)
    store = Store(path)
    assert [c.role for c in store.clients()] == ["user"]  # a client is a user
    assert store.leases()[0].granted == Granted(7, 7, (Share(0, 3, 10),), "ana")
    store.close()
    kept = tmp_path / "pool.db.v1"
    assert kept.stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(kept) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert db.execute("SELECT name, role FROM clients").fetchall() == [("ana", "client")]
    db.close()
    kept.unlink()
    Store(path).close()
    assert not kept.exists()  # a file that is up to date is not copied


def test_a_migration_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pool.db"
    first_version(path)
    before = migrations.MIGRATIONS
    broken = (*before, "CREATE TABLE good (x); CREATE TABLE codes (x);")
    monkeypatch.setattr(migrations, "MIGRATIONS", broken)
    with pytest.raises(PoolError, match="cannot be used"):
        Store(path)
    with sqlite3.connect(path) as db:  # the migrations before it are done
        assert db.execute("PRAGMA user_version").fetchone() == (len(before),)
        assert not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'good'").fetchall()
    db.close()
    assert (tmp_path / "pool.db.v1").exists()
    monkeypatch.setattr(migrations, "MIGRATIONS", before)
    assert [c.role for c in Store(path).clients()] == ["user"]


# --- the thread that writes ------------------------------------------------------------------------


def test_one_wrong_change_does_not_harm_the_others_of_its_commit(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    ana = StoredClient("ana", "user", "1F", 1.0, 99.0, None, Quota())
    good = store.add_client(ana, None, 1.0)
    same_name = store.add_client(replace(ana, serial="2F"), None, 1.0)
    store.write_audit(2.0, "head", "start", "")
    store.flush(good)
    with pytest.raises(StoreError, match="does not allow this"):
        store.flush(same_name)
    assert store.clients() == [ana]
    assert [action for _, _, action, *_ in store.read_audit(9)] == ["join", "start"]
    assert (store.failed_writes, store.error) == (0, "")


def test_changes_that_gather_are_one_commit(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")

    async def run() -> tuple[int, int]:
        before = commits(tmp_path / "db-wal")
        await asyncio.gather(*(promise(n) for n in range(200)))
        return before, commits(tmp_path / "db-wal")

    async def promise(number: int) -> None:
        code = codes.IssuedCode(f"c{number}", bytes(32), "user", 9e9, Quota())
        await store.flushed(store.add_code(code, "owner", 0.0))

    before, after = asyncio.run(run())
    assert len(store.codes()) == 200
    assert after - before < 100  # each would be one without gathering


def commits(journal: Path) -> int:
    """Return how many frames of SQLite's journal end a commit."""
    data = journal.read_bytes() if journal.exists() else b""
    frame = 24 + int.from_bytes(data[8:12], "big")
    return sum(
        int.from_bytes(data[at + 4 : at + 8], "big") > 0 for at in range(32, len(data) - 24, frame)
    )
