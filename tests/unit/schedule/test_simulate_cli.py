"""`shoal simulate` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shoal.cli.simulation.simulate import simulate

EXAMPLES = Path(__file__).parents[3] / "examples" / "schedule"
POOL = ["--devices", "a100:2:40GiB,t4:4:16GiB"]
TABLE = ["--throughputs", str(EXAMPLES / "throughputs.csv")]
TRACE = str(EXAMPLES / "trace.csv")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(simulate, list(arguments))


def test_json_has_the_figures_and_the_bounds() -> None:
    result = _run(TRACE, *TABLE, *POOL, "--json", "--restart-cost", "30")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["policy"] == "shoal"
    assert found["tasks"] == 10
    assert found["average_completion_s"] >= found["bounds"]["average_completion_s"]
    assert found["makespan_s"] >= found["bounds"]["makespan_s"]
    for name in ("p99_completion_s", "utilisation", "restarts", "worst_finish_ratio"):
        assert found[name] >= 0


def test_several_policies_give_a_table_and_plots(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    policies = ["--policy", "shoal", "--policy", "fifo"]
    result = _run(TRACE, *TABLE, *POOL, *policies, "--html", str(page))
    assert result.exit_code == 0, result.output
    assert "lower" in result.stdout
    html = page.read_text()
    assert html.count("<svg") == 3
    assert "sweep-1" in html
    assert "http://" not in html
    assert "https://" not in html


def test_a_generated_trace_can_be_saved_and_run_again(tmp_path: Path) -> None:
    saved = str(tmp_path / "made.csv")
    make = ["--generate", "12", "--seed", "3", "--per-hour", "6", "--save-trace", saved]
    first = _run(*make, *TABLE, *POOL, "--json", "--no-bounds")
    again = _run(saved, *TABLE, *POOL, "--json", "--no-bounds")
    assert first.exit_code == 0, first.output
    one, two = json.loads(first.stdout), json.loads(again.stdout)
    assert one["makespan_s"] == pytest.approx(two["makespan_s"], rel=1e-6)
    assert one["bounds"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([TRACE, *TABLE, "--devices", "a100"], "v100:8:16GiB"),
        ([TRACE, *TABLE, *POOL, "--policy", "magic"], "there are: allox"),
        ([TRACE, *TABLE, *POOL, "--restart-cost", "400"], "shorter than a round"),
        ([*TABLE, *POOL], "--generate"),
        ([TRACE, *TABLE, "--devices", "t4:4:16GiB"], "trace.csv:4: devices: task 'finetune'"),
        ([TRACE, *TABLE, *POOL, "--quota", "ana"], "OWNER=DEVICES"),
        ([TRACE, *TABLE, *POOL, "--quota", "ana=1"], "more than the quota of 'ana'"),
    ],
)
def test_errors_say_what_to_do(arguments: list[str], told: str) -> None:
    result = _run(*arguments)
    assert result.exit_code != 0
    assert told in result.output
    assert "Traceback" not in result.output


def test_policies_are_listed() -> None:
    result = _run("--policy", "list", *TABLE, *POOL)
    assert "max-min-packed" in result.stdout
