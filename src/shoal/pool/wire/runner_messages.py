"""Messages between runner and head, and between a runner and the process of an attempt."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.msgpack import Decoder

from shoal.pool.base.limits import (
    ATTEMPTS_PER_RUNNER_MAX,
    DEVICES_PER_LEASE_MAX,
    FILE_CHUNK_BYTES,
)
from shoal.pool.wire.message_fields import Count, Name, Pem, Text
from shoal.pool.wire.messages import Beat, Refusal
from shoal.pool.wire.task_messages import (
    AskFiles,
    FileList,
    FilePart,
    FilePath,
    Hash,
    LogPart,
    ReadFile,
    ReadLog,
    Seconds,
)
from shoal.tasks.spec import Line, TaskSpec

# --- runner and head -------------------------------------------------------------------------------


class HeldAttempt(msgspec.Struct, frozen=True):
    """An attempt that a runner knows and whose end the head has not written."""

    task: Count
    attempt: Count
    started: bool


class RunnerHello(msgspec.Struct, frozen=True, tag=True):
    """Runner → head: I start programs on this machine, and have these already."""

    name: Name
    machine: Name
    shoal: Name
    pid: Count
    held: Annotated[list[HeldAttempt], Meta(max_length=ATTEMPTS_PER_RUNNER_MAX)]
    sandbox: bool = False  # for other people's programs


class RunnerWelcome(msgspec.Struct, frozen=True, tag=True):
    """Head → runner."""

    pool: Name
    beat_s: float


class Pass(msgspec.Struct, frozen=True):
    """With what a program in a sandbox comes to the head and its devices, and to nothing else."""

    name: Name
    key: Pem
    certificate: Pem
    authority: Pem
    #: Host and port of its devices' servers; "": the host at which the runner reaches the head.
    devices: Annotated[list[tuple[Name, Count]], Meta(max_length=DEVICES_PER_LEASE_MAX)]


class StartAttempt(msgspec.Struct, frozen=True, tag=True):
    """Head → runner: start this program. One that it has already is not started again."""

    task: Count
    attempt: Count
    task_id: Line
    owner: Name
    spec: TaskSpec
    ticket: Name  # for the lease that was planned
    sandbox: Pass | None = None  # another's program


class StopAttempt(msgspec.Struct, frozen=True, tag=True):
    """Head → runner: end it. `AttemptEnded` answers, also for one that the runner does not know."""

    task: Count
    attempt: Count
    grace_s: Seconds


class PauseAttempt(msgspec.Struct, frozen=True, tag=True):
    """Head → runner: its --limit does not count while it is suspended."""

    task: Count
    attempt: Count
    paused: bool


class AttemptStarted(msgspec.Struct, frozen=True, tag=True):
    """Runner → head: its program runs."""

    task: Count
    attempt: Count


class AttemptEnded(msgspec.Struct, frozen=True, tag=True):
    """Runner → head: nothing of it is left. It says so until `EndNoted`."""

    task: Count
    attempt: Count
    code: Annotated[int, Meta(ge=0, le=255)] | None
    over_limit: bool = False
    problem: Text = ""
    lost: Text = ""
    over: Text = ""  # what it used too much of, in a sandbox


class EndNoted(msgspec.Struct, frozen=True, tag=True):
    """Head → runner: its end is on the disk."""

    task: Count
    attempt: Count


class ForgetTask(msgspec.Struct, frozen=True, tag=True):
    """Head → runner: remove its logs and files."""

    task: Count


class AskRunner(msgspec.Struct, frozen=True, tag=True):
    """Head → runner: what a client asks for. `RunnerAnswer` answers with the same number."""

    number: Count
    task: Count
    attempt: Count
    keep: list[FilePath]
    folder: FilePath  # of a task that runs where it was submitted; "": its own
    request: ReadLog | AskFiles | ReadFile


class RunnerAnswer(msgspec.Struct, frozen=True, tag=True):
    """Runner → head."""

    number: Count
    answer: LogPart | FileList | FilePart | Refusal


class ReadSubmitted(msgspec.Struct, frozen=True, tag=True):
    """Runner → head: a file that came with a task of mine. `Submitted` has the same number."""

    number: Count
    task: Count
    hash: Hash
    offset: Count


class Submitted(msgspec.Struct, frozen=True, tag=True):
    """Head → runner."""

    number: Count
    data: Annotated[bytes, Meta(max_length=FILE_CHUNK_BYTES)] = b""
    last: bool = True
    problem: Text = ""


# --- runner and attempt process --------------------------------------------------------------------


class ProgramStarted(msgspec.Struct, frozen=True, tag=True):
    """Attempt process → runner."""

    pid: Count


class ProgramEnded(msgspec.Struct, frozen=True, tag=True):
    """Attempt process → runner: nothing of the attempt is left but the sender."""

    code: Annotated[int, Meta(ge=0, le=255)] | None
    over_limit: bool = False
    problem: Text = ""
    lost: Text = ""
    over: Text = ""


class StopProgram(msgspec.Struct, frozen=True, tag=True):
    """Runner → attempt process: SIGTERM now, SIGKILL after the grace."""

    grace_s: Seconds


class PauseLimit(msgspec.Struct, frozen=True, tag=True):
    """Runner → attempt process: stop, or go on, counting the time of --limit."""

    paused: bool


# --- the links -------------------------------------------------------------------------------------

OfAttempt = AttemptStarted | AttemptEnded | ReadSubmitted
FromRunner = AttemptStarted | AttemptEnded | RunnerAnswer | ReadSubmitted | Beat
ToRunner = (
    RunnerWelcome | StartAttempt | StopAttempt | PauseAttempt | EndNoted | ForgetTask | AskRunner
    | Submitted | Beat | Refusal
)  # fmt: skip
FromAttempt = ProgramStarted | ProgramEnded
ToAttempt = StopProgram | PauseLimit
FROM_RUNNER: Decoder[FromRunner] = Decoder(FromRunner)
TO_RUNNER: Decoder[ToRunner] = Decoder(ToRunner)
FROM_ATTEMPT: Decoder[FromAttempt] = Decoder(FromAttempt)
TO_ATTEMPT: Decoder[ToAttempt] = Decoder(ToAttempt)
