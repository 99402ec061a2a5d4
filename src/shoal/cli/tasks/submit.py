"""`shoal submit`: what a task asks for, from the command line."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from shoal.cli import why_live
from shoal.cli.common import json_option, pool_option, print_json
from shoal.cli.tasks.queue import client, wait_for
from shoal.errors import DeviceSpecError
from shoal.pool.base import paths
from shoal.pool.client import snapshot, submitting
from shoal.pool.client.tasks import TaskClient, inherited, new_key
from shoal.pool.wire import admission_messages
from shoal.pool.wire.task_messages import TaskInfo
from shoal.tasks import spec as specs
from shoal.tasks.spec import Needs, SpecError, TaskSpec
from shoal.units import parse_bytes

Command = TypeVar("Command", bound=Callable[..., Any])

#: Options of `submit` and `run`, in the order of their help.
_OPTIONS = [
    click.option("--name", default="", help="Name of the task. Default: its script's name."),
    click.option("--devices", default=1, show_default=True, type=click.IntRange(1, 32),
                 help="Devices that it needs."),
    click.option("--kind", help="Kind of the devices, like 'a100' or 'a100|v100'."),
    click.option("--memory", metavar="SIZE",
                 help="Memory of each device, like 8GiB. Default: all; no other task shares it."),
    click.option("--priority", default="normal", show_default=True,
                 type=click.Choice(specs.PRIORITIES), help="Only an admin may give high."),
    click.option("--after", multiple=True, metavar="TASK",
                 help="Start when TASK has succeeded; repeat for several."),
    click.option("--each", multiple=True, metavar="NAME=A,B,…",
                 help="Submit a task for each value. It replaces {NAME} and sets variable NAME."),
    click.option("--limit", metavar="DURATION", help="End it after this long, like 90s or 2h."),
    click.option("--grace", metavar="DURATION", default="10s", show_default=True,
                 help="Time from SIGTERM to SIGKILL."),
    click.option("--deadline", metavar="TIME",
                 help="Time by which it should end: a duration or ISO 8601. The planner heeds it."),
    click.option("--steps", type=click.IntRange(1, 10**12),
                 help="Training steps that it makes in all: the planner estimates its end."),
    click.option("--until", metavar="TIME", help="Time by which it must start, else it expires."),
    click.option("--retries", default=specs.RETRIES, show_default=True, type=click.IntRange(0, 1000),
                 help="Restarts after a lost device, node or runner."),
    click.option("--retry-exits", default=0, show_default=True, type=click.IntRange(0, 1000),
                 help="Restarts after an exit code other than 0."),
    click.option("--yields", is_flag=True,
                 help="On SIGTERM it saves its work and exits with 75, to go on later."),
    click.option("--env", multiple=True, metavar="NAME[=VALUE]",
                 help="Variable for its environment. NAME alone takes this shell's value."),
    click.option("--env-file", multiple=True, type=click.Path(exists=True, dir_okay=False),
                 help="File of NAME=VALUE lines."),
    click.option("--requirements", type=click.Path(exists=True, dir_okay=False),
                 help="File of Python packages that it needs, as pip reads it."),
    click.option("--snapshot", is_flag=True,
                 help="Copy this folder now, and run in the copy. Always on other machines."),
    click.option("--keep", multiple=True, metavar="PATTERN",
                 help="Results for `shoal fetch`, like 'runs/**'; repeat for several."),
    click.option("--key", help="Key of the request: the same key and request are one task."),
    click.option("--wait", is_flag=True, help="Wait for its end, and exit with its code."),
    click.option("--dry-run", is_flag=True, help="Submit nothing; say whether and why it would wait."),
]  # fmt: skip


def task_options(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)(command)


class Wrong(click.UsageError):
    """What was typed is not a task."""


def make_spec(program: tuple[str, ...], options: dict[str, Any]) -> TaskSpec:
    """Return the task that the options of `submit` and `run` describe."""
    now = time.time()
    try:
        spec = TaskSpec(
            program=list(program),
            folder=os.getcwd(),
            name=options["name"],
            needs=Needs(options["devices"], options["kind"], _memory(options["memory"])),
            priority=options["priority"],
            after=list(options["after"]),
            limit_s=_duration(options["limit"]),
            grace_s=_duration(options["grace"]) or 0.0,
            steps=options["steps"],
            deadline=options["deadline"],
            deadline_at=_moment(options["deadline"], now),
            until=options["until"],
            until_at=_moment(options["until"], now),
            retries=options["retries"],
            retry_exits=options["retry_exits"],
            yields=options["yields"],
            environment=_environment(options["env"], options["env_file"]),
            inherited=inherited(),
            requirements=_text(options["requirements"]),
            keep=list(options["keep"]),
            machine=paths.host_id(),
        )
        specs.check(spec)
        return msgspec.convert(msgspec.to_builtins(spec), TaskSpec)
    except (SpecError, DeviceSpecError) as error:
        raise Wrong(str(error)) from None
    except msgspec.ValidationError as error:
        raise Wrong(_out_of_bounds(str(error))) from None


def _out_of_bounds(text: str) -> str:
    """Name the option of a value that a field does not take.

    >>> _out_of_bounds("Expected `float` <= 3600.0 - at `$.grace_s`")
    '--grace is out of its bounds: expected `float` <= 3600.0'
    """
    what, _, where = text.partition(" - at `$.")
    field = where.rstrip("`").removeprefix("needs.").partition("[")[0]
    for unit in ("_s", "_bytes"):
        field = field.removesuffix(unit)
    option = {"environment": "env", "program": "PROGRAM"}.get(field, field).replace("_", "-")
    option = option if option.isupper() else f"--{option}"
    return f"{option} is out of its bounds: {what[:1].lower()}{what[1:]}"


def make_specs(program: tuple[str, ...], options: dict[str, Any]) -> list[TaskSpec]:
    """Return the tasks of a submission: several with --each."""
    try:
        return specs.expand(make_spec(program, options), specs.parse_each(options["each"]))
    except SpecError as error:
        raise Wrong(str(error)) from None


def _memory(text: str | None) -> int | None:
    return parse_bytes(text) if text is not None else None


def _duration(text: str | None) -> float | None:
    return specs.parse_duration(text) if text is not None else None


def _moment(text: str | None, now: float) -> float | None:
    """Read a duration from now, or a time as ISO 8601; without a zone it is of this machine."""
    if text is None:
        return None
    try:
        return now + specs.parse_duration(text)
    except SpecError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise SpecError(f"{text!r} is neither a duration like 2h nor a time in ISO 8601") from None


def _environment(given: tuple[str, ...], files: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in files:
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            name, equals, value = text.removeprefix("export ").partition("=")
            if not equals:
                raise SpecError(f"{path}, line {number}: write NAME=VALUE")
            found[name.strip()] = _unquoted(value.strip())
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            if name not in os.environ:
                raise SpecError(
                    f"--env {name}: this shell has no such variable; write {name}=VALUE"
                )
            value = os.environ[name]
        found[name] = value
    return found


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def _text(path: str | None) -> str:
    return Path(path).read_text() if path is not None else ""


@click.command(context_settings={"ignore_unknown_options": False})
@task_options
@click.option("--hold", is_flag=True, help="Let it wait until `shoal release`.")
@pool_option
@json_option
def submit(
    program: tuple[str, ...], hold: bool, pool: str | None, as_json: bool, **options: Any
) -> None:
    """Have the pool run a program when devices are free for it.

    \b
    shoal submit -- python train.py --epochs 3
    shoal submit --devices 2 --memory 8GiB --each lr=1e-3,1e-4 -- python train.py --lr {lr}
    """
    wanted = make_specs(program, options)
    if hold:
        wanted = [msgspec.structs.replace(one, held=True) for one in wanted]
    if options["dry_run"]:
        dry_run(wanted, pool, as_json=as_json, is_array=bool(options["each"]))
        return
    if options["snapshot"]:
        name = snapshot.take(Path.cwd())
        wanted = [msgspec.structs.replace(one, snapshot=name) for one in wanted]
    with client(pool) as connection:
        wanted = submitting.place(connection, wanted)
        found = connection.submit(options["key"] or new_key(), wanted)
        if options["wait"]:
            raise SystemExit(_wait(connection, found, as_json, bool(options["each"])))
    if as_json:
        print_json(found if options["each"] else found[0])
        return
    for one in found:
        click.echo(_line(one))


def _line(one: TaskInfo) -> str:
    why = "; ".join(reason.text.splitlines()[0] for reason in one.reasons)
    return f"{one.id} {one.state}" + (f": {why}" if why else "")


def _wait(
    connection: TaskClient, found: list[TaskInfo], as_json: bool, is_array: bool
) -> int:  # fmt: skip
    """Wait for all tasks of a submission. Return the first code that is not 0."""
    codes = [wait_for(connection, one.id, None, as_json=False) for one in found]
    if as_json:
        ended = [connection.task(one.id) for one in found]
        print_json(ended if is_array else ended[0])
    return next((code for code in codes if code), 0)


def dry_run(
    wanted: list[TaskSpec], pool: str | None, *, as_json: bool = False, is_array: bool = False
) -> None:
    """Print whether the tasks would wait, and why: those of an array wait alike."""
    with client(pool) as connection:
        asked = admission_messages.AskDryRun(wanted[0])
        answer = connection.ask(asked, admission_messages.WhyAnswer)
    if as_json:
        why = why_live.as_data(answer.why)
        found = [{"program": one.program, "needs": one.needs, **why} for one in wanted]
        print_json(found if is_array else found[0])
        return
    for one in wanted:
        click.echo(f"{answer.request} would be submitted: {shlex.join(one.program)}")
    click.echo("it would wait:" if answer.why.reasons else "it would start at once")
    why_live.show_why(answer.why)
