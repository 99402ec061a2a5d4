"""Shows the address space of the lease: which segment is on which device, or swapped out."""

from __future__ import annotations

import html
from dataclasses import astuple, dataclass
from pathlib import Path

from shoal import _core, plots
from shoal.units import show_bytes

_PRESENT, _SWAPPED, _REPLICA, _FREE = "#2a7de1", "#e0a030", "#8bbcf0", "#eeeeee"


@dataclass(frozen=True, slots=True)
class Segment:
    """One live segment (what torch calls a storage).

    >>> for segment in shoal.memory.map():
    ...     print(hex(segment.address), segment.bytes, segment.state)
    """

    address: int
    bytes: int
    home: int | None  # number of the member device that wrote it last; None: no memory yet
    copies: tuple[int, ...]  # all member devices with its present bytes
    swapped: tuple[int, ...]  # of these, those where it is not in the device's memory now
    device: int  # 0: of the whole lease; k: of shoal:k
    part_of: int | None = None  # address of the segment larger than any device that it is a part of
    version: int = 0  # number of its home's message that wrote it last
    frame: int | None = None  # byte of its home's memory where it starts; None: not there
    shared: bool = False  # other programs have it, too

    @property
    def state(self) -> str:
        """ "empty" (no memory yet), "shared", "swapped", "replicated" or "resident"."""
        if self.home is None:
            return "empty"
        if self.shared:
            return "shared"
        if set(self.copies) <= set(self.swapped):
            return "swapped"
        return "replicated" if len(self.copies) > 1 else "resident"


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes moved since the lease began, by cause, and the time that devices waited for them.

    >>> moved = shoal.memory.counters()
    >>> print(moved.peer_bytes, moved.swapped_bytes, moved.stall_s)
    """

    peer_bytes: int  # from device to device
    peer_ahead_bytes: int  # of those, from other machines, that were there before they were used
    swapped_in_bytes: int
    swapped_out_bytes: int
    disk_bytes: int  # of those swapped
    dropped_bytes: int  # evicted without a copy: dead, or unchanged
    prefetched_bytes: int  # of those swapped in, that were there before they were used
    stall_s: float

    @property
    def swapped_bytes(self) -> int:
        """Bytes between devices and swap space, in both directions."""
        return self.swapped_in_bytes + self.swapped_out_bytes

    @property
    def host_bytes(self) -> int:
        """Those from and to host memory."""
        return self.swapped_bytes - self.disk_bytes

    def __sub__(self, earlier: Counters) -> Counters:
        """Return the bytes moved since `earlier`."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return Counters(*(after - before for after, before in pairs))


def map() -> list[Segment]:
    """Return all live segments of this program, by address.

    >>> for segment in shoal.memory.map():
    ...     print(hex(segment.address), segment.bytes, segment.home, segment.state)
    """
    if not _core.device_count():
        return []
    return [_segment(entry) for entry in _core.segments()]


def _segment(entry: _core.MapEntry) -> Segment:
    copies = tuple(i + 1 for i in range(32) if entry.valid >> i & 1)
    return Segment(
        address=entry.address,
        bytes=entry.bytes,
        home=entry.home + 1 if entry.home >= 0 else None,
        copies=copies,
        swapped=tuple(i for i in copies if not entry.resident >> (i - 1) & 1),
        device=entry.pinned + 1,
        part_of=entry.extent_of or None,
        version=entry.written_at,
        frame=entry.frame if entry.frame >= 0 else None,
        shared=entry.shared,
    )


def members() -> int:
    """Return the number of devices of the lease."""
    count = _core.device_count()
    return 1 if count == 1 else max(0, count - 1)


def counters() -> Counters:
    """Wait for the lease's devices and return the bytes that they moved.

    >>> print(shoal.memory.counters().swapped_in_bytes)
    """
    stats = [_core.worker_stats(i + 1) for i in range(members())]

    def total(name: str) -> int:
        return sum(s[name] for s in stats)

    return Counters(
        peer_bytes=total("bytes_peer"),
        peer_ahead_bytes=total("peer_ahead"),
        swapped_in_bytes=total("paged_in"),
        swapped_out_bytes=total("paged_out"),
        disk_bytes=total("paged_disk"),
        dropped_bytes=total("dropped"),
        prefetched_bytes=total("prefetched"),
        stall_s=total("stall_ns") / 1e9,
    )


def _rows() -> list[tuple[str, int, int, int, int]]:
    """Return (name, memory, own, replicas, swapped) of each device, in bytes."""
    segments = map()
    rows = []
    for member in range(1, members() + 1):
        own = sum(s.bytes for s in segments if s.home == member and member not in s.swapped)
        replicas = sum(
            s.bytes
            for s in segments
            if member in s.copies and s.home != member and member not in s.swapped
        )
        swapped = sum(s.bytes for s in segments if member in s.swapped)
        limit = _core.memory_use(member)["memory_bytes"]
        rows.append((f"shoal:{member}", limit, own, replicas, swapped))
    return rows


def picture(width: int = 60) -> str:
    """Draw the devices' memory as text: `█` own segments, `▒` copies of others', `·` free.

    >>> print(shoal.memory.picture())
    """
    lines = []
    for name, limit, own, replicas, swapped in _rows():
        cells = max(1, limit)
        first = round(width * min(own, limit) / cells)
        second = min(width - first, round(width * replicas / cells))
        bar = "█" * first + "▒" * second + "·" * (width - first - second)
        lines.append(
            f"{name:<9}{bar} {show_bytes(own + replicas)} of {show_bytes(limit)}"
            + (f", {show_bytes(swapped)} swapped out" if swapped else "")
        )
    return "\n".join(lines) or "no lease"


def save_picture(path: str | Path) -> Path:
    """Write the address space as an HTML page: one line per device, one block per segment.

    >>> shoal.memory.save_picture("memory.html")
    """
    target = Path(path)
    body = "".join(_strip(member) for member in range(1, members() + 1))
    colours = (
        ("in memory", _PRESENT), ("copy of another device's", _REPLICA),
        ("swapped out", _SWAPPED), ("free", _FREE),
    )  # fmt: skip
    target.write_text(plots.page("Memory of the lease", plots.legend(colours) + body))
    return target


def _strip(member: int) -> str:
    limit = max(1, _core.memory_use(member)["memory_bytes"])
    blocks = []
    for s in sorted(map(), key=lambda s: (member in s.swapped, s.home != member, s.address)):
        if member not in s.copies:
            continue
        colour = _SWAPPED if member in s.swapped else _PRESENT if s.home == member else _REPLICA
        title = html.escape(
            f"{s.address:#x}: {show_bytes(s.bytes)}, {s.state}, written by shoal:{s.home}"
        )
        blocks.append(
            f'<div title="{title}" style="flex:0 0 {100 * s.bytes / limit:.4f}%;'
            f'background:{colour};outline:1px solid #fff"></div>'
        )
    return (
        f'<h2>shoal:{member}, {show_bytes(limit)}</h2><div style="display:flex;flex-wrap:wrap;'
        f'min-height:3em;background:{_FREE}">{"".join(blocks)}</div>'
    )
