"""Runs one of PyTorch's test files in this process: `python one_file.py ORDER.json`.

It writes one line of JSON per event, at once, so that a crash loses nothing: what was collected,
which test began, how it ended. The order names the file, the tests wanted and where to write.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: What the release's tests import from torch.testing and newer releases have under another name.
RENAMED: dict[str, dict[str, Callable[[Any], Any]]] = {
    "torch.testing._internal.common_cuda": {"tf32_is_not_fp32": lambda module: lambda: False},
    "torch.testing._internal.common_mkldnn": {
        "bf32_on_and_off": lambda module: module.reduced_f32_on_and_off
    },
    "torch.testing._internal.common_nn": {
        "new_module_tests": lambda module: module.get_new_module_tests()
    },
}


def supply_old_names(file: Path) -> None:
    """Add the old names that this file mentions. The other files' processes stay untouched."""
    text = file.read_text()
    for module_name, attributes in RENAMED.items():
        for attribute, make in attributes.items():
            if attribute in text:
                module = importlib.import_module(module_name)
                setattr(module, attribute, getattr(module, attribute, None) or make(module))


def shoal_modules() -> set[str]:
    return {name for name in sys.modules if name == "shoal" or name.startswith("shoal.")}


class Journal:
    """Pytest's events, as lines."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._wanted = None if order["tests"] is None else set(order["tests"])
        self._multiprocess = order["multiprocess"]
        self._file = Path(order["journal"]).open("a")  # noqa: SIM115 - open as long as pytest runs
        self._worst: tuple[str, str] = ("passed", "")
        self._began = 0.0
        self._modules = shoal_modules()

    def write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not self._multiprocess:
            items[:] = [item for item in items if not needs_processes(item)]
        self.write(collected=[name(item.nodeid) for item in items])
        if self._wanted is not None:
            items[:] = [item for item in items if name(item.nodeid) in self._wanted]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(import_error=last_line(report.longreprtext))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._worst = ("passed", "")
        self._began = time.monotonic()
        self.write(start=name(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test has several reports: set-up, call, tear-down, and one for each subtest.
        if report.failed:
            self._worst = ("failed", last_line(report.longreprtext))
        elif report.skipped and self._worst[0] == "passed":
            self._worst = ("skipped", "")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, why = self._worst
        modules = shoal_modules()
        self.write(
            end=name(nodeid),
            outcome=outcome,
            why=why,
            imported=sorted(modules - self._modules),
            seconds=round(time.monotonic() - self._began, 2),
        )
        self._modules = modules


def name(nodeid: str) -> str:
    """A test's name without its file: the directory from which it runs does not matter."""
    return nodeid.partition("::")[2]


def last_line(text: str) -> str:
    """The error's own line of pytest's report: the first that it marks with an E."""
    lines = [line for line in text.splitlines() if line.startswith("E  ")]
    return (lines[0][1:].strip() if lines else text.strip()[-300:])[:300]


def needs_processes(item: pytest.Item) -> bool:
    """Whether the test starts one process per rank."""
    common = sys.modules.get("torch.testing._internal.common_distributed")
    cls = getattr(item, "cls", None)
    if common is None or cls is None:
        return False
    return issubclass(cls, common.MultiProcessTestCase)


def main() -> int:
    order = json.loads(Path(sys.argv[1]).read_text())
    sys.path[0] = str(Path(order["file"]).parent)  # as if pytest had been started there
    import torch

    journal = Journal(order)
    journal.write(device=torch._C._get_privateuse1_backend_name(), shoal=bool(shoal_modules()))
    supply_old_names(Path(order["file"]))
    # Without pytest's log handler: it formats torch's records, which some tests do not expect.
    options = ["-c", "/dev/null", "--rootdir", sys.path[0], "--noconftest", "-p", "no:logging"]
    code = pytest.main([*options, "-q", order["file"]], plugins=[journal])
    journal.write(finished=int(code))
    return 0


if __name__ == "__main__":
    sys.exit(main())
