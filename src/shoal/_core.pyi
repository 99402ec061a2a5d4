"""Types of the compiled core (csrc/python)."""

from collections.abc import Callable, Sequence
from mmap import mmap

import torch

LANES_MAX: int
PROTOCOL_VERSION: int
EXIT_FAILED: int  # of a worker: csrc/transport/ending.h
EXIT_CLIENT_ENDED: int
EXIT_CLIENT_CLOSED: int
EXIT_CLIENT_SILENT: int
EXIT_DEVICE_FAILED: int

# --- layouts that C++ owns ---
# By name: the number of the kind, and its fields with their offset in the message and their bytes. An
# offset of -1 is behind a field of any length, which has 0 bytes.
MESSAGES: dict[str, tuple[int, list[tuple[str, int, int]]]]
FRAMES: dict[str, tuple[int, list[tuple[str, int, int]]]]
ACCESS_READ: int  # in an event of a trace
ACCESS_WRITE: int
ACCESS_MAKE: int
ACCESS_FREE: int
ACCESS_UPLOAD: int
SEEN_CLOSED: int  # what the core saw of a device that it lost
SEEN_SILENT: int
SEEN_HUNG: int
SEEN_BROKEN: int

def heartbeat(progress: mmap) -> int: ...
def passed_connection() -> bytes: ...
def passed_reader_memory(number: int) -> bytes: ...

# --- the client of the torch device ---
def register_device(
    device_lost: type[BaseException],
    peer_lost: type[BaseException],
    share: type[BaseException],
    share_revoked: type[BaseException],
    internal: list[str],
) -> None: ...
def register_kernels() -> None: ...

# `explain` takes session, member, what the client saw, and its own reason. It returns the pool's.
def set_loss_explainer(explain: Callable[[int, int, int, str], str]) -> None: ...
def report_lost(session: int, member: int, reason: str) -> None: ...
def set_pool_starter(start: Callable[[], None]) -> None: ...
def host_region() -> tuple[int, int]: ...
def sessions_in_use() -> list[int]: ...

class ClientLink:
    """The client's half of a session between machines."""

    def __init__(
        self,
        *,
        up_fds: list[int],
        down_fds: list[int],
        key: str,
        certificate: str,
        authority: str,
        server_name: str,
        secret: bytes,
    ) -> None: ...
    @property
    def lanes(self) -> int: ...
    def fds(self) -> list[int]: ...
    def failure(self) -> str: ...
    def stop(self) -> None: ...

class MemberOptions:
    """A leased device, for `attach`."""

    def __init__(
        self,
        *,
        socket: int,
        fds: list[int],
        arena_bytes: int,
        memory_bytes: int,
        spill_bytes: int,
        name: str,
        is_cpu: bool,
        link: ClientLink | None = None,
    ) -> None: ...

def attach(session: int, members: list[MemberOptions]) -> None: ...
def detach() -> None: ...
def abandon() -> bool: ...
def wanted() -> bool: ...
def want() -> None: ...
def device_count() -> int: ...
def current_device() -> int: ...
def set_device(index: int) -> None: ...
def give_up(index: int) -> None: ...
def synchronize(index: int) -> None: ...
def seed_default_generators(seed: int) -> None: ...
def default_generator(index: int) -> torch.Generator: ...
def set_blocking(blocking: bool) -> None: ...
def set_whole_rnn(whole: bool) -> None: ...
def whole_rnn() -> bool: ...

# --- memory shared between programs ---
class SharedDescriptors:
    """The descriptors of shared memory."""

    def __init__(self, *, memory: int, control: int, line: int, participant: int) -> None: ...

def share(tensor: torch.Tensor, member: int, fds: SharedDescriptors, exclusive: bool) -> None: ...
def open_shared(
    bytes: int,
    member: int,
    fds: SharedDescriptors,
    exclusive: bool,
    dtype: torch.dtype,
    sizes: list[int],
    strides: list[int],
    offset: int,
) -> torch.Tensor: ...
def unshare(tensor: torch.Tensor) -> None: ...
def is_shared(tensor: torch.Tensor) -> bool: ...

# --- counters ---
def memory_use(index: int) -> dict[str, int]: ...
def reset_peak() -> None: ...
def trim() -> None: ...

class MapEntry:
    """One live segment. Bit k of a mask stands for member k; -1: none."""

    address: int
    bytes: int
    bound: int  # mask of members that have memory for it
    valid: int  # of these, those with its present bytes
    resident: int  # of these, those that have it in device memory now
    home: int  # the member that wrote it last
    pinned: int  # the member whose device it belongs to
    extent_of: int  # address of the sharded segment that it belongs to; 0: none
    written_at: int  # its home's message that wrote it last
    frame: int  # its offset in its home's memory
    shared: bool

class DirectoryReport:
    """What the directory of segments says of itself."""

    violation: str  # what is wrong with it; empty: nothing
    steps: list[str]  # the latest, oldest first

