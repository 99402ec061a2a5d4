"""The process of one attempt: starts a task's program, writes its log, and ends everything of it.

It ends when nothing of the attempt is left, and has then written how that came. It never outlives its
runner for long: without one it ends the program.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.errors import PoolError, ProtocolError, describe
from shoal.pool.base import limits, log, process
from shoal.pool.runner import environments, prepare, process_tree
from shoal.pool.runner.attempt_folder import AttemptEnd, AttemptFolder, Order
from shoal.pool.runner.log_file import LogWriter
from shoal.pool.runner.sandbox.enclosure import Enclosure
from shoal.pool.wire import frames, runner_messages
from shoal.pool.wire.acceptor import SelectorLoop, Timer
from shoal.tasks import log_frames


class Attempt:
    """Args:
    control: the socket to the runner.
    """

    def __init__(self, order: Order, folder: AttemptFolder, control: socket.socket) -> None:
        self._order = order
        self._folder = folder
        self._control = control
        self._inbox = frames.Inbox()
        self._log = LogWriter(folder.path)
        self._loop = SelectorLoop()
        self._program: subprocess.Popen[bytes] | None = None
        self._pipes: dict[int, int] = {}  # descriptor -> stream
        self._status: int | None = None  # of the program, once it has ended
        self._end = AttemptEnd()
        self._done = False
        self._stopping = False
        self._killing: Timer | None = None
        self._over_limit = False
        self._lost = ""
        self._over = ""  # what a sandbox used too much of
        self._over_fd = -1
        self._limit: Timer | None = None
        self._limit_left_s = order.spec.limit_s
        self._limit_since = 0.0  # monotonic

    def run(self) -> AttemptEnd:
        """Run the program to its end, and return how that was."""
        runner = process.watch(self._order.runner_pid)
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            self._start()
        except prepare.CannotStart as error:
            self._log.write(time.time(), log_frames.ERR, f"shoal: {error}\n".encode())
            self._log.end(time.time())
            return AttemptEnd(error.code, False, str(error), ended_at=time.time())
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._hear)
        self._loop.add_reader(runner, self._runner_ended, runner)
        self._loop.add_reader(wake_read, self._children_changed, wake_read)
        self._reap()
        while not self._done:
            self._loop.run_once()
        self._drain()
        self._log.end(time.time())
        code = None if self._status is None else process_tree.exit_code(self._status)
        return AttemptEnd(code, self._over_limit, "", self._over, self._lost, time.time())

    def _start(self) -> None:
        if self._order.sandbox is None:
            self._program = self._start_own()
        else:
            self._program = self._start_enclosed()
        for pipe, stream in (
            (self._program.stdout, log_frames.OUT), (self._program.stderr, log_frames.ERR)
        ):  # fmt: skip
            assert pipe is not None
            fd = pipe.fileno()
            os.set_blocking(fd, False)
            self._pipes[fd] = stream
            self._loop.add_reader(fd, self._read, fd)
        frames.send(self._control, runner_messages.ProgramStarted(self._program.pid))
        self._go_on()

    def _start_own(self) -> subprocess.Popen[bytes]:
        """Start a program of this user."""
        order = self._order
        environment = prepare.environment(order)
        where = prepare.folder(order)
        command = list(order.spec.program)
        prepare.check_program(command, where, environment)
        if order.spec.requirements:
            listed = self._folder.path / "requirements.txt"
            listed.write_text(order.spec.requirements)
            command = environments.command(listed, environments.cache(), command)
        return _run(command, str(where), environment, process.die_with_parent_thread)

    def _start_enclosed(self) -> subprocess.Popen[bytes]:
        """Start another's program in a sandbox."""
        prepare.folder(self._order)
        enclosure = Enclosure(self._order, self._folder, self._over_in_thread)
        read_fd, self._over_fd = os.pipe2(os.O_CLOEXEC)
        self._loop.add_reader(read_fd, self._used_too_much, read_fd)
        try:
            program = _run(
                enclosure.command, enclosure.cwd, enclosure.environment, enclosure.before_program,
                enclosure.fds,
            )  # fmt: skip
        except BaseException:
            enclosure.close()
            raise
        enclosure.started()
        return program

    def _over_in_thread(self, what: str) -> None:
        os.write(self._over_fd, what.encode()[: limits.TEXT_CHARS_MAX])

    def _used_too_much(self, fd: int) -> None:
        self._over = os.read(fd, limits.TEXT_CHARS_MAX).decode()
        self._log.write(time.time(), log_frames.ERR, f"shoal: {self._over}\n".encode())
        self._stop(0.0)

    # --- output --------------------------

    def _read(self, fd: int) -> bool:
        """Write a piece of output to the log. Return whether there may be more now."""
        try:
            data = os.read(fd, limits.PIPE_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(fd)
            del self._pipes[fd]
            return False
        self._log.write(time.time(), self._pipes[fd], data)
        return True

    def _drain(self) -> None:
        for fd in list(self._pipes):
            while self._read(fd):
                pass

    # --- the runner ----------------------

    def _hear(self) -> None:
        try:
            if not self._inbox.read(self._control):
                raise frames.Closed
            while (message := self._inbox.next(runner_messages.TO_ATTEMPT)) is not None:
                match message:
                    case runner_messages.StopProgram(grace_s):
                        self._stop(grace_s)
                    case runner_messages.PauseLimit(paused):
                        self._pause() if paused else self._go_on()
        except (OSError, ProtocolError):
            self._loop.remove_reader(self._control)  # the end of the runner says more

    def _runner_ended(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        if self._status is None:
            self._lost = "its runner ended"
        self._stop(min(limits.RUNNER_GONE_GRACE_S, self._order.spec.grace_s))

    # --- time ----------------------------

    def _go_on(self) -> None:
        """Count the time of running from now on."""
        if self._limit_left_s is not None and self._limit is None:
            self._limit_since = time.monotonic()
            self._limit = self._loop.call_later(max(0.0, self._limit_left_s), self._limit_over)

    def _pause(self) -> None:
        if self._limit is not None and self._limit_left_s is not None:
            self._limit.cancel()
            self._limit = None
            self._limit_left_s -= time.monotonic() - self._limit_since

    def _limit_over(self) -> None:
        if self._status is None and not self._stopping:
            self._over_limit = True
            self._stop(self._order.spec.grace_s)

    # --- the end -------------------------

    def _stop(self, grace_s: float) -> None:
        """SIGTERM to all, and SIGKILL after `grace_s`. A second call can only shorten it."""
        if not self._stopping:
            self._stopping = True
            # Of a sandbox the program hears it; the end of `bwrap` would end all at once.
            alone = 0
            if self._order.sandbox is not None and self._program is not None:
                alone = self._program.pid
            process_tree.send_signal(os.getpid(), signal.SIGTERM, alone=alone)
            process_tree.send_signal(os.getpid(), signal.SIGCONT)  # a stopped one hears it now
        self._loop.call_later(grace_s, self._kill)

    def _kill(self) -> None:
        """SIGKILL to all, again and again until nothing is left: they may fork meanwhile."""
        if self._done or self._killing is not None:
            return
        self._kill_again()

    def _kill_again(self) -> None:
        self._reap()
        if not self._done:
            process_tree.send_signal(os.getpid(), signal.SIGKILL)
            self._killing = self._loop.call_later(limits.KILL_POLL_S, self._kill_again)

    def _children_changed(self, wake: int) -> None:
        with suppress(BlockingIOError):
            os.read(wake, 4096)
        self._reap()

    def _reap(self) -> None:
        """Take in processes that have ended. Everything of the attempt is a child, or below one."""
        assert self._program is not None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._done = True
                return
            if pid == 0:
                return
            if pid == self._program.pid:
                self._status = self._program.returncode = status
                if self._limit is not None:
                    self._limit.cancel()
                self._stop(self._order.spec.grace_s)  # what it has left behind


def _run(
    command: list[str],
    cwd: str,
    environment: dict[str, str],
    before: Callable[[], None],
    fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=fds,
            preexec_fn=before,
        )
    except OSError as error:
        raise prepare.CannotStart(f"{command[0]} cannot be run: {describe(error)}", 126) from None


def main() -> None:
    """`python -m shoal.pool.runner.attempt_process CONTROL_FD`: the order is on stdin."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not ignored: its program would ignore it as well
    control = socket.socket(fileno=int(sys.argv[1]))
    control.setblocking(True)
    os.set_inheritable(control.fileno(), False)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    log.set_up(f"task[{order.task_id}]")
    folder = AttemptFolder(Path(order.folder).parents[1], order.task, order.attempt)
    lock = folder.lock()
    if lock is None:
        sys.exit("this attempt has a process already")
    process_tree.become_subreaper()
    try:
        end = Attempt(order, folder, control).run()
    except ProcessLookupError:
        end = AttemptEnd(lost="its runner ended", ended_at=time.time())
    except OSError as error:
        process_tree.send_signal(os.getpid(), signal.SIGKILL)
        end = AttemptEnd(problem=describe(error), ended_at=time.time())
    with suppress(PoolError):  # a full disk: the runner takes it from the message
        folder.write_end(end)
    with suppress(OSError, ProtocolError):
        control.setblocking(True)
        frames.send(
            control,
            runner_messages.ProgramEnded(end.code, end.over_limit, end.problem, end.lost, end.over),
        )
    if order.sandbox is not None:
        shutil.rmtree(folder.temporary, ignore_errors=True)
    os.close(lock)


if __name__ == "__main__":
    main()
