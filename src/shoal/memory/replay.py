"""Replays a recorded trace on a device of any size: the fewest bytes that a pager must move.

Pure: no device, no clock. The optimal pager knows the future and evicts what is used furthest ahead
(Belady's rule); `lru` evicts what was used least recently. Both move whole segments, on demand, and
begin with what the device held when the recording began.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

from shoal.memory.trace import FREES, MAKES, UPLOADS, WRITES, Event, Trace

NEVER = 1 << 62


@dataclass(slots=True)
class Replayed:
    """Bytes between the device and its host, in each direction."""

    in_bytes: int = 0
    out_bytes: int = 0
    #: Not written, because the trace frees them before it uses them again. The program may not have
    #: freed them when they left: then a pager that does not know the future has to write them.
    dead_bytes: int = 0
    peak_bytes: int = 0  # that are alive at once

    @property
    def moved_bytes(self) -> int:
        return self.in_bytes + self.out_bytes


@dataclass(slots=True)
class _Held:
    """A live segment."""

    bytes: int
    resident: bool
    clean: bool  # the host has its present bytes
    used: int = 0


@dataclass(slots=True)
class _Pager:
    capacity_bytes: int
    optimal: bool
    future: dict[int, deque[int]]  # calls that use it
    freed: set[int]  # those that the trace frees
    result: Replayed = field(default_factory=Replayed)
    live: dict[int, _Held] = field(default_factory=dict)
    live_bytes: int = 0
    resident_bytes: int = 0
    #: Candidates for eviction, last first; entries may be out of date.
    heap: list[tuple[int, int]] = field(default_factory=list)

    def next_use(self, address: int, call: int) -> int:
        uses = self.future[address]
        while uses and uses[0] <= call:
            uses.popleft()
        return uses[0] if uses else NEVER

    def rank(self, address: int, call: int) -> int:
        return self.next_use(address, call) if self.optimal else -self.live[address].used

    def offer(self, address: int, call: int) -> None:
        heapq.heappush(self.heap, (-self.rank(address, call), address))

    def hold(self, address: int, held: _Held) -> None:
        self.live[address] = held
        self.live_bytes += held.bytes
        self.result.peak_bytes = max(self.result.peak_bytes, self.live_bytes)
        if held.resident:
            self.resident_bytes += held.bytes

    def make_room(self, bytes_needed: int, call: int, keep: set[int]) -> None:
        aside = []
        while self.resident_bytes + bytes_needed > self.capacity_bytes and self.heap:
            rank, address = heapq.heappop(self.heap)
            held = self.live.get(address)
            if held is None or not held.resident or -rank != self.rank(address, call):
                continue
            if address in keep:
                aside.append((rank, address))
                continue
            held.resident = False
            self.resident_bytes -= held.bytes
            dead = self.optimal and address in self.freed and self.next_use(address, call) == NEVER
            if not held.clean:
                held.clean = True
                if dead:
                    self.result.dead_bytes += held.bytes
                else:
                    self.result.out_bytes += held.bytes
        for entry in aside:
            heapq.heappush(self.heap, entry)

    def run(self, call: int, events: list[Event]) -> None:
        keep = {event.address for event in events}
        for event in events:
            if event.kind == FREES:
                self.free(event.address)
            else:
                self.use(event, call, keep)

    def free(self, address: int) -> None:
        held = self.live.pop(address, None)
        if held is None:
            return
        self.live_bytes -= held.bytes
        if held.resident:
            self.resident_bytes -= held.bytes

    def use(self, event: Event, call: int, keep: set[int]) -> None:
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
            self.make_room(held.bytes, call, keep)
            held.resident = True
            self.resident_bytes += held.bytes
        if event.kind in (WRITES, MAKES):
            held.clean = False
        held.used = call
        self.offer(event.address, call)


def replay(
    trace: Trace | Iterable[Event], capacity_bytes: int, policy: str = "optimal"
) -> Replayed:
    """Replay a trace on a device with `capacity_bytes`.

    Args:
        policy: "optimal" or "lru".

    >>> replay(Trace(), capacity_bytes=1024).moved_bytes
    0
    """
    if policy not in ("optimal", "lru"):
        raise ValueError(f"policy is 'optimal' or 'lru', not {policy!r}")
    if not isinstance(trace, Trace):
        trace = Trace(list(trace))
    pager = _Pager(capacity_bytes, policy == "optimal", defaultdict(deque), set())
    lives: dict[int, int] = {}
    renamed = []
    for event in trace.events:  # an address is used again after it is freed: another segment
        number = lives.setdefault(event.address, 0)
        name = _name(event.address, number)
        if event.kind == FREES:
            lives[event.address] = number + 1
            pager.freed.add(name)
        else:
            pager.future[name].append(event.call)
        renamed.append(Event(event.call, event.kind, name, event.bytes, event.member))
    for segment in trace.before:
        # Whatever the device held may have had a copy in the host: the optimum gets the benefit.
        name = _name(segment.address, 0)
        pager.hold(name, _Held(segment.bytes, not segment.swapped, clean=True))
        pager.offer(name, -1)
    for call, group in groupby(renamed, key=lambda event: event.call):
        pager.run(call, list(group))
    return pager.result


def _name(address: int, number: int) -> int:
    return address * 1_000_003 + number
