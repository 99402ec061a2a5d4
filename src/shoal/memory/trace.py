"""What a program did with its memory, call by call: recorded by the client, which knows it all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal import _core

#: Kinds of event, as the core numbers them.
READS, WRITES, MAKES, FREES, UPLOADS = range(5)


@dataclass(frozen=True, slots=True)
class Event:
    """One segment in one call. Events of one call have the same number, and need it together."""

    call: int
    kind: int
    address: int
    bytes: int
    member: int  # the device of the lease that ran the call


@dataclass(slots=True)
class Trace:
    """Events in the order in which the program caused them."""

    events: list[Event] = field(default_factory=list)


@contextmanager
def record() -> Iterator[Trace]:
    """Records the memory accesses of the program inside the block.

    >>> with shoal.memory.record() as trace:
    ...     loss = step(batch)
    >>> shoal.memory.replay(trace, capacity_bytes=2**30).moved_bytes
    """
    trace = Trace()
    _core.start_trace()
    try:
        yield trace
    finally:
        trace.events = [Event(*event) for event in _core.stop_trace()]
