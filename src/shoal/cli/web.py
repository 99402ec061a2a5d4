"""`shoal open` and `shoal token`: the dashboard in a browser, and tokens for programs."""

from __future__ import annotations

import time
from typing import get_args

import click

from shoal.cli.common import ago, ask, json_option, pool_option, pool_url, print_json, print_table
from shoal.errors import PoolError
from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people

WEB_START_S = 2.0


def sign_in_link(url: str) -> str:
    """Return the dashboard's address with a one-time ticket."""
    found = ask(url, people.MakeTicket(), people.Ticket)
    deadline = time.monotonic() + WEB_START_S
    while not found.web and time.monotonic() < deadline:  # it has just started
        time.sleep(0.1)
        found = ask(url, people.MakeTicket(), people.Ticket)
    if not found.web:
        raise PoolError("the pool has no dashboard. Start it with one: shoal up (without --no-web)")
    return f"{found.web}/#ticket={found.ticket}"


@click.command("open")
@click.option("--print", "only_print", is_flag=True, help="Print the link; do not open a browser.")
@click.option("--page", default="", metavar="PAGE", help="Page to open, like events or doctor.")
@pool_option
@json_option
def open_dashboard(only_print: bool, page: str, pool: str | None, as_json: bool) -> None:
    """Open the dashboard in your browser, signed in. The link is good once, for a minute."""
    link = sign_in_link(pool_url(pool))
    if page:
        address, _, ticket = link.partition("/#")
        link = f"{address}/{page.strip('/')}#{ticket}"
    if as_json:
        print_json({"link": link, "address": link.partition("#")[0]})
        return
    if not only_print:
        import webbrowser

        if webbrowser.open(link):
            click.echo(f"opened {link.partition('#')[0]}")
            return
        click.echo("no browser could be started; open this link within a minute:", err=True)
    click.echo(link)


@click.group()
def token() -> None:
    """Make, list and end tokens for programs that use the HTTP API."""


@token.command()
@click.argument("label")
@click.option("--scope", type=click.Choice(get_args(people.TokenScope)), default="read",
              show_default=True, help="What it may do with your rights.")  # fmt: skip
@click.option("--days", type=click.FloatRange(0, 366, min_open=True), default=30.0,
              show_default=True, help="Days until it expires.")  # fmt: skip
@pool_option
@json_option
def make(
    label: str, scope: people.TokenScope, days: float, pool: str | None, as_json: bool
) -> None:
    """Print a new token. It is shown once."""
    made = ask(pool_url(pool), people.MakeToken(label, scope, days * 86400), people.Token)
    if as_json:
        print_json({"token": made.token, "expires": made.expires})
        return
    click.echo(made.token)
    click.echo(f"valid for {ago(made.expires - time.time())}; send it as: Authorization: Bearer …",
               err=True)  # fmt: skip


@token.command("list")
@pool_option
@json_option
def list_tokens(pool: str | None, as_json: bool) -> None:
    """List your tokens and browser sessions; an admin sees everybody's."""
    found = ask(pool_url(pool), people.ListTokens(), people.TokenList).tokens
    if as_json:
        print_json(found)
        return
    now = time.time()
    rows = [
        [t.token_id, t.owner, t.kind, t.scope, t.label, f"{ago(now - t.made)} ago",
         f"for {ago(t.expires - now)}"]
        for t in found
    ]  # fmt: skip
    print_table(["token", "owner", "kind", "scope", "label", "made", "valid"], rows)


@token.command("revoke")
@click.argument("token_id", metavar="TOKEN")
@pool_option
@json_option
def revoke_token(token_id: str, pool: str | None, as_json: bool) -> None:
    """End a token or browser session now."""
    done = ask(pool_url(pool), people.RevokeToken(token_id), messages.Done)
    print_json({"revoked": token_id}) if as_json else click.echo(done.text)
