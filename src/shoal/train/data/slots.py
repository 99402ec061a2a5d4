"""An allocator of ranges of a reader's memory. Pure."""

from __future__ import annotations

import bisect

ALIGN_BYTES = 64


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Slots:
    """Ranges of a memory. The lowest one that fits is reserved, so that few pages are ever touched.

    >>> slots = Slots(256)
    >>> slots.reserve(100), slots.reserve(100), slots.reserve(100)
    (0, 128, None)
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._free = [(0, self.memory_bytes)] if self.memory_bytes else []  # offset, bytes; sorted
        self._reserved: dict[int, int] = {}  # bytes by offset

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    @property
    def reserved(self) -> int:
        return len(self._reserved)

    def reserve(self, wanted_bytes: int) -> int | None:
        """Reserve a contiguous range. Return its offset, or None if nothing fits."""
        wanted = aligned(max(1, wanted_bytes))
        for index, (offset, size) in enumerate(self._free):
            if size >= wanted:
                self._free[index : index + 1] = (
                    [(offset + wanted, size - wanted)] if size > wanted else []
                )
                self._reserved[offset] = wanted
                return offset
        return None

    def release(self, offset: int) -> None:
        """Free the range at this offset."""
        start, stop = offset, offset + self._reserved.pop(offset)
        index = bisect.bisect(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == stop:
            stop += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop - start))
