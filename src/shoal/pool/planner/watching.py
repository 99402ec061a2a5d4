"""Watches running tasks: their speed alone and together, from the steps that workers count. Pure.

A measurement covers a time in which the same tasks ran on a device. It is taken in when it is long
enough, and the next one begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.pool.base import limits
from shoal.pool.planner.facts import WATCH_STEPS, Knowledge
from shoal.schedule.model.device_profile import DeviceProfile


@dataclass(frozen=True, slots=True)
class Sample:
    """What a worker counted last."""

    at: float  # monotonic: when the head heard of it
    type: str
    steps: int


@dataclass(slots=True)
class _Window:
    members: frozenset[int]
    first: dict[int, Sample] = field(default_factory=dict)  # by task


@dataclass
class Watch:
    knowledge: Knowledge
    gains: dict[frozenset[int], float] = field(default_factory=dict)  # of tasks that share, latest
    _windows: dict[int, _Window] = field(default_factory=dict)  # by device

    def look(
        self,
        running: Mapping[int, frozenset[int]],
        samples: Mapping[int, Sample],
        profiles: Mapping[int, DeviceProfile],
    ) -> bool:
        """Take in new samples. Return whether tasks that share a device were found to lose by it.

        Args:
            running: by device, the tasks of one device that run there.
            samples: by task.
            profiles: of the devices, with the names of their kinds.
        """
        loses = False
        for gone in self._windows.keys() - running.keys():
            del self._windows[gone]
        for device, members in running.items():
            window = self._windows.get(device)
            if window is None or window.members != members:
                self._windows[device] = window = _Window(members)
            if device not in profiles or any(t not in samples for t in members):
                continue
            if any(t not in window.first for t in members):
                window.first = {t: samples[t] for t in members}
                continue
            if self._take_in(profiles[device], window, samples):
                loses = True
        self.gains = {m: g for m, g in self.gains.items() if m in running.values()}
        return loses

    def _take_in(
        self, profile: DeviceProfile, window: _Window, samples: Mapping[int, Sample]
    ) -> bool:
        """Take in a measurement that is long enough. Return whether it is a loss."""
        rates = {}
        least_s = float("inf")
        for task, first in window.first.items():
            now = samples[task]
            seconds, steps = now.at - first.at, now.steps - first.steps
            if steps < 0 or now.type != first.type:  # another lease of the same task
                window.first = {}
                return False
            least_s = min(least_s, seconds)
            rates[task] = (now.type, steps / seconds if seconds > 0 else 0.0, steps)
        if len(rates) == 1:
            [(type_, rate, steps)] = rates.values()
            if least_s >= limits.ALONE_S and steps >= WATCH_STEPS:
                self.knowledge.alone(type_, profile, rate * least_s, least_s)
                window.first = {}
            return False
        if least_s < limits.WATCH_S:
            return False
        members = [(type_, rate * least_s) for type_, rate, _ in rates.values()]
        gain = self.knowledge.together(profile.kind, members, least_s)
        window.first = {}
        if gain is None:
            return False
        self.gains[window.members] = gain
        return gain < 1.0
