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


def test_what_grows_with_each_lease_is_a_leak() -> None:
    """Each lease leaves a descriptor, a thread and a MiB behind."""
    program = """
        import os, threading
        from bench import leaks

        kept = []
        def use():
            kept.append(open(os.devnull))
            kept.append(b"x" * 2**20)
            threading.Thread(target=threading.Event().wait, daemon=True).start()

        leaks.use, leaks.SETTLED_S = use, 2.0
        with leaks.place("embedded") as where:
            print(leaks.leases(where, 24, lambda text: None))
    """
    found = programs.succeed(program)
    for what in ("descriptors grew", "threads grew", "memory grew"):
        assert f"embedded: client: {what}" in found


def test_what_leaks_with_every_tenth_lease_is_found() -> None:
    program = """
        import os
        from bench import leaks

        kept, leased = [], 0
        def use():
            global leased
            leased += 1
            if leased % 10 == 0:
                kept.append(open(os.devnull))

        leaks.use, leaks.SETTLED_S = use, 2.0
        with leaks.place("embedded") as where:
            print(leaks.leases(where, 24, lambda text: None))
    """
    assert "embedded: client: descriptors grew" in programs.succeed(program)


def test_a_descriptor_that_is_opened_once_is_not_a_leak() -> None:
    program = """
        import os
        from bench import leaks

        kept, leased = [], 0
        def use():
            global leased
            leased += 1
            if leased == 20:
                kept.append(open(os.devnull))

        leaks.use, leaks.SETTLED_S = use, 5.0
        with leaks.place("embedded") as where:
            print(leaks.leases(where, 24, print))
    """
    lines = programs.succeed(program).splitlines()
    assert any("client: descriptors grew" in line and "/dev/null" in line for line in lines)
    assert lines[-1] == "[]"


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
