"""The runners that are connected to the head, and what it asks of them for clients."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from shoal.errors import ProtocolError
from shoal.pool.base import limits, process
from shoal.pool.base.clock import Clock
from shoal.pool.head.tasks.rows import Entry
from shoal.pool.wire import messages, runner_messages
from shoal.pool.wire.channel import Channel
from shoal.pool.wire.frames import Closed

SANDBOX = "tasks@"  # begins the names of nodes' runners, and of nobody else's


@dataclass(eq=False)
class Runner:
    """A runner. Without a channel it is away, and its attempts may go on."""

    name: str
    owner: str
    machine: str
    pid: int
    sandbox: bool
    node: str
    channel: Channel | None = None
    pidfd: int = -1  # on this machine: says for sure when it ends; -1: on another
    heard: float = 0.0  # monotonic
    held: set[tuple[int, int]] = field(default_factory=set)  # task, attempt: as it said at first
    attempts: int = 0  # that were sent to it

    def send(self, message: msgspec.Struct) -> None:
        if self.channel is not None:
            self.channel.send(message)

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended, and with it everything it had."""
        return self.pidfd >= 0 and process.has_ended(self.pidfd)


class Runners:
    """Args:
    on_change: called when a runner has come or gone.
    on_message: called with what a runner reports about its attempts, and asks for them.
    """

    def __init__(
        self,
        clock: Clock,
        on_hello: Callable[[Runner, list[runner_messages.HeldAttempt]], None],
        on_message: Callable[[Runner, runner_messages.OfAttempt], None],
        on_gone: Callable[[Runner], None],
    ) -> None:
        self.known: dict[str, Runner] = {}
        self._clock = clock
        self._on_hello = on_hello
        self._on_message = on_message
        self._on_gone = on_gone
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[runner_messages.RunnerAnswer]] = {}

    async def serve(
        self, channel: Channel, owner: str, hello: runner_messages.RunnerHello, pool: str, pid: int
    ) -> None:
        """Serve a runner's connection. `pid` is its process on this machine; 0: it is on another."""
        runner = self._welcome(channel, owner, hello, pid)
        if runner is None:
            return
        channel.send(runner_messages.RunnerWelcome(pool, limits.BEAT_S))
        self._on_hello(runner, hello.held)
        try:
            while True:
                message = await channel.receive(runner_messages.FROM_RUNNER, limits.SILENCE_S)
                runner.heard = self._clock.monotonic()
                match message:
                    case messages.Beat():
                        channel.send(messages.Beat())
                    case runner_messages.RunnerAnswer(number):
                        asked = self._asked.get(number)
                        if asked is not None and not asked.done():
                            asked.set_result(message)
                    case _:
                        self._on_message(runner, message)
        except Closed:
            pass
        except ProtocolError as error:
            channel.send(messages.refusal(str(error)))
        finally:
            if runner.channel is channel:
                runner.channel = None
                runner.heard = self._clock.monotonic()
                self._on_gone(runner)

    def _welcome(
        self, channel: Channel, owner: str, hello: runner_messages.RunnerHello, pid: int
    ) -> Runner | None:
        """Take in a runner that connects. Refuse one whose name another process has."""
        called = SANDBOX if hello.sandbox else f"{owner}@"
        if not hello.name.startswith(called):
            text = f"a runner of {owner} is called {called}…, not {hello.name}"
            channel.send(messages.refusal(text))
            return None
        before = self.known.get(hello.name)
        if before is not None and (
            before.owner not in ("", owner)
            or (before.machine not in ("", hello.machine) and before.channel is not None)
        ):
            text = f"there is a runner {hello.name} already; give this one another name"
            channel.send(messages.refusal(text))
            return None
        if before is not None and before.channel is not None:
            old, before.channel = before.channel, None
            old.abort()  # the same runner on a newer connection
        if before is not None and before.pidfd >= 0:
            os.close(before.pidfd)
        pidfd = -1
        if pid:
            with suppress(OSError):
                pidfd = os.pidfd_open(pid)
        node = hello.name.rpartition("@")[2]
        runner = Runner(
            hello.name, owner, hello.machine, pid or hello.pid, hello.sandbox, node, channel, pidfd,
            self._clock.monotonic(), {(h.task, h.attempt) for h in hello.held},
        )  # fmt: skip
        self.known[hello.name] = runner
        return runner

    def expect(self, name: str, owner: str) -> None:
        """Expect a runner of an earlier head to come back: it has an attempt of `owner`."""
        if name not in self.known:
            node = name.rpartition("@")[2]
            sandbox = name.startswith(SANDBOX)  # a node's, whatever its name
            self.known[name] = Runner(
                name, "" if sandbox else owner, "", 0, sandbox, node, heard=self._clock.monotonic()
            )  # fmt: skip

    def of(self, entry: Entry, may_travel: bool) -> Runner | None:
        """Return a runner that can start this task: its owner's, on the machine with its folder; else
        a node's that has the fewest attempts, if the task may run there."""
        others = []
        for runner in self.known.values():
            if runner.channel is None:
                continue
            if runner.sandbox:
                others.append(runner)
            elif runner.owner == entry.owner and entry.machine in ("", runner.machine):
                return runner
        return min(others, key=lambda r: r.attempts, default=None) if may_travel else None

    def gone(self) -> list[Runner]:
        """Return the runners whose attempts are lost: their process has ended, or they are silent so
        long that they have ended their attempts themselves."""
        now = self._clock.monotonic()
        found = []
        for runner in self.known.values():
            if runner.channel is not None:
                continue
            away_s = now - runner.heard
            if (runner.ended and away_s > limits.RUNNER_WAIT_S) or (
                away_s > limits.RUNNER_SILENCE_S
            ):
                found.append(runner)
        return found

    def forget(self, runner: Runner) -> None:
        if runner.pidfd >= 0:
            os.close(runner.pidfd)
        if self.known.get(runner.name) is runner:
            del self.known[runner.name]

    async def ask(
        self, runner: Runner, make: Callable[[int], runner_messages.AskRunner]
    ) -> runner_messages.RunnerAnswer | None:
        """Return a runner's answer, or None if there is none in time."""
        if runner.channel is None:
            return None
        number = next(self._numbers)
        asked: asyncio.Future[runner_messages.RunnerAnswer] = (
            asyncio.get_running_loop().create_future()
        )
        self._asked[number] = asked
        try:
            runner.send(make(number))
            async with asyncio.timeout(limits.COMMAND_ANSWER_S / 2):
                return await asked
        except TimeoutError:
            return None
        finally:
            del self._asked[number]
