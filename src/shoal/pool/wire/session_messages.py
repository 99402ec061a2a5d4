"""Messages between a client and a device server or worker, before the op stream begins."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.msgpack import Decoder

from shoal import _constants
from shoal.errors import ProtocolError
from shoal.pool.base.limits import DEVICES_PER_LEASE_MAX
from shoal.pool.wire.message_fields import Count, Name, Pem
from shoal.pool.wire.messages import NetworkEndpoint, Refusal


class Versions(msgspec.Struct, frozen=True):
    """What must be the same for client and device server."""

    shoal: Name
    torch: Name
    protocol: Count


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Client → device server, with the descriptor of the client's host region."""

    versions: Versions
    token: Name
    host_bytes: Count
    # Of the lease; where there are several, `Peers` follows the answer.
    devices: Annotated[int, Meta(ge=1, le=DEVICES_PER_LEASE_MAX)] = 1


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Client → device server over TLS: what Hello is on one machine."""

    versions: Versions
    token: Name
    lease: Count
    epoch: Count
    devices: Annotated[int, Meta(ge=1, le=DEVICES_PER_LEASE_MAX)] = 1


# A data connection begins with these eight bytes and the sixteen of a session's `data_id`, in plain:
# the device server passes it to the worker, which demands a certificate and the secret.
DATA_MAGIC = _constants.DATA_MAGIC
DATA_ID_BYTES = 16
SECRET_BYTES = 32


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Worker → client, with the descriptors of the rings where it is on this machine. Then the op
    stream begins; of a remote worker, on data connections.
    """

    arena_bytes: Count
    worker_pid: Count
    spill_bytes: Count = 0  # what the session may hold beyond the device's memory
    data_id: Annotated[bytes, Meta(max_length=DATA_ID_BYTES)] = b""  # empty: there is no TLS port
    secret: Annotated[bytes, Meta(max_length=SECRET_BYTES)] = b""
    serves_data: bool = False  # the node reads files for sessions (AttachReader)
    # Of the worker's own key: what its data connections show. Empty: there is no TLS port.
    certificate: Pem = ""


class Handover(msgspec.Struct, frozen=True, tag=True):
    """Device server → remote client: begin TLS again on this connection. At its other end is now the
    worker, or reader, that has this certificate. Its Welcome, or ReaderReady, follows.
    """

    certificate: Pem


class AttachReader(msgspec.Struct, frozen=True, tag=True):
    """Client → device server over TLS: a reader beside the worker that this session has here."""

    versions: Versions
    lease: Count
    epoch: Count
    data_id: Annotated[bytes, Meta(max_length=DATA_ID_BYTES)]
    secret: Annotated[bytes, Meta(max_length=SECRET_BYTES)]


class ReaderReady(msgspec.Struct, frozen=True, tag=True):
    """Reader → client. Requests of `data_messages` follow."""

    number: Annotated[int, Meta(ge=1, le=2**63 - 1)]  # by which the op stream names its memory
    memory_bytes: Count


class PeerEndpoint(msgspec.Struct, frozen=True):
    """Where a worker on another machine is reached, and what it wants to see."""

    network: NetworkEndpoint
    data_id: Annotated[bytes, Meta(max_length=DATA_ID_BYTES)]
    secret: Annotated[bytes, Meta(max_length=SECRET_BYTES)]
    certificate: Pem  # the worker's


class Peer(msgspec.Struct, frozen=True):
    """A device of the lease, as its other devices see it."""

    name: Name
    arena_bytes: Count
    # Where it is reached; None: on the worker's machine.
    remote: PeerEndpoint | None = msgspec.field(default=None, name="elsewhere")


class Peers(msgspec.Struct, frozen=True, tag=True):
    """Client → worker: all devices of the lease in its order. Those on the worker's machine, itself not
    among them, come with three descriptors each (progress, places and arena), or two where a device
    has no arena to map. Then the op stream begins.
    """

    devices: Annotated[list[Peer], Meta(max_length=DEVICES_PER_LEASE_MAX)]
    own: Count  # the worker's own place


# A client on the device server's machine begins with Hello, a remote one with one of `FromRemote`.
FromRemote = Attach | AttachReader
FromServer = Handover | Refusal
FromWorker = Welcome | Refusal
FromReader = ReaderReady | Refusal
HELLO: Decoder[Hello] = Decoder(Hello)
PEERS: Decoder[Peers] = Decoder(Peers)
FROM_REMOTE: Decoder[FromRemote] = Decoder(FromRemote)
FROM_SERVER: Decoder[FromServer] = Decoder(FromServer)
FROM_WORKER: Decoder[FromWorker] = Decoder(FromWorker)
FROM_READER: Decoder[FromReader] = Decoder(FromReader)


def our_versions() -> Versions:
    """Return this process's versions, without importing torch."""
    import shoal
    from shoal import _core

    return Versions(shoal.__version__, metadata.version("torch"), _core.PROTOCOL_VERSION)


def version_mismatch(client: Versions, server: Versions) -> str | None:
    """Return why these two cannot work together, or None."""
    if client == server:
        return None
    return (
        f"versions differ: the client has shoal {client.shoal}, torch {client.torch}, protocol "
        f"{client.protocol}; the device server has shoal {server.shoal}, torch {server.torch}, "
        f"protocol {server.protocol}. Install the same versions on both sides."
    )


def check_versions(client: Versions) -> None:
    """Raise ProtocolError unless this process can serve the client."""
    problem = version_mismatch(client, our_versions())
    if problem is not None:
        raise ProtocolError(problem)
