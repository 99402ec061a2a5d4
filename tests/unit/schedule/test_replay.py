"""A live day is a test case: its record is run again, round by round and as a whole."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shoal.cli.main import main
from shoal.schedule.allocator.policy import Plan, View
from shoal.schedule.formats import records, views
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.replay import day, replay
from shoal.schedule.simulate.simulator import Simulation


class Recorded(Shoal):
    """The policy as the pool runs it: each round is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[records.Record] = []

    def decide(self, view: View) -> Plan:
        memory = records.as_json(self.state()) if self.written else {}
        question = records.Question(
            len(self.written), "shoal", self.balance, views.to_fields(view), memory
        )
        plan = super().decide(view)
        self.written.append(records.Record(0.0, question, views.plan_to_fields(plan)))
        return plan


POOL = Pool.parse("fast:1:16GiB,slow:2:16GiB")
TABLE = Throughputs(
    ("fast", "slow"),
    [("a", 1), ("b", 1)],
    np.array([[10.0, 2.0], [4.0, 3.0]]),
    np.full((2, 2), 2.0**30),
    measured={(0, (0, 1)): (6.0, 3.0)},
)
TASKS = [Task(f"t{n}", "ab"[n % 2], 4000.0 + 500 * n, 100.0 * n) for n in range(6)]


def a_day() -> tuple[list[records.Record], list[float]]:
    policy = Recorded()
    run = Simulation(POOL, TABLE, TASKS, policy, 120.0, 5.0).run()
    return policy.written, run.finishes_s.tolist()


def test_every_round_is_decided_alike_again() -> None:
    written, _ = a_day()
    found = replay(written)
    assert found.rounds == found.by_planner == found.equal > 5
    lied = msgspec_replace(written[2], carried_out=records.PlanFields([]))
    assert replay([*written[:2], lied, *written[3:]]).equal == found.equal - 1


def msgspec_replace(record: records.Record, **changes: object) -> records.Record:
    return records.Record(
        **{name: getattr(record, name) for name in record.__struct_fields__} | changes  # type: ignore[arg-type]
    )


def test_a_recorded_day_is_a_trace() -> None:
    written, finishes_s = a_day()
    pool, table, tasks = day(written)
    assert (pool, [t.name for t in tasks]) == (POOL, [t.name for t in TASKS])
    again = Simulation(pool, table, tasks, Shoal(), 120.0, 5.0).run()
    assert again.finishes_s.tolist() == finishes_s


def test_the_command_replays_a_record(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    records.write_records(path, a_day()[0])
    arguments = ["simulate", "--record", str(path), "--round", "120", "--no-bounds", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert '"tasks":6' in result.output.replace(" ", "")
    path.write_text("{}\n")
    broken = CliRunner().invoke(main, arguments)
    assert broken.exit_code == 2
    assert "rounds.jsonl:1: record" in broken.output


def test_a_bundle_without_names_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shoal dump` of a pool that does not run, and `shoal simulate --record` of what it wrote."""
    monkeypatch.setenv("SHOAL_STATE", str(tmp_path))
    written, _ = a_day()
    (tmp_path / "lab").mkdir()
    records.write_records(tmp_path / "lab" / "rounds.jsonl", written)
    bundle = tmp_path / "day.zip"
    run = CliRunner().invoke
    dumped = run(main, ["dump", "--name", "lab", "-o", str(bundle)])
    assert dumped.exit_code == 0, dumped.output
    with zipfile.ZipFile(bundle) as read:
        assert sorted(read.namelist()) == ["about.json", "rounds.jsonl"]
        assert b'"t3"' not in read.read("rounds.jsonl")
        assert json.loads(read.read("about.json"))["running"] is False
    again = list(views.read_records(bundle))
    assert len(again) == len(written)
    found = run(main, ["simulate", "--record", str(bundle), "--policy", "shoal"])
    assert found.exit_code == 0, found.output
    named = run(main, ["dump", "--name", "lab", "-o", str(bundle), "--names"])
    assert named.exit_code == 0, named.output
    assert [r.question.view for r in views.read_records(bundle)] == [
        r.question.view for r in written
    ]


def test_a_bundle_that_is_none_is_refused(tmp_path: Path) -> None:
    bundle = tmp_path / "day.zip"
    with zipfile.ZipFile(bundle, "w") as made:
        made.writestr("other", "x")
    found = CliRunner().invoke(main, ["simulate", "--record", str(bundle)])
    assert found.exit_code == 2
    assert "rounds.jsonl" in found.output
