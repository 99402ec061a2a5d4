"""Keeps the processes of a standing pool or node running, until it is told to end.

They end with this process, however it ends; one that ends by itself is started again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import PoolError, PoolStartError
from shoal.pool.base import limits, paths, process
from shoal.pool.base.process import exit_reason, wait_readable

_log = logging.getLogger(__name__)
START_S = 90.0  # the first import of torch from a cold disk takes a while
STOP_S = 10.0


class Lock:
    """One supervisor per state directory. The kernel lets go of it when its holder ends."""

    def __init__(self, state: Path) -> None:
        paths.make_directory(state)
        self._file = open(state / "lock", "a+")  # noqa: SIM115  (held as long as this process lives)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = holder_pid(state)
            self._file.close()
            raise PoolStartError(
                f"{state.name} runs already (process {holder}). Look at it with `shoal status`, end it "
                "with `shoal down`, or start another with --name."
            ) from None
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()


def holder_pid(state: Path) -> int | None:
    """The supervisor of that state directory, if one runs."""
    try:
        with open(state / "lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                text = file.read(32).strip()
                return int(text) if text.isdecimal() else None
    except FileNotFoundError:
        pass
    return None


def stop(state: Path) -> bool:
    """Ends the supervisor of that directory and all that it runs. False if none runs."""
    pid = holder_pid(state)
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while holder_pid(state) == pid:
        if time.monotonic() > deadline:
            raise PoolError(f"process {pid} has not ended in {STOP_S:g} s. Type: kill -9 {pid}")
        time.sleep(0.02)
    return True


@dataclass
class Part:
    """A process to keep running. It says on its stdout that it is ready, or why it cannot start."""

    name: str
    module: str
    options: str  # JSON
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    started: float = 0.0  # monotonic
    failures: int = 0  # in a row: it ended at once


class Supervisor:
    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = list(parts)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = True
        with suppress(OSError):
            os.write(self._wake_write, b"x")

    def start(self) -> None:
        """Starts every part in turn and waits until it is ready."""
        for part in self._parts:
            self._start(part)
            self._until_ready(part)

    def run(self) -> None:
        """Until a signal comes."""
        while not self._stopping:
            fds = [self._wake_read, *(p.pidfd for p in self._parts)]
            ready = wait_readable(fds)
            for part in self._parts:
                if part.pidfd in ready and not self._stopping:
                    self._restart(part)

    def end(self) -> None:
        """Ends all parts, the last first, and their children with them."""
        for part in reversed(self._parts):
            if part.process is not None:
                part.process.kill()
        for part in self._parts:
            if part.process is not None:
                part.process.wait()

    def _start(self, part: Part) -> None:
        command = [sys.executable, "-m", part.module, part.options]
        part.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        part.pidfd = os.pidfd_open(part.process.pid)
        part.started = time.monotonic()

    def _until_ready(self, part: Part) -> None:
        assert part.process is not None
        assert part.process.stdout is not None
        out = part.process.stdout
        fds = [out.fileno(), self._wake_read]
        ready = wait_readable(fds, START_S)
        if self._wake_read in ready:
            raise PoolStartError("it was ended while it started")
        if not ready:
            raise PoolStartError(f"the {part.name} was not ready in {START_S:g} s")
        said = os.read(out.fileno(), process.REPORT_BYTES_MAX)
        if said != process.READY:
            ended = exit_reason(part.process.wait(timeout=STOP_S)) if not said else repr(said)
            reason = process.failure_in(said) or f"{ended}; its output is above"
            raise PoolStartError(f"the {part.name} did not start: {reason}")

    def _restart(self, part: Part) -> None:
        assert part.process is not None
        why = exit_reason(part.process.wait())
        assert part.process.stdout is not None
        os.set_blocking(part.process.stdout.fileno(), False)
        with suppress(BlockingIOError), part.process.stdout as out:
            why = process.failure_in(os.read(out.fileno(), process.REPORT_BYTES_MAX)) or why
        os.close(part.pidfd)
        failed = time.monotonic() - part.started < limits.WORKED_S
        part.failures = part.failures + 1 if failed else 0
        _log.warning("the %s has ended and is started again: %s", part.name, why)
        if part.failures > 1:  # it does not get far: not too fast
            delay_s = min(limits.RESTART_BACKOFF_MAX_S, 0.25 * 2**part.failures)
            wait_readable([self._wake_read], delay_s)
        if not self._stopping:
            self._start(part)
