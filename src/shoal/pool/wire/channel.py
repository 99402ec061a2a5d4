"""Connections of head and agent: framed messages with a deadline on every wait and a bound on every
buffer, over Unix sockets or TLS.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec.msgpack import Decoder

from shoal.errors import ProtocolError
from shoal.pool.base import limits, paths, process
from shoal.pool.base.addresses import LOCAL_PREFIX, NETWORK_PREFIX, split_address
from shoal.pool.wire import frames, tls
from shoal.pool.wire.acceptor import Acceptor, PendingConnection
from shoal.pool.wire.frames import Closed, Kind, Silence

if TYPE_CHECKING:
    import ssl


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
        self.peer_pid = 0  # of a process on this machine
        if self.is_local:
            self.peer_pid, _ = process.peer_credentials(writer.get_extra_info("socket"))

    @property
    def has_ended(self) -> bool:
        """Whether the other side has closed, and all that it said was received."""
        return self._reader.at_eof() or self._writer.is_closing()

    async def receive(self, kinds: Decoder[Kind], timeout_s: float | None) -> Kind:
        """Return the next message. Raise Silence, Closed or another ProtocolError if none comes.

        A frame that has begun must be whole within limits.FRAME_S, however slowly it drips.
        """
        try:
            async with asyncio.timeout(timeout_s):
                first = await self._reader.readexactly(1)
            async with asyncio.timeout(limits.FRAME_S):
                header = first + await self._reader.readexactly(frames.HEADER_BYTES - 1)
                length = frames.body_length(header, self.frame_bytes_max)
                body = await self._reader.readexactly(length)
        except TimeoutError:
            raise Silence from None
        except (OSError, asyncio.IncompleteReadError):
            raise Closed from None
        return frames.decode(body, kinds)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message without waiting. A peer that does not read is cut off."""
        if self._writer.is_closing():
            return
        self._writer.write(frames.encode(message))
        if self._writer.transport.get_write_buffer_size() > limits.OUTGOING_BYTES_MAX:
            self._writer.transport.abort()

    async def close(self) -> None:
        """Flush for at most limits.CLOSE_S, then close."""
        self._writer.close()
        try:
            async with asyncio.timeout(limits.CLOSE_S):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    def hang_up(self) -> None:
        """Close after everything that was sent, without waiting."""
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


async def open_channel(
    sock: socket.socket, context: ssl.SSLContext | None = None, server_name: str | None = None
) -> Channel:
    """Return a channel over a connected socket."""
    reader, writer = await asyncio.open_connection(
        sock=sock,
        limit=limits.READ_BYTES,
        ssl=context,
        server_hostname=server_name,
        ssl_handshake_timeout=limits.HANDSHAKE_S if context else None,
    )
    return Channel(reader, writer)


async def connect_to_head(url: str, context: ssl.SSLContext | None) -> Channel:
    """Return a channel to the head of a pool. `context` has the identity for a remote one."""
    if url.startswith(LOCAL_PREFIX):
        return await _connect_local(paths.socket_name(url.removeprefix(LOCAL_PREFIX), "head"))
    assert context is not None
    host, port = split_address(url.removeprefix(NETWORK_PREFIX))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(2 * limits.HANDSHAKE_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        sock = socket.socket(found[0][0], socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, found[0][4])
            return await open_channel(sock, context, tls.server_name("head", ""))
        except BaseException:
            sock.close()
            raise


async def _connect_local(address: str) -> Channel:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(address)  # at once, or it fails
        process.check_same_user(sock)
        return await open_channel(sock)
    except BaseException:
        sock.close()
        raise


class Listener:
    """Accepts connections for `serve`, a coroutine that runs as long as its connection is of use.

    With TLS, a connection is pending until it has shown a certificate.
    """

    def __init__(
        self,
        sock: socket.socket,
        serve: Callable[[Channel], Awaitable[None]],
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._serve = serve
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(
            sock,
            self._loop,
            PendingConnection,
            self._accepted,
            most=limits.STRANGERS_AT_START_MAX,
            most_per_address=limits.STRANGERS_AT_START_MAX,
        )
        self._loop.call_later(limits.RESUME_S, self._acceptor.limit, limits.STRANGERS_MAX,
                              limits.STRANGERS_PER_ADDRESS_MAX)  # fmt: skip

    def _accepted(self, pending: PendingConnection) -> None:
        if self._context is not None and len(self._tasks) >= limits.CONNECTIONS_MAX:
            self._acceptor.release(pending)
            pending.socket.close()
            return
        task = self._loop.create_task(self._welcome(pending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _welcome(self, pending: PendingConnection) -> None:
        try:
            channel = await self._handshake(pending.socket)
        except (TimeoutError, OSError, ProtocolError):
            self._acceptor.release(pending)
            pending.socket.close()
            return
        if channel.peer is not None or channel.is_local:
            self._acceptor.release(pending)
        try:
            await self._serve(channel)
        finally:
            self._acceptor.release(pending)
            with suppress(Exception):
                await channel.close()

    async def _handshake(self, sock: socket.socket) -> Channel:
        reader = asyncio.StreamReader(limit=limits.READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=self._context,
            ssl_handshake_timeout=limits.HANDSHAKE_S if self._context else None,
        )
        try:
            return Channel(reader, asyncio.StreamWriter(transport, protocol, reader, self._loop))
        except ProtocolError:
            transport.abort()
            raise
