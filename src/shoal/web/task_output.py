"""What a task has written: its log, as a stream that resumes, and its files."""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from collections.abc import AsyncIterator
from urllib.parse import quote

import msgspec

from shoal.pool.base import limits
from shoal.pool.wire import task_messages as tasks
from shoal.tasks import log_frames
from shoal.tasks.states import FINAL
from shoal.web.head_connections import HeadAway, HeadConnections, Refused

SHOWN_BYTES = 128 * 1024  # of a log's end
READS_MAX = 1000  # of one answer
FOLLOWERS_MAX = 500
BEAT_S = 15.0
HEAD_AWAY_S = 30.0  # then a stream ends, and its browser asks again
FILE_BYTES_MAX = 4 * 2**30


class Tail:
    """Reads a log to its end and keeps the last bytes of it."""

    def __init__(self, head: HeadConnections, token: str, task: str) -> None:
        self._head, self._token, self._task = head, token, task
        self.attempt: int | None = None
        self.decoder = log_frames.Decoder()
        self.position = 0  # of the frame after the last whole one
        self.ended = False

    def resume(self, attempt: int, position: int) -> None:
        """Go on behind a frame that was read before."""
        self.attempt, self.position = attempt, position
        self.decoder = log_frames.Decoder(position)

    def next_attempt(self, attempt: int) -> None:
        self.resume(attempt, 0)
        self.ended = False

    async def read(self) -> bytes:
        """Return what is new, or the end of it if that is long."""
        kept: deque[bytes] = deque()
        size = 0
        for _ in range(READS_MAX):
            ask = tasks.ReadLog(self._task, self.attempt, self.decoder.position)
            part = await self._head.ask(self._token, ask)
            assert isinstance(part, tasks.LogPart)
            self.attempt = part.attempt or None
            for frame in self.decoder.feed(part.position, part.data):
                self.position = frame.following
                kept.append(frame.data)
                size += len(frame.data)
                while size > SHOWN_BYTES and len(kept) > 1:
                    size -= len(kept.popleft())
            if part.ended or self.decoder.ended:
                self.ended = True
                break
            if not part.data:
                break
        return b"".join(kept)


class Followers:
    """Streams of logs, as server-sent events. An event's id is attempt and position: `2:4711`."""

    def __init__(self, head: HeadConnections) -> None:
        self._head = head
        self._count = 0

    @property
    def full(self) -> bool:
        return self._count >= FOLLOWERS_MAX

    async def follow(self, token: str, task: str, last: str) -> AsyncIterator[bytes]:
        """Yield what a task writes, from behind its event `last`, until the task has ended."""
        self._count += 1
        try:
            yield b"retry: 500\n\n"
            async for event in self._events(token, task, last):
                yield event
        except Refused as refused:
            yield _event("refused", {"text": str(refused)})
        except (HeadAway, log_frames.LogError):
            return  # the browser asks again, from where it was
        finally:
            self._count -= 1

    async def _events(self, token: str, task: str, last: str) -> AsyncIterator[bytes]:
        tail = Tail(self._head, token, task)
        attempt, _, position = last.partition(":")
        if attempt.isdecimal() and position.isdecimal() and len(last) < 30:
            tail.resume(int(attempt), int(position))
        else:
            yield _event("begin", {})
        text = codecs.getincrementaldecoder("utf-8")("replace")
        clock = asyncio.get_running_loop().time
        said = heard = clock()
        while True:
            try:
                data = await tail.read()
                heard = clock()
            except HeadAway:
                if clock() - heard > HEAD_AWAY_S:
                    raise
                data = b""
            if data:
                number = f"{tail.attempt}:{tail.position}"
                yield _event("text", {"text": text.decode(data)}, number)
                said = clock()
            elif clock() - said > BEAT_S:
                yield b": beat\n\n"
                said = clock()
            if tail.ended:
                page = await self._head.ask(token, tasks.AskTasks([task], 0, True))
                assert isinstance(page, tasks.TaskPage)
                found = page.tasks[0]
                if found.state in FINAL:
                    yield _event("end", {"state": found.state})
                    return
                if (found.attempt or 0) > (tail.attempt or 0):
                    tail.next_attempt(found.attempt or 0)
                    yield _event("attempt", {"attempt": found.attempt})
                    continue
            await asyncio.sleep(limits.LOG_POLL_S)


def _event(name: str, data: dict[str, object], number: str = "") -> bytes:
    head = f"id: {number}\n" if number else ""
    return f"{head}event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


async def read_file(
    head: HeadConnections, token: str, task: str, path: str, first: bytes
) -> AsyncIterator[bytes]:
    """Yield the bytes of a task's file; `first` was read already, to know that there is one."""
    offset, part = 0, first
    while part and offset < FILE_BYTES_MAX:
        yield part
        offset += len(part)
        part = await read_part(head, token, task, path, offset)


async def read_part(head: HeadConnections, token: str, task: str, path: str, offset: int) -> bytes:
    found = await head.ask(token, tasks.ReadFile(task, path, offset))
    assert isinstance(found, tasks.FilePart)
    return found.data


def attachment(path: str) -> str:
    """Return the header that makes a browser keep a file instead of showing it.

    >>> attachment("runs/a b.txt")
    "attachment; filename*=UTF-8''a%20b.txt"
    """
    return f"attachment; filename*=UTF-8''{quote(path.rpartition('/')[2], safe='')}"
