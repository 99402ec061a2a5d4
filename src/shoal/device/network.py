"""A device on another machine: showing lease and certificate at its server's door, and the data
connections that then carry the op stream.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal import _core
from shoal.errors import LeaseError, ProtocolError
from shoal.pool.base import limits
from shoal.pool.client import head_connection
from shoal.pool.wire import frames, messages, tls

if TYPE_CHECKING:
    import ssl

ANSWER_S = 30.0  # a worker is forked before the door answers


@dataclass
class Attached:
    """A worker elsewhere that has said Welcome."""

    name: str  # of the device
    host: str
    port: int
    server_name: str
    identity: tls.Identity
    connection: ssl.SSLSocket  # its end is the end of the session
    welcome: messages.Welcome

    def open_link(self) -> _core.Link:
        """The data connections. The door knows by their first bytes whom they are for."""
        count = 1 + lanes()
        with ThreadPoolExecutor(2 * count) as threads:  # at once: each costs a round trip
            dialled = [threads.submit(self._dial) for _ in range(2 * count)]
        try:
            fds = [plain.detach() for plain in [one.result() for one in dialled]]
            return _core.Link(
                up_fds=fds[:count],
                down_fds=fds[count:],
                key=self.identity.key,
                certificate=self.identity.certificate,
                authority=self.identity.authority,
                server_name=self.server_name,
                secret=self.welcome.secret,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise LeaseError(
                f"device {self.name} cannot be reached: its data connections did not come up: {error}"
            ) from None
        finally:
            for one in dialled:
                if one.exception() is None:
                    one.result().close()  # nothing, if the link has it

    def open_reader(self, lease: int, epoch: int) -> tuple[ssl.SSLSocket, messages.ReaderReady]:
        """A reader beside the worker; raises LeaseError with the reason why there is none."""
        try:
            connection = head_connection.open_tls(
                self.host, self.port, self.identity, self.server_name, ANSWER_S
            )
        except (OSError, ProtocolError) as error:
            raise LeaseError(f"device {self.name} cannot be reached: {error}") from None
        try:
            connection.settimeout(ANSWER_S)
            request = messages.AttachReader(
                messages.our_versions(), lease, epoch, self.welcome.data_id, self.welcome.secret
            )
            frames.send(connection, request)
            ready, _ = frames.receive(connection)
            if isinstance(ready, messages.ReaderReady):
                return connection, ready
            reason = ready.reason if isinstance(ready, messages.Refusal) else type(ready).__name__
            raise LeaseError(reason)
        except (OSError, ProtocolError) as error:
            connection.close()
            raise LeaseError(f"the reader did not start: {error}") from None
        except LeaseError:
            connection.close()
            raise

    def _dial(self) -> socket.socket:
        plain = socket.create_connection((self.host, self.port), limits.HANDSHAKE_S)
        plain.sendall(messages.DATA_MAGIC + self.welcome.data_id)
        return plain


def lanes() -> int:
    """Connections for large transfers, in each direction, beside the op stream's own.

    Each has a core to encrypt on, if there are enough. `SHOAL_LANES` sets another number; 0 sends
    everything with the op stream.
    """
    wanted = os.environ.get("SHOAL_LANES")
    if wanted is None:
        return 2 if (os.cpu_count() or 1) < 8 else _core.LANES_MAX
    if not wanted.isdecimal() or int(wanted) > _core.LANES_MAX:
        raise LeaseError(f"SHOAL_LANES={wanted} is no number from 0 to {_core.LANES_MAX}")
    return int(wanted)


def attach(
    device: messages.GrantedDevice, head: head_connection.Connection, lease: messages.Lease
) -> Attached:
    """Starts a worker for the lease on a device elsewhere."""
    endpoint = device.network
    name = device.info.name
    if endpoint is None:
        raise LeaseError(
            f"device {name} cannot be reached by network: its pool does not listen. "
            "Start it with: shoal up --listen ADDRESS"
        )
    if not head.url.startswith(head_connection.NETWORK_PREFIX):
        raise LeaseError(
            f"device {name} is to be reached by network, which takes the identity of one who joined: "
            f"use {head_connection.NETWORK_PREFIX}HOST:PORT and not {head.url}"
        )
    identity = head_connection.identity_for(head.url)
    host = endpoint.host or head.host
    try:
        connection = head_connection.open_tls(
            host, endpoint.port, identity, endpoint.server_name, ANSWER_S
        )
    except (OSError, ProtocolError) as error:
        raise LeaseError(f"device {name} cannot be reached: {error}") from None
    try:
        connection.settimeout(ANSWER_S)
        versions = messages.our_versions()
        request = messages.Attach(
            versions, device.token, lease.lease, lease.epoch, len(lease.devices)
        )
        frames.send(connection, request)
        welcome, _ = frames.receive(connection)
        if isinstance(welcome, messages.Refusal):
            raise LeaseError(f"device {name}: {welcome.reason}")
        if not isinstance(welcome, messages.Welcome) or not welcome.data_id:
            raise LeaseError(f"device {name} answered {type(welcome).__name__}")
    except (OSError, ProtocolError) as error:
        connection.close()
        raise LeaseError(f"device {name} cannot be reached: {error}") from None
    except LeaseError:
        connection.close()
        raise
    return Attached(name, host, endpoint.port, endpoint.server_name, identity, connection, welcome)
