"""The comparison itself: it must see a difference, a crash and a hang, and lose nothing else."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.ecosystem.pytorch_suite import compare, report, sources
from tests.ecosystem.pytorch_suite.runs import Outcome, Run, Runner

TROUBLE = """
import os, pathlib, signal, subprocess, unittest

class TestTrouble(unittest.TestCase):
    def test_a_fails(self):
        self.fail("as it should")

    def test_b_crashes(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def test_c_is_skipped(self):
        self.skipTest("always")

    def test_d_hangs(self):
        child = subprocess.Popen(["sleep", "3600"], process_group=0)
        pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
        while True:
            signal.pause()

    def test_e_passes(self):
        pass
"""

DISTURBED = """
import os, sys, unittest

class TestGuest(unittest.TestCase):
    seen = 0

    def test_a_loads_more(self):
        type(self).seen = 1
        if "shoal" in sys.modules:
            sys.modules["shoal.imported_by_a_test"] = sys

    def test_b_alone(self):
        self.assertNotIn("shoal", sys.modules, "installed")

    def test_c_after_the_first(self):
        self.assertFalse(self.seen and "shoal" in sys.modules, "after the first")

    def test_d_nobody_asked(self):
        self.assertFalse([name for name in os.environ if name.startswith("SHOAL")])

if "shoal" in sys.modules:
    class TestOnlyWithShoal(unittest.TestCase):
        def test_it(self):
            pass
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_crash_or_a_hang_costs_one_test(tmp_path: Path) -> None:
    (tmp_path / "test_trouble.py").write_text(TROUBLE)
    run = Runner(tmp_path, test_seconds=20).run("test_trouble", shoal=False)
    results = {test.partition("_")[2]: outcome.result for test, outcome in run.outcomes.items()}
    assert results == {
        "a_fails": "failed",
        "b_crashes": "crashed",
        "c_is_skipped": "skipped",
        "d_hangs": "hung",
        "e_passes": "passed",
    }
    assert run.outcomes["TestTrouble::test_a_fails"].why.endswith("as it should")
    assert run.outcomes["TestTrouble::test_b_crashes"].why == "SIGSEGV"
    assert ended((tmp_path / "child").read_text())


def ended(pid: str) -> bool:
    """Whether the process is gone, or waits only for its exit code to be read."""
    state = Path("/proc", pid, "stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_file_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "test_old.py").write_text("from torch.testing import gone_since_then\n")
    run = Runner(tmp_path).run("test_old", shoal=False)
    assert not run.outcomes
    assert "gone_since_then" in run.broken


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_differences_alone_and_in_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DEFAULT", "1")  # of whoever runs the comparison
    monkeypatch.setattr(compare, "TIMES", 1)
    (tmp_path / "test_guest.py").write_text(DISTURBED)
    runner = Runner(tmp_path)
    without = runner.run("test_guest", shoal=False)
    with_shoal = runner.run("test_guest", shoal=True, wanted=without.passed())
    result = compare.FileResult(without, with_shoal, compare.suspects(without, with_shoal))
    for suspect in result.suspects:
        compare.run_again(runner, result, suspect)
    alone, after = result.differences
    assert (alone.test, alone.alone) == ("TestGuest::test_b_alone", (1, 0))
    assert (after.test, after.alone) == ("TestGuest::test_c_after_the_first", (1, 1))
    assert after.together == (1, 0)
    assert result.woke == ["TestGuest::test_a_loads_more"]
    assert result.added == ["TestOnlyWithShoal::test_it"]
    assert "| `test_guest` | 4 | 4 | 2 | 0 | 3 |" in report.markdown([result])


def test_the_table_goes_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n")
    with pytest.raises(ValueError, match="pytorch tests: begin"):
        report.write_into(page, [])
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    passed = {"TestA::test_a": Outcome("passed"), "TestA::test_b": Outcome("failed")}
    run = Run("test_nn", shoal=False, collected=list(passed), outcomes=passed)
    report.write_into(page, [compare.FileResult(run, run)])
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "| `test_nn` | 2 | 1 | 1 | 0 | 0 |" in lines
    assert "old" not in lines


def test_only_the_tests_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "HOME", tmp_path)
    with pytest.raises(sources.SourcesMissing, match="--fetch"):
        sources.find()
    inside = tmp_path / "pytorch-v2.6.0"
    for path in ("test/test_torch.py", "test/nn/test_init.py", "torch/version.py"):
        (inside / path).parent.mkdir(parents=True, exist_ok=True)
        (inside / path).touch()
    with tarfile.open(tmp_path / "pytorch_2.6.0+dfsg.orig.tar.xz", "w:xz") as archive:
        archive.add(inside, inside.name)
    directory = sources.find()
    assert (directory / "nn" / "test_init.py").exists()
    assert not (directory.parent / "torch").exists()
