"""A worker, from its fork to the first message of its op stream."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from shoal import _core
from shoal.errors import ProtocolError
from shoal.pool.base import limits, log, process
from shoal.pool.node import orders
from shoal.pool.wire import frames, messages, roles, session_messages, tls

if TYPE_CHECKING:
    import ssl


def serve(order: orders.ServeSession, fds: list[int], line: socket.socket) -> NoReturn:
    """Serve the session of the order, then exit. `fds` are those of `orders.ServeSession`."""
    device = order.offer.spec
    last_words_fd = fds[1]
    connection = socket.socket(fileno=fds[0])
    try:
        component = f"worker[{device.name}]"
        log.set_up(component)
        process.hide_memory()
        _core.set_up_log(
            component=component,
            json=log.chosen_format() == "json",
            errors_only=log.chosen_level() == "error",
        )
        # The core watches this descriptor for the client's end; ours may get a layer of TLS.
        watched_fd = os.dup(connection.fileno())
        connection.settimeout(limits.SERVER_SEND_S)
        key = certificate = ""
        if order.remote is not None:
            key, certificate = _core.make_session_identity()
        if order.remote is not None and not order.is_local:
            connection = taken = take_over(connection, line, order.remote, key, certificate)
            check_owner(taken, order.remote)
        line.close()
        block_fd, orders_fd, reports_fd = fds[2:5]
        host_fd = fds[5] if order.is_local else -1
        worker = _core.Worker(
            socket=watched_fd,
            client_pidfd=_watch_client(connection) if order.is_local else -1,
            session=order.session,
            device=device.device,
            name=device.name,
            memory_bytes=order.memory_bytes,
            host_fd=host_fd,
            host_bytes=order.host_bytes,
            spill_host_bytes=_share(order, order.offer.spill.host_bytes),
            spill_disk_bytes=_share(order, order.offer.spill.disk_bytes),
            spill_directory=order.offer.spill.directory,
            least_recent=device.paging == "lru",
            speed=device.speed,
            threads=order.offer.threads,
            arrivals=_arrivals(order, fds[-1], key, certificate),
            last_words_fd=last_words_fd,
            block_fd=block_fd,
            orders_fd=orders_fd,
            reports_fd=reports_fd,
        )
        fds_out = worker.fds() if order.is_local else []
        frames.send(connection, _welcome(order, worker, certificate), fds_out)
        if order.devices > 1:
            connection.settimeout(limits.PEERS_S)
            add_peers(worker, connection, order.devices)
        connection.close()
        worker.serve()
    except BaseException as error:
        reason = f"the worker of {device.name} did not start: {error}"
        with suppress(OSError):
            os.write(last_words_fd, reason.encode()[: limits.LAST_WORDS_BYTES_MAX])
        with suppress(OSError):
            frames.send(connection, messages.refusal(reason))
    os._exit(1)


def take_over(
    connection: socket.socket,
    line: socket.socket,
    remote: orders.RemoteAccess,
    key: str,
    certificate: str,
) -> ssl.SSLSocket:
    """Return a remote client's connection with this process's own TLS on it.

    The device server, whom the client trusts, tells it our certificate; then it begins TLS again.
    """
    frames.send(line, orders.Vouch(certificate))
    connection.settimeout(limits.HANDSHAKE_S)
    taken = tls.accept_again(connection, key, certificate, remote.authority)
    taken.settimeout(limits.SERVER_SEND_S)
    return taken


def check_owner(connection: ssl.SSLSocket, remote: orders.RemoteAccess) -> None:
    """Raise ProtocolError unless the client at the other end has the session."""
    peer = tls.peer_of(connection)
    if peer is None or not roles.is_client(peer.role) or peer.name != remote.client:
        raise ProtocolError("the session belongs to another client")


def _share(order: orders.ServeSession, spill_bytes: int) -> int:
    """Return the session's part of the device's swap space."""
    return int(spill_bytes * min(1.0, order.memory_bytes / order.offer.memory_bytes))


def _welcome(
    order: orders.ServeSession, worker: _core.Worker, certificate: str
) -> session_messages.Welcome:
    spill = order.offer.spill
    remote = order.remote
    return session_messages.Welcome(
        worker.arena_bytes() if order.is_local else 0,
        os.getpid(),
        # An accelerator's memory is torch's to manage: it does not page yet.
        _share(order, spill.host_bytes) + _share(order, spill.disk_bytes)
        if order.offer.spec.device == "cpu"
        else 0,
        remote.data_id if remote else b"",
        remote.secret if remote else b"",
        serves_data=remote is not None and remote.serves_data,
        certificate=certificate,
    )


def _watch_client(connection: socket.socket) -> int:
    return process.watch(process.peer_credentials(connection)[0])


def _arrivals(
    order: orders.ServeSession, channel: int, key: str, certificate: str
) -> _core.ArrivalsOptions | None:
    """Return who may open data connections to the worker."""
    if order.remote is None:
        return None
    return _core.ArrivalsOptions(
        channel=channel,
        key=key,
        certificate=certificate,
        authority=order.remote.authority,
        secret=order.remote.secret,
        client="" if order.is_local else order.remote.client,
    )


def add_peers(worker: _core.Worker, connection: socket.socket, devices: int) -> None:
    """Receive the other devices of the lease from the client, and let the worker read them."""
    by_unix = connection.family == socket.AF_UNIX
    fds_max = 3 * min(devices, limits.DEVICES_PER_LEASE_MAX) if by_unix else 0
    message, fds = frames.receive(connection, session_messages.PEERS, fds_max)
    if len(message.devices) != devices:
        raise ProtocolError(
            f"the client named {len(message.devices)} of the lease's {devices} devices"
        )
    for index, peer in enumerate(message.devices):
        if index == message.own:
            worker.add_self(name=peer.name)
            continue
        if peer.remote is not None:
            worker.add_remote_peer(
                host=peer.remote.network.host,
                port=peer.remote.network.port,
                certificate=peer.remote.certificate,
                data_id=peer.remote.data_id,
                secret=peer.remote.secret,
                member=message.own,
                name=peer.name,
            )
            continue
        count = 3 if peer.arena_bytes else 2
        if len(fds) < count:
            raise ProtocolError("too few descriptors came with Peers")
        worker.add_peer(fds=fds[:count], arena_bytes=peer.arena_bytes, name=peer.name)
        fds = fds[count:]
