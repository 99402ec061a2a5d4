"""Records a program's memory accesses, call by call, at the client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from shoal import _core
from shoal.memory.address_map import Segment, map

#: Kinds of event, as the core numbers them.
READS, WRITES, MAKES = _core.ACCESS_READ, _core.ACCESS_WRITE, _core.ACCESS_MAKE
FREES, UPLOADS = _core.ACCESS_FREE, _core.ACCESS_UPLOAD


@dataclass(frozen=True, slots=True)
class Event:
    """One segment in one call. Events of one call have the same number and are needed together.

    >>> with shoal.memory.record() as trace:
    ...     y = x @ x
    >>> for event in trace.events:
    ...     print(event.call, hex(event.address), event.bytes)
    """

    call: int
    kind: int
    address: int
    bytes: int
    member: int  # the device of the lease that ran the call, from 0


@dataclass(slots=True)
class Trace:
    """Events in program order, and the segments before the first.

    >>> with shoal.memory.record() as trace:
    ...     y = x @ x
    >>> print(len(trace.events), "accesses")
    """

    events: list[Event] = field(default_factory=list)
    before: list[Segment] = field(default_factory=list)

    def of_member(self, member: int) -> Trace:
        """Return the events of one device of the lease (from 0).

        A copy from another device comes for nothing: it is that device's to count. A write there
        makes the copy here worthless, which is the segment's end here.
        """
        seen = {s.address for s in self.before if member + 1 in s.copies}
        kept = []
        for event in self.events:
            if event.member == member or event.kind == FREES:
                if event.kind in (READS, WRITES) and event.address not in seen:
                    kept.append(replace(event, kind=UPLOADS))
                seen.add(event.address)
                kept.append(event)
            elif event.kind != READS and event.address in seen:
                seen.discard(event.address)
                kept.append(replace(event, kind=FREES, member=member))
        return Trace(kept, [s for s in self.before if member + 1 in s.copies])


@contextmanager
def record() -> Iterator[Trace]:
    """Record the memory accesses of the program inside the block.

    >>> with shoal.memory.record() as trace:
    ...     loss = step(batch)
    >>> shoal.memory.replay(trace, capacity_bytes=2**30).moved_bytes
    """
    trace = Trace()
    if _core.device_count():
        _core.synchronize(0)  # what is on its way in or out has arrived
    trace.before = map()
    _core.start_trace()
    try:
        yield trace
    finally:
        trace.events = [Event(*event) for event in _core.stop_trace()]
