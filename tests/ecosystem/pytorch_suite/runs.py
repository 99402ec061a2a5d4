"""Runs test files in processes of their own and survives what they do: crashes, hangs, leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.ecosystem.pytorch_suite.sources import ROOT

WORKER = Path(__file__).with_name("one_file.py")
LOGS = ROOT / "build" / "pytorch-suite"
TEST_SECONDS = 600.0  # for one test, and for collecting a file; some tests compile C++
FILE_SECONDS = 7200.0
LOOK_SECONDS = 0.2


@dataclass
class Outcome:
    result: str  # passed, failed, skipped, crashed, hung, not run
    why: str = ""
    imported: list[str] = field(default_factory=list)  # modules of Shoal, while the test ran
    seconds: float = 0.0


@dataclass
class Run:
    """One file, one way."""

    file: str
    shoal: bool
    collected: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    broken: str = ""  # why the file could not be imported
    seconds: float = 0.0

    def passed(self) -> list[str]:
        return [name for name, outcome in self.outcomes.items() if outcome.result == "passed"]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Run:
        run = Run(**json.loads(path.read_text()))
        run.outcomes = {name: Outcome(**outcome) for name, outcome in run.outcomes.items()}  # type: ignore[arg-type]
        return run


class Runner:
    """Starts the processes. `tests` is the directory of PyTorch's tests."""

    def __init__(
        self, tests: Path, *, multiprocess: bool = False, test_seconds: float = TEST_SECONDS
    ) -> None:
        self._tests = tests
        self._multiprocess = multiprocess
        self._test_seconds = test_seconds

    def run(self, file: str, *, shoal: bool, wanted: Iterable[str] | None = None) -> Run:
        """Run a file's tests, or those wanted. A process that dies costs the test it was in."""
        run = Run(file, shoal)
        left = None if wanted is None else list(wanted)
        began = time.monotonic()
        while left is None or left:
            end = self._process(run, left, began + FILE_SECONDS)
            left = [test for test in left or run.collected if test not in run.outcomes]
            if end is not None:
                run.outcomes |= dict.fromkeys(left, end)
                break
        run.seconds = round(time.monotonic() - began, 1)
        return run

    def _process(self, run: Run, tests: list[str] | None, deadline: float) -> Outcome | None:
        """One process. Returns None if another must go on, else what becomes of the tests left."""
        LOGS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="pytorch-suite-") as home:
            journal = Path(home, "journal")
            journal.touch()
            order = {
                "file": str(self._tests / f"{run.file}.py"),
                "tests": tests,
                "multiprocess": self._multiprocess,
                "journal": str(journal),
            }
            Path(home, "order").write_text(json.dumps(order))
            log = LOGS / f"{run.file.replace('/', '-')}-{'with' if run.shoal else 'without'}.log"
            with log.open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, str(WORKER), str(Path(home, "order"))],
                    cwd=Path(order["file"]).parent,  # type: ignore[arg-type]
                    env=environment(Path(home), shoal=run.shoal),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                how = watch(process, journal, self._test_seconds, deadline)
            return read(run, journal, how, log)


def environment(home: Path, *, shoal: bool) -> dict[str, str]:
    """The same for both ways, but for the switch that keeps Shoal out. Nobody asked for a pool."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SHOAL_", "XDG_", "PYTORCH_", "TORCH_", "PYTEST_", "ACCELERATE_"))
        and name not in ("CI", "PYTHONPATH")
    }
    kept |= {
        "HOME": str(home),
        "TMPDIR": str(home),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if not shoal:
        kept["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return kept


def watch(
    process: subprocess.Popen[bytes], journal: Path, test_seconds: float, deadline: float
) -> str:
    """Wait until the process ends, and end its children. Return how, if it was not by itself."""
    size, moved, how = -1, time.monotonic(), ""
    while not ended(process.pid):
        now = time.monotonic()
        if journal.stat().st_size != size:
            size, moved = journal.stat().st_size, now
        if now - moved > test_seconds:
            how = f"hung: no end within {test_seconds:.0f} s"
        elif now > deadline:
            how = f"not run: the file took more than {FILE_SECONDS:.0f} s"
        if how:
            break
        time.sleep(LOOK_SECONDS)
    end_session(process.pid)
    code = process.wait()
    if not how and code < 0:
        how = f"crashed: {signal.Signals(-code).name}"
    elif not how and code:
        how = f"crashed: exit code {code}"
    return how


def ended(pid: int) -> bool:
    """Whether the process ended. It stays a zombie, so that nobody else gets its number."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_session(leader: int) -> None:
    """End the process and its children: data loaders' workers, ranks, compilers.

    A process group is not enough: ninja gives each compiler one of its own.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(entry.name)) == leader:
                    os.kill(int(entry.name), signal.SIGKILL)


def read(run: Run, journal: Path, how: str, log: Path) -> Outcome | None:
    """Add a journal's events to the run."""
    running, finished, before = "", False, len(run.outcomes)
    for line in journal.read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if "shoal" in event and event["shoal"] != run.shoal:
            raise SystemExit(
                f"{run.file}: Shoal is {'' if event['shoal'] else 'not '}loaded in a process that "
                f"must run {'with' if run.shoal else 'without'} it. Install it: make setup"
            )
        if "import_error" in event:
            run.broken = event["import_error"]
        if "collected" in event and not run.collected:
            run.collected = event["collected"]
        if "start" in event:
            running = event["start"]
        if "end" in event:
            run.outcomes[event["end"]] = Outcome(
                event["outcome"], event["why"], event["imported"], event["seconds"]
            )
            running = ""
        finished = finished or "finished" in event
    if finished:
        # A test that was wanted and is not there any more was not collected this way.
        return Outcome("not run", run.broken or "not collected")
    result, _, why = (how or "crashed: the process ended early").partition(": ")
    if result == "not run":
        return Outcome(result, why)
    if running:
        run.outcomes[running] = Outcome(result, why)
    if len(run.outcomes) == before:  # it would only happen again
        run.broken = f"{result} before the first test ({why}); see {log}"
        return Outcome(result, run.broken)
    return None
