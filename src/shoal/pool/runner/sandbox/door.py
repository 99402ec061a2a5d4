"""The door of a sandbox: the only way out, to the addresses of the pool's head and devices.

It copies bytes instead of passing sockets: a socket of this machine could be connected anew to any
other address. It runs as threads in the process of the attempt, and ends with that.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from shoal.errors import PoolError
from shoal.pool.base import door, limits
from shoal.pool.base.addresses import split_address

Address = tuple[str, int]


class Door:
    """Args:
    folder: in which its socket `door` is made.
    addresses: hosts and ports that may be reached, as callers write them.
    """

    def __init__(self, folder: Path, addresses: list[Address]) -> None:
        self._allowed = frozenset(addresses)
        self._open = threading.BoundedSemaphore(limits.DOOR_CONNECTIONS_MAX)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path = folder / "door"
        self.path.unlink(missing_ok=True)
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # a Unix address has at most 107 bytes, and the folder's path may have more
            self._listener.bind(f"/proc/self/fd/{directory}/door")
        finally:
            os.close(directory)
        self._listener.listen(limits.DOOR_CONNECTIONS_MAX)

    def start(self) -> None:
        """Serve, in threads. Not before the program was forked."""
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            if not self._open.acquire(blocking=False):
                caller.close()
                continue
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller:
                caller.settimeout(limits.HANDSHAKE_S)
                try:
                    server = self._connect(caller)
                except (OSError, PoolError, UnicodeDecodeError) as error:
                    with suppress(OSError):
                        caller.sendall(door.MINUS + str(error)[:300].encode() + b"\n")
                    return
                with server:
                    caller.sendall(door.PLUS + b"\n")
                    caller.settimeout(None)
                    back = threading.Thread(target=_copy, args=(server, caller), daemon=True)
                    back.start()
                    _copy(caller, server)
                    back.join()
        except OSError:
            pass
        finally:
            self._open.release()

    def _connect(self, caller: socket.socket) -> socket.socket:
        host, port = split_address(door.read_line(caller).decode())
        if (host, port) not in self._allowed:
            raise ConnectionRefusedError("a sandbox reaches only its pool's head and devices")
        server = socket.create_connection((host, port), timeout=limits.CONNECT_S)
        server.settimeout(None)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source's end. An error on one side ends the other."""
    buffer = memoryview(bytearray(limits.DOOR_BUFFER_BYTES))
    try:
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
