"""What a task asks for, as its owner submits it. Pure, with bounds on every field."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.tasks.room import kinds

TEXTS_MAX = 64 * 1024  # characters of arguments and environment together; with the rest a frame
ARRAY_MAX = 1000  # tasks of one submission
PRIORITIES = ("low", "normal", "high")
GRACE_S = 10.0
RETRIES = 3
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}")
_KEY = re.compile(r"[\x21-\x7e]{1,100}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Short = Annotated[str, Meta(max_length=64)]
Line = Annotated[str, Meta(max_length=256)]
Path = Annotated[str, Meta(max_length=4096)]
Argument = Annotated[str, Meta(max_length=TEXTS_MAX)]
Seconds = Annotated[float, Meta(gt=0, le=10 * 365 * 86400)]
Environment = Annotated[dict[Line, Argument], Meta(max_length=500)]


class SpecError(ValueError):
    """What was asked for is not a task; the text says why and what to write."""


class Needs(msgspec.Struct, frozen=True):
    """The devices of a task."""

    devices: Annotated[int, Meta(ge=1, le=32)] = 1
    kind: Line | None = None  # "a100|v100"
    memory_bytes: Annotated[int, Meta(ge=1, le=2**60)] | None = None  # of each device


class Program(msgspec.Struct, frozen=True, omit_defaults=True):
    """What runs, from which folder, in which environment, and which of its files are results."""

    program: Annotated[list[Argument], Meta(min_length=1, max_length=1000)]
    folder: Path
    environment: Environment = {}  # by --env and --env-file, and what --each adds
    inherited: Environment = {}  # PATH and others of the shell of `submit`
    requirements: Annotated[str, Meta(max_length=TEXTS_MAX)] = ""  # the file's text
    snapshot: Short = ""  # hash of the list of its files; "": it runs in `folder` itself
    implied: bool = False  # the snapshot: nobody asked for it, it runs on another machine
    keep: Annotated[list[Path], Meta(max_length=100)] = []  # patterns of results


class TaskSpec(Program, frozen=True, omit_defaults=True):
    """A task, as its owner submits it: a program, on which devices, when and how often.

    `inherited` is not a part of the request: see request_hash.
    """

    name: Short = ""
    needs: Needs = Needs()
    priority: Literal["low", "normal", "high"] = "normal"
    after: Annotated[list[Line], Meta(max_length=100)] = []  # ids or keys
    limit_s: Seconds | None = None  # of running
    grace_s: Annotated[float, Meta(ge=0, le=3600)] = GRACE_S
    deadline: Line | None = None  # for the policy; as the owner wrote it
    deadline_at: float | None = None  # Unix time
    until: Line | None = None  # to have started by
    until_at: float | None = None
    steps: Annotated[int, Meta(ge=1, le=10**12)] | None = None  # training steps, in all
    retries: Annotated[int, Meta(ge=0, le=1000)] = RETRIES
    retry_exits: Annotated[int, Meta(ge=0, le=1000)] = 0
    machine: Short = ""  # on which it was submitted
    held: bool = False  # from the start
    yields: bool = False  # asked by SIGTERM, it saves its work and exits with 75


#: Fields that two submissions of one request may differ in: the moment and the shell.
_NOT_REQUESTED = ("deadline_at", "until_at", "inherited", "machine")


def request_hash(spec: TaskSpec) -> bytes:
    """Return a hash of what the owner asked for. One key stands for one request.

    >>> a = TaskSpec(["true"], "/", inherited={"PATH": "/bin"})
    >>> request_hash(a) == request_hash(TaskSpec(["true"], "/"))
    True
    """
    asked = msgspec.to_builtins(spec)
    for name in _NOT_REQUESTED:
        asked.pop(name, None)
    if spec.implied:
        del asked["snapshot"], asked["implied"]
    return hashlib.sha256(msgspec.json.encode(asked, order="deterministic")).digest()[:16]


def check(spec: TaskSpec) -> None:
    """Raise SpecError for what the fields' bounds allow and a task cannot have."""
    if spec.name and not _NAME.fullmatch(spec.name):
        raise SpecError(
            f"{spec.name!r}: a task's name is at most 48 letters, digits, '_', '.' or '-'"
        )
    if spec.needs.kind is not None and not kinds(spec.needs.kind):
        raise SpecError(f"{spec.needs.kind!r} names no kind of devices; write a100, or a100|v100")
    _check_program(spec)


