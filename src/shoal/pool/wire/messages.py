"""Messages between a client and the head, and those that other links have as well.

Each link has a module: this one, `join_messages`, `node_messages`, `session_messages`,
`share_messages` and `data_messages`. Each direction of a link has a union of its messages and a
decoder of that union, so mypy checks every `match` and no process decodes what it cannot answer.
`frames` sends and receives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.msgpack import Decoder

from shoal.pool.base.limits import (
    DEVICES_PER_LEASE_MAX,
    DEVICES_PER_NODE_MAX,
    PROFILES_PER_PAGE,
    SESSIONS_MAX,
    TEXT_CHARS_MAX,
)
from shoal.pool.wire import admission_messages, people_messages
from shoal.pool.wire.end_reasons import End, Why
from shoal.pool.wire.message_fields import Count, Folders, Name, Pem, SessionPart, Text
from shoal.pool.wire.profile_messages import SessionProfile
from shoal.pool.wire.task_messages import ClientTaskRequest, TaskAnswer
from shoal.schedule.model.device_profile import DeviceProfile


class GpuState(msgspec.Struct, frozen=True):
    """What a GPU's driver says of it now. None: it does not say."""

    used_bytes: Count  # by all programs, also those that do not use Shoal
    total_bytes: Count
    busy: Annotated[float, Meta(ge=0, le=1)] | None = None  # part of the last moment with a kernel
    celsius: int | None = None
    watts: float | None = None
    watts_max: float | None = None


class DeviceInfo(msgspec.Struct, frozen=True):
    """A device as the head knows it."""

    number: Count
    name: Name
    device: Name
    memory_bytes: Count
    free_bytes: Count
    sessions: Count
    speed: float
    threads: Count
    kind: Name = ""  # what `kind=` of a request is looked for in: "cpu", "NVIDIA A100-SXM4-40GB"
    node: Name = ""
    hardware: Name = ""  # what the device calls itself, whatever kind it was declared as
    context_bytes: Count = 0  # of an accelerator, that each session takes beside its memory
    capability: tuple[Count, Count] = (0, 0)  # of CUDA; (0, 0): the device has none
    gpu: GpuState | None = None  # a moment ago

    # What programs ask torch.cuda.get_device_properties() for.
    @property
    def total_memory(self) -> int:
        return self.memory_bytes

    @property
    def major(self) -> int:
        return self.capability[0]

    @property
    def minor(self) -> int:
        return self.capability[1]


# --- client and head -------------------------------------------------------------------------------


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Client → head: which devices are there?"""


class PoolInfo(msgspec.Struct, frozen=True, tag=True):
    """Head → client: these."""

    devices: list[DeviceInfo]


class AskLease(msgspec.Struct, frozen=True, tag=True):
    """Client → head: devices for me, for as long as I am there."""

    devices: int | None  # None: one
    memory_bytes: int | None  # of each; None: what there is, from a floor up
    # Numbers that tensors of older leases of this client still carry.
    sessions_in_use: Annotated[list[Count], Meta(max_length=SESSIONS_MAX)]
    fraction: float | None = None  # of each device's memory, instead of memory_bytes
    kind: Annotated[str, Meta(max_length=256)] | None = None  # "a100|v100"
    duration_s: float | None = None  # None: until it is given back
    program: Annotated[str, Meta(max_length=200)] = ""  # for the pool's status
    ticket: Name = ""  # of a task's program: it gets what was planned for the task
    wait: bool = False  # else it is granted or refused at once
    wait_s: float | None = None  # None: as long as it takes


class NetworkEndpoint(msgspec.Struct, frozen=True):
    """Where a device server listens with TLS, and who it must prove to be."""

    host: Annotated[str, Meta(max_length=255)]  # "": the host at which the head was reached
    port: Annotated[int, Meta(ge=1, lt=65536)]
    server_name: Name  # in the certificate of its node


class GrantedDevice(msgspec.Struct, frozen=True):
    info: DeviceInfo
    address: Text  # of the device server's Unix socket, for clients on its machine
    token: Name  # shown once to the device server
    session: Count
    machine: Name = ""  # the machine on which `address` means something
    network: NetworkEndpoint | None = None

    @property
    def part(self) -> SessionPart:
        return self.info.number, self.session


class Lease(msgspec.Struct, frozen=True, tag=True):
    """Head → client: yours."""

    lease: Count
    epoch: Count
    devices: list[GrantedDevice]
    secret: Name = ""  # shown to come back to the lease; empty: it ends with this connection


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Client → head: the lease that I had, on a new connection."""

    lease: Count
    epoch: Count
    secret: Name


