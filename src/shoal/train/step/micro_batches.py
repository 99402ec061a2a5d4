"""In how many pieces a group computes its part, where its memory does not hold all at once. Pure.

Gradients are summed over the pieces, so the result is that of the whole part. A device of little memory
can then have the share that its speed is worth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: The part of a device's memory that weights and one piece may fill: a backward pass needs some more
#: than what it finds.
FILL = 0.9


@dataclass(slots=True)
class Pieces:
    """What was learnt of each group, by its index.

    >>> pieces = Pieces()
    >>> pieces.fit(0, 1, used_bytes=900, fixed_bytes=100, memory_bytes=500)
    True
    >>> pieces.of(0, 1)
    3
    """

    _least: dict[int, int] = field(default_factory=dict)

    def of(self, group: int, wanted: int) -> int:
        """Pieces for a group that would have `wanted` if memory were no matter."""
        return max(wanted, self._least.get(group, 1))

    def fit(
        self, group: int, now: int, used_bytes: int, fixed_bytes: int, memory_bytes: int
    ) -> bool:
        """Takes in what a step used with `now` pieces, and what of it was there before: weights and
        the optimizer's state. True if there are more pieces from now on."""
        room_bytes = FILL * memory_bytes - fixed_bytes
        if used_bytes <= memory_bytes or room_bytes <= 0:  # nothing to do, or nothing that helps
            return False
        return self._raise_to(group, math.ceil(now * (used_bytes - fixed_bytes) / room_bytes))

    def double(self, group: int, now: int, samples: int) -> bool:
        """There was too little memory with `now` pieces. False if each is a single sample already."""
        return now < samples and self._raise_to(group, min(samples, 2 * now))

    def _raise_to(self, group: int, pieces: int) -> bool:
        if pieces <= self._least.get(group, 1):
            return False
        self._least[group] = pieces
        return True
