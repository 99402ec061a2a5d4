"""A plain copy through a socket, to compare with: `sendall` and `recv_into` of whole buffers, which is
C speed. With an identity of a pool also through TLS, as Python's own `ssl` does it.

`python -m bench.network.socket_peer ADDRESS [IDENTITY]` is the far end; it prints its port.
"""

from __future__ import annotations

import socket
import ssl
import struct
import subprocess
import sys
import time
from pathlib import Path

from bench.measure import Burst
from shoal.pool.wire import tls

_REQUEST = struct.Struct("<cQQ")  # direction, bytes of a buffer, buffers


def _receive(connection: socket.socket, into: memoryview) -> None:
    got = 0
    while got < len(into):
        more = connection.recv_into(into[got:])
        if more == 0:
            raise ConnectionError("the other side closed the connection")
        got += more


def serve(address: str, identity: Path | None) -> None:
    listener = socket.create_server((address, 0))
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if identity is not None:
        context = tls.server_context(tls.Identity.load(identity))
        connection = context.wrap_socket(connection, server_side=True)
    request = bytearray(_REQUEST.size)
    while True:
        try:
            _receive(connection, memoryview(request))
        except (ConnectionError, ssl.SSLError):
            return
        direction, size, count = _REQUEST.unpack(request)
        buffer = memoryview(bytearray(size))
        for _ in range(count):
            if direction == b"u":
                _receive(connection, buffer)
            else:
                connection.sendall(buffer)
        if direction == b"u":
            connection.sendall(b"k")


class FarEnd:
    """The far end as a process; `command` puts it on another host."""

    def __init__(
        self, address: str, command: list[str] | None = None, identity: Path | None = None
    ) -> None:
        words = [sys.executable, "-m", "bench.network.socket_peer", address]
        words += [str(identity)] if identity else []
        self._process = subprocess.Popen(
            [*(command or []), *words], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = address
        self.port = int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


class SocketCopy:
    """Copies through one connection to a far end; with TLS if both identities are given."""

    def __init__(
        self,
        address: str,
        port: int,
        server: Path | None = None,
        client: tls.Identity | None = None,
    ) -> None:
        plain = socket.create_connection((address, port), 10)
        plain.settimeout(None)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server and client:
            name = tls.Identity.load(server)
            plain = tls.client_context(client).wrap_socket(
                plain, server_hostname=tls.server_name(name.role, name.name)
            )
        self.connection = plain

    def burst(self, direction: str, size: int, one_by_one: bool = False) -> Burst:
        """Copies of one buffer of `size` bytes, "up" or "down".

        `one_by_one`: each copy is asked for when the one before has come, as a program does that
        wants to see what it has copied.
        """
        buffer = memoryview(bytearray(size))
        if one_by_one:
            single = self.burst(direction, size)
            return lambda count: sum(single(1) for _ in range(count))

        def copy(count: int) -> float:
            connection = self.connection
            start = time.perf_counter()
            connection.sendall(_REQUEST.pack(direction[:1].encode(), size, count))
            for _ in range(count):
                if direction == "up":
                    connection.sendall(buffer)
                else:
                    _receive(connection, buffer)
            if direction == "up":
                _receive(connection, memoryview(bytearray(1)))
            return time.perf_counter() - start

        return copy

    def close(self) -> None:
        self.connection.close()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None)
