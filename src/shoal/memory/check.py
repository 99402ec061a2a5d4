"""Checks the invariants of the page table."""

from __future__ import annotations

from itertools import pairwise

from shoal import _core
from shoal.memory.address_map import Segment, map


def check() -> int:
    """Check the memory of the lease. Return the number of compared copies.

    One writer: who wrote a segment last has its bytes. Replicas are equal. No two segments are in the
    same place. The bytes of all segments are those that the program has allocated.

    Waits for the devices. Raises `RuntimeError` with the segment that is wrong.

    >>> shoal.memory.check()
    3
    """
    if not _core.device_count():
        return 0
    _core.synchronize(0)
    segments = map()
    for segment in segments:
        if segment.home is not None and segment.home not in segment.copies:
            raise RuntimeError(f"its writer shoal:{segment.home} does not have {segment}")
    _check_places(segments)
    _check_bytes(segments)
    return sum(_check_copies(segment) for segment in segments if segment.home is not None)


def _check_places(segments: list[Segment]) -> None:
    placed = [s for s in segments if s.frame is not None]
    for before, after in pairwise(sorted(placed, key=lambda s: (s.home or 0, s.frame or 0))):
        if before.home == after.home and (before.frame or 0) + before.bytes > (after.frame or 0):
            raise RuntimeError(f"{before} and {after} are in the same place")


def _check_bytes(segments: list[Segment]) -> None:
    wholes = {s.part_of for s in segments}  # they have no memory but their parts'
    found = sum(s.bytes for s in segments if s.address not in wholes)
    allocated = _core.memory_use(0)["allocated_bytes"]
    if found != allocated:
        raise RuntimeError(f"{allocated} bytes are allocated, {found} are in segments")


def _check_copies(segment: Segment) -> int:
    if segment.shared:
        return 0  # other programs may be writing to it
    copies = _core.copies(segment.address)
    if any(content != copies[0][1] for _, content in copies):
        where = ", ".join(f"shoal:{member + 1}" for member, _ in copies)
        raise RuntimeError(f"the copies on {where} differ of {segment}")
    return len(copies)
