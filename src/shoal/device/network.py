"""A device on another machine: attaches to its device server with lease and certificate, and opens the
data connections that carry the op stream.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.msgpack import Decoder

from shoal import _core
from shoal.errors import LeaseError, ProtocolError
from shoal.pool.base import door, limits
from shoal.pool.base.addresses import NETWORK_PREFIX
from shoal.pool.client import head_connection
from shoal.pool.wire import frames, messages, session_messages, tls

if TYPE_CHECKING:
    import ssl

Answer = TypeVar("Answer", bound=msgspec.Struct)


@dataclass
class Attached:
    """A remote worker that has sent Welcome."""

    name: str  # of the device
    host: str
    port: int
    server_name: str
    identity: tls.Identity
    connection: ssl.SSLSocket  # its end is the end of the session
    welcome: session_messages.Welcome

    def open_link(self) -> _core.ClientLink:
        """Open the data connections. Their first bytes name the session."""
        count = 1 + lanes()
        with ThreadPoolExecutor(2 * count) as threads:  # at once: each costs a round trip
            dialled = [threads.submit(self._dial) for _ in range(2 * count)]
        try:
            fds = [plain.detach() for plain in [one.result() for one in dialled]]
            return _core.ClientLink(
                up_fds=fds[:count],
                down_fds=fds[count:],
                key=self.identity.key,
                certificate=self.identity.certificate,
                authority=self.welcome.certificate,
                server_name=_core.SESSION_SERVER_NAME,
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

    def open_reader(
        self, lease: int, epoch: int
    ) -> tuple[ssl.SSLSocket, session_messages.ReaderReady]:
        """Start a data reader beside the worker. Raise LeaseError with the reason if it refuses."""
        request = session_messages.AttachReader(
            session_messages.our_versions(), lease, epoch, self.welcome.data_id, self.welcome.secret
        )
        connection = _dial_tls(self.name, self.host, self.port, self.identity, self.server_name)
        return _ask(connection, self.name, self.identity, request, session_messages.FROM_READER)

    def _dial(self) -> socket.socket:
        plain = door.dial(self.host, self.port, limits.HANDSHAKE_S)
        plain.sendall(session_messages.DATA_MAGIC + self.welcome.data_id)
        return plain


def lanes() -> int:
    """Return the number of connections for large transfers, in each direction, beside the op stream's.

    Each has a core to encrypt on, if there are enough. `SHOAL_LANES` sets another number; 0 sends
    everything with the op stream.
    """
    wanted = os.environ.get("SHOAL_LANES")
    if wanted is None:
        return 2 if (os.cpu_count() or 1) < 8 else _core.LANES_MAX
    if not wanted.isdecimal() or int(wanted) > _core.LANES_MAX:
        raise LeaseError(
            f"SHOAL_LANES must be a number from 0 to {_core.LANES_MAX} (got {wanted!r})"
        )
    return int(wanted)


def attach(
    device: messages.GrantedDevice, head: head_connection.Connection, lease: messages.Lease
) -> Attached:
    """Start a worker for the lease on a remote device."""
    endpoint = device.network
    name = device.info.name
    if endpoint is None:
        raise LeaseError(
            f"device {name} cannot be reached by network: its pool does not listen. "
            "Start it with: shoal up --listen ADDRESS"
        )
    if not head.url.startswith(NETWORK_PREFIX):
        raise LeaseError(
            f"device {name} can be reached by network only with the identity of a client that joined. "
            f"Connect to {NETWORK_PREFIX}HOST:PORT, not to {head.url}"
        )
    identity = head_connection.identity_for(head.url)
    host = endpoint.host or head.host
    request = session_messages.Attach(
        session_messages.our_versions(), device.token, lease.lease, lease.epoch, len(lease.devices)
    )
    connection = _dial_tls(name, host, endpoint.port, identity, endpoint.server_name)
    connection, welcome = _ask(connection, name, identity, request, session_messages.FROM_WORKER)
    if not welcome.data_id:
        connection.close()
        raise LeaseError(f"device {name} does not take data connections")
    return Attached(name, host, endpoint.port, endpoint.server_name, identity, connection, welcome)


def _dial_tls(
    name: str, host: str, port: int, identity: tls.Identity, server_name: str
) -> ssl.SSLSocket:
    try:
        return head_connection.open_tls(host, port, identity, server_name, limits.WORKER_ANSWER_S)
    except (OSError, ProtocolError) as error:
        raise LeaseError(f"device {name} cannot be reached: {error}") from None


def _ask(
    connection: ssl.SSLSocket,
    name: str,
    identity: tls.Identity,
    request: session_messages.FromRemote,
    kinds: Decoder[Answer | messages.Refusal],
) -> tuple[ssl.SSLSocket, Answer]:
    """Return the answer of the process that the device server starts for us, and its connection.

    Close the connection and raise if one of them refuses.
    """
    try:
        connection.settimeout(limits.WORKER_ANSWER_S)
        frames.send(connection, request)
        handover, _ = frames.receive(connection, session_messages.FROM_SERVER)
        if isinstance(handover, messages.Refusal):
            raise LeaseError(f"device {name}: {handover.reason}")
        connection = tls.connect_again(
            connection, identity, handover.certificate, _core.SESSION_SERVER_NAME
        )
        answer, _ = frames.receive(connection, kinds)
        if isinstance(answer, messages.Refusal):
            raise LeaseError(f"device {name}: {answer.reason}")
        return connection, answer
    except (OSError, ProtocolError) as error:
        connection.close()
        raise LeaseError(f"device {name} cannot be reached: {error}") from None
    except LeaseError:
        connection.close()
        raise
