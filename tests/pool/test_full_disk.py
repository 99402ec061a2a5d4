"""A full disk at the head stops promises, never an end: `shoal revoke` works, and the rest is written
when there is room."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoal
from shoal.pool.access import codes
from shoal.pool.head.store import Store
from shoal.pool.wire import messages
from tests.support import disks
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

MiB = 2**20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[StandingPool]:
    """Its state is on a disk of 1 MiB."""
    directory = tmp_path / "pool"
    directory.mkdir()
    with disks.file_system(directory / "state", "size=1m"):
        with StandingPool(directory, "cpu,memory=64MiB,threads=1", listen=True) as made:
            yield made


def fill(directory: Path) -> Path:
    """Leave no room on the disk of `directory`."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65536, 4096, 512, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return filler


def add_codes(store: Store) -> None:
    """More than fit the room that a journal may have left."""
    for number in range(1000):
        code = codes.IssuedCode(f"code-{number}", bytes(32), "user", 9e9, codes.Quota())
        store.flush(store.add_code(code, "owner", 0.0))


def test_revoke_on_a_full_disk(pool: StandingPool, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = pool.join("carl")
    monkeypatch.setenv("SHOAL_IDENTITY", str(identity.path))
    with shoal.connect(pool.network_url, memory="8MiB", transport="network") as lease:
        x = torch.ones(3, device="shoal")
        assert x.sum().item() == 3
        filler = fill(pool.directory / "state")
        done = pool.run("revoke", "carl", "--name", pool.name)
        assert done.code == 0, done.err
        assert "carl is revoked; 1 lease(s) ended" in done.out
        assert "not on the disk yet" in done.out
        with pytest.raises(shoal.DeviceLostError, match="carl was revoked by the pool's owner"):
            wait_until(lambda: x.sum().item() != 3, 30, "the session is over")
        assert lease.end_reason == "carl was revoked by the pool's owner"
    with pytest.raises(shoal.LeaseError, match="carl was revoked by the pool's owner"):
        shoal.connect(pool.network_url)
    state = pool.status().state
    assert state.failed_writes > 0
    assert state.unwritten > 0
    doctor = pool.run("doctor", "--pool", pool.name, "--json")
    found = {f["what"]: f for f in json.loads(doctor.out)}
    assert found["state"]["state"] == "bad"
    assert "full" in found["state"]["text"]

    filler.unlink()
    wait_until(lambda: pool.status().state.unwritten == 0, 30, "it is written when there is room")
    assert not pool.status().state.error
    log = pool.ask(messages.ReadAudit(20))
    assert isinstance(log, messages.AuditLog)
    told = [(e.action, e.detail) for e in log.entries]
    assert ("revoke", "carl") in told
    assert ("end", f"lease {lease.number}: carl was revoked by the pool's owner") in told
    pool.stop()
    pool.start()  # what was written later is there for the next head
    with pytest.raises(shoal.LeaseError, match="carl was revoked by the pool's owner"):
        shoal.connect(pool.network_url)


def test_what_waits_for_room_is_written_before_the_next_promise(tmp_path: Path) -> None:
    with disks.file_system(tmp_path / "disk", "size=1m") as disk:
        store = Store(disk / "db")
        filler = fill(disk)
        store.write_audit(1.0, "head", "first", "")
        store.flush()
        store.write_audit(2.0, "head", "second", "")
        store.flush()
        assert (store.unwritten, store.failed_writes > 1, store.free_bytes()) == (2, True, 0)
        filler.unlink()
        store.write_audit(3.0, "head", "third", "")
        store.flush()
        assert (store.unwritten, store.error) == (0, "")
        assert [action for _, _, action, *_ in store.read_audit(9)] == ["first", "second", "third"]
        store.close()


def test_a_failure_that_nothing_waits_for_is_over_when_there_is_room(tmp_path: Path) -> None:
    with disks.file_system(tmp_path / "disk", "size=1m") as disk:
        store = Store(disk / "db")
        filler = fill(disk)
        with pytest.raises(shoal.PoolError, match="Is the disk full"):
            add_codes(store)
        store.retry()
        store.flush()
        assert store.error
        filler.unlink()
        store.retry()
        store.flush()
        assert not store.error
        store.close()