def segments() -> list[MapEntry]: ...
def directory_report() -> DirectoryReport: ...
def copies(address: int) -> list[tuple[int, bytes]]: ...
def start_trace() -> None: ...
def stop_trace() -> list[tuple[int, int, int, int, int]]: ...

# --- capture on one device, replay on another ---
class Capture:
    """The operators that this thread sends to one device, from here to `stop()`."""

    def __init__(self, device: int) -> None: ...
    def stop(self) -> None: ...
    def mark(self) -> int: ...
    @staticmethod
    def pause() -> None: ...
    @staticmethod
    def resume() -> None: ...
    @property
    def failure(self) -> str: ...

class Replay:
    """A capture on another device. Raises ValueError, before any effect, if that is impossible."""

    def __init__(
        self,
        capture: Capture,
        device: int,
        *,
        ours: Sequence[torch.Tensor],
        theirs: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
    ) -> None: ...
    def until(self, mark: int) -> None: ...
    def tensor(self, original: torch.Tensor) -> torch.Tensor: ...

# Adds a tensor of another device of the lease in place. False if that needs a copy first.
def add_from(target: torch.Tensor, source: torch.Tensor) -> bool: ...

# Copies a whole tensor of another device of the lease lazily: on first use of the target, or before
# the source changes. False if the copy cannot be deferred.
def copy_later(target: torch.Tensor, source: torch.Tensor) -> bool: ...

# Fills a tensor of one device from `offset` of the memory of a data reader at its node. Returns the
# message's number; once the device `is_past` it, the reader may reuse that memory.
def load(target: torch.Tensor, reader: int, offset: int) -> int: ...
def is_past(index: int, sequence: int) -> bool: ...

# Takes `torch.Event.event_id` of two events. Returns the milliseconds between them, and how many of
# these the device waited for other devices.
def elapsed_ms(start: int, end: int) -> tuple[float, float]: ...
def traffic(index: int) -> dict[str, int]: ...
def worker_stats(index: int) -> dict[str, int]: ...

class PolicyReplay:
    def __init__(self, limit_bytes: int, least_recent: bool) -> None: ...
    def foresee(self, call: int, segment: int, frees: bool) -> None: ...
    def advance(self, call: int, end: int, used: list[int]) -> None: ...
    def enter(self, segment: int, bytes: int) -> None: ...
    def use(self, segment: int, copied: bool) -> None: ...
    def evict(self) -> int | None: ...
    def is_dead(self, segment: int) -> bool: ...
    def free(self, segment: int) -> None: ...

class ArrivalsOptions:
    """Who may open data connections to a worker."""

    def __init__(
        self,
        *,
        channel: int,
        key: str,
        certificate: str,
        authority: str,
        secret: bytes,
        client: str,
    ) -> None: ...

def start_device(device: str) -> tuple[int, int]:
    """Start an accelerator's runtime in this process. Return its free and total bytes."""

def device_bytes(device: str) -> tuple[int, int]:
    """Return the free and total bytes of a device that `start_device` started."""

def cuda_facts(ordinal: int) -> tuple[str, int, int]:
    """Return name and compute capability of a CUDA device; an empty name without a driver."""

SESSION_SERVER_NAME: str

def make_session_identity() -> tuple[str, str]:
    """Make a key and a certificate that it signs itself; return both as PEM texts."""

def set_up_log(*, component: str, json: bool, errors_only: bool) -> None: ...

class SessionBlock:
    """What a device server and one of its workers share: orders, and what the session does."""

    limit_bytes: int
    ceiling_bytes: int
    swap_limit_bytes: int
    order: int
    def __init__(self) -> None: ...
    def fd(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def reason(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def away_bytes(self) -> int: ...
    @property
    def swap_bytes(self) -> int: ...
    @property
    def disk_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def wanted_bytes(self) -> int: ...
    def uses(self) -> list[tuple[bytes, int, int, int, int, bool, int, int, int]]:
        """Return (operator, hash, dtype, FLOPs and bytes of a call, whether it changes memory in
        place, calls, nanoseconds, repeats) of each prepared call that has run."""

class Worker:
    """One session on one device; the process serves it."""

    def __init__(
        self,
        *,
        socket: int,
        client_pidfd: int,
        session: int,
        device: str,
        name: str,
        memory_bytes: int,
        host_fd: int,
        host_bytes: int,
        spill_host_bytes: int,
        spill_disk_bytes: int,
        spill_directory: str,
        least_recent: bool,
        speed: float,
        threads: int,
        arrivals: ArrivalsOptions | None = None,
        last_words_fd: int = -1,
        block_fd: int = -1,
        orders_fd: int = -1,
        reports_fd: int = -1,
    ) -> None: ...
    def fds(self) -> list[int]: ...
    def arena_bytes(self) -> int: ...
    def add_peer(self, *, fds: list[int], arena_bytes: int, name: str) -> None: ...
    def add_self(self, *, name: str) -> None: ...
    def add_remote_peer(
        self,
        *,
        host: str,
        port: int,
        certificate: str,
        data_id: bytes,
        secret: bytes,
        member: int,
        name: str,
    ) -> None: ...
    def serve(self) -> None: ...