class PartEnded(msgspec.Struct, frozen=True):
    part: SessionPart
    end: End


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """Head → client: it is still yours."""

    parts: list[SessionPart]  # those of it that are still there
    ended: Annotated[list[PartEnded], Meta(max_length=DEVICES_PER_LEASE_MAX)] = []  # the others


class Release(msgspec.Struct, frozen=True, tag=True):
    """Client → head: I give this connection's lease back."""


class SessionsLost(msgspec.Struct, frozen=True, tag=True):
    """Head → client: these parts of your lease's session are over, and why."""

    parts: list[SessionPart]
    end: End


class LostSight(msgspec.Struct, frozen=True, tag=True):
    """Client → head: my connection to these parts of the session is gone. `SessionsLost` answers, once
    the head knows why."""

    parts: Annotated[list[SessionPart], Meta(max_length=DEVICES_PER_LEASE_MAX)]
    seen: Why  # from here: UNKNOWN, CUT, WORKER_HUNG or WORKER_FAILED


class SessionUse(msgspec.Struct, frozen=True):
    """What a session has done so far on one device, as its client counts it."""

    device: Count
    session: Count
    memory_bytes: Count
    calls: Count
    bytes_in: Count
    bytes_out: Count


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Either way: I am here."""

    uses: Annotated[list[SessionUse], Meta(max_length=DEVICES_PER_NODE_MAX)] = []


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Anyone → client: no, and why."""

    reason: Text
    code: Name = ""  # for programs; empty: no particular one
    unblock: Annotated[list[Text], Meta(max_length=20)] = []  # what would help


class Done(msgspec.Struct, frozen=True, tag=True):
    """Head → client: it is done."""

    text: Text = ""


# --- looking at the pool, and governing it ---------------------------------------------------------


class AskStatus(msgspec.Struct, frozen=True, tag="Look"):
    """Client → head: how is the pool? A page at a time."""

    page: Count = 0
    version: Count = 0  # of the page before; 0: there was none


class NodeInfo(msgspec.Struct, frozen=True):
    name: Name
    state: Name  # "starting", "up", "absent" while the head waits for it, then "lost"
    devices: Count
    last_beat_s: float  # ago
    failures: Annotated[list[Text], Meta(max_length=DEVICES_PER_NODE_MAX)] = []
    clock_ahead_s: float = 0.0  # of the head's
    folders: Folders = []  # whose files trainings on its devices may read


class SessionInfo(msgspec.Struct, frozen=True):
    session: Count
    lease: Count
    epoch: Count
    client: Name
    program: Text
    device: Count
    granted_bytes: Count
    since: float  # Unix time
    use: SessionUse | None = None
    profile: SessionProfile | None = None  # without its operators

    @property
    def part(self) -> SessionPart:
        return self.device, self.session


class ProcessInfo(msgspec.Struct, frozen=True):
    """A process of the pool: head, planner, runner, agent, server or worker."""

    role: Name
    pid: Count
    node: Name


class StateInfo(msgspec.Struct, frozen=True):
    """What the head keeps on its disk."""

    failed_writes: Count = 0  # since the head started
    unwritten: Count = 0  # changes that wait for room on the disk
    error: Text = ""  # of the last write; empty: it went well
    free_bytes: Count | None = None  # on its disk; None: it is in memory


class PoolStatus(msgspec.Struct, frozen=True, tag=True):
    """Head → client: like this."""

    pool: Name
    shoal: Name
    pid: Count
    started: float  # Unix time
    now: float  # Unix time at the head: a clock that differs is worth knowing of
    listen: Text  # "" on this machine only
    nodes: list[NodeInfo]
    devices: list[DeviceInfo]
    sessions: list[SessionInfo]
    state: StateInfo = StateInfo()
    processes: list[ProcessInfo] = []
    page: Count = 0  # of the four lists
    following: Count | None = None  # the next page; None: this is the last
    version: Count = 0  # all pages of a version are of one moment


class AskProfiles(msgspec.Struct, frozen=True, tag=True):
    """Client → head: how fast are the devices? A page at a time."""

    first: Count = 0  # the lowest device number of the page


class MeasuredDevice(msgspec.Struct, frozen=True):
    number: Count
    profile: DeviceProfile


