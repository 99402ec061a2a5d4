"""Types of the compiled core (csrc/python/bindings.cpp)."""

from collections.abc import Callable, Sequence
from mmap import mmap

import torch

LANES_MAX: int
PROTOCOL_VERSION: int
SESSIONS_MAX: int
EXIT_FAILED: int  # of a worker: csrc/transport/ending.h
EXIT_CLIENT_ENDED: int
EXIT_CLIENT_CLOSED: int
EXIT_CLIENT_SILENT: int

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
DATA_MAGIC: bytes
SHARE_CONTROL_BYTES: int
SHARE_REVOKED_WORD: int
SHARE_HOLDER_WORD: int

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

# With session, member, what was seen and what is known by itself; returns why the device is lost.
def set_loss_explainer(explain: Callable[[int, int, int, str], str]) -> None: ...
def tell_lost(session: int, member: int, reason: str) -> None: ...
def set_pool_starter(start: Callable[[], None]) -> None: ...
def host_region() -> tuple[int, int]: ...
def sessions_in_use() -> list[int]: ...

class Link:
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

class Member:
    """A leased device's end of the session."""

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
        link: Link | None = None,
    ) -> None: ...

def attach(session: int, members: list[Member]) -> None: ...
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
class SharedMemory:
    """What makes a memory shared."""

    def __init__(self, *, memory: int, control: int, line: int, participant: int) -> None: ...

def share(tensor: torch.Tensor, member: int, fds: SharedMemory, exclusive: bool) -> None: ...
def open_shared(
    bytes: int,
    member: int,
    fds: SharedMemory,
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
def segments() -> list[tuple[int, int, int, int, int, int, int, int, int, int, bool]]: ...
def copies(address: int) -> list[tuple[int, bytes]]: ...
def start_trace() -> None: ...
def stop_trace() -> list[tuple[int, int, int, int, int]]: ...

# --- what one device is told, told to another ---
class Recording:
    """What this thread tells one device, from here to `stop()`."""

    def __init__(self, device: int) -> None: ...
    def stop(self) -> None: ...
    def mark(self) -> int: ...
    @staticmethod
    def pause() -> None: ...
    @staticmethod
    def resume() -> None: ...
    @property
    def failure(self) -> str: ...

class Repeat:
    """A recording on another device. Raises ValueError, with nothing done, where that cannot be."""

    def __init__(
        self,
        recording: Recording,
        device: int,
        *,
        ours: Sequence[torch.Tensor],
        theirs: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
    ) -> None: ...
    def until(self, mark: int) -> None: ...
    def tensor(self, original: torch.Tensor) -> torch.Tensor: ...

# Adds a tensor of another device of the lease in place; False where that takes a copy first.
def add_from(target: torch.Tensor, source: torch.Tensor) -> bool: ...

# The whole of a tensor on another device of the lease, as it is now, copied when the target is used or
# before the source changes; False where that can't be put off.
def copy_later(target: torch.Tensor, source: torch.Tensor) -> bool: ...

# Fills a tensor of one device with what a reader at its node has at `offset` of its memory. Returns the
# number of the message; once the device `is_past` it, that memory may change.
def load(target: torch.Tensor, reader: int, offset: int) -> int: ...
def is_past(index: int, sequence: int) -> bool: ...

# Takes `torch.Event.event_id` of two: milliseconds between them, and for how many of those the device
# waited for others.
def elapsed_ms(start: int, end: int) -> tuple[float, float]: ...
def traffic(index: int) -> dict[str, int]: ...
def worker_stats(index: int) -> dict[str, int]: ...

class Arrivals:
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

def set_up_log(*, component: str, json: bool, errors_only: bool) -> None: ...

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
        arrivals: Arrivals | None = None,
        last_words_fd: int = -1,
    ) -> None: ...
    def fds(self) -> list[int]: ...
    def arena_bytes(self) -> int: ...
    def add_peer(self, *, fds: list[int], arena_bytes: int, name: str) -> None: ...
    def add_self(self, *, name: str) -> None: ...
    def add_peer_elsewhere(
        self,
        *,
        host: str,
        port: int,
        server_name: str,
        data_id: bytes,
        secret: bytes,
        member: int,
        name: str,
    ) -> None: ...
    def serve(self) -> None: ...
