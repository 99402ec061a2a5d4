"""The memory of a lease: the location of every segment, the bytes moved, and the optimum.

>>> import shoal
>>> print(shoal.memory.picture())
"""

from __future__ import annotations

from shoal.memory.address_map import Counters, Segment, counters, map, picture, save_picture
from shoal.memory.check import check
from shoal.memory.replay import Replayed, replay
from shoal.memory.trace import Event, Trace, record
from shoal.memory.watch import Watched, watch

__all__ = [
    "Counters",
    "Event",
    "Replayed",
    "Segment",
    "Trace",
    "Watched",
    "check",
    "counters",
    "map",
    "picture",
    "record",
    "replay",
    "save_picture",
    "watch",
]
