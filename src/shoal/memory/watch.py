"""Counts the bytes that a block of a program moved, and those that an optimal pager moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal import _core
from shoal.memory.address_map import Counters, counters, members
from shoal.memory.replay import Replayed, replay
from shoal.memory.trace import Trace, record
from shoal.units import show_bytes

_NOTHING = Counters(0, 0, 0, 0, 0, 0, 0, 0.0)


@dataclass(slots=True)
class Watched:
    """The counts of a block, filled in when it ends. `print` shows them.

    >>> with shoal.memory.watch() as seen:
    ...     y = x @ x
    >>> print(seen.moved.swapped_bytes, seen.optimal_bytes)
    """

    moved: Counters = _NOTHING
    optimal_bytes: int = 0  # of Belady's rule, for the same accesses and memory
    #: The same for a pager that also knows what will be freed, and does not write it.
    clairvoyant_bytes: int = 0

    @property
    def over_optimal(self) -> float:
        """Return the swapped bytes over the optimal ones; 1 if both are equal."""
        if self.moved.swapped_bytes == self.optimal_bytes:
            return 1.0
        return self.moved.swapped_bytes / max(1, self.optimal_bytes)

    def __str__(self) -> str:
        moved = self.moved
        swapped, inward, outward = map(
            show_bytes, (moved.swapped_bytes, moved.swapped_in_bytes, moved.swapped_out_bytes)
        )
        host, disk, peer = map(show_bytes, (moved.host_bytes, moved.disk_bytes, moved.peer_bytes))
        optimal, clairvoyant = map(show_bytes, (self.optimal_bytes, self.clairvoyant_bytes))
        return (
            f"you moved {swapped} between devices and swap space (in {inward}, out {outward}; host "
            f"memory {host}, disk {disk}), and {peer} from device to device; devices waited "
            f"{moved.stall_s:.3f} s\nan optimal pager would have moved {optimal} "
            f"({self.over_optimal:.2f} x); one that also knows what will be freed, {clairvoyant}"
        )


@contextmanager
def watch() -> Iterator[Watched]:
    """Count what the block moves, and replay its accesses on an optimal pager (Belady's rule).

    Each device of the lease is a pager of its own, for the operators that ran there.

    >>> with shoal.memory.watch() as seen:
    ...     train(model, batches)
    >>> print(seen)
    you moved 97.4 MiB between devices and swap space (…)
    an optimal pager would have moved 93.9 MiB (1.04 x); …
    """
    seen = Watched()
    if not _core.device_count():
        yield seen
        return
    before = counters()
    with record() as trace:
        yield seen
    seen.moved = counters() - before
    best = _replayed(trace)
    seen.clairvoyant_bytes = sum(one.moved_bytes for one in best)
    seen.optimal_bytes = seen.clairvoyant_bytes + sum(one.dead_bytes for one in best)


def _replayed(trace: Trace) -> list[Replayed]:
    return [
        replay(trace.of_member(member), _core.memory_use(member + 1)["memory_bytes"])
        for member in range(members())
    ]
