"""The files of other people's tasks: a runner brings them from the head, each by its hash."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.errors import PoolError
from shoal.pool.base import limits, paths, snapshots
from shoal.pool.wire import runner_messages


class Files:
    """Args:
    root: where they are kept, for the next task as well.
    say: sends a message to the head, if there is one.
    """

    def __init__(self, root: Path, say: Callable[[msgspec.Struct], None]) -> None:
        self.root = root
        self._say = say
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[runner_messages.Submitted]] = {}
        self._busy = asyncio.Semaphore(limits.FILES_ASKED_MAX)

    def hear(self, message: runner_messages.Submitted) -> None:
        asked = self._asked.get(message.number)
        if asked is not None and not asked.done():
            asked.set_result(message)

    async def bring(self, task: int, snapshot: str) -> None:
        """Bring what is missing of a task's snapshot. Raise PoolError if that cannot be."""
        paths.make_directory(self.root)
        snapshots.forget_old(self.root)
        await self._bring(task, snapshot, limits.FILE_LIST_BYTES_MAX)
        listed = snapshots.read_list(snapshots.file_of(self.root, snapshot).read_bytes())
        sizes = {file.hash: file.size_bytes for file in listed if file.link is None}
        await asyncio.gather(*(self._bring(task, name, size) for name, size in sizes.items()))

    async def _bring(self, task: int, name: str, most_bytes: int) -> None:
        path = snapshots.file_of(self.root, name)
        if path.exists():
            os.utime(path)  # it is in use
            return
        async with self._busy:
            scratch = path.with_name(f".{name}.{next(self._numbers)}.{os.getpid()}")
            path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                await self._copy(task, name, most_bytes, scratch)
                scratch.replace(path)
            except OSError as error:
                raise PoolError(f"its files cannot be kept here: {error}") from None
            finally:
                scratch.unlink(missing_ok=True)

    async def _copy(self, task: int, name: str, most_bytes: int, target: Path) -> None:
        digest, offset = hashlib.sha256(), 0
        with open(target, "wb") as file:
            while True:
                part = await self._ask(task, name, offset)
                if part.problem:
                    raise PoolError(part.problem)
                offset += len(part.data)
                if offset > most_bytes:
                    raise PoolError(f"the file {name} is longer than its list says")
                digest.update(part.data)
                file.write(part.data)
                if part.last:
                    break
        if digest.hexdigest() != name:
            raise PoolError(f"the file {name} has other bytes than its hash says")

    async def _ask(self, task: int, name: str, offset: int) -> runner_messages.Submitted:
        number = next(self._numbers)
        asked: asyncio.Future[runner_messages.Submitted] = (
            asyncio.get_running_loop().create_future()
        )
        self._asked[number] = asked
        try:
            self._say(runner_messages.ReadSubmitted(number, task, name, offset))
            async with asyncio.timeout(limits.COMMAND_ANSWER_S):
                return await asked
        except TimeoutError:
            raise PoolError("the head did not send the task's files") from None
        finally:
            del self._asked[number]
