"""The workers of a lease: connects to its device servers, and hands their streams to the core."""

from __future__ import annotations

import mmap
import os
import socket
from dataclasses import dataclass
from typing import Literal

import msgspec

from shoal import _core
from shoal.device import network
from shoal.errors import LeaseError, ProtocolError
from shoal.pool.base import limits, paths
from shoal.pool.client import head_connection
from shoal.pool.wire import frames, messages, session_messages

Transport = Literal["auto", "network"]


@dataclass
class Opened:
    """A worker that has sent Welcome."""

    device: messages.GrantedDevice
    connection: socket.socket
    welcome: session_messages.Welcome
    fds: list[int]  # requests, replies, progress, places and, where it can be mapped, arena
    remote: network.Attached | None = None  # on another machine: nothing is mapped
    link: _core.ClientLink | None = None
    progress: mmap.mmap | None = None  # the worker's completion counters


def open_workers(
    head: head_connection.Connection, granted: messages.Lease, transport: Transport
) -> tuple[list[Opened], list[socket.socket]]:
    """Connect to the device servers and hand the session to the core.

    Return the workers and, for a standing pool, second descriptors of their connections, which can
    shut them down.
    """
    opened: list[Opened] = []
    try:
        for device in granted.devices:
            opened.append(_open_worker(device, head, granted, transport))
        if len(opened) > 1:
            _introduce(opened, head)
        for one in opened:
            if one.remote is not None:
                one.link = one.remote.open_link()
                one.fds = one.link.fds()
                # From here on only the connection's end matters: nothing more is sent on it.
                one.connection = socket.socket(fileno=one.connection.detach())
    except BaseException:
        for one in opened:
            one.connection.close()
            for fd in one.fds:
                os.close(fd)
        raise
    members = []
    copies = []
    for one in opened:
        one.connection.settimeout(None)
        if granted.secret:
            copies.append(one.connection.dup())
        one.progress = mmap.mmap(one.fds[2], mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        members.append(
            _core.MemberOptions(
                socket=one.connection.detach(),
                fds=one.fds,
                arena_bytes=one.welcome.arena_bytes,
                memory_bytes=one.device.info.memory_bytes,
                spill_bytes=one.welcome.spill_bytes,
                name=one.device.info.name,
                is_cpu=one.device.info.device == "cpu",
                link=one.link,
            )
        )
    _core.attach(granted.devices[0].session, members)
    return opened, copies


def _host_region() -> tuple[int, int]:
    try:
        return _core.host_region()
    except RuntimeError as error:
        raise LeaseError(
            f"{error}. Shoal reserves addresses for memory that it does not use yet. Do the limits of "
            "this shell forbid it? Type: ulimit -v unlimited; ulimit -f unlimited"
        ) from None


def _open_worker(
    device: messages.GrantedDevice,
    head: head_connection.Connection,
    lease: messages.Lease,
    transport: Transport,
) -> Opened:
    connection = _reach(device) if transport == "auto" else None
    if connection is None:
        remote = network.attach(device, head, lease)
        return Opened(device, remote.connection, remote.welcome, [], remote)
    fds: list[int] = []
    devices = len(lease.devices)
    try:
        host_fd, host_bytes = _host_region()
        versions = session_messages.our_versions()
        hello = session_messages.Hello(versions, device.token, host_bytes, devices)
        frames.send(connection, hello, [host_fd])
        welcome, fds = frames.receive(connection, session_messages.FROM_WORKER, fds_max=5)
        if isinstance(welcome, messages.Refusal):
            raise LeaseError(welcome.reason)
        if len(fds) < 4:
            raise LeaseError(f"device {device.info.name} sent {len(fds)} of 4 descriptors")
    except (OSError, ProtocolError) as error:
        connection.close()
        raise LeaseError(f"device {device.info.name} cannot be reached: {error}") from None
    except LeaseError:
        connection.close()
        for fd in fds:
            os.close(fd)
        raise
    return Opened(device, connection, welcome, fds)


def _introduce(opened: list[Opened], head: head_connection.Connection) -> None:
    """Send each worker the addresses of the others, so that they copy from one another."""
    for own, one in enumerate(opened):
        peers = []
        fds: list[int] = []
        for other in opened:
            remote = None
            if other is not one and (one.remote or other.remote):
                remote = _endpoint(other, one, head)
            elif other is not one:
                fds += other.fds[2:]
            name, arena_bytes = other.device.info.name, other.welcome.arena_bytes
            peers.append(session_messages.Peer(name, arena_bytes, remote))
        try:
            frames.send(one.connection, session_messages.Peers(peers, own), fds)
        except OSError as error:
            raise LeaseError(f"device {one.device.info.name} was lost: {error}") from None


def _endpoint(
    device: Opened, reader: Opened, head: head_connection.Connection
) -> session_messages.PeerEndpoint:
    """Return where `reader`, on another machine than `device`, reaches it."""
    endpoint, welcome = device.device.network, device.welcome
    if endpoint is None or not welcome.data_id:
        raise LeaseError(
            f"device {device.device.info.name} cannot be reached from {reader.device.info.name}: its "
            "pool does not listen. Start it with: shoal up --listen ADDRESS"
        )
    host = endpoint.host or head.host
    if device.remote is None and reader.remote is not None:
        # The device is on this machine; the reader sees this end of its connection's address.
        host = str(reader.remote.connection.getsockname()[0])
    return session_messages.PeerEndpoint(
        msgspec.structs.replace(endpoint, host=host),
        welcome.data_id,
        welcome.secret,
        welcome.certificate,
    )


def _reach(device: messages.GrantedDevice) -> socket.socket | None:
    """Connect to the device server, if it is on this machine and can share memory with it."""
    if device.machine not in ("", paths.machine_id()):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(limits.WORKER_ANSWER_S)
    try:
        connection.connect(device.address)
        return connection
    except OSError as error:  # the same machine, but another network namespace or container
        connection.close()
        if device.network is None:
            raise LeaseError(f"device {device.info.name} cannot be reached: {error}") from None
        return None
