"""The folder of an attempt at its runner: its log, and how it ended. It outlives the runner."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.pool.base import paths
from shoal.pool.wire.runner_messages import Pass
from shoal.tasks.spec import TaskSpec


class Order(msgspec.Struct, frozen=True):
    """What a runner hands to the process of an attempt, over a memfd: it contains secrets."""

    task: int
    attempt: int
    task_id: str
    owner: str
    spec: TaskSpec
    pool_url: str
    ticket: str
    folder: str  # of the attempt
    store: str  # of files by hash, and environments
    runner_pid: int
    sandbox: Pass | None = None  # another's program


class AttemptEnd(msgspec.Struct, frozen=True):
    """How an attempt ended, after nothing of it was left."""

    code: int | None = None  # None: its program never ran
    over_limit: bool = False
    problem: str = ""  # why it could not be started
    over: str = ""  # what it used too much of
    lost: str = ""  # why it ended with its runner
    ended_at: float = 0.0


class AttemptFolder:
    """`tasks/TASK/ATTEMPT` below a runner's state directory."""

    def __init__(self, root: Path, task: int, attempt: int) -> None:
        self.task, self.attempt = task, attempt
        self.path = root / str(task) / str(attempt)

    def make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def work(self) -> Path:
        """Where a snapshot's files are, and what the program writes beside them."""
        return self.path / "work"

    @property
    def temporary(self) -> Path:
        """The /tmp of a sandbox."""
        return self.path / "tmp"

    def lock(self) -> int | None:
        """Take the folder's lock, which the attempt's process holds while anything of it is left.

        Return its descriptor, or None if another process has it.
        """
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        return fd

    @property
    def locked(self) -> bool:
        fd = self.lock()
        if fd is None:
            return True
        os.close(fd)
        return False

    def write_end(self, end: AttemptEnd) -> None:
        paths.write_private(self.path / "end.json", msgspec.json.encode(end).decode())

    def end(self) -> AttemptEnd | None:
        try:
            return msgspec.json.decode((self.path / "end.json").read_bytes(), type=AttemptEnd)
        except (OSError, msgspec.MsgspecError):
            return None

    def note_acknowledged(self) -> None:
        """Note that the head has written the end: it is not reported again."""
        with suppress(OSError):
            (self.path / "noted").touch()

    @property
    def acknowledged(self) -> bool:
        return (self.path / "noted").exists()


def attempts(root: Path) -> Iterator[AttemptFolder]:
    """Yield every attempt that a runner has a folder of, in order."""
    for task in _numbers(root):
        for attempt in _numbers(root / str(task)):
            yield AttemptFolder(root, task, attempt)


def last_attempt(root: Path, task: int) -> int | None:
    found = _numbers(root / str(task))
    return found[-1] if found else None


def remove(root: Path, task: int) -> None:
    shutil.rmtree(root / str(task), ignore_errors=True)


def _numbers(path: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(path) if name.isdecimal())
    except (FileNotFoundError, NotADirectoryError):
        return []
