"""What-if answers and dry runs speak of the pool as it is now."""

from __future__ import annotations

from dataclasses import replace

from shoal.tasks import forecast
from shoal.tasks.reasons import Code, Reason
from shoal.tasks.requests import Ask, Planning
from shoal.tasks.room import Needs
from tests.unit.tasks.driver import Pool, devices


def test_what_if_reasons_are_the_planners_while_it_decides() -> None:
    pool = Pool("least-waiting", devices(100))
    pool.step(Planning(1000.0))
    pool.ask("other", needs=Needs(memory_bytes=10), by_plan=True)
    pool.ask("big", needs=Needs(memory_bytes=500), by_plan=True)
    small = Needs(memory_bytes=10)
    found = forecast.why(pool.admission, "big", 1.0, forecast.Errors(), small)
    assert [r.code for r in found.reasons] == [Code.OUTBID, Code.PLACING]
    assert not found.never
    assert forecast.why(pool.admission, "big", 1.0, forecast.Errors()).never


def test_a_dry_run_changes_nothing() -> None:
    pool = Pool("least-waiting", devices(100))
    errors = forecast.Errors()
    ask = Ask("new", "ana", Needs(memory_bytes=60))
    found = forecast.dry_run(pool.admission, ask, (), 1.0, errors)
    assert (found.reasons, found.estimate and found.estimate.start) == ([], 1.0)
    pool.ask("first", needs=Needs(memory_bytes=60))
    found = forecast.dry_run(pool.admission, ask, (), 1.0, errors)
    assert [r.code for r in found.reasons] == [Code.BUSY]
    assert all("new" not in (one.command or "") for one in found.unblock)
    held = Reason(Code.AFTER, "x-1 has not succeeded yet")
    found = forecast.dry_run(pool.admission, replace(ask, limit_s=5.0), (held,), 1.0, errors)
    assert (found.reasons[0], found.estimate) == (held, None)
    assert not pool.admission.waiting
