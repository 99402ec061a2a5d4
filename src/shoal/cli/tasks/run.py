"""`shoal run`: a program here, in the foreground, with the pool's devices."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from shoal.cli.common import pool_option, pool_url
from shoal.cli.errors import ShoalFailed
from shoal.cli.tasks.submit import dry_run, make_specs, task_options
from shoal.errors import PoolError, ShoalError
from shoal.pool.base import snapshots
from shoal.pool.client import snapshot
from shoal.pool.client.tasks import TaskClient
from shoal.pool.local import foreground
from shoal.tasks import states
from shoal.tasks.spec import TaskSpec


@click.command()
@task_options
@pool_option
def run(program: tuple[str, ...], pool: str | None, **options: Any) -> None:
    """Run a program here and now. Only its lease waits for devices.

    It ends with the program's code; 125 if Shoal failed, 130 after Ctrl-C. With --each it runs once
    for each value, one after the other.

    \b
    shoal run -- python train.py
    shoal run --devices 2 --memory 1GiB -- python train.py
    """
    wanted = make_specs(program, options)
    if options["dry_run"]:
        dry_run(wanted, pool)
        return
    try:
        url = pool_url(pool)
        _wait_for_earlier(url, wanted[0])
        if options["snapshot"]:
            name = snapshot.take(Path.cwd())
            wanted = [msgspec.structs.replace(one, snapshot=name) for one in wanted]
    except ShoalError as error:
        raise ShoalFailed(error) from None
    for one in wanted:
        code = _run(one, url)
        if code:
            raise SystemExit(code)


def _wait_for_earlier(url: str, spec: TaskSpec) -> None:
    """Wait for the tasks of --after, until --until."""
    if not spec.after:
        return
    with TaskClient(url) as client:
        for text in spec.after:
            left_s = None if spec.until_at is None else max(0.0, spec.until_at - time.time())
            found = client.wait(text, left_s)
            if found.state != states.State.SUCCEEDED.value:
                raise PoolError(f"--after: {found.id} did not succeed: it is {found.state}")


def _run(spec: TaskSpec, url: str) -> int:
    """Run one program, again after exits as --retry-exits says. Return its code."""
    for left in range(spec.retry_exits, -1, -1):
        with tempfile.TemporaryDirectory(prefix="shoal-run-") as scratch:
            folder = Path(spec.folder)
            if spec.snapshot:
                folder = Path(scratch)
                snapshots.restore(spec.snapshot, folder)
            code = foreground.run(
                foreground.command(spec, Path(scratch)), folder, _environment(spec, url),
                limit_s=spec.limit_s, grace_s=spec.grace_s,
            )  # fmt: skip
        if code == 0 or left == 0 or code > states.EXIT_SIGNAL:
            return code
        click.echo(f"it exited with {code} and starts again", file=sys.stderr)
    return states.EXIT_SHOAL


def _environment(spec: TaskSpec, url: str) -> dict[str, str]:
    needs = {
        "devices": spec.needs.devices,
        "kind": spec.needs.kind,
        "memory": spec.needs.memory_bytes,
    }
    asked = {name: value for name, value in needs.items() if value is not None}
    return {
        **os.environ,
        **spec.environment,
        "SHOAL_POOL": url,
        "SHOAL_WAIT": os.environ.get("SHOAL_WAIT", "1"),
        "SHOAL_NEEDS": msgspec.json.encode(asked).decode(),
    }
