"""`DEVICE=standin:MODE pytest`: the tests' CPU devices are the stand-in's.

tests/conftest.py imports this before anything imports Shoal.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.standin.skips import reason_for

if TYPE_CHECKING:
    from tests.standin.environment import Counts

_PREFIX = "standin:"


def wanted() -> str:
    """Return the mode that DEVICE asks for; "" if it asks for none."""
    device = os.environ.get("DEVICE", "")
    if not device:
        return ""
    if not device.startswith(_PREFIX):
        raise pytest.UsageError(f"DEVICE={device}: write standin:now, late, threads or random")
    return device.removeprefix(_PREFIX)


class Plugin:
    """Fails the test in which an unordered access was found."""

    def __init__(self, mode: str) -> None:
        from tests.standin import instead_of_cpu
        from tests.standin.environment import Options, Run

        self._run = Run(Options(mode, devices=4))
        atexit.register(self._run.close)
        os.environ.update(self._run.environment())
        os.environ[instead_of_cpu.VARIABLE] = "1"
        instead_of_cpu.install()

    def counts(self) -> Counts:
        """Return what the stand-in has counted in this process and its children."""
        return self._run.counts()

    @pytest.fixture(autouse=True)
    def _no_unordered_access(self) -> Iterator[None]:
        before = self._run.counts().races
        yield
        found = self._run.counts().races - before
        if found:
            pytest.fail(f"the stand-in found {found} unordered accesses; stderr names them")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if reason := reason_for(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Give a failed test's lease back: its context may be lost, and later tests want one."""
        from shoal.device import leases

        lease = leases.current()
        if report.failed and lease is not None:
            lease.close()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"standin: {self._run.counts()}")


STANDIN = Plugin(wanted()) if wanted() else None
