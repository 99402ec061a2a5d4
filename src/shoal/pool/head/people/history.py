"""The last hours of every device: memory, calls and sessions, for charts. Bounded, in memory only."""

from __future__ import annotations

from collections import deque
from itertools import islice

from shoal.pool.base import limits
from shoal.pool.head.requests import Route, Routes
from shoal.pool.head.session_ends import Client
from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people
from shoal.pool.wire.roles import Role


class Histories:
    def __init__(self) -> None:
        self._samples: dict[int, deque[people.Sample]] = {}
        self._calls: dict[int, int] = {}  # all calls of a device's sessions, at the last sample
        self._running: dict[tuple[int, int], people.Span] = {}
        self._ended: deque[people.Span] = deque(maxlen=limits.HISTORY_SPANS_MAX)
        self._at = 0.0

    def routes(self) -> Routes:
        return {people.AskHistory: Route(Role.USER, self._ask)}

    def due(self, now: float) -> bool:
        return now - self._at >= limits.HISTORY_SAMPLE_S

    def sample(self, status: messages.PoolStatus, now: float) -> None:
        """Note how the pool is."""
        passed_s, self._at = now - self._at, now
        present = {s.part: s for s in status.sessions}
        for part in self._running.keys() - present.keys():
            span = self._running.pop(part)
            self._ended.append(
                people.Span(span.device, span.session, span.client, span.program, span.since, now)
            )
        granted: dict[int, int] = {}
        used: dict[int, int] = {}
        calls: dict[int, int] = {}
        for part, one in present.items():
            if part not in self._running:
                self._running[part] = people.Span(*part, one.client, one.program, one.since, None)
            granted[one.device] = granted.get(one.device, 0) + one.granted_bytes
            if one.use is not None:
                used[one.device] = used.get(one.device, 0) + one.use.memory_bytes
                calls[one.device] = calls.get(one.device, 0) + one.use.calls
        for device in status.devices[: limits.HISTORY_DEVICES_MAX]:
            number = device.number
            more = calls.get(number, 0) - self._calls.get(number, 0)
            self._samples.setdefault(number, deque(maxlen=limits.HISTORY_SAMPLES_MAX)).append(
                people.Sample(
                    now, granted.get(number, 0), used.get(number, 0), max(0, more) / passed_s
                )
            )
        self._calls = calls

    async def _ask(self, client: Client, ask: people.AskHistory) -> people.History:
        spans = [*islice(reversed(self._ended), 500), *self._running.values()]
        if ask.device is None:
            return people.History([], spans[-1000:], self._overview())
        samples = list(self._samples.get(ask.device, ()))
        return people.History(samples, [s for s in spans if s.device == ask.device])

    def _overview(self) -> list[people.DeviceSamples]:
        """Return samples of the first devices, thinned out; the newest one is always there."""
        found = []
        for device in sorted(self._samples)[: limits.HISTORY_SHOWN_MAX]:
            samples = list(self._samples[device])
            step = -(-len(samples) // limits.HISTORY_SHOWN_SAMPLES)
            found.append(people.DeviceSamples(device, samples[::-step][::-1]))
        return found
