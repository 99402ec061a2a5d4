"""What every engine does alike: start, list, watch, want and stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from shoal.errors import PoolError
from shoal.pool.engines import engine as engines
from tests.engine.pools import EnginePool, OnLocal, parts, told
from tests.engine.ray_hosts import OnRay, RayHosts, require_ray
from tests.support import processes
from tests.support.namespaces import Hosts
from tests.support.waiting import wait_until


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnginePool]:
    directory = tmp_path_factory.mktemp(request.param)
    with contextlib.ExitStack() as stack:
        made: EnginePool
        if request.param == "local":
            made = OnLocal(directory)
        else:
            require_ray()
            ray = RayHosts(stack.enter_context(Hosts(2)), directory)
            stack.callback(ray.close)
            ray.start(0)
            made = OnRay(ray)
        stack.callback(made.close)
        yield made


def test_it_lists_head_and_agents(pool: EnginePool) -> None:
    found = parts(pool)
    assert [p["part"] for p in found][:2] == ["head", "agent"]
    assert all(processes.alive(p["pid"]) and p["node"] for p in found)
    assert {p["problem"] for p in found} == {""}


def test_a_second_start_makes_no_second_head(pool: EnginePool) -> None:
    before = parts(pool)
    assert "runs already" in pool.up_again().err
    assert parts(pool) == before


def test_a_head_that_ends_is_started_again_and_watchers_hear_of_it(pool: EnginePool) -> None:
    before = parts(pool)
    events = told(
        pool,
        f"""
import os, signal
seen = engine.watch(pool)
there = [next(seen) for _ in range({1 + len(before)})]
os.kill({before[0]["pid"]}, signal.SIGKILL)
tell([*there, next(seen), next(seen)])
""",
    )
    assert [e["type"] for e in events[:2]] == ["NodeCame", "PartStarted"]
    assert [(e["type"], e["placed"]["part"]) for e in events[-2:]] == [
        ("PartEnded", "head"),
        ("PartStarted", "head"),
    ]
    after = parts(pool)
    assert after[0]["restarts"] == before[0]["restarts"] + 1
    assert after[1] == before[1], "the agent went on"


def test_a_wish_is_answered_and_can_be_taken_back(pool: EnginePool) -> None:
    text = told(pool, "import time\ntell(engine.want(pool, [engines.Shape(1)], time.time() + 5))")
    assert isinstance(text, str)
    assert told(pool, "tell(engine.want(pool, [], 0.0))") == ""


def test_nothing_is_left_after_stop(pool: EnginePool) -> None:
    pids = [p["pid"] for p in parts(pool)]
    pids += [child for pid in pids for child in processes.descendants(pid)]
    assert told(pool, "tell([engine.stop(pool), engine.stop(pool)])") == [True, False]
    assert told(pool, "tell([engine.list(pool), list(engine.watch(pool))])") == [[], []]
    wait_until(lambda: not any(map(processes.alive, pids)), 30, "no process is left")


def test_an_engine_that_is_not_there_is_named_with_the_line_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PoolError, match=r"'slurm' is not an engine. There are: local, ray"):
        engines.load("slurm")
    absent = ("a_module_that_nobody_has:Engine", "ray")
    monkeypatch.setitem(engines.ENGINES, "ray", absent)
    with pytest.raises(PoolError, match=r"pip install 'shoal\[ray\]'"):
        engines.load("ray")
