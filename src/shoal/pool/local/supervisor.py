"""Keeps the processes of a standing pool or node running, until a signal ends it.

They end with this process, however it ends. It restarts one that ends by itself.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shoal.errors import PoolError, PoolStartError
from shoal.pool.base import limits, paths, process
from shoal.pool.base.process import exit_reason, wait_readable

_log = logging.getLogger(__name__)
_RECORD = "processes.json"


class Lock:
    """One supervisor per state directory. The kernel releases the lock when its holder ends."""

    def __init__(self, state: Path) -> None:
        paths.make_directory(state)
        self._file = open(state / "lock", "a+")  # noqa: SIM115  (held as long as this process lives)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = holder_pid(state)
            self._file.close()
            raise PoolStartError(
                f"{state.name} runs already (process {holder}). See it with `shoal status`, end it "
                "with `shoal down`, or start another with --name."
            ) from None
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()


def holder_pid(state: Path) -> int | None:
    """Return the process of that state directory's supervisor, if one runs."""
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
    """End the supervisor of that directory and its processes. Return False if none runs."""
    pid = holder_pid(state)
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + limits.STOP_S
    while holder_pid(state) == pid:
        if time.monotonic() > deadline:
            raise PoolError(
                f"process {pid} has not ended in {limits.STOP_S:g} s. Type: kill -9 {pid}"
            )
        time.sleep(0.02)
    return True


class Run(msgspec.Struct, frozen=True):
    """A process that a supervisor has started, as it notes it for others."""

    name: str
    pid: int
    since: float  # Unix time
    restarts: int


def recorded(state: Path) -> list[Run]:
    """Return the processes of that directory's supervisor; empty: none runs."""
    if holder_pid(state) is None:
        return []
    try:
        return msgspec.json.decode((state / _RECORD).read_bytes(), type=list[Run])
    except FileNotFoundError:
        return []  # it is just starting


@dataclass
class Supervised:
    """A process to keep running. It reports on its stdout that it is ready, or why it cannot start."""

    name: str
    module: str
    options: str  # JSON
    descriptors: tuple[int, ...] = ()  # that it inherits
    environment: Mapping[str, str] | None = None  # None: this process's own
    since: float = 0.0  # Unix time
    restarts: int = -1
    child: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    started: float = 0.0  # monotonic
    backoff: process.Backoff = field(default_factory=process.Backoff)


class Supervisor:
    """The thread that starts and runs it must live as long as the processes: they end with it.

    Args:
        record: the directory in which to note what runs, for `recorded`.
        signals: whether a signal ends it. Only a main thread can have that.
    """

    def __init__(
        self, processes: Sequence[Supervised], record: Path | None = None, *, signals: bool = True
    ) -> None:
        self._processes = list(processes)
        self._record = record
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = False
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, lambda number, frame: self.stop())

    def stop(self) -> None:
        """Have `start` and `run` return, from a signal handler or another thread."""
        self._stopping = True
        with suppress(OSError):
            os.write(self._wake_write, b"x")

    @property
    def runs(self) -> list[Run]:
        """The processes that were started, in order."""
        started = [one for one in self._processes if one.child is not None]
        return [Run(p.name, p.child.pid, p.since, p.restarts) for p in started if p.child]

    def start(self) -> None:
        """Start every process in turn and wait until it is ready."""
        for one in self._processes:
            self._start(one)
            self._until_ready(one)

    def run(self) -> None:
        """Restart processes that end, until a signal comes."""
        while not self._stopping:
            fds = [self._wake_read, *(p.pidfd for p in self._processes)]
            ready = wait_readable(fds)
            for one in self._processes:
                if one.pidfd in ready and not self._stopping:
                    self._restart(one)

    def end(self) -> None:
        """End all processes, the last first, and their children with them."""
        for one in reversed(self._processes):
            if one.child is not None:
                one.child.kill()
        for one in self._processes:
            if one.child is not None and one.child.stdout is not None:
                one.child.wait()
                one.child.stdout.close()
                os.close(one.pidfd)
                one.child = None

    def _start(self, one: Supervised) -> None:
        command = [sys.executable, "-m", one.module, one.options]
        one.child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
            pass_fds=one.descriptors, env=one.environment,
        )  # fmt: skip
        one.pidfd = os.pidfd_open(one.child.pid)
        one.started, one.since = time.monotonic(), time.time()
        one.restarts += 1
        if self._record is not None:
            text = msgspec.json.encode(self.runs).decode()
            with suppress(PoolError):  # a full disk is no reason to be without the process
                paths.write_private(self._record / _RECORD, text)

    def _until_ready(self, one: Supervised) -> None:
        assert one.child is not None
        assert one.child.stdout is not None
        out = one.child.stdout
        fds = [out.fileno(), self._wake_read]
        ready = wait_readable(fds, limits.START_S)
        if self._wake_read in ready:
            raise PoolStartError("a signal ended it while it started")
        if not ready:
            raise PoolStartError(f"the {one.name} was not ready in {limits.START_S:g} s")
        report = os.read(out.fileno(), limits.REPORT_BYTES_MAX)
        if report != process.READY:
            ended = (
                exit_reason(one.child.wait(timeout=limits.STOP_S)) if not report else repr(report)
            )
            reason = process.failure_in(report) or f"{ended}; its output is above"
            raise PoolStartError(f"the {one.name} did not start: {reason}")

    def _restart(self, one: Supervised) -> None:
        assert one.child is not None
        why = exit_reason(one.child.wait())
        assert one.child.stdout is not None
        os.set_blocking(one.child.stdout.fileno(), False)
        with suppress(BlockingIOError), one.child.stdout as out:
            why = process.failure_in(os.read(out.fileno(), limits.REPORT_BYTES_MAX)) or why
        os.close(one.pidfd)
        one.child = None
        delay_s = one.backoff.ended(time.monotonic() - one.started >= limits.WORKED_S)
        _log.warning("the %s has ended; it starts again: %s", one.name, why)
        if delay_s:
            wait_readable([self._wake_read], delay_s)
        if not self._stopping:
            self._start(one)
