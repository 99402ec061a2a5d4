"""Leases and tensors that come and go leave nothing behind: descriptors, threads and memory stay flat.

`python -m bench.leaks` does the same for thousands of leases and for minutes.
"""

from __future__ import annotations

import pytest

from tests.support import programs

LEAKS = """
    from bench import leaks
    problems = []
    with leaks.place({way!r}) as where:
        problems += leaks.{what}
    assert not problems, problems
"""


@pytest.mark.parametrize("way", ["embedded", "standing", "network"])
def test_leases_leave_nothing_behind(way: str) -> None:
    programs.succeed(LEAKS.format(way=way, what="leases(where, 70, print)"))


@pytest.mark.parametrize("way", ["standing", "network"])
def test_a_program_with_many_open_files_keeps_its_lease(way: str) -> None:
    """select() counts to 1024: the thread that keeps the lease died, and the lease 10 s later."""
    source = LEAKS.format(way=way, what="files(where, print, keep_s=3.0)")
    outcome = programs.run(source)
    assert outcome.code == 0, outcome.err
    assert "out of range" not in outcome.err


def test_tensors_that_come_and_go_leave_nothing_behind() -> None:
    programs.succeed(LEAKS.format(way="standing", what="churn(where, 2000, 0.05, print)"))


def test_no_select_in_the_sources() -> None:
    """It fails in programs with more than 1024 descriptors."""
    found = [p for p in (programs.ROOT / "src").rglob("*.py") if "select.select" in p.read_text()]
    assert not found
