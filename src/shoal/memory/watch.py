"""What a part of a program moved, and what an optimal pager would have moved in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal import _core
from shoal.memory.address_map import Counters, counters, members, size
from shoal.memory.replay import Replayed, replay
from shoal.memory.trace import Trace, record

_NOTHING = Counters(0, 0, 0, 0, 0, 0, 0, 0.0)


@dataclass(slots=True)
class Watched:
    """Filled in when the block ends. `print` says it in words."""

    moved: Counters = _NOTHING
    optimal_bytes: int = 0  # that Belady's rule swaps for the same accesses, with the same memory
    #: The same for a pager that also knows what will be freed, and so need not be written.
    clairvoyant_bytes: int = 0

    @property
    def over_optimal(self) -> float:
        """Bytes swapped over the optimum's; 1 where neither swapped anything."""
        if self.moved.swapped_bytes == self.optimal_bytes:
            return 1.0
        return self.moved.swapped_bytes / max(1, self.optimal_bytes)

    def __str__(self) -> str:
        moved = self.moved
        return (
            f"you moved {size(moved.swapped_bytes)} between devices and swap space "
            f"(in {size(moved.swapped_in_bytes)}, out {size(moved.swapped_out_bytes)}; "
            f"host memory {size(moved.host_bytes)}, disk {size(moved.disk_bytes)}), and "
            f"{size(moved.peer_bytes)} from device to device; devices waited {moved.stall_s:.3f} s\n"
            f"an optimal pager would have moved {size(self.optimal_bytes)} ({self.over_optimal:.2f} x"
            f"); one that also knows what will be freed, {size(self.clairvoyant_bytes)}"
        )


@contextmanager
def watch() -> Iterator[Watched]:
    """Counts what the block moves, and replays its accesses on an optimal pager (Belady's rule).

    On a lease of several devices each is a pager of its own, for the operators that ran there.

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
