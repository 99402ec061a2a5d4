"""What several verbs need: the pool that is meant, its answers, and how amounts are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import click
import msgspec

from shoal.errors import LeaseError, PoolError
from shoal.pool.base import paths
from shoal.pool.client import head_connection
from shoal.pool.wire import messages

ANSWER_S = 10.0
Answer = TypeVar("Answer", bound=msgspec.Struct)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
pool_option = click.option(
    "--pool", metavar="URL|NAME",
    help="Default: $SHOAL_POOL, else the pool that was joined, else `default` on this machine.",
)  # fmt: skip
name_option = click.option(
    "--name", default="default", show_default=True, help="Of the pool, on this machine."
)


def pool_url(pool: str | None) -> str:
    """The pool that a command means."""
    if pool is None:
        return head_connection.default_url() or local_url("default")
    return pool if "://" in pool else local_url(pool)


def local_url(name: str) -> str:
    return head_connection.LOCAL_PREFIX + paths.local_pool_id(name)


class NoPool(PoolError):
    """No head answers on this machine."""


NO_POOL = (
    "no pool: none runs on this machine, and none was joined. Start one with `shoal up`, or join one "
    "with `shoal join CODE@HOST`."
)


def ask(url: str, request: messages.Message, answer: type[Answer]) -> Answer:
    """The head's answer, or an error that says what to type."""
    try:
        with head_connection.Connection(url, ANSWER_S) as connection:
            found = connection.ask(request, ANSWER_S)
    except LeaseError as error:
        if url.startswith(head_connection.LOCAL_PREFIX) and "cannot be reached" in str(error):
            raise NoPool(NO_POOL if url == local_url("default") else str(error)) from None
        raise
    if not isinstance(found, answer):
        raise PoolError(f"the head answered {type(found).__name__}; is it of another version?")
    return found


def govern(name: str, request: messages.Message, answer: type[Answer]) -> Answer:
    """Ask what only the owner of a pool may, on the machine where its head runs."""
    try:
        return ask(local_url(name), request, answer)
    except NoPool:
        joined = head_connection.default_url()
        if joined is None or not joined.startswith(head_connection.NETWORK_PREFIX):
            raise
        verb = click.get_current_context().info_name
        raise PoolError(
            f"`shoal {verb}` is for the pool's owner, on the head's machine. This machine is only a "
            f"client of {joined}, and runs no pool {name} of its own. Type it there."
        ) from None


def print_json(value: Any) -> None:
    click.echo(msgspec.json.encode(value).decode())


def ago(seconds: float) -> str:
    """A length of time for people."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns of text, as wide as they must be; numbers to the right."""
    widths = [max(len(head), *(len(r[i]) for r in rows), 0) for i, head in enumerate(heads)]
    numeric = [all(r[i][:1].isdigit() or r[i] == "-" for r in rows) for i in range(len(heads))]
    for row in (heads, *rows):
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())
