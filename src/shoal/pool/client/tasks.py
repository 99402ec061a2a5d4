"""Tasks of a pool, for programs: `shoal.submit(...)` returns a `Task`."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal import views
from shoal.errors import PoolError, ProtocolError
from shoal.pool.base import limits, paths
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.client import head_connection
from shoal.pool.client.head_connection import Connection
from shoal.pool.wire import admission_messages, messages, task_messages
from shoal.pool.wire.admission_messages import WhyAnswer
from shoal.pool.wire.task_messages import LogPart, TaskInfo, TaskPage
from shoal.tasks import log_frames, states
from shoal.tasks import spec as specs
from shoal.tasks.reasons import Why
from shoal.tasks.spec import Needs, TaskSpec
from shoal.units import parse_bytes

Answer = TypeVar("Answer", bound=msgspec.Struct)
FINAL = frozenset(state.value for state in states.FINAL)
#: Variables of this shell that a task's program gets.
INHERITED = (
    "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "LANG", "LANGUAGE",
)  # fmt: skip


class TaskError(PoolError):
    """The pool refused a request about a task. `code` is for programs; `unblock` says what helps."""

    def __init__(self, text: str, code: str = "", unblock: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.code, self.unblock = code, list(unblock)


class TaskTimeout(TaskError, TimeoutError):
    """A task has not ended in time."""


def inherited() -> dict[str, str]:
    """Return what a task's program takes from this process's environment."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in INHERITED or name.startswith("LC_")
    }


def default_url() -> str:
    """Return the pool of a program that names none."""
    return head_connection.default_url() or LOCAL_PREFIX + paths.local_pool_id("default")


