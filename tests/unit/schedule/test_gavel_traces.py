"""Gavel's published traces: the simulator agrees with Gavel's, and the policy with its promise.

The data is not in the repository. Set SHOAL_GAVEL_DATA to the folder that holds
`physical_cluster_throughputs.json` and `traces/`.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from shoal.schedule.allocator.policy import policies
from shoal.schedule.formats.tables import read_table, read_trace
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.simulate.bounds import bounds, completion_bound
from shoal.schedule.simulate.simulator import Result, Simulation

BESIDE = Path(__file__).parents[4] / "shared" / "data" / "gavel"
DATA = Path(os.environ.get("SHOAL_GAVEL_DATA", BESIDE))
POOL = Pool.parse("v100:8,p100:16,k80:24")
pytestmark = pytest.mark.skipif(
    not (DATA / "traces").is_dir(), reason="Gavel's traces are not here; set SHOAL_GAVEL_DATA"
)

#: Hours of Gavel's own simulator on its two traces: average completion time, makespan.
PUBLISHED = {
    "fifo-fast": ((5.18, 19.0), (10.7, 24.3)),
    "las": ((5.20, 19.7), (9.22, 22.4)),
    "max-min": ((3.82, 17.1), (9.26, 18.6)),
    "max-min-packed": ((3.73, 17.1), (8.46, 17.7)),
    "finish-time": ((3.94, 17.2), (9.37, 19.1)),
    "makespan": ((5.94, 16.25), (17.0, 17.40)),
    "makespan-packed": ((6.30, 16.25), (15.7, 16.11)),
}
TRACES = ("max_min_fairness", "minimize_makespan")


@cache
def _table() -> Throughputs:
    return read_table(DATA / "physical_cluster_throughputs.json")


@cache
def _tasks(trace: str) -> tuple[Task, ...]:
    return tuple(read_trace(DATA / "traces" / f"{trace}.trace").tasks)


@cache
def _run(policy: str, trace: str) -> Result:
    return Simulation(POOL, _table(), _tasks(trace), policies()[policy](), 360.0).run()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("policy", sorted(PUBLISHED))
def test_baselines_agree_with_gavels_simulator(policy: str, place: int) -> None:
    result = _run(policy, TRACES[place])
    average_h, makespan_h = PUBLISHED[policy][place]
    assert result.completions_s.mean() / 3600 == pytest.approx(average_h, rel=0.10)
    assert result.makespan_s / 3600 == pytest.approx(makespan_h, rel=0.10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trace", "least_h"), [(TRACES[0], (2.98, 16.2)), (TRACES[1], (6.1, 15.85))]
)
def test_bounds(trace: str, least_h: tuple[float, float]) -> None:
    known = bounds(POOL, _table(), _tasks(trace))
    assert known.average_completion_s / 3600 == pytest.approx(least_h[0], rel=0.01)
    assert known.makespan_s / 3600 == pytest.approx(least_h[1], rel=0.01)


def test_an_early_end_and_early_completions_exclude_each_other() -> None:
    """On the second trace: with the last finish at 16.3 h, no average below 6.2 h."""
    bound_s = completion_bound(POOL, _table(), _tasks(TRACES[1]), 2, 16.3 * 3600, intervals=6)
    assert bound_s is not None
    assert 6.2 < bound_s / 3600 < 6.4


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES)
def test_shoal_is_ahead_of_every_baseline_on_completion_time_and_fair(trace: str) -> None:
    shoal = _run("shoal", trace)
    for name in PUBLISHED:
        assert shoal.completions_s.mean() < _run(name, trace).completions_s.mean() * 0.9
    fairest = _run("finish-time", trace)
    assert shoal.finish_ratios.max() <= fairest.finish_ratios.max()
    packed = _run("max-min", trace)
    assert np.percentile(shoal.completions_s, 99) <= np.percentile(packed.completions_s, 99)
