"""Replays a recorded trace offline on a device of any size, to compare pagers.

Pure: no device, no clock. Three pagers move whole segments, on demand:

- `optimal` knows the future and evicts the segment that is used furthest ahead (Belady's rule);
- `shoal` is the worker's own policy (csrc/worker/paging/eviction_policy.h), which sees a few calls
  ahead and learns the rest;
- `lru` is the same code, told to evict the segment that was used least recently.

All begin with the segments that the device held when the recording began.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count, groupby

from shoal import _core
from shoal.memory.trace import FREES, MAKES, UPLOADS, WRITES, Event, Trace

NEVER = 1 << 62
#: How many calls a program is ahead of its device, if `replay` is not told.
AHEAD_CALLS = 256


@dataclass(slots=True)
class Replayed:
    """Bytes between the device and its host, in each direction.

    >>> replayed = shoal.memory.replay(shoal.memory.Trace(), capacity_bytes=1024)
    >>> print(replayed.in_bytes, replayed.out_bytes, replayed.peak_bytes)
    """

    in_bytes: int = 0
    out_bytes: int = 0
    #: Not written, because the trace frees them before it uses them again. The program may not have
    #: freed them when they left: then a pager that does not know the future has to write them.
    dead_bytes: int = 0
    peak_bytes: int = 0  # that are alive at once

    @property
    def moved_bytes(self) -> int:
        return self.in_bytes + self.out_bytes


class _Belady:
    """Evicts the segment that is used furthest ahead; knows every coming use and every free."""

    def __init__(self, events: list[Event]) -> None:
        self.call = -1
        self.kept: set[int] = set()
        self.future: dict[int, deque[int]] = defaultdict(deque)  # calls that use it
        self.freed = {event.address for event in events if event.kind == FREES}
        self.resident: set[int] = set()
        #: Candidates for eviction, last use first; entries may be out of date.
        self.heap: list[tuple[int, int]] = []
        for event in events:
            if event.kind != FREES:
                self.future[event.address].append(event.call)

    def begin(self, call: int, used: set[int]) -> None:
        self.call, self.kept = call, used

    def _next_use(self, segment: int) -> int:
        uses = self.future[segment]
        while uses and uses[0] <= self.call:
            uses.popleft()
        return uses[0] if uses else NEVER

    def enter(self, segment: int, size: int) -> None:
        self.resident.add(segment)
        heapq.heappush(self.heap, (-self._next_use(segment), segment))

    def use(self, segment: int, copied: bool) -> None:
        heapq.heappush(self.heap, (-self._next_use(segment), segment))

    def evict(self) -> int | None:
        kept, victim = [], None
        while self.heap and victim is None:
            rank, segment = heapq.heappop(self.heap)
            if segment not in self.resident or -rank != self._next_use(segment):
                continue
            if segment in self.kept:
                kept.append((rank, segment))
            else:
                victim = segment
                self.resident.discard(segment)
        for entry in kept:
            heapq.heappush(self.heap, entry)
        return victim

    def is_dead(self, segment: int) -> bool:
        return segment in self.freed and self._next_use(segment) == NEVER

    def free(self, segment: int) -> None:
        self.resident.discard(segment)


class _Worker(_core.PolicyReplay):
    """The policy that workers run, with a window of `ahead_calls`; without one, LRU."""

    def __init__(self, capacity_bytes: int, events: list[Event], ahead_calls: int) -> None:
        super().__init__(capacity_bytes, least_recent=ahead_calls == 0)
        self.ahead_calls = ahead_calls
        self.coming = deque(events)

    def begin(self, call: int, used: set[int]) -> None:
        end = call + self.ahead_calls
        while self.coming and self.coming[0].call < end:
            event = self.coming.popleft()
            self.foresee(event.call + 1, event.address, event.kind == FREES)
        self.advance(call + 1, end + 1, list(used))


@dataclass(slots=True)
class _Held:
    """A live segment."""

    bytes: int
    resident: bool
    clean: bool  # the host has its present bytes


@dataclass(slots=True)
class _Device:
    capacity_bytes: int
    policy: _Belady | _Worker
    result: Replayed = field(default_factory=Replayed)
    live: dict[int, _Held] = field(default_factory=dict)
    live_bytes: int = 0
    resident_bytes: int = 0

    def hold(self, segment: int, held: _Held) -> None:
        self.live[segment] = held
        self.live_bytes += held.bytes
        self.result.peak_bytes = max(self.result.peak_bytes, self.live_bytes)

    def enter(self, segment: int, held: _Held) -> None:
        held.resident = True
        self.resident_bytes += held.bytes
        self.policy.enter(segment, held.bytes)

    def make_room(self, bytes_needed: int) -> None:
        while self.resident_bytes + bytes_needed > self.capacity_bytes:
            segment = self.policy.evict()
            if segment is None:
                return
            held = self.live[segment]
            held.resident = False
            self.resident_bytes -= held.bytes
            if not held.clean:
                held.clean = True
                if self.policy.is_dead(segment):
                    self.result.dead_bytes += held.bytes
                else:
                    self.result.out_bytes += held.bytes

    def run(self, call: int, events: list[Event]) -> None:
        self.policy.begin(call, {event.address for event in events})
        for event in events:
            if event.kind == FREES:
                self.free(event.address)
            else:
                self.use(event)

    def free(self, segment: int) -> None:
        held = self.live.pop(segment, None)
        if held is None:
            return
        self.live_bytes -= held.bytes
        if held.resident:
            self.resident_bytes -= held.bytes
        self.policy.free(segment)

    def use(self, event: Event) -> None:
        held = self.live.get(event.address)
        if held is None:
            held = _Held(event.bytes, False, clean=event.kind == UPLOADS)
            self.hold(event.address, held)
            if event.kind not in (MAKES, UPLOADS):  # it was elsewhere before the trace began
                held.clean = True
                self.result.in_bytes += held.bytes
        elif not held.resident:
            self.result.in_bytes += held.bytes
        if not held.resident:
            self.make_room(held.bytes)
            self.enter(event.address, held)
        if event.kind in (WRITES, MAKES):
            held.clean = False
        self.policy.use(event.address, held.clean)


def replay(
    trace: Trace | Iterable[Event],
    capacity_bytes: int,
    policy: str = "optimal",
    ahead_calls: int = AHEAD_CALLS,
) -> Replayed:
    """Run a trace on a device with `capacity_bytes`.

    Args:
        policy: "optimal", "shoal" or "lru".
        ahead_calls: How many calls "shoal" sees ahead.

    >>> replay(Trace(), capacity_bytes=1024).moved_bytes
    0
    """
    if policy not in ("optimal", "shoal", "lru"):
        raise ValueError(f"policy must be 'optimal', 'shoal' or 'lru' (got {policy!r})")
    if not isinstance(trace, Trace):
        trace = Trace(list(trace))
    before, events = _numbered(trace)
    window = ahead_calls if policy == "shoal" else 0
    optimal = policy == "optimal"
    pager = _Belady(events) if optimal else _Worker(capacity_bytes, events, window)
    device = _Device(capacity_bytes, pager)
    for segment, size, resident in before:
        # The host may have a copy of any segment that the device held: all pagers may assume one.
        held = _Held(size, False, clean=True)
        device.hold(segment, held)
        if resident:
            device.enter(segment, held)
        pager.use(segment, copied=True)
    for call, group in groupby(events, key=lambda event: event.call):
        device.run(call, list(group))
    return device.result


def _numbered(trace: Trace) -> tuple[list[tuple[int, int, bool]], list[Event]]:
    """Give each segment a number instead of its address, which a later segment may use again.

    Returns (number, bytes, resident) of the segments before the trace, and the events.
    """
    fresh = count()
    numbers: dict[int, int] = {}

    def number(address: int) -> int:
        if address not in numbers:
            numbers[address] = next(fresh)
        return numbers[address]

    before = [(number(s.address), s.bytes, not s.swapped) for s in trace.before]
    events = []
    for event in trace.events:
        events.append(replace(event, address=number(event.address)))
        if event.kind == FREES:
            del numbers[event.address]
    return before, events