class TaskClient:
    """Requests about tasks over one connection, which is opened again if the head restarts.

    Args:
        away_s: how long a request waits for a head that is away.
    """

    def __init__(self, url: str, away_s: float = limits.COMMAND_ANSWER_S) -> None:
        self.url = url
        self._away_s = away_s
        self._connection: Connection | None = None

    def ask(
        self, request: messages.FromClient, answer: type[Answer], wait_s: float = 0.0
    ) -> Answer:
        """Return the answer to a request that may be sent again: each of them may."""
        deadline = time.monotonic() + self._away_s
        while True:
            try:
                if self._connection is None:
                    self._connection = Connection(self.url, limits.COMMAND_ANSWER_S)
                self._connection.send(request)
                found = self._connection.receive(limits.COMMAND_ANSWER_S + wait_s)
                break
            except (ProtocolError, head_connection.PoolUnreachable) as error:
                self.close()
                if getattr(error, "problem", None) is not None or time.monotonic() > deadline:
                    if isinstance(error, ProtocolError):
                        raise head_connection.PoolUnreachable(self.url, error) from None
                    raise
                time.sleep(limits.RETRY_S)
        if isinstance(found, messages.Refusal):
            if found.code == "again":
                return self.ask(request, answer, wait_s)
            raise TaskError(found.reason, found.code, found.unblock)
        if not isinstance(found, answer):
            raise PoolError(
                f"the head answered {type(found).__name__} to {type(request).__name__}. Does it have "
                "another version? Type: shoal doctor"
            )
        return found

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> TaskClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- requests ----------------------------------------------------------------------------------

    def submit(self, key: str, wanted: Sequence[TaskSpec]) -> list[TaskInfo]:
        """Submit tasks; those of an array have keys of their own."""
        found: list[TaskInfo] = []
        batch: list[task_messages.Submission] = []
        batch_bytes = 0
        for index, spec in enumerate(wanted):
            one = task_messages.Submission(specs.array_key(key, index, len(wanted)), spec)
            one_bytes = len(msgspec.msgpack.encode(one))
            if one_bytes > limits.FRAME_BYTES_MAX - 1024:
                raise TaskError(
                    "arguments and environment are too long for a message", "bad-request"
                )
            full = len(batch) >= limits.TASKS_PER_SUBMISSION_MAX
            if batch and (full or batch_bytes + one_bytes > limits.FRAME_BYTES_MAX - 1024):
                found += self.ask(task_messages.SubmitTasks(batch), TaskPage).tasks
                batch, batch_bytes = [], 0
            batch.append(one)
            batch_bytes += one_bytes + 16
        found += self.ask(task_messages.SubmitTasks(batch), TaskPage).tasks
        return found

    def tasks(self, *, ended: bool = False) -> Iterator[TaskInfo]:
        """Yield all unfinished tasks, or all of them, page by page."""
        first: int | None = 0
        while first is not None:
            page = self.ask(task_messages.AskTasks(first=first, ended=ended), TaskPage)
            yield from page.tasks
            first = page.following

    def task(self, text: str) -> TaskInfo:
        return self.ask(task_messages.AskTasks([text]), TaskPage).tasks[0]

    def change(self, text: str, action: str) -> TaskInfo:
        request = msgspec.convert({"type": "ChangeTask", "id": text, "action": action},
                                  task_messages.ChangeTask)  # fmt: skip
        return self.ask(request, TaskPage).tasks[0]

    def wait(self, text: str, timeout_s: float | None = None) -> TaskInfo:
        """Return a task that has ended. Raise TaskTimeout if it has not in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = limits.TASK_WAIT_S
            if deadline is not None:
                left_s = min(left_s, max(0.0, deadline - time.monotonic()))
            found = self.ask(task_messages.WaitTask(text, left_s), TaskPage, left_s).tasks[0]
            if found.state in FINAL:
                return found
            if deadline is not None and time.monotonic() >= deadline:
                raise TaskTimeout(f"{found.id} is {found.state} after {timeout_s:g} s", "timeout")

    def log(
        self, text: str, attempt: int | None = None, *, follow: bool = False
    ) -> Iterator[log_frames.Frame]:
        """Yield the log of an attempt; None: the last one. `follow` waits for its end."""
        decoder, number = log_frames.Decoder(), attempt
        while True:
            part = self.ask(task_messages.ReadLog(text, number, decoder.position), LogPart)
            number = number or part.attempt or None
            yield from decoder.feed(part.position, part.data)
            if decoder.ended or part.ended:
                number = self._next_attempt(text, number) if follow and attempt is None else None
                if number is None:
                    return
                decoder = log_frames.Decoder()
            elif not part.data:
                if not follow:
                    return
                time.sleep(limits.LOG_POLL_S)

    def _next_attempt(self, text: str, number: int | None) -> int | None:
        """Wait for the attempt after this one. Return None if the task ends before."""
        while True:
            found = self.task(text)
            if (found.attempt or 0) > (number or 0):
                return found.attempt
            if found.state in FINAL:
                return None
            time.sleep(limits.LOG_POLL_S)

    def files(self, text: str, patterns: Sequence[str]) -> Iterator[task_messages.FileInfo]:
        first: int | None = 0
        while first is not None:
            request = task_messages.AskFiles(text, list(patterns), first)
            page = self.ask(request, task_messages.FileList)
            yield from page.files
            first = page.following

    def read_file(self, text: str, path: str) -> Iterator[bytes]:
        offset = 0
        while True:
            part = self.ask(task_messages.ReadFile(text, path, offset), task_messages.FilePart)
            if not part.data:
                return
            offset += len(part.data)
            yield part.data


class Task:
    """A task of a pool, as it was when it was last asked after. `refresh()` asks again.

    >>> task = shoal.submit(["python", "train.py"], devices=2)
    >>> task.wait().state
    'succeeded'
    """

    def __init__(self, url: str, info: TaskInfo) -> None:
        self.url = url
        self._info = info

    def __getattr__(self, name: str) -> Any:
        """`id`, `key`, `name`, `owner`, `state`, `needs`, `devices`, `reasons`, `position`, `attempt`,
        `exit_code`, `end_reason`, `submitted_at`, `started_at` and `ended_at`."""
        if name.startswith("_") or name not in TaskInfo.__struct_fields__:
            raise AttributeError(f"a task has no attribute {name!r}")
        return getattr(self._info, name)

    def _repr_html_(self) -> str:
        """What a notebook shows: the state, and every reason while it waits."""
        info = self._info
        rows: list[list[object]] = [["state", info.state], ["owner", info.owner]]
        rows += [["devices", ", ".join(info.devices)]] if info.devices else []
        rows += [[reason.code, reason.text] for reason in info.reasons]
        rows += [["ended", info.end_reason]] if info.end_reason else []
        return views.table(f"task {info.id} {info.name or ''}", ["", ""], rows)

    def refresh(self) -> Task:
        """Ask the pool how the task is now."""
        with TaskClient(self.url) as client:
            self._info = client.task(self._info.id)
        return self

    def wait(self, timeout: float | None = None) -> Task:
        """Wait for the task's end. Raise TimeoutError if it has not ended after `timeout` seconds."""
        with TaskClient(self.url) as client:
            self._info = client.wait(self._info.id, timeout)
        return self

    def cancel(self) -> Task:
        """End the task: SIGTERM to its processes, and SIGKILL after the grace."""
        with TaskClient(self.url) as client:
            self._info = client.change(self._info.id, "cancel")
        return self

    def why(self) -> Why:
        """Return why the task waits: all reasons, what would help, an estimate and a bound.

        >>> task.why().reasons[0].text
        'busy: 0 of 2 devices are free'
        """
        with TaskClient(self.url) as client:
            found = client.ask(admission_messages.AskWhy(self._info.id), WhyAnswer)
        return found.why

    def logs(self, attempt: int | None = None) -> str:
        """Return what the last attempt, or the given one, has written to both streams so far."""
        with TaskClient(self.url) as client:
            data = b"".join(frame.data for frame in client.log(self._info.id, attempt))
        return data.decode(errors="replace")

    def __repr__(self) -> str:
        return f"<shoal.Task {self._info.id} {self._info.state}>"


