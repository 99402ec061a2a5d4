"""Checks the invariants of the lease's memory, and that what they claim is true of its bytes."""

from __future__ import annotations

from itertools import pairwise

from shoal import _core
from shoal.memory.address_map import Segment, map

_SHOWN_STEPS = 20


def check() -> int:
    """Check the memory of the lease. Return the number of compared copies.

    One writer: who wrote a segment last has its bytes. Replicas are equal. No two segments are in the
    same place. The bytes of all segments are those that the program has allocated.

    Waits for the devices. Raises `RuntimeError` with the segment that is wrong.

    >>> print(shoal.memory.check(), "copies are equal")
    """
    if not _core.device_count():
        return 0
    _core.synchronize(0)
    report = _core.directory_report()
    if report.violation:
        latest = "".join(f"\n  {step}" for step in report.steps[-_SHOWN_STEPS:])
        raise RuntimeError(f"{report.violation}. The latest steps of the lease's memory:{latest}")
    segments = map()
    _check_frames(segments)
    return sum(_check_copies(segment) for segment in segments if segment.home is not None)


def _check_frames(segments: list[Segment]) -> None:
    placed = [s for s in segments if s.frame is not None]
    for before, after in pairwise(sorted(placed, key=lambda s: (s.home or 0, s.frame or 0))):
        if before.home == after.home and (before.frame or 0) + before.bytes > (after.frame or 0):
            raise RuntimeError(f"{before} and {after} are in the same place")


def _check_copies(segment: Segment) -> int:
    if segment.shared:
        return 0  # other programs may be writing to it
    copies = _core.copies(segment.address)
    if any(content != copies[0][1] for _, content in copies):
        where = ", ".join(f"shoal:{member + 1}" for member, _ in copies)
        raise RuntimeError(f"the copies on {where} differ of {segment}")
    return len(copies)