def _check_program(spec: Program) -> None:
    texts = [*spec.program, spec.folder, spec.requirements]
    for variable, value in [*spec.environment.items(), *spec.inherited.items()]:
        if not _VARIABLE.fullmatch(variable):
            raise SpecError(f"{variable!r} is not a name of an environment variable")
        texts += [variable, value]
    if any("\0" in text for text in texts):
        raise SpecError("an argument or a variable contains a zero byte")
    if sum(map(len, texts)) > TEXTS_MAX:
        raise SpecError(
            f"arguments, environment and requirements are over {TEXTS_MAX // 1024} KiB together"
        )
    if not spec.program[0]:
        raise SpecError("the program's name is empty")
    if not spec.folder.startswith("/"):
        raise SpecError(f"the folder must be a whole path (got {spec.folder!r})")


def check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise SpecError("a key is 1 to 100 printable characters without spaces")


# --- names -----------------------------------------------------------------------------------------


def default_name(program: Sequence[str]) -> str:
    """Return the name of a task that was given none: its script's.

    >>> default_name(["python", "-u", "/home/ana/train.py", "--lr", "1"])
    'train'
    """
    words = [word for word in program if not word.startswith("-")]
    script = next((w for w in words if w.endswith((".py", ".sh"))), program[0])
    stem = script.rpartition("/")[2].rpartition(".")[0] or script.rpartition("/")[2]
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in stem)
    return kept.lstrip("_.-")[:48] or "task"


def task_id(name: str, number: int) -> str:
    return f"{name}-{number}"


def number_of(text: str) -> int | None:
    """Return the number in a task's id, or of a bare number; None for another text."""
    digits = text.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 19 else None


# --- arrays ----------------------------------------------------------------------------------------


def parse_each(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Read `--each lr=1e-3,1e-4`.

    >>> parse_each(["lr=1e-3,1e-4"])
    [('lr', ['1e-3', '1e-4'])]
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not _VARIABLE.fullmatch(name) or not all(values.split(",")):
            raise SpecError(f"--each {text!r}: write NAME=VALUE,VALUE,…, like lr=1e-3,1e-4")
        if name in found:
            raise SpecError(f"--each names {name} twice; write all its values in one")
        found[name] = values.split(",")
    return list(found.items())


def expand(spec: TaskSpec, each: Sequence[tuple[str, list[str]]]) -> list[TaskSpec]:
    """Return a task for each combination of values.

    A value replaces `{NAME}` in the arguments, and is the environment variable NAME.

    >>> [s.program for s in expand(TaskSpec(["t", "--lr={lr}"], "/"), [("lr", ["1", "2"])])]
    [['t', '--lr=1'], ['t', '--lr=2']]
    """
    chosen: list[dict[str, str]] = [{}]
    for name, values in each:
        chosen = [{**one, name: value} for one in chosen for value in values]
        if len(chosen) > ARRAY_MAX:
            raise SpecError(f"--each makes more than {ARRAY_MAX} tasks")
    if not each:
        return [spec]
    return [
        msgspec.structs.replace(
            spec,
            program=[fill(argument, one) for argument in spec.program],
            environment={**spec.environment, **one},
        )
        for one in chosen
    ]


def fill(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def array_key(key: str, index: int, count: int) -> str:
    """Return the key of one task of an array: its own for each, and the same the next time."""
    return key if count == 1 else f"{key}/{index}"


# --- times -----------------------------------------------------------------------------------------

_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")


def parse_duration(text: str) -> float:
    """Read a duration in seconds.

    >>> parse_duration("90"), parse_duration("1.5h"), parse_duration("10min")
    (90.0, 5400.0, 600.0)
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise SpecError(f"{text!r} is not a duration; write a number and one of {units}, like 90s")
    seconds = float(match[1]) * _UNITS[match[2]]
    if not 0 <= seconds <= 10 * 365 * 86400:
        raise SpecError(f"{text!r} is longer than ten years")
    return seconds
