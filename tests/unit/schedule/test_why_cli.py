"""`shoal why` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shoal.cli.simulation.simulate import simulate
from shoal.cli.why import why

EXAMPLES = Path(__file__).parents[3] / "examples" / "schedule"
FILES = ["--trace", str(EXAMPLES / "trace.csv"), "--throughputs", str(EXAMPLES / "throughputs.csv")]
POOL = ["--devices", "a100:2:40GiB,t4:4:16GiB"]


def _why(*arguments: str) -> Result:
    return CliRunner().invoke(why, list(arguments))


def _report(*arguments: str) -> dict[str, object]:
    result = _why(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_a_waiting_task_is_told_all_reasons_what_helps_and_when() -> None:
    found = _report("big", "--at", "2000", *FILES, *POOL)
    assert (found["state"], found["decided_at_s"]) == ("waits", 1800.0)
    assert [reason["code"] for reason in found["reasons"]] == ["outbid", "speed"]  # type: ignore[attr-defined]
    assert "2 more a100" in found["unblock"]  # type: ignore[operator]
    assert 2000 < found["starts_at_s"] < found["ends_at_s"]  # type: ignore[operator]
    assert found["earliest_end_s"] < found["ends_at_s"]  # type: ignore[operator]
    assert found["gap"] > 0  # type: ignore[operator]
    assert found["decision_gap"] >= 0  # type: ignore[operator]
    text = _why("big", "--at", "2000", *FILES, *POOL).stdout
    for told in ("big waits", "what would help", "estimate: starts about", "bound: no schedule"):
        assert told in text


def test_followed_to_its_end_it_says_what_the_simulation_does() -> None:
    found = _report("big", "--follow", *FILES, *POOL)
    assert found["started_at_s"] >= found["decided_at_s"]  # type: ignore[operator]
    assert found["ended_at_s"] >= found["earliest_end_s"]  # type: ignore[operator]


def test_before_it_arrives_while_it_runs_and_after_it_has_ended() -> None:
    early = _report("late", "--at", "100", *FILES, *POOL)
    assert early["decided_at_s"] == early["arrival_s"] == 7200.0
    assert "arrives at 7200 s" in _why("late", "--at", "100", *FILES, *POOL).stdout
    running = _report("nightly", *FILES, *POOL)
    assert running["state"] == "runs"
    assert running["starts_at_s"] == 0.0
    ended = _report("tiny", "--at", "90000", *FILES, *POOL)
    assert ended["state"] == "has ended"
    assert ended["ended_at_s"] < 90000  # type: ignore[operator]
    assert "tiny has ended" in _why("tiny", "--at", "90000", *FILES, *POOL).stdout


def test_a_task_that_can_never_run_has_an_exit_code_of_its_own() -> None:
    result = _why(
        "big", "--json", *FILES, "--devices", "a100:1:40GiB,t4:1:16GiB", "--quota", "ana=1"
    )
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert found["state"] == "never runs"
    assert [reason["code"] for reason in found["reasons"]] == ["quota", "gang", "speed"]
    assert found["unblock"] == ["a quota of 3 for ana", "1 more a100"]
    assert found["ends_at_s"] is found["earliest_end_s"] is None
    # Others that can never run do not stand in the way.
    assert _why("tiny", *FILES, "--devices", "t4:1:16GiB").exit_code == 0
    alone = _why("finetune", *FILES, "--devices", "t4:4:16GiB")
    assert alone.exit_code == 3
    assert "the task did not ask for it" in alone.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["swep-4", *POOL], "no task 'swep-4'; did you mean 'sweep-4'"),
        (["SWEEP", *POOL], "did you mean 'sweep-1'"),
        (["unlike", *POOL], "there are 'nightly'"),
        (["big", *POOL, "--at", "-1"], "--at -1.0 must be seconds since the trace began"),
        (["big", *POOL, "--at", "nan"], "must be seconds since the trace began"),
        (["big", "--devices", "h100:1"], "'h100' is unknown"),
        (["big", *POOL, "--policy", "magic"], "there are: allox"),
    ],
)
def test_errors_say_what_to_type(arguments: list[str], told: str) -> None:
    result = _why(*arguments, *FILES)
    assert result.exit_code == 2, result.output
    assert told in result.output


def test_tasks_of_gavel_traces_go_by_their_line(tmp_path: Path) -> None:
    line = "LM\tx\tx\t-n\t1\t100000\t1\t1\t-1.0\t0\n"
    (tmp_path / "t.trace").write_text(line * 3)
    (tmp_path / "t.json").write_text('{"v100": {"(\'LM\', 1)": {"null": 4.0}}}')
    files = [str(tmp_path / "t.json"), "--devices", "v100:1"]
    found = _report("3", "--trace", str(tmp_path / "t.trace"), "--throughputs", *files)
    assert found["task"] == "3: LM"
    assert found["state"] == "waits"
    assert found["starts_at_s"] == 50000.0
    run = CliRunner().invoke(
        simulate, [str(tmp_path / "t.trace"), "--throughputs", *files, "--json"]
    )
    assert json.loads(run.stdout)["makespan_s"] == 75000.0
