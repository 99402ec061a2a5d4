"""The runner: speaks to the head, and starts and ends attempts as the head says.

Its tasks live on while the head is away. When it is back, the runner reports what it has; an attempt
that is no longer the task's current one is ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec

import shoal
from shoal.errors import ProtocolError
from shoal.pool.base import limits, paths
from shoal.pool.runner import results
from shoal.pool.runner.attempts import Attempts
from shoal.pool.runner.sandbox.files import Files
from shoal.pool.wire import messages, runner_messages
from shoal.pool.wire.channel import Channel
from shoal.pool.wire.task_messages import FileList, FilePart, LogPart

_log = logging.getLogger(__name__)


class Runner:
    """Args:
    name: in the pool.
    state: its directory.
    is_local: the head is on this machine and watches this process; else the runner ends its tasks
        when the head was silent for long, because the head then starts them elsewhere.
    on_ready: called once the head has welcomed it for the first time.
    """

    def __init__(
        self,
        name: str,
        state: Path,
        pool_url: str,
        pid: int,
        *,
        is_local: bool,
        sandbox: bool = False,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._files = Files(state / "files", self._say)
        self.attempts = Attempts(state / "tasks", self._files, pool_url, self._say)
        self._pid = pid
        self._is_local = is_local
        self._sandbox = sandbox
        self._on_ready = on_ready
        self._head: Channel | None = None
        self._heard = time.monotonic()
        self._answers: set[asyncio.Task[None]] = set()

    async def run(self, connect: Callable[[], Awaitable[Channel]]) -> None:
        """Serve heads, one after the other, for ever."""
        await self.attempts.take_over()
        told = ""
        while True:
            with suppress(OSError, TimeoutError):
                try:
                    channel = await connect()
                    try:
                        await self._speak(channel)
                    finally:
                        self._head = None
                        channel.abort()
                except ProtocolError as error:
                    if str(error) != told:
                        told = str(error)
                        _log.info("the head is away: %s", told)
            self._end_alone()
            await asyncio.sleep(limits.RUNNER_RETRY_S)

    def _end_alone(self) -> None:
        alone_s = time.monotonic() - self._heard
        if not self._is_local and alone_s > limits.RUNNER_ALONE_S:
            self.attempts.stop_all(0.0)

    async def _speak(self, channel: Channel) -> None:
        held = self.attempts.report()[: limits.ATTEMPTS_PER_RUNNER_MAX]
        channel.send(
            runner_messages.RunnerHello(
                self.name, paths.host_id(), shoal.__version__, self._pid, held, self._sandbox
            )
        )
        patience_s = limits.HEAD_WELCOME_S
        beating: asyncio.Future[None] | None = None
        try:
            while True:
                message = await channel.receive(runner_messages.TO_RUNNER, patience_s)
                self._heard = time.monotonic()
                if isinstance(message, runner_messages.RunnerWelcome):
                    patience_s = limits.SILENCE_S
                    self._head = channel  # everything from now on is sent after the hello
                    beating = asyncio.ensure_future(_beat(channel, message.beat_s))
                    self.attempts.report_ends()
                    if self._on_ready is not None:
                        on_ready, self._on_ready = self._on_ready, None
                        on_ready()
                elif isinstance(message, messages.Refusal):
                    _log.warning("the head refuses this runner: %s", message.reason)
                    await asyncio.sleep(limits.REFUSED_S)
                    return
                else:
                    self._hear(message)
        finally:
            if beating is not None:
                beating.cancel()

    def _hear(self, message: runner_messages.ToRunner) -> None:
        attempts = self.attempts
        match message:
            case runner_messages.StartAttempt():
                if (
                    message.sandbox is not None
                ) != self._sandbox:  # never without one, whoever asks
                    _log.warning("the head sent task %d to the wrong runner", message.task)
                else:
                    attempts.start(message)
            case runner_messages.StopAttempt():
                attempts.stop(message)
            case runner_messages.PauseAttempt():
                attempts.pause(message)
            case runner_messages.EndNoted():
                attempts.end_noted(message)
            case runner_messages.Submitted():
                self._files.hear(message)
            case runner_messages.ForgetTask(task):
                attempts.forget(task)
            case runner_messages.AskRunner():
                answering = asyncio.ensure_future(self._answer(message))
                self._answers.add(answering)
                answering.add_done_callback(self._answers.discard)
            case _:
                pass  # a beat

    async def _answer(self, ask: runner_messages.AskRunner) -> None:
        """Read what is asked for, in a thread: a folder may have a million files."""
        answer: messages.Refusal | LogPart | FileList | FilePart
        try:
            answer = await asyncio.to_thread(results.answer, self.attempts.root, ask)
        except (OSError, RecursionError) as error:
            answer = messages.refusal(f"the runner cannot read it: {error}")
        self._say(runner_messages.RunnerAnswer(ask.number, answer))

    def _say(self, message: msgspec.Struct) -> None:
        if self._head is not None:
            self._head.send(message)


async def _beat(channel: Channel, beat_s: float) -> None:
    while True:
        channel.send(messages.Beat())
        await asyncio.sleep(beat_s)
