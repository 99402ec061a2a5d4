"""The policy that docs/scheduling.md shows is a policy, and short."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from shoal.schedule.model import Pool, Task
from shoal.schedule.policy import Policy
from shoal.schedule.simulator import Simulation
from shoal.schedule.throughputs import Throughputs

DOCS = Path(__file__).parents[3] / "docs" / "scheduling.md"
POLICIES = Path(__file__).parents[3] / "src" / "shoal" / "schedule" / "policies"


def test_the_example_policy_runs_and_has_under_60_lines() -> None:
    found = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    code = found[1]
    assert len(code.splitlines()) < 60
    names: dict[str, object] = {}
    exec(code, names)
    policy = names["ShortestFirst"]
    assert isinstance(policy, type)
    assert issubclass(policy, Policy)
    table = Throughputs(("gpu",), [("a", 1)], np.array([[1.0]]))
    tasks = [Task("long", "a", 2000.0), Task("short", "a", 300.0)]
    run = Simulation(Pool.parse("gpu:1"), table, tasks, policy(), 360.0).run()
    assert run.finishes_s.tolist() == [2300.0, 300.0]


def test_baseline_policies_are_under_60_lines_of_their_own() -> None:
    for path in POLICIES.glob("*.py"):
        if path.name not in ("shoal.py", "allox.py"):
            assert len(path.read_text().splitlines()) < 60, path.name
