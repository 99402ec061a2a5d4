"""`shoal audit`: what happened in the pool, and whether its log was changed."""

from __future__ import annotations

import time

import click

from shoal.cli.common import govern, governed_option, json_option, print_json
from shoal.pool.wire import messages


@click.group(invoke_without_command=True)
@click.option("--count", default=50, show_default=True, type=click.IntRange(1, 500),
              help="Number of entries.")  # fmt: skip
@governed_option
@json_option
@click.pass_context
def audit(context: click.Context, count: int, name: str, as_json: bool) -> None:
    """List what happened in the pool, newest last; `verify` checks its chain of hashes."""
    if context.invoked_subcommand is not None:
        return
    found = govern(name, messages.ReadAudit(count), messages.AuditLog).entries
    if as_json:
        print_json(found)
        return
    for entry in found:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at))
        click.echo(f"{at}  {entry.actor:16}  {entry.action:12}  {entry.detail}")


@audit.command()
@click.option(
    "--noted", default="", metavar="HASH", help="A hash that this command printed earlier."
)
@governed_option
@json_option
def verify(noted: str, name: str, as_json: bool) -> None:
    """Recompute the log's chain of hashes. Note the last hash: it proves everything before it."""
    found = govern(name, messages.VerifyAudit(noted.strip().lower()), messages.AuditVerdict)
    if as_json:
        print_json(found)
    if found.wrong is not None:
        raise click.ClickException(
            f"entry {found.wrong} of the audit log does not have the hash that follows from those "
            "before it: the log was changed outside of Shoal"
        )
    if noted and not found.noted_found:
        raise click.ClickException(
            f"the hash {noted} is not in the log: it was written anew, or that entry is too old"
        )
    if not as_json:
        click.echo(f"{found.entries} entries follow from each other; the last hash is")
        click.echo(found.last_hash)
