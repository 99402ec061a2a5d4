"""`shoal logs` and `shoal fetch`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from shoal.cli.common import iso, json_option, pool_option, print_json
from shoal.cli.tasks.queue import client, task_argument
from shoal.errors import PoolError
from shoal.pool.client.tasks import write_file
from shoal.pool.wire.task_messages import FileInfo
from shoal.tasks import log_frames
from shoal.units import show_bytes

_STREAMS = {log_frames.OUT: "stdout", log_frames.ERR: "stderr"}


class _Line(msgspec.Struct):
    """A piece of a log in `shoal logs --json`."""

    offset: int  # of the piece in the log, in bytes
    at: str  # ISO 8601, UTC
    stream: str
    text: str


@click.command()
@task_argument
@click.option("-f", "--follow", is_flag=True, help="Wait for more, until the task has ended.")
@click.option("--attempt", type=click.IntRange(1), help="Number of the attempt. Default: the last.")
@pool_option
@json_option
def logs(task: str, follow: bool, attempt: int | None, pool: str | None, as_json: bool) -> None:
    """Print what a task has written to stdout and stderr."""
    out = sys.stdout.buffer
    pieces: list[_Line] = []
    with client(pool) as connection:
        for frame in connection.log(task, attempt, follow=follow):
            if frame.stream == log_frames.END:
                continue
            if as_json:
                text = frame.data.decode(errors="replace")
                pieces.append(_Line(frame.position, iso(frame.at), _STREAMS[frame.stream], text))
            else:
                out.write(frame.data)
                out.flush()
    if as_json:
        print_json(pieces)


@click.command()
@task_argument
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--to", "target", default=".", type=click.Path(file_okay=False), metavar="DIR",
              help="Folder to write to. Default: this one.")  # fmt: skip
@pool_option
@json_option
def fetch(
    task: str, patterns: tuple[str, ...], target: str, pool: str | None, as_json: bool
) -> None:
    """Bring results of a task: files below its folder that match a PATTERN.

    Without a PATTERN: those of its --keep. `**` stands for any number of folders.
    """
    brought: list[FileInfo] = []
    with client(pool) as connection:
        for file in connection.files(task, patterns):
            path = _inside(Path(target), file.path)
            write_file(path, connection.read_file(task, file.path), executable=file.executable)
            brought.append(file)
    if as_json:
        print_json(brought)
        return
    total_bytes = sum(file.size_bytes for file in brought)
    click.echo(f"{len(brought)} file(s), {show_bytes(total_bytes)}, in {target}")


def _inside(target: Path, path: str) -> Path:
    """Return where a result goes, which is below `target` whatever its name says."""
    where = (target / path).resolve()
    if not where.is_relative_to(target.resolve()):
        raise PoolError(f"the result {path!r} is not below its task's folder; nothing was written")
    return where
