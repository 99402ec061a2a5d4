"""`shoal dump`: a bundle of what a pool knew and decided, without names, to run again elsewhere."""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

import shoal
from shoal.cli.common import NoPool, ask, json_option, local_url, name_option, print_json
from shoal.cli.status import read_status
from shoal.errors import PoolError
from shoal.pool.base import paths
from shoal.pool.planner.recorder import lines_of
from shoal.pool.wire import task_messages
from shoal.schedule.formats import records


@click.command()
@click.option("--output", "-o", default="shoal-dump.zip", show_default=True, metavar="FILE",
              type=click.Path(dir_okay=False, path_type=Path), help="Where to write.")  # fmt: skip
@click.option("--names", is_flag=True, help="Keep the names of tasks, owners and devices.")
@name_option
@json_option
def dump(output: Path, names: bool, name: str, as_json: bool) -> None:
    """Write what a pool of this machine decided, for `shoal simulate --record FILE`.

    The bundle has the last rounds of the planner, the devices, and the tasks that have not ended. It
    has no command, environment, file or log. Names are replaced, unless --names.
    """
    state = paths.state_directory(name)
    if not state.is_dir():
        raise PoolError(f"there is no pool {name} on this machine: {state} does not exist")
    known: dict[str, str] = {}
    lines = [_line(line, None if names else known) for line in lines_of(state / "rounds.jsonl")]
    about = _about(name, None if names else known)
    made = output.with_name(output.name + ".new")
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("about.json", json.dumps(about, indent=1))
        bundle.writestr(records.BUNDLED, b"".join(lines))
    os.replace(made, output)
    if as_json:
        print_json({"file": str(output), "rounds": len(lines), "tasks": len(about["tasks"])})
        return
    click.echo(f"{output}: {len(lines)} rounds, {len(about['tasks'])} tasks")
    if lines:
        click.echo(f"run it again: shoal simulate --record {output}")
    else:
        click.echo("the pool's planner has decided nothing yet, so there is nothing to simulate")


def _line(line: bytes, known: dict[str, str] | None) -> bytes:
    record = msgspec.json.decode(line, type=records.Record)
    if known is not None:
        record = records.redacted(record, known)
    return msgspec.json.encode(record) + b"\n"


def _about(name: str, known: dict[str, str] | None) -> dict[str, Any]:
    """Return the pool as it is now; with `known`, without names."""

    def shown(text: str, kind: str) -> str:
        return text if known is None else records.other_name(known, text, kind)

    found: dict[str, Any] = {"shoal": shoal.__version__, "at": time.time(), "running": True}
    try:
        status = read_status(local_url(name))
    except NoPool:
        return {**found, "running": False, "devices": [], "tasks": []}
    found["devices"] = [
        {
            "name": shown(device.name, "device"), "node": shown(device.node, "node"),
            "kind": device.kind, "speed": device.speed, "threads": device.threads,
            "memory_bytes": device.memory_bytes, "free_bytes": device.free_bytes,
            "sessions": device.sessions,
        }
        for device in status.devices
    ]  # fmt: skip
    found["tasks"] = [
        {
            "name": shown(task.id, "task"), "owner": shown(task.owner, "owner"),
            "state": task.state, "needs": msgspec.to_builtins(task.needs),
            "devices": [shown(device, "device") for device in task.devices],
            "reasons": [{"code": r.code, "numbers": r.numbers} for r in task.reasons],
            "attempt": task.attempt, "exit_code": task.exit_code,
            "submitted_at": task.submitted_at, "started_at": task.started_at,
        }
        for task in _tasks(name)
    ]  # fmt: skip
    return found


def _tasks(name: str) -> Iterator[task_messages.TaskInfo]:
    first: int | None = 0
    while first is not None:
        page = ask(local_url(name), task_messages.AskTasks(first=first), task_messages.TaskPage)
        yield from page.tasks
        first = page.following
