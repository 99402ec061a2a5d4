"""Connections of head and agent: framed messages with a deadline on every wait and a bound on every
buffer, over Unix sockets or TLS.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal.errors import ProtocolError
from shoal.pool.base import limits
from shoal.pool.wire import frames, messages, tls

if TYPE_CHECKING:
    import ssl

_READ_BYTES = 64 * 1024


class Channel:
    """One connection. `peer` is who the certificate names; None: a stranger, or this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.frame_bytes_max = limits.FRAME_BYTES_MAX
        found = writer.get_extra_info("ssl_object")
        self.peer = tls.peer_of(found) if found is not None else None
        self.is_local = writer.get_extra_info("socket").family == socket.AF_UNIX
        address = writer.get_extra_info("peername")
        self.address = "" if self.is_local or not address else str(address[0])
        ours = writer.get_extra_info("sockname")
        self.own_address = "" if self.is_local or not ours else str(ours[0])

    async def receive(self, timeout_s: float | None) -> messages.Message:
        """The next message. ProtocolError if it is none, does not come in time, or the peer is gone.

        A frame that has begun must be whole within limits.FRAME_S, however slowly it drips.
        """
        try:
            async with asyncio.timeout(timeout_s):
                first = await self._reader.readexactly(1)
            async with asyncio.timeout(limits.FRAME_S):
                length = struct.unpack("<I", first + await self._reader.readexactly(3))[0]
                if length > self.frame_bytes_max:
                    raise ProtocolError(
                        f"a frame of {length} bytes is over the limit of {self.frame_bytes_max}"
                    )
                body = await self._reader.readexactly(length)
        except TimeoutError:
            raise ProtocolError("no whole message came in time") from None
        except (OSError, asyncio.IncompleteReadError):
            raise Closed from None
        return frames.decode(body)

    def send(self, message: messages.Message) -> None:
        """Never waits. A peer that does not read is cut off."""
        if self._writer.is_closing():
            return
        self._writer.write(frames.encode(message))
        if self._writer.transport.get_write_buffer_size() > limits.OUTGOING_BYTES_MAX:
            self._writer.transport.abort()

    async def close(self) -> None:
        """Says what is still to be said, for a moment, and hangs up."""
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    @property
    def raw_socket(self) -> socket.socket:
        """For questions to the kernel only."""
        found = self._writer.get_extra_info("socket")
        assert found is not None
        return found  # type: ignore[no-any-return]

    def hang_up(self) -> None:
        """Closes after what was sent."""
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


class Closed(ProtocolError):
    """The peer has hung up."""

    def __init__(self) -> None:
        super().__init__("the other side closed the connection")


async def open_channel(
    sock: socket.socket, context: ssl.SSLContext | None = None, server_name: str | None = None
) -> Channel:
    """A channel over a connected socket."""
    reader, writer = await asyncio.open_connection(
        sock=sock,
        limit=_READ_BYTES,
        ssl=context,
        server_hostname=server_name,
        ssl_handshake_timeout=limits.HANDSHAKE_S if context else None,
    )
    return Channel(reader, writer)


class Listener:
    """Accepts connections for `serve`, a coroutine that runs as long as its connection is of use.

    With TLS, nobody is waited for: strangers are few at a time, few from one address, and each has a
    deadline.
    """

    def __init__(
        self,
        sock: socket.socket,
        serve: Callable[[Channel], Awaitable[None]],
        context: ssl.SSLContext | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._serve = serve
        self._context = context
        self._strangers: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._sock)
            except OSError:  # no descriptors left, or the peer gave up already
                await asyncio.sleep(0.05)
                continue
            source = str(address[0]) if self._context is not None else ""
            if self._context is not None and self._crowded(source):
                sock.close()
                continue
            task = loop.create_task(self._welcome(sock, source))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _crowded(self, source: str) -> bool:
        return (
            self._strangers.total() >= limits.STRANGERS_MAX
            or self._strangers[source] >= limits.STRANGERS_PER_ADDRESS_MAX
            or len(self._tasks) >= limits.CONNECTIONS_MAX
        )

    async def _welcome(self, sock: socket.socket, source: str) -> None:
        channel = None
        self._strangers[source] += 1
        try:
            channel = await self._handshake(sock)
        except (TimeoutError, OSError, ProtocolError):
            sock.close()
            return
        finally:
            if channel is None or channel.peer is not None or channel.is_local:
                self._forget(source)
        try:
            await self._serve(channel)
        finally:
            if channel.peer is None and not channel.is_local:
                self._forget(source)
            with suppress(Exception):
                await channel.close()

    async def _handshake(self, sock: socket.socket) -> Channel:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=self._context,
            ssl_handshake_timeout=limits.HANDSHAKE_S if self._context else None,
        )
        try:
            return Channel(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        except ProtocolError:
            transport.abort()
            raise

    def _forget(self, source: str) -> None:
        self._strangers[source] -= 1
        if self._strangers[source] <= 0:
            del self._strangers[source]
