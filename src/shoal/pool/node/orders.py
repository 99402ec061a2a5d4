"""What a device server and the child that the fork server made for it say on the child's line."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.msgpack import Decoder

from shoal.pool.node.spec import DeviceSpec, Spill
from shoal.pool.wire.message_fields import Count, Folders, Name, Pem, Text
from shoal.pool.wire.session_messages import DATA_ID_BYTES, SECRET_BYTES


class DeviceOffer(msgspec.Struct, frozen=True):
    """A device, and how its device server shares it out."""

    spec: DeviceSpec
    memory_bytes: Count
    threads: Count
    spill: Spill


class RemoteAccess(msgspec.Struct, frozen=True):
    """Who may reach a session over the network: public facts, and the session's own secret."""

    authority: Pem  # of the pool; the client's certificate must come from it
    client: Name  # the owner of the session
    data_id: Annotated[bytes, Meta(max_length=DATA_ID_BYTES)] = b""
    secret: Annotated[bytes, Meta(max_length=SECRET_BYTES)] = b""
    serves_data: bool = False


class ServeSession(msgspec.Struct, frozen=True, tag=True):
    """Device server → child: be the worker of a session.

    Descriptors: the client's connection, the pipe for last words, the session's block, the events of
    its orders and its reports, the host region of a local client, and the channel for data connections
    if there is `remote`.
    """

    offer: DeviceOffer
    session: Count
    memory_bytes: Count  # the most that it may ever have
    devices: Count  # of the lease
    host_bytes: Count
    is_local: bool
    remote: RemoteAccess | None = None  # None: the device server does not listen


class ServeReader(msgspec.Struct, frozen=True, tag=True):
    """Device server → child: be the data reader of a session.

    Descriptors: the client's connection, and the memory.
    """

    module: Name  # whose `serve` reads
    folders: Folders
    number: Count
    remote: RemoteAccess


class ProbeDevice(msgspec.Struct, frozen=True, tag=True):
    """Device server → child: start the device's runtime, say what it finds, and end."""

    device: Name


class DeviceFacts(msgspec.Struct, frozen=True, tag=True):
    """Probe → device server."""

    name: Name
    memory_bytes: Count
    context_bytes: Count = 0  # that each process takes of the device before its first tensor
    capability: tuple[Count, Count] = (0, 0)
    uuid: Name = ""  # by which NVML knows it


class Vouch(msgspec.Struct, frozen=True, tag=True):
    """Worker or reader → device server: tell the client, on the connection that both trust, that this
    certificate is mine. Only I have its key.
    """

    certificate: Pem


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Child → device server."""

    reason: Text


Order = ServeSession | ServeReader | ProbeDevice
FromChild = DeviceFacts | Vouch | Failed
ORDER: Decoder[Order] = Decoder(Order)
FROM_CHILD: Decoder[FromChild] = Decoder(FromChild)
