"""Addresses of hosts and URLs of pools, and the name and address of this machine."""

from __future__ import annotations

import ipaddress
import os
import socket

from shoal.errors import PoolError
from shoal.pool.base import limits

LOCAL_PREFIX = "shoal+local://"
NETWORK_PREFIX = "shoal://"


def split_address(text: str, default_port: int = limits.PORT) -> tuple[str, int]:
    """Return host and port of "host", "host:7433" or "[::1]:7433".

    >>> split_address("10.0.0.1:80")
    ('10.0.0.1', 80)
    """
    host, port = text, str(default_port)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, port = text.split(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536 or len(host) > 255:
        raise PoolError(
            f"{text!r} is not an address. Write for example 10.0.0.1 or host:{limits.PORT}"
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def own_name() -> str:
    """Return this machine's host name, in the form that a certificate takes."""
    name = "".join(c if c.isalnum() else "-" for c in socket.gethostname().split(".")[0].lower())
    return name.strip("-")[:24] or f"host-{os.getpid()}"


def address_for_others(host: str, port: int) -> str:
    """Return the address that other machines use, also of a head that listens at all addresses."""
    if host in ("0.0.0.0", "::"):
        host = address_towards("192.0.2.1" if host == "0.0.0.0" else "2001:db8::1")
    return join_address(host, port) if port != limits.PORT or ":" in host else host


def address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`. Sends no packet."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
