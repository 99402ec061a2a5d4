"""What `shoal node --tasks` and `shoal up --tasks` share: a runner for other people's programs."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.cli import starting
from shoal.pool.local import runner_process, supervisor


def runners(
    node: str, url: str, state: Path, *, identity: str = "", network_url: str = ""
) -> list[supervisor.Supervised]:
    """Return the process that runs programs of others; none, and say why, where that cannot be."""
    problem = runner_process.sandbox_problem()
    if problem is not None:
        click.echo(f"Warning: {node} does not run programs of others: {problem}", err=True)
        return []
    options = runner_process.Options(
        f"tasks@{node}", url, str(state / "tasks-of-others"), identity, True, network_url
    )
    return [starting.supervised("runner of others", runner_process, options)]
