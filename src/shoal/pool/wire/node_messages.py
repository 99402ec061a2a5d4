"""Messages between agent and head, and between agent and device server."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.msgpack import Decoder

from shoal.pool.base.limits import DEVICES_PER_NODE_MAX, ENDED_PER_NODE_MAX, SESSIONS_MAX
from shoal.pool.wire.end_reasons import End
from shoal.pool.wire.message_fields import Count, Device, Folders, Name, Text
from shoal.pool.wire.messages import Beat, GpuState, ProcessInfo, Refusal
from shoal.pool.wire.profile_messages import SessionProfile
from shoal.schedule.model.device_profile import DeviceProfile

# --- agent and device server -----------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Device server → agent: torch is loaded, sessions can start."""

    memory_bytes: Count
    threads: Count
    kind: Name = ""
    hardware: Name = ""  # what it really is, whatever kind it was declared as
    context_bytes: Count = 0  # of an accelerator, that each session takes before its first tensor
    capability: tuple[Count, Count] = (0, 0)
    elastic: bool = False  # sessions may grow into memory that nobody booked
    uuid: Name = ""  # by which NVML knows the device: "GPU-…"


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Head → device server: a client with this token may have a session."""

    token: Name
    session: Count
    memory_bytes: Count  # booked: the session always gets so much
    lease: Count = 0
    epoch: Count = 0
    client: Name = ""
    limit_bytes: Count = 0  # of an elastic lease: it grows to this where nobody booked it; 0: fixed

    @property
    def most_bytes(self) -> int:
        return max(self.memory_bytes, self.limit_bytes)


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """Agent → device server: end this session if it runs, and forget its grant."""

    session: Count


class SessionEnded(msgspec.Struct, frozen=True, tag=True):
    """Device server → agent: this session's worker is gone."""

    session: Count
    epoch: Count
    end: End


class OrderSession(msgspec.Struct, frozen=True, tag=True):
    """Head → agent → device server: suspend a session in place, or let it go on.

    Its next `SessionProfile` says what became of it.
    """

    session: Count
    epoch: Count
    suspend: bool


# --- head and agent --------------------------------------------------------------------------------


class NodeDevice(msgspec.Struct, frozen=True):
    """A device that is ready, as its agent announces it."""

    index: Device
    name: Name
    device: Name
    kind: Name
    memory_bytes: Count
    speed: float
    threads: Count
    address: Text
    port: Annotated[int, Meta(ge=0, lt=65536)] = 0  # 0: not on the network
    hardware: Name = ""
    context_bytes: Count = 0
    capability: tuple[Count, Count] = (0, 0)
    elastic: bool = False


class HeldSession(msgspec.Struct, frozen=True):
    """A session that a device server has a grant or a worker for."""

    device: Device
    session: Count
    lease: Count
    epoch: Count


class NodeSessionEnded(msgspec.Struct, frozen=True, tag=True):
    """Device server `index` → agent → head."""

    index: Device
    session: Count
    epoch: Count
    end: End


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """Agent → head: this node is here; this is what it has and holds."""

    node: Name
    machine: Name
    shoal: Name
    now: float  # Unix time there
    starting: bool  # some devices are not ready yet
    declared: Annotated[list[Name], Meta(max_length=DEVICES_PER_NODE_MAX)]  # all, ready or not
    devices: Annotated[list[NodeDevice], Meta(max_length=DEVICES_PER_NODE_MAX)]
    held: Annotated[list[HeldSession], Meta(max_length=SESSIONS_MAX)]
    host: Annotated[str, Meta(max_length=255)] = ""  # where its device servers listen
    folders: Folders = []  # that it serves
    # Sessions that ended while it had no head to tell.
    ended: Annotated[list[NodeSessionEnded], Meta(max_length=ENDED_PER_NODE_MAX)] = []


class NodeWelcome(msgspec.Struct, frozen=True, tag=True):
    """Head → agent."""

    pool: Name
    beat_s: float  # 0: none, the connection itself tells


class DeviceUp(msgspec.Struct, frozen=True, tag=True):
    """Agent → head: one more device is ready."""

    device: NodeDevice
    starting: bool  # others are not ready yet


class DeviceDown(msgspec.Struct, frozen=True, tag=True):
    """Agent → head: a device server has ended."""

    index: Device
    reason: Text
    starting: bool  # others are not ready yet


class NodeGrant(msgspec.Struct, frozen=True, tag=True):
    """Head → agent → device server `index`."""

    index: Device
    grant: Grant


class NodeGranted(msgspec.Struct, frozen=True, tag=True):
    """Agent → head: device server `index` has the grant, so its client may come."""

    index: Device
    session: Count
    epoch: Count


class NodeRevoke(msgspec.Struct, frozen=True, tag=True):
    """Head → agent → device server `index`."""

    index: Device
    session: Count


class DeviceMeasured(msgspec.Struct, frozen=True, tag=True):
    """Agent → head: how fast a device is."""

    index: Device
    profile: DeviceProfile


class NodeOrderSession(msgspec.Struct, frozen=True, tag=True):
    """Head → agent → device server `index`."""

    index: Device
    order: OrderSession


class NodeSessionProfile(msgspec.Struct, frozen=True, tag=True):
    """Device server `index` → agent → head."""

    index: Device
    profile: SessionProfile


class NodeProcesses(msgspec.Struct, frozen=True, tag=True):
    """Agent → head: itself, its device servers and their workers, whenever these have changed."""

    processes: Annotated[list[ProcessInfo], Meta(max_length=SESSIONS_MAX)]


class NodeGpu(msgspec.Struct, frozen=True, tag=True):
    """Agent → head: what the driver says of a device now; None: nothing any more."""

    index: Device
    state: GpuState | None


class NodeMeasure(msgspec.Struct, frozen=True, tag=True):
    """Head → agent: measure these again, when they are idle."""

    indices: Annotated[list[Device], Meta(max_length=DEVICES_PER_NODE_MAX)]


# --- the links -------------------------------------------------------------------------------------

FromServer = Ready | SessionEnded | SessionProfile | Refusal
ToServer = Grant | Revoke | OrderSession
FromNode = (
    DeviceUp | DeviceDown | NodeGranted | NodeSessionEnded | NodeSessionProfile | DeviceMeasured
    | NodeProcesses | NodeGpu | Beat
)  # fmt: skip
FromHead = NodeWelcome | NodeGrant | NodeRevoke | NodeOrderSession | NodeMeasure | Beat | Refusal
FROM_SERVER: Decoder[FromServer] = Decoder(FromServer)
TO_SERVER: Decoder[ToServer] = Decoder(ToServer)
FROM_NODE: Decoder[FromNode] = Decoder(FromNode)
FROM_HEAD: Decoder[FromHead] = Decoder(FromHead)
