"""Runs a program in the foreground for `shoal run`, and ends all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from shoal.pool.base import limits, process
from shoal.pool.runner import environments, process_tree
from shoal.tasks.spec import Program


def command(spec: Program, scratch: Path) -> list[str]:
    """Return the command of a task, which makes the environment of --requirements first."""
    program = list(spec.program)
    if not spec.requirements:
        return program
    listed = scratch / "requirements.txt"
    listed.write_text(spec.requirements)
    return environments.command(listed, environments.cache(), program)


def run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    limit_s: float | None,
    grace_s: float,
) -> int:
    """Run a program with this terminal. Return its exit code: 128 + n for signal n."""
    process_tree.become_subreaper()
    try:
        program = subprocess.Popen(list(command), cwd=folder, env=dict(environment))
    except FileNotFoundError:
        print(f"shoal: {command[0]}: command not found", file=sys.stderr)
        return 127
    except OSError as error:
        print(f"shoal: {command[0]}: {error.strerror}", file=sys.stderr)
        return 126
    program.returncode = 0  # this function reaps it, with all others
    ends = [] if limit_s is None else [time.monotonic() + limit_s]

    def stop(number: int, frame: FrameType | None) -> None:
        ends.append(time.monotonic())

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to the program as well
    _wait(program.pid, ends)
    return _end_all(program.pid, grace_s)


def _wait(pid: int, ends: list[float]) -> None:
    """Wait until the program has ended by itself, or must end."""
    pidfd = os.pidfd_open(pid)
    try:
        while not ends or time.monotonic() < min(ends):
            left_s = min(ends) - time.monotonic() if ends else limits.BEAT_S
            if process.wait_readable([pidfd], min(limits.BEAT_S / 4, max(0.0, left_s))):
                return
    finally:
        os.close(pidfd)


def _end_all(pid: int, grace_s: float) -> int:
    """End what is left: SIGTERM, and SIGKILL after the grace. Return the program's exit code."""
    me, code, deadline = os.getpid(), 0, time.monotonic() + grace_s
    asked = False
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if ended == pid:
            code = process_tree.exit_code(status)
        if ended:
            continue
        if not asked:
            asked = True
            process_tree.send_signal(me, signal.SIGTERM)
        elif time.monotonic() > deadline:
            process_tree.send_signal(me, signal.SIGKILL)
        time.sleep(limits.KILL_POLL_S)
