"""Connections to the pool's servers: directly, or from a sandbox, which has no network, by its door.

A door is a Unix socket. Its caller sends a line with an address, and gets a line: `+` and from then on
that server's bytes, or `-` and the reason why not.
"""

from __future__ import annotations

import os
import socket

from shoal.pool.base import limits
from shoal.pool.base.addresses import join_address

PLUS, MINUS = b"+", b"-"
VARIABLE = "SHOAL_DOOR"  # of a program in a sandbox: the path of its door


def dial(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to a server of the pool. The connection keeps the timeout."""
    path = os.environ.get(VARIABLE)
    if not path:
        plain = socket.create_connection((host, port), timeout=timeout_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return plain
    through = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        through.settimeout(timeout_s)
        through.connect(path)
        through.sendall(f"{join_address(host, port)}\n".encode())
        answer = read_line(through)
        if not answer.startswith(PLUS):
            raise ConnectionRefusedError(answer[1:].decode(errors="replace") or "its door is shut")
        return through
    except BaseException:
        through.close()
        raise


def read_line(connection: socket.socket) -> bytes:
    """Read up to a line's end, and nothing after it."""
    found = b""
    while not found.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(found) >= limits.DOOR_LINE_BYTES_MAX:
            raise ConnectionError("the line was not whole")
        found += byte
    return found[:-1]
