"""`shoal join`: makes this machine a client of a remote pool."""

from __future__ import annotations

import click

from shoal.cli.common import json_option, print_json
from shoal.pool.base import paths
from shoal.pool.base.addresses import own_name


@click.command()
@click.argument("invitation", metavar="CODE@HOST")
@click.option("--as", "wished", default=None, help="Name in the pool. Default: the host name.")
@json_option
def join(invitation: str, wished: str | None, as_json: bool) -> None:
    """Make this machine a client of a remote pool.

    Write one small file that only you can read. From then on device="shoal" means that pool.
    """
    from shoal.pool.client import joining

    made = joining.join(invitation, "client", wished or own_name(), paths.identity_file())
    if as_json:
        print_json({"name": made.name, "url": made.url, "identity": str(made.path)})
        return
    click.echo(f"joined {made.url} as {made.name}; the key is in {made.path}")
    click.echo('device="shoal" now means that pool. `shoal status` shows it.')
