"""How many micro-batches a group computes, where its memory does not hold its sub-batch. Pure.

Gradients are summed over the micro-batches, so the result is that of the whole sub-batch. A device with
little memory can then compute as many samples as its speed is worth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: The fraction of a device's memory that weights and one micro-batch may fill. The backward pass needs
#: a little more than the forward pass leaves behind.
FILL = 0.9


@dataclass(slots=True)
class MicroBatchCounts:
    """The fewest micro-batches of each group, by its index, as steps have shown.

    >>> counts = MicroBatchCounts()
    >>> counts.fit(0, 1, used_bytes=900, fixed_bytes=100, memory_bytes=500)
    True
    >>> counts.of(0, 1)
    3
    """

    _least: dict[int, int] = field(default_factory=dict)

    def of(self, group: int, wanted: int) -> int:
        """Return the micro-batches of a group that has `wanted` if memory does not matter."""
        return max(wanted, self._least.get(group, 1))

    def fit(
        self, group: int, now: int, used_bytes: int, fixed_bytes: int, memory_bytes: int
    ) -> bool:
        """Learn from a step of `now` micro-batches. Return True if there are more from now on.

        `fixed_bytes` of `used_bytes` were in use before the step: weights and optimizer state.
        """
        room_bytes = FILL * memory_bytes - fixed_bytes
        if used_bytes <= memory_bytes or room_bytes <= 0:  # nothing to do, or nothing that helps
            return False
        return self._raise_to(group, math.ceil(now * (used_bytes - fixed_bytes) / room_bytes))

    def double(self, group: int, now: int, samples: int) -> bool:
        """Learn that `now` micro-batches lack memory. Return False if each is a single sample."""
        return now < samples and self._raise_to(group, min(samples, 2 * now))

    def _raise_to(self, group: int, count: int) -> bool:
        if count <= self._least.get(group, 1):
            return False
        self._least[group] = count
        return True
