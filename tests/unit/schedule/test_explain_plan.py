"""A waiting task is told all reasons, what would help, and when."""

from __future__ import annotations

import numpy as np

from shoal.schedule.allocator.explain_plan import Explanation, explain
from shoal.schedule.allocator.policy import TaskState, View
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.policies.shoal import Shoal

TABLE = Throughputs(
    ("fast", "slow"),
    [("a", 1), ("big", 1), ("gang", 4), ("fast-only", 1)],
    np.array([[10.0, 2.0], [10.0, 2.0], [10.0, 5.0], [10.0, 0.0]]),
    np.array([[2.0, 2.0], [30.0, 30.0], [2.0, 2.0], [2.0, 2.0]]) * 2**30,
)


def _explain(tasks: list[Task], about: int, quotas: dict[str, int] | None = None) -> Explanation:
    pool = Pool.parse("fast:1:40GiB,slow:2:16GiB", quotas)
    states = [
        TaskState(n, t, TABLE.row_of[t.type, t.devices], t.steps) for n, t in enumerate(tasks)
    ]
    view = View(0.0, 360.0, 0.0, pool, TABLE, states)
    return explain(view, Shoal().decide(view), about)


def _codes(explanation: Explanation) -> list[str]:
    return [reason.code for reason in explanation.reasons]


def test_a_running_task_says_where() -> None:
    found = _explain([Task("t", "a", 3600.0)], 0)
    assert found.running
    assert _codes(found) == ["running"]
    assert found.ends_in_s == 360.0


def test_all_reasons_are_given_kind_by_kind() -> None:
    tasks = [Task("t0", "fast-only", 3600.0), Task("t1", "fast-only", 7200.0)]
    found = _explain(tasks, 1)
    assert _codes(found) == ["outbid", "speed"]
    assert "t0" in found.reasons[0].text
    assert "1 more fast" in found.unblock
    assert found.starts_in_s == 360.0  # When t0 is done.


def test_memory_gang_quota_and_kinds() -> None:
    first = Task("first", "big", 36000.0, owner="ana")
    wants_slow = Task("wants-slow", "big", 36000.0, kinds=frozenset(["slow"]), owner="ana")
    found = _explain([first, wants_slow], 1)
    assert _codes(found) == ["kind", "memory"]
    assert found.starts_in_s is None
    gang = _explain([Task("gang", "gang", 10.0, devices=4)], 0)
    assert _codes(gang) == ["gang", "gang"]
    assert "2 more slow" in gang.unblock
    limited = _explain([first, Task("second", "a", 72000.0, owner="ana")], 1, {"ana": 1})
    assert _codes(limited)[0] == "quota"
    assert "a quota of 2 for ana" in limited.unblock