def submit(
    program: Sequence[str],
    *,
    name: str = "",
    devices: int = 1,
    memory: int | str | None = None,
    kind: str | None = None,
    key: str | None = None,
    priority: str = "normal",
    after: Sequence[str | Task] = (),
    limit: float | str | None = None,
    grace: float | str = specs.GRACE_S,
    retries: int = specs.RETRIES,
    retry_exits: int = 0,
    yields: bool = False,
    steps: int | None = None,
    env: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    hold: bool = False,
    url: str | None = None,
) -> Task:
    """Have the pool run a program when devices are free for it.

    Args:
        program: the program and its arguments.
        name: what people call the task. Default: that of the script.
        devices: how many devices it needs.
        memory: of each device: in bytes, or like "8GiB". Default: what there is.
        kind: of the devices, like "a100" or "a100|v100".
        key: the same key with the same request is the same task, so a submission may be repeated.
        priority: "low", "normal" or "high".
        after: tasks that must succeed first.
        limit: seconds of running, or like "2h"; then the task fails.
        grace: seconds from SIGTERM to SIGKILL.
        retries: starts after lost devices, nodes and runners.
        retry_exits: starts after an exit with a code that is not 0.
        yields: asked by `shoal.task.should_yield()`, it saves its work and exits with 75.
        steps: training steps that it makes in all, by which the planner estimates its end.
        env: variables of its environment.
        folder: in which it starts. Default: this program's.
        hold: let it wait until `shoal release`.
        url: the pool. Default: $SHOAL_POOL, else the one that was joined, else this machine's.

    >>> shoal.submit(["python", "train.py"], memory="2GiB").wait(timeout=60).exit_code
    0
    """
    spec = msgspec.convert(
        {
            "program": list(program), "folder": os.path.abspath(folder or os.getcwd()), "name": name,
            "needs": Needs(devices, kind, parse_bytes(memory) if isinstance(memory, str) else memory),
            "priority": priority, "after": [t.id if isinstance(t, Task) else t for t in after],
            "limit_s": seconds(limit), "grace_s": seconds(grace), "retries": retries,
            "retry_exits": retry_exits, "yields": yields, "environment": dict(env or {}),
            "inherited": inherited(),
            "machine": paths.host_id(), "held": hold, "steps": steps,
        },
        TaskSpec,
    )  # fmt: skip
    pool = url or default_url()
    from shoal.pool.client import submitting  # which needs this module

    with TaskClient(pool) as client:
        placed = submitting.place(client, [spec])
        return Task(pool, client.submit(key or new_key(), placed)[0])


def seconds(value: float | str | None) -> float | None:
    return specs.parse_duration(value) if isinstance(value, str) else value


def new_key() -> str:
    return secrets.token_hex(8)


def write_file(target: Path, chunks: Iterator[bytes], *, executable: bool) -> int:
    """Write a result, whole or not at all. Return its size."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    size_bytes = 0
    try:
        with open(scratch, "wb") as file:
            for chunk in chunks:
                size_bytes += file.write(chunk)
        if executable:
            scratch.chmod(0o755)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    return size_bytes
