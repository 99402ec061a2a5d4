"""Asks the planner what should run, checks what it says, and goes on without it where it must."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextlib import suppress
from typing import Any, Literal

import msgspec

from shoal.pool.base import limits, process
from shoal.pool.planner.recorder import Recorder
from shoal.schedule.formats import plan_check, records

_log = logging.getLogger(__name__)
_ANSWER = msgspec.json.Decoder(records.Answer)

Source = Literal["planner", "last", "fill", "rule"]


class Round(msgspec.Struct, frozen=True):
    """What should run now, and who says so."""

    plan: records.PlanFields
    source: Source
    problem: str = ""  # why it is not the planner's


class Planner:
    """The planner's process, as the head sees it. It is started again when it has died.

    Args:
        fills: make a plan where the planner has none; else the rule of admission goes on.

    >>> planner = Planner(Recorder(None))                              # doctest: +SKIP
    >>> round = await planner.decide(view)                             # doctest: +SKIP
    """

    def __init__(
        self,
        recorder: Recorder,
        policy: str = "shoal",
        balance: float = 0.3,
        answer_s: float = limits.PLAN_S,
        fills: bool = True,
        command: tuple[str, ...] = (sys.executable, "-m", "shoal.pool.planner"),
    ) -> None:
        self.policy, self.balance = policy, balance
        self._recorder = recorder
        self._answer_s = answer_s
        self._fills = fills
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._backoff = process.Backoff()
        self._starting = asyncio.Lock()
        self._start_at = 0.0  # monotonic: not before
        self._asked_at = 0.0  # monotonic: the question that has no answer yet, or the start
        self._busy = False  # it starts, or works on a question
        self._worked = False
        self._answer: asyncio.Future[records.Answer] | None = None  # that is waited for
        self._number = 0
        self._memory: dict[str, Any] = {}  # of the policy
        self._last: records.PlanFields | None = None
        self._problem = ""  # of the last round

    @property
    def memory(self) -> dict[str, Any]:
        """What the policy wants to hear again with the next question."""
        return self._memory

    def restore(self, memory: dict[str, Any]) -> None:
        """Go on from what the policy told an earlier head."""
        self._memory = memory

    @property
    def pid(self) -> int | None:
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    async def ensure(self) -> None:
        """Start the process, unless it runs or has just ended."""
        with suppress(OSError):
            async with self._starting:
                await self._start()

    async def decide(self, view: records.ViewFields) -> Round:
        """Return a plan that can be carried out, in little more than the time of an answer."""
        self._number += 1
        question = records.Question(self._number, self.policy, self.balance, view, self._memory)
        plan, problem = None, ""
        try:
            answer = await self._ask(question)
            plan, problem = answer.plan, answer.error
            if plan is not None:
                problem = plan_check.problem(view, plan) or ""
        except (OSError, TimeoutError) as error:
            problem = str(error)
        if plan is not None and not problem:
            self._memory, self._last, self._problem = answer.memory, plan, ""
            found = Round(plan, "planner")
        else:
            found = self._without(view, problem)
        self._recorder.add(records.Record(time.time(), question, found.plan, found.source))
        return found

    def _without(self, view: records.ViewFields, problem: str) -> Round:
        """The last plan stands, as far as it still can; free devices are filled by a simple rule."""
        log = _log.debug if problem == self._problem else _log.warning
        log("the planner: %s", problem)
        self._problem = problem
        if not self._fills:
            self._last = None
            return Round(records.PlanFields([]), "rule", problem)
        source: Source = "fill" if self._last is None else "last"
        plan = plan_check.fill(view, self._last)
        self._last = plan
        return Round(plan, source, problem)

    async def _ask(self, question: records.Question) -> records.Answer:
        """Return the answer. Raise TimeoutError or OSError, which say why there is none in time."""
        deadline = time.monotonic() + self._answer_s
        async with self._starting:
            await self._start()
        while self._busy:  # it starts, or is late with an earlier question
            await self._wait(deadline)
        assert self._process is not None
        assert self._process.stdin is not None
        self._busy, self._asked_at = True, time.monotonic()
        self._process.stdin.write(msgspec.json.encode(question) + b"\n")
        answer = await self._wait(deadline)
        while answer.number != question.number:
            answer = await self._wait(deadline)
        return answer

    async def _wait(self, deadline: float) -> records.Answer:
        self._answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await self._answer
        except TimeoutError:
            if time.monotonic() - self._asked_at > limits.PLAN_HANG_S:
                self._kill()
            raise TimeoutError(f"it did not answer within {self._answer_s:g} s") from None
        finally:
            self._answer = None

    async def _start(self) -> None:
        if self._process is not None and self._process.returncode is not None:
            self._process = None
            self._start_at = time.monotonic() + self._backoff.ended(self._worked)
        if self._process is not None:
            return
        if time.monotonic() < self._start_at:
            raise OSError("it ended, and is not started again yet")
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=limits.PLAN_BYTES_MAX,
        )
        self._busy, self._worked, self._asked_at = True, False, time.monotonic()
        self._reading = asyncio.ensure_future(self._read(self._process))

    async def _read(self, running: asyncio.subprocess.Process) -> None:
        """Hear the process until it ends. Its first line says that it has started."""
        assert running.stdout is not None
        problem = "it ended"
        try:
            while line := await running.stdout.readline():
                answer = _ANSWER.decode(line)
                self._busy, self._worked = False, True
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(answer)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            problem = f"its answer makes no sense: {error}"
        with suppress(ProcessLookupError):
            running.kill()
        await running.wait()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(OSError(problem))

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """End the process."""
        self._kill()
        if self._reading is not None:
            await self._reading
