"""The policy that docs/scheduling.md shows is a policy, and short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import shoal.schedule.policies as package
from shoal.cli.simulation.simulate import simulate
from shoal.cli.why import why
from shoal.schedule.allocator.policy import Policy, policies
from shoal.schedule.allocator.time_shares import SharePolicy
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.simulate.simulator import Simulation

DOCS = Path(__file__).parents[3] / "docs" / "scheduling.md"
EXAMPLES = Path(__file__).parents[3] / "examples" / "schedule"
POLICIES = Path(__file__).parents[3] / "src" / "shoal" / "schedule" / "policies"


def _example() -> str:
    found = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_policy_is_found_in_a_new_file_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a reader would do it: a file among the policies, then its name on the command line."""
    assert len(_example().splitlines()) < 60
    (tmp_path / "shortest_of_the_docs.py").write_text(_example())
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    run = [
        "--throughputs",
        str(EXAMPLES / "throughputs.csv"),
        "--devices",
        "a100:2:40GiB,t4:4:16GiB",
    ]
    found = CliRunner().invoke(
        simulate,
        [str(EXAMPLES / "trace.csv"), *run, "--policy", "shortest", "--json", "--no-bounds"],
    )
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["policy"] == "shortest"
    policy = policies()["shortest"]
    table = Throughputs(("gpu",), [("a", 1)], np.array([[1.0]]))
    tasks = [Task("long", "a", 2000.0), Task("short", "a", 300.0)]
    result = Simulation(Pool.parse("gpu:1"), table, tasks, policy(), 360.0).run()
    assert result.finishes_s.tolist() == [2300.0, 300.0]


@pytest.mark.parametrize("base", [Policy, SharePolicy])
def test_a_policy_that_decides_nothing_cannot_be_made(base: type[Policy]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        base()


def test_baseline_policies_are_under_60_lines_of_their_own() -> None:
    for path in POLICIES.glob("*.py"):
        if path.name not in ("shoal.py", "allox.py"):
            assert len(path.read_text().splitlines()) < 60, path.name


def test_no_placeholder_is_left() -> None:
    for word in ("@@", "TODO", "TBD", "FIXME"):
        assert word not in DOCS.read_text()


def test_why_prints_what_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [b for b in DOCS.read_text().split("```") if "big waits in the round" in b]
    command, shown = re.split(r"\n(?=big waits)", block)
    words = command.replace("\\\n", " ").partition("shoal why ")[2].split()
    monkeypatch.chdir(EXAMPLES.parents[1])
    found = CliRunner().invoke(why, words)
    assert found.exit_code == 0, found.output
    assert found.stdout.split() == shown.split()
