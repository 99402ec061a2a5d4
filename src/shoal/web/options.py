"""Where the dashboard is, and the names by which browsers may reach it. Imports no web server."""

from __future__ import annotations

import socket

import msgspec

from shoal.errors import PoolStartError
from shoal.pool.base.addresses import (
    address_for_others,
    family,
    join_address,
    own_name,
    split_address,
)

PORT = 7480


class Options(msgspec.Struct):
    pool: str
    host: str
    port: int
    certificate: str = ""  # PEM file with key and certificates; "": plain HTTP, on loopback only
    join_host: str = ""
    socket: int = -1  # a descriptor that listens there


def names_of(options: Options) -> list[str]:
    """Return the host names by which browsers may reach this server."""
    names = {options.host, "localhost"}
    if options.host in ("0.0.0.0", "::"):
        names |= {"127.0.0.1", "::1", own_name(), socket.gethostname(), socket.getfqdn()}
        names.add(split_address(address_for_others(options.host, options.port))[0])
    elif options.certificate:
        names.add(own_name())
    elif options.host.startswith("127."):
        names.add("127.0.0.1")
    plain = 443 if options.certificate else 80
    hosts = [join_address(name, options.port) for name in names]
    return sorted(hosts + [name for name in names if options.port == plain])


def address_of(options: Options) -> str:
    """Return the address that `shoal open` opens."""
    scheme = "https" if options.certificate else "http"
    host, _ = split_address(address_for_others(options.host, options.port), options.port)
    return f"{scheme}://{join_address(host, options.port)}"


def listen(options: Options, any_port: bool = False) -> socket.socket:
    """Listen for browsers, and note where.

    Args:
        any_port: take another port if the wanted one is in use.

    `shoal up` keeps the socket while the web process starts again, so its port stays the pool's, and
    browsers that connect meanwhile wait instead of being refused.
    """
    try:
        made = _bind(options.host, options.port)
    except OSError as error:
        if not any_port:
            where = join_address(options.host, options.port)
            raise PoolStartError(
                f"--web: cannot listen at {where}: {error.strerror}. Name another port: "
                "--web ADDRESS:PORT"
            ) from None
        made = _bind(options.host, 0)
    options.port = int(made.getsockname()[1])
    options.socket = made.fileno()
    return made


def _bind(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=family(host), backlog=256)
