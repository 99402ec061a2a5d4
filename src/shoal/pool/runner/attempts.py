"""The attempts of a runner: starts their processes, and knows how each of them ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.errors import PoolError, ProtocolError, describe
from shoal.pool.base import limits, process
from shoal.pool.runner import attempt_folder, process_tree
from shoal.pool.runner.attempt_folder import AttemptEnd, AttemptFolder, Order
from shoal.pool.runner.prepare import MARK
from shoal.pool.runner.sandbox.files import Files
from shoal.pool.wire import runner_messages
from shoal.pool.wire.channel import Channel, open_channel

_log = logging.getLogger(__name__)
Key = tuple[int, int]  # task, attempt


@dataclass
class Held:
    """An attempt whose end the head has not written yet."""

    folder: AttemptFolder
    child: subprocess.Popen[bytes] | None = None
    channel: Channel | None = None
    started: bool = False
    end: AttemptEnd | None = None
    stop_s: float | None = None  # the grace of a stop that came before its process listened


class Attempts:
    """Args:
    root: the folder of all tasks, in the runner's state directory.
    files: of other people's tasks, which come from the head.
    say: sends a message to the head, if there is one.
    """

    def __init__(
        self, root: Path, files: Files, pool_url: str, say: Callable[[msgspec.Struct], None]
    ) -> None:
        self.root = root
        self.held: dict[Key, Held] = {}
        self._files = files
        self._pool_url = pool_url
        self._say = say
        self._work: set[asyncio.Task[None]] = set()

    # --- after a start ---------------------------------------------------------------------------

    async def take_over(self) -> None:
        """Take over what an earlier runner has left, once nothing of it runs any more."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        left = [f for f in attempt_folder.attempts(self.root) if not f.acknowledged]
        deadline = time.monotonic() + limits.LEFT_BEHIND_S
        while any(f.locked for f in left) and time.monotonic() < deadline:
            await asyncio.sleep(limits.KILL_POLL_S)
        while kill_marked(self.root) and time.monotonic() < deadline:
            await asyncio.sleep(limits.KILL_POLL_S)
        for folder in left:
            end = folder.end()
            if end is None:
                end = AttemptEnd(lost="its runner ended", ended_at=time.time())
            self.held[folder.task, folder.attempt] = Held(folder, started=True, end=end)

    # --- the head --------------------------------------------------------------------------------

    def report(self) -> list[runner_messages.HeldAttempt]:
        return [
            runner_messages.HeldAttempt(task, attempt, held.started)
            for (task, attempt), held in self.held.items()
        ]

    def report_ends(self) -> None:
        """Send the ends that the head has not written, to a new head or on a new connection."""
        for key, held in list(self.held.items()):
            if held.end is not None:
                self._say_end(key, held.end)

    def start(self, message: runner_messages.StartAttempt) -> None:
        """Start an attempt. One that is known is reported again, and never started again."""
        key = (message.task, message.attempt)
        known = self.held.get(key)
        folder = AttemptFolder(self.root, *key)
        if known is None and folder.path.exists():  # from before the head lost its answer
            end = folder.end() or AttemptEnd(lost="its runner ended", ended_at=time.time())
            known = self.held[key] = Held(folder, started=True, end=end)
        if known is not None:
            if known.end is not None:
                self._say_end(key, known.end)
            elif known.started:
                self._say(runner_messages.AttemptStarted(*key))
            return
        held = self.held[key] = Held(folder)
        order = Order(
            task=message.task, attempt=message.attempt, task_id=message.task_id,
            owner=message.owner, spec=message.spec, pool_url=self._pool_url, ticket=message.ticket,
            folder=str(folder.path), store=str(self._files.root), runner_pid=os.getpid(),
            sandbox=message.sandbox,
        )  # fmt: skip
        try:
            folder.make()
            if message.sandbox is None:
                self._go_on(self._attend(key, held, self._spawn(held, order)))
            else:
                self._go_on(self._bring(key, held, order))
        except OSError as error:
            self._not_started(key, held, describe(error))

    def _go_on(self, coroutine: Coroutine[None, None, None]) -> None:
        work = asyncio.ensure_future(coroutine)
        self._work.add(work)
        work.add_done_callback(self._work.discard)

    def _not_started(self, key: Key, held: Held, why: str) -> None:
        lost = f"its runner could not start it: {why}"
        self._ended(key, held, AttemptEnd(lost=lost, ended_at=time.time()))

    async def _bring(self, key: Key, held: Held, order: Order) -> None:
        """Bring the files of another's task, and start it."""
        try:
            await self._files.bring(order.task, order.spec.snapshot)
            if held.stop_s is not None:
                return self._not_started(key, held, "it was to end before")
            control = self._spawn(held, order)
        except (OSError, PoolError) as error:
            return self._not_started(key, held, describe(error))
        await self._attend(key, held, control)

    def _spawn(self, held: Held, order: Order) -> socket.socket:
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("order", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(memory), "wb") as file:
                file.write(msgspec.json.encode(order))
            os.lseek(memory, 0, os.SEEK_SET)
            held.child = subprocess.Popen(
                [sys.executable, "-m", "shoal.pool.runner.attempt_process", str(theirs.fileno())],
                stdin=memory,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(memory)
        return ours

    def stop(self, message: runner_messages.StopAttempt) -> None:
        key = (message.task, message.attempt)
        held = self.held.get(key)
        if held is None:  # it never came here, or its end is written
            end = AttemptFolder(self.root, *key).end() or AttemptEnd(
                lost="its runner did not have it"
            )
            self._say_end(key, end)
        elif held.end is not None:
            self._say_end(key, held.end)
        elif held.channel is not None:
            held.channel.send(runner_messages.StopProgram(message.grace_s))
        else:
            held.stop_s = message.grace_s

    def stop_all(self, grace_s: float) -> None:
        for (task, attempt), held in list(self.held.items()):
            if held.end is None:
                self.stop(runner_messages.StopAttempt(task, attempt, grace_s))

    def pause(self, message: runner_messages.PauseAttempt) -> None:
        held = self.held.get((message.task, message.attempt))
        if held is not None and held.channel is not None:
            held.channel.send(runner_messages.PauseLimit(message.paused))

    def end_noted(self, message: runner_messages.EndNoted) -> None:
        key = (message.task, message.attempt)
        held = self.held.get(key)
        if held is not None and held.end is not None:
            held.folder.note_acknowledged()
            del self.held[key]

    def forget(self, task: int) -> None:
        """Remove the logs and files of a task, unless an attempt of it runs."""
        if not any(key[0] == task and held.end is None for key, held in self.held.items()):
            attempt_folder.remove(self.root, task)

    # --- a process -------------------------------------------------------------------------------

    async def _attend(self, key: Key, held: Held, control: socket.socket) -> None:
        """Listen to an attempt's process until it has ended."""
        assert held.child is not None
        held.channel = channel = await open_channel(control)
        if held.stop_s is not None:
            channel.send(runner_messages.StopProgram(held.stop_s))
        said: AttemptEnd | None = None
        try:
            while True:
                message = await channel.receive(runner_messages.FROM_ATTEMPT, None)
                match message:
                    case runner_messages.ProgramStarted():
                        held.started = True
                        self._say(runner_messages.AttemptStarted(*key))
                    case runner_messages.ProgramEnded(code, over_limit, problem, lost, over):
                        said = AttemptEnd(code, over_limit, problem, over, lost, time.time())
        except ProtocolError:
            pass
        channel.abort()
        await _until_ended(held.child)
        end = held.folder.end() or said
        if end is None:
            await self._end_orphans()
            reason = process.exit_reason(held.child.returncode)
            end = AttemptEnd(lost=f"the process that held it ended: {reason}", ended_at=time.time())
        self._ended(key, held, end)

    def _ended(self, key: Key, held: Held, end: AttemptEnd) -> None:
        held.end = end
        if held.folder.end() is None:
            with suppress(PoolError):
                held.folder.write_end(end)
        self._say_end(key, end)

    def _say_end(self, key: Key, end: AttemptEnd) -> None:
        text = limits.TEXT_CHARS_MAX
        self._say(
            runner_messages.AttemptEnded(
                *key, end.code, end.over_limit, end.problem[:text], end.lost[:text], end.over[:text]
            )
        )

    async def _end_orphans(self) -> None:
        """Kill what the process of an attempt left behind when it was killed itself."""
        while True:
            known = {
                h.child.pid for h in self.held.values() if h.child and h.child.returncode is None
            }
            orphans = [p for p in process_tree.children(os.getpid()) if p not in known]
            if not orphans:
                return
            process_tree.send_signal(os.getpid(), signal.SIGKILL, frozenset(known))
            for pid in orphans:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            await asyncio.sleep(limits.KILL_POLL_S)


async def _until_ended(child: subprocess.Popen[bytes]) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(child.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    child.wait()


def kill_marked(root: Path) -> int:
    """Kill processes that an earlier runner of this state directory has left. Return their count.

    They carry its mark, unless they have cleared their environment. This is for the case that runner
    and attempt process were killed at one moment.
    """
    mark = f"{MARK}={root}".encode()
    count = 0
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            pidfd = os.pidfd_open(int(entry))
        except OSError:
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                found = mark in file.read().split(b"\0")
            if found:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                count += 1
        except OSError:
            pass
        finally:
            os.close(pidfd)
    return count
