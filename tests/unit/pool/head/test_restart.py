"""A head that starts again waits longer for many clients than for few."""

from __future__ import annotations

from pathlib import Path

from shoal.pool.base import limits
from shoal.pool.base.clock import Clock
from shoal.pool.head.head import Head
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.placement import Request
from shoal.pool.head.store import Store, StoredLease


def restarted(path: Path, leases: int) -> Head:
    store, table = Store(path), LeaseTable()
    number = store.device_number("far", "cpu/0")
    table.add_device(number, "cpu/0", 2**40, "cpu", "far", 0)
    for _ in range(leases):
        granted = table.grant(Request(1, 2**20, client="ana"))
        store.add_lease(StoredLease(granted, "hash", "program", 0.0), table)
    store.close()
    return Head("p", Store(path), standing=True, clock=Clock(monotonic=lambda: 1000.0))


def test_many_clients_have_more_time_to_come_back(tmp_path: Path) -> None:
    few, many = restarted(tmp_path / "few.db", 5), restarted(tmp_path / "many.db", 1000)
    for head, leases in ((few, 5), (many, 1000)):
        deadlines = {h.deadline for h in head.ends.holders.values()}
        served = 1000.0 + (leases + 1) / limits.RETURNS_PER_S
        assert deadlines == {served + limits.RESUME_S}
        assert len(head.ends.holders) == leases
        assert not head.nodes.silent(served + limits.SILENCE_S - 0.1)
        assert [n.name for n in head.nodes.silent(served + limits.SILENCE_S + 0.1)] == ["far"]
    assert min(h.deadline or 0.0 for h in many.ends.holders.values()) > 1000.0 + 20.0
