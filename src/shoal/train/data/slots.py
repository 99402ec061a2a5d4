"""Which parts of a reader's memory are in use: pure."""

from __future__ import annotations

import bisect

ALIGN_BYTES = 64


class Slots:
    """Ranges of a memory. The lowest that fits is given, so that few pages are ever touched.

    >>> slots = Slots(256)
    >>> slots.take(100), slots.take(100), slots.take(100)
    (0, 128, None)
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._free = [(0, self.memory_bytes)] if self.memory_bytes else []  # offset, bytes; sorted
        self._taken: dict[int, int] = {}  # bytes by offset

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    @property
    def taken(self) -> int:
        return len(self._taken)

    def take(self, wanted_bytes: int) -> int | None:
        """Where so many bytes are free from now on not; None if they are nowhere together."""
        wanted = max(1, -(-wanted_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        for place, (offset, size) in enumerate(self._free):
            if size >= wanted:
                self._free[place : place + 1] = (
                    [(offset + wanted, size - wanted)] if size > wanted else []
                )
                self._taken[offset] = wanted
                return offset
        return None

    def give(self, offset: int) -> None:
        """What `take` gave there is free again."""
        start, stop = offset, offset + self._taken.pop(offset)
        place = bisect.bisect(self._free, (start, 0))
        if place < len(self._free) and self._free[place][0] == stop:
            stop += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == start:
            place -= 1
            start = self._free.pop(place)[0]
        self._free.insert(place, (start, stop - start))