class Profiles(msgspec.Struct, frozen=True, tag=True):
    """Head → client: those that were measured, by number."""

    devices: list[MeasuredDevice]
    following: Count | None = None  # where the next page begins; None: this is the last


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Owner → head: measure these devices again, when they are idle."""

    devices: Annotated[list[Count], Meta(max_length=PROFILES_PER_PAGE)] | None = None  # None: all


class MakeCode(msgspec.Struct, frozen=True, tag=True):
    """Owner → head: a code with which one client or node can join."""

    role: Name
    ttl_s: float
    devices_max: Count | None = None  # what its bearer may lease at once
    memory_bytes_max: Count | None = None


class Code(msgspec.Struct, frozen=True, tag=True):
    """Head → owner."""

    code: Name
    expires: float  # Unix time


class EnrolNode(msgspec.Struct, frozen=True, tag=True):
    """Owner → head: certify the key of a node that an engine has started. A node of that name comes
    back with this key, and its old one is not good any more."""

    name: Name
    request: Pem  # PKCS #10


class NodeEnrolled(msgspec.Struct, frozen=True, tag=True):
    """Head → owner: for the node. None of it is secret."""

    name: Name
    certificate: Pem
    authority: Pem


class RevokeClient(msgspec.Struct, frozen=True, tag=True):
    """Owner → head: this client or node is no longer welcome."""

    name: Name


class AskSessionProfile(msgspec.Struct, frozen=True, tag=True):
    """Owner → head: what has the worker of this session counted? `SessionProfile` answers."""

    part: SessionPart


class OrderLease(msgspec.Struct, frozen=True, tag=True):
    """Owner → head: suspend this lease's sessions in place, or let them go on."""

    lease: Count
    suspend: bool


class ListClients(msgspec.Struct, frozen=True, tag=True):
    """Owner → head: who has joined?"""


class ClientInfo(msgspec.Struct, frozen=True):
    name: Name
    role: Name
    joined: float  # Unix time
    expires: float  # Unix time
    revoked: float | None  # Unix time
    devices_max: Count | None
    memory_bytes_max: Count | None
    leases: Count
    used_device_s: float = 0.0  # device seconds, which fade with a half-life of a day


class ClientList(msgspec.Struct, frozen=True, tag=True):
    """Head → owner: these."""

    clients: list[ClientInfo]


class ReadAudit(msgspec.Struct, frozen=True, tag=True):
    """Owner → head: the newest entries of the audit log."""

    count: Annotated[int, Meta(ge=1, le=500)]


class AuditEntry(msgspec.Struct, frozen=True):
    at: float  # Unix time
    actor: Name
    action: Name
    detail: Text
    number: Count = 0
    hash: Name = ""  # of this entry and the hash before it


class VerifyAudit(msgspec.Struct, frozen=True, tag=True):
    """Admin → head: is the audit log's chain whole? `noted` is a hash from an earlier answer."""

    noted: Name = ""


class AuditVerdict(msgspec.Struct, frozen=True, tag=True):
    """Head → admin."""

    entries: Count
    unchained: Count  # from before there was a chain
    wrong: Count | None  # number of the first entry whose hash is not right
    last_hash: Name
    noted_found: bool


class AuditLog(msgspec.Struct, frozen=True, tag=True):
    """Head → owner."""

    entries: list[AuditEntry]  # oldest first


# --- the link --------------------------------------------------------------------------------------

OwnerRequest = (
    Measure | AskSessionProfile | OrderLease | MakeCode | EnrolNode | RevokeClient | ListClients
    | ReadAudit | VerifyAudit
)  # fmt: skip
FromClient = (
    Describe | AskLease | Resume | Release | LostSight | Beat | AskStatus | AskProfiles | OwnerRequest
    | ClientTaskRequest | admission_messages.FromClient | people_messages.PeopleRequest
)  # fmt: skip
FromHead = (
    PoolInfo | Lease | Resumed | SessionsLost | Beat | PoolStatus | Profiles | Code | ClientList
    | AuditLog | SessionProfile | Done | TaskAnswer | admission_messages.FromHead | Refusal
    | AuditVerdict | NodeEnrolled | people_messages.PeopleAnswer
)  # fmt: skip
FROM_CLIENT: Decoder[FromClient] = Decoder(FromClient)
FROM_HEAD: Decoder[FromHead] = Decoder(FromHead)


def refusal(reason: str, code: str = "", unblock: Sequence[str] = ()) -> Refusal:
    """Return a refusal whose text fits its frame."""
    help_texts = [text[:TEXT_CHARS_MAX] for text in unblock[:20]]
    return Refusal(reason[:TEXT_CHARS_MAX], code, help_texts)
