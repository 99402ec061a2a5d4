"""Messages about tasks between a client and the head. `messages` joins them to its unions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.pool.base.limits import (
    FETCH_FILES_MAX,
    FILE_CHUNK_BYTES,
    FILES_PER_MESSAGE_MAX,
    LOG_READ_BYTES_MAX,
    TASKS_PER_PAGE,
    TASKS_PER_SUBMISSION_MAX,
)
from shoal.pool.wire.message_fields import Count, Name, Text
from shoal.tasks.reasons import Numbers
from shoal.tasks.spec import Line, Needs, Short, TaskSpec

Seconds = Annotated[float, Meta(ge=0, le=3600)]
ReadBytes = Annotated[int, Meta(ge=1, le=LOG_READ_BYTES_MAX)]
Data = Annotated[bytes, Meta(max_length=LOG_READ_BYTES_MAX)]
FilePath = Annotated[str, Meta(max_length=4096)]
Hash = Annotated[str, Meta(max_length=64)]  # SHA-256 of a file; snapshots.file_of checks its form

# --- client and head -------------------------------------------------------------------------------


class TaskReason(msgspec.Struct, frozen=True):
    """Why a task waits. The numbers' names have their units."""

    code: Name
    text: Text
    numbers: Numbers = {}


class TaskInfo(msgspec.Struct, frozen=True):
    """A task as people see it. Another user's has only id, name, owner, state and devices."""

    id: Line
    key: Line | None
    name: Line
    owner: Name
    state: Name
    needs: Needs | None
    devices: list[Name]  # that it holds now
    reasons: list[TaskReason]
    position: Count | None  # among those that wait; 1 is next
    attempt: Count | None
    exit_code: int | None
    end_reason: Text | None
    submitted_at: str | None  # ISO 8601, UTC
    started_at: str | None
    ended_at: str | None

    @property
    def version(self) -> str:
        """Changes with what somebody who changes the task goes by."""
        return f"{self.state}-{self.attempt or 0}"


class Submission(msgspec.Struct, frozen=True):
    key: Line
    spec: TaskSpec


class SubmitTasks(msgspec.Struct, frozen=True, tag=True):
    """Client → head: run these. A key that is known with the same request is that task."""

    tasks: Annotated[list[Submission], Meta(min_length=1, max_length=TASKS_PER_SUBMISSION_MAX)]


class AskTasks(msgspec.Struct, frozen=True, tag=True):
    """Client → head: which tasks are there? A page at a time."""

    ids: Annotated[list[Line], Meta(max_length=TASKS_PER_PAGE)] | None = None  # None: all
    first: Count = 0  # the lowest number of the page
    ended: bool = False  # also those that have ended


class TaskPage(msgspec.Struct, frozen=True, tag=True):
    """Head → client: these, by number."""

    tasks: list[TaskInfo]
    following: Count | None = None  # where the next page begins; None: this is the last


class ChangeTask(msgspec.Struct, frozen=True, tag=True):
    """Client → head: do this with that task of mine."""

    id: Line
    action: Literal["cancel", "hold", "release"]
    match: Line = ""  # the version that the sender saw; empty: any


class WaitTask(msgspec.Struct, frozen=True, tag=True):
    """Client → head: answer when the task has ended, or after so long."""

    id: Line
    timeout_s: Seconds


class ReadLog(msgspec.Struct, frozen=True, tag=True):
    """Client → head → runner: the log of a task's attempt from this position."""

    id: Line
    attempt: Count | None  # None: the last
    position: Count
    bytes_max: ReadBytes = LOG_READ_BYTES_MAX


class LogPart(msgspec.Struct, frozen=True, tag=True):
    """Head → client: these bytes of the log; see `shoal.tasks.log_frames`."""

    attempt: Count
    position: Count
    data: Data
    ended: bool  # the attempt has ended, and its log has nothing after these bytes


class AskFiles(msgspec.Struct, frozen=True, tag=True):
    """Client → head → runner: which results of a task are there?"""

    id: Line
    patterns: Annotated[list[FilePath], Meta(max_length=100)]  # none: those of --keep
    first: Count = 0


class FileInfo(msgspec.Struct, frozen=True):
    path: FilePath  # below the task's folder
    size_bytes: Count
    executable: bool = False


class FileList(msgspec.Struct, frozen=True, tag=True):
    """Head → client: these."""

    files: Annotated[list[FileInfo], Meta(max_length=FETCH_FILES_MAX)]
    following: Count | None = None


class ReadFile(msgspec.Struct, frozen=True, tag=True):
    """Client → head → runner: the bytes of a result from this offset."""

    id: Line
    path: FilePath
    offset: Count
    bytes_max: ReadBytes = LOG_READ_BYTES_MAX


class FilePart(msgspec.Struct, frozen=True, tag=True):
    """Head → client: these; none at the file's end."""

    data: Data


class AskPlaces(msgspec.Struct, frozen=True, tag=True):
    """Client → head: where could a task of mine run that is submitted on this machine?"""

    machine: Short


class Places(msgspec.Struct, frozen=True, tag=True):
    """Head → client."""

    here: bool  # a runner of its owner is connected on that machine
    may: bool  # run on a node that runs programs of others; then its files must be at the head
    elsewhere: bool  # it may, and such a node is connected


class FindFiles(msgspec.Struct, frozen=True, tag=True):
    """Client → head: which of my files do you not have?"""

    hashes: Annotated[list[Hash], Meta(max_length=FILES_PER_MESSAGE_MAX)]


class MissingFiles(msgspec.Struct, frozen=True, tag=True):
    """Head → client: these."""

    hashes: list[Hash]


class FileChunk(msgspec.Struct, frozen=True):
    """A part of a file. Those of one file come in order."""

    hash: Hash
    offset: Count
    data: Annotated[bytes, Meta(max_length=FILE_CHUNK_BYTES)]
    last: bool


class PutFiles(msgspec.Struct, frozen=True, tag=True):
    """Client → head: keep these for my tasks that run on other machines. `Done` answers."""

    chunks: Annotated[list[FileChunk], Meta(max_length=FILES_PER_MESSAGE_MAX)]


ClientTaskRequest = (
    SubmitTasks | AskTasks | ChangeTask | WaitTask | ReadLog | AskFiles | ReadFile | AskPlaces
    | FindFiles | PutFiles
)  # fmt: skip
TaskAnswer = TaskPage | LogPart | FileList | FilePart | Places | MissingFiles
