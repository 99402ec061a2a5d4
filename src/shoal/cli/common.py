"""What several commands share: the pool that they mean, its answers, and tables."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import click
import msgspec
from click.core import ParameterSource

from shoal.errors import PoolError
from shoal.pool.base import limits, paths
from shoal.pool.base.addresses import LOCAL_PREFIX, NETWORK_PREFIX
from shoal.pool.client import head_connection
from shoal.pool.wire import messages, tls
from shoal.pool.wire.roles import Role

Answer = TypeVar("Answer", bound=msgspec.Struct)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
pool_option = click.option(
    "--pool", metavar="URL|NAME",
    help="Pool to ask. Default: $SHOAL_POOL, else the pool that this machine joined, else `default` "
    "on this machine.",
)  # fmt: skip
name_option = click.option(
    "--name", default="default", show_default=True, help="Name of the pool on this machine."
)

governed_option = click.option(
    "--name", default="default",
    help="Name of a pool on this machine. Default: $SHOAL_POOL if it is on this machine or you are its "
    "admin, else the pool that you joined as admin, else `default`.",
)  # fmt: skip


def pool_url(pool: str | None) -> str:
    """Return the URL of the pool that a command means."""
    if pool is None:
        return head_connection.default_url() or local_url("default")
    return pool if "://" in pool else local_url(pool)


def local_url(name: str) -> str:
    return LOCAL_PREFIX + paths.local_pool_id(name)


class NoPool(PoolError):
    """No head answers on this machine."""


NO_POOL = (
    "no pool: none runs on this machine, and none was joined. Start one with `shoal up`, or join one "
    "with `shoal join CODE@HOST`."
)


@contextlib.contextmanager
def naming_no_pool(url: str) -> Iterator[None]:
    """Raise NoPool, with what to type, where no head answers on this machine."""
    try:
        yield
    except head_connection.PoolUnreachable as error:
        if url.startswith(LOCAL_PREFIX):
            raise NoPool(NO_POOL if url == local_url("default") else str(error)) from None
        raise


def ask(url: str, request: messages.FromClient, answer: type[Answer]) -> Answer:
    """Return the head's answer. Raise PoolError with what to type if there is none."""
    with (
        naming_no_pool(url),
        head_connection.Connection(url, limits.COMMAND_ANSWER_S) as connection,
    ):
        found = connection.ask(request, limits.COMMAND_ANSWER_S)
    if not isinstance(found, answer):
        raise PoolError(
            f"the head answered {type(found).__name__} to {type(request).__name__}. Does it have "
            "another version? Type: shoal doctor"
        )
    return found


def govern(name: str, request: messages.OwnerRequest, answer: type[Answer]) -> Answer:
    """Send a request that an admin may: on the head's machine, or as an admin from another.

    Without `--name` it means the pool that other commands mean, if this user may govern that.
    """
    context = click.get_current_context()
    joined = head_connection.default_url()
    named = context.get_parameter_source("name") is not ParameterSource.DEFAULT
    if joined is not None and not named and (joined.startswith(LOCAL_PREFIX) or joined_as_admin()):
        return ask(joined, request, answer)
    try:
        return ask(local_url(name), request, answer)
    except NoPool:
        if joined is None or not joined.startswith(NETWORK_PREFIX):
            raise
        verb = context.info_name
        raise PoolError(
            f"`shoal {verb}` is for the pool's owner, on the head's machine, and for admins. This "
            f"machine is only a client of {joined}, and does not run a pool {name} of its own. Type "
            "it there."
        ) from None


def joined_as_admin() -> bool:
    """Return whether this machine joined a pool with the role admin. The head checks it again."""
    identity = tls.default_identity()
    return identity is not None and identity.role == Role.ADMIN


def print_json(value: Any) -> None:
    click.echo(msgspec.json.encode(value).decode())


def iso(at: float) -> str:
    """Return a Unix time as ISO 8601 in UTC.

    >>> iso(1.5)
    '1970-01-01T00:00:01.500Z'
    """
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at * 1000) % 1000:03d}Z"


def ago(seconds: float) -> str:
    """Return a duration in a readable unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as they must be, numbers aligned right.

    Not by rich: its import takes longer than the rest of a quick command.
    """
    widths = [max(len(head), *(len(r[i]) for r in rows), 0) for i, head in enumerate(heads)]
    numeric = [all(r[i][:1].isdigit() or r[i] == "-" for r in rows) for i in range(len(heads))]
    for row in (heads, *rows):
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())
