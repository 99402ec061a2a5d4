"""`shoal queue`, `cancel`, `hold`, `release` and `wait`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import datetime

import click

from shoal.cli.common import (
    ago,
    json_option,
    local_url,
    naming_no_pool,
    pool_option,
    pool_url,
    print_json,
    print_table,
)
from shoal.cli.errors import ShoalFailed
from shoal.errors import ShoalError
from shoal.pool.base import limits, paths
from shoal.pool.client.tasks import FINAL, TaskClient, TaskTimeout, seconds
from shoal.pool.local import supervisor
from shoal.pool.wire.task_messages import TaskInfo
from shoal.tasks import states
from shoal.tasks.spec import SpecError
from shoal.tasks.states import State

task_argument = click.argument("task", metavar="TASK")


@contextlib.contextmanager
def client(pool: str | None) -> Iterator[TaskClient]:
    """Connect to the pool that a command means.

    A request waits for a head that restarts. Where no `shoal up` runs, none will.
    """
    url = pool_url(pool)
    started = url != local_url("default") or supervisor.holder_pid(paths.state_directory("default"))
    away_s = limits.COMMAND_ANSWER_S if started else 0.0
    with naming_no_pool(url), TaskClient(url, away_s) as connection:
        yield connection


@click.command()
@click.argument("tasks", metavar="[TASK]...", nargs=-1)
@click.option("--all", "ended", is_flag=True, help="Also list tasks that have ended.")
@pool_option
@json_option
def queue(tasks: tuple[str, ...], ended: bool, pool: str | None, as_json: bool) -> None:
    """List the tasks of the pool: those that have not ended, or TASK."""
    with client(pool) as connection:
        if tasks:
            found = [connection.task(task) for task in tasks]
        else:
            found = list(connection.tasks(ended=ended))
    if as_json:
        print_json(found[0] if len(tasks) == 1 else found)
        return
    rows = [_row(one) for one in sorted(found, key=_in_line)]
    print_table(["#", "task", "owner", "state", "devices", "since", "why"], rows)


def _in_line(one: TaskInfo) -> tuple[bool, bool, int]:
    """Order tasks for people: what has ended, what runs, then the line, the next one first."""
    waits = one.state in (State.WAITING, State.HELD)
    return one.state not in FINAL, waits, (one.position or sys.maxsize) if waits else 0


def _row(one: TaskInfo) -> list[str]:
    since = one.ended_at or one.started_at or one.submitted_at
    devices = "+".join(one.devices)
    if not devices and one.needs is not None and one.state not in FINAL:
        devices = f"{one.needs.devices}×{one.needs.kind or 'any'}"
    why = one.end_reason or (one.reasons[0].text.splitlines()[0] if one.reasons else "")
    more = f" (+{len(one.reasons) - 1}: shoal why {one.id})" if len(one.reasons) > 1 else ""
    return [
        str(one.position or ""), one.id, one.owner, one.state, devices,
        ago(time.time() - datetime.fromisoformat(since).timestamp()) if since else "",
        why[:80] + more,
    ]  # fmt: skip


def _changed(task: str, action: str, pool: str | None, as_json: bool) -> None:
    with client(pool) as connection:
        found = connection.change(task, action)
    if as_json:
        print_json(found)
    elif action == "cancel" and found.state not in FINAL:
        click.echo(f"{found.id} is {found.state}; it was asked to end")
    else:
        click.echo(f"{found.id} is {found.state}")


@click.command()
@task_argument
@pool_option
@json_option
def cancel(task: str, pool: str | None, as_json: bool) -> None:
    """End a task: SIGTERM to all of its processes, and SIGKILL after its grace."""
    _changed(task, "cancel", pool, as_json)


@click.command()
@task_argument
@pool_option
@json_option
def hold(task: str, pool: str | None, as_json: bool) -> None:
    """Keep a waiting task from starting, until `shoal release`."""
    _changed(task, "hold", pool, as_json)


@click.command()
@task_argument
@pool_option
@json_option
def release(task: str, pool: str | None, as_json: bool) -> None:
    """Let a held task go on."""
    _changed(task, "release", pool, as_json)


@click.command()
@task_argument
@click.option("--timeout", metavar="DURATION", help="Wait at most this long, like 90s or 2h.")
@pool_option
@json_option
def wait(task: str, timeout: str | None, pool: str | None, as_json: bool) -> None:
    """Wait for the end of a task, and exit with its program's code.

    \b
    128 + n  a signal n ended it        124  --timeout came first
    130      it was cancelled           125  it expired, was lost, or Shoal failed
    """
    try:
        timeout_s = seconds(timeout)
    except SpecError as error:
        raise click.BadParameter(str(error), param_hint="'--timeout'") from None
    try:
        with client(pool) as connection:
            code = wait_for(connection, task, timeout_s, as_json)
    except ShoalError as error:
        raise ShoalFailed(error) from None
    raise SystemExit(code)


def wait_for(
    connection: TaskClient, task: str, timeout_s: float | None, as_json: bool
) -> int:  # fmt: skip
    """Wait for a task, print how it ended, and return the exit code of `shoal wait`."""
    try:
        found = connection.wait(task, timeout_s)
    except TaskTimeout as error:
        if as_json:
            print_json({"error": {"code": error.code, "text": str(error), "unblock": []}})
        else:
            click.echo(f"Error: {error}", err=True)
        return states.EXIT_TIMEOUT
    if as_json:
        print_json(found)
    else:
        why = (found.end_reason or "").partition(": ")[2]
        click.echo(f"{found.id} {found.state}" + (f": {why}" if why else ""), err=True)
    return states.wait_code(states.State(found.state), found.exit_code)
