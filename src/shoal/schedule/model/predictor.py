"""Predicts the speed of tasks on devices where they never ran, from profiles and observations.

A task is profiled on one device and predicted on the others: its operators are known (each passes
through the stream), so its step takes, on a device, the sum over operators of the larger of
compute time and memory time, plus the cost of issuing them. Real operators reach only part of that;
the part is learnt where the task did run and carried over. Observations correct predictions, and
the error of past predictions is kept beside every new one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec

from shoal.schedule.model.device_profile import DeviceProfile

__all__ = [
    "DeviceProfile",
    "Operators",
    "Prediction",
    "Predictor",
    "TaskProfile",
    "busy_shares",
    "busy_times",
]

#: Error that a prediction is given before any was checked: what rooflines are usually off by.
ERROR_PRIOR = 0.3
#: Weight of a new observation against all older ones.
OBSERVATION_WEIGHT = 0.3


class Operators(msgspec.Struct, frozen=True):
    """Operators of one step that have a dtype and a name in common."""

    name: str
    dtype: str
    calls: int
    flops: float
    bytes: float  # Read and written, all calls together.


class TaskProfile(msgspec.Struct, frozen=True):
    """A type of task: the memory of a step, its operators, and its speed where it ran."""

    type: str
    batch: int
    weights_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # Peak, at `batch`.
    operators: list[Operators]
    steps_per_s: dict[str, float] = {}  # Kind -> observed, running alone.

    def memory_bytes(self, batch: int | None = None) -> int:
        """Memory of a step; activations grow with the batch, the rest does not.

        >>> TaskProfile("t", 32, 100, 200, 64, []).memory_bytes(batch=64)
        428
        """
        scale = (batch or self.batch) / self.batch
        return self.weights_bytes + self.optimizer_bytes + int(self.activation_bytes * scale)


class Prediction(msgspec.Struct, frozen=True):
    """`error` is relative: 0.1 says that predictions like this were off by 10 % so far."""

    steps_per_s: float
    error: float
    observed: bool  # False: the task never ran on this kind.


def busy_times(task: TaskProfile, device: DeviceProfile) -> tuple[float, float, float]:
    """Seconds of one step at full speed: all of it, its compute part, its memory part."""
    step_s = compute_s = memory_s = 0.0
    for group in task.operators:
        fastest = max(device.flops_per_s.values())
        flops_s = group.flops / device.flops_per_s.get(group.dtype, fastest)
        bytes_s = group.bytes / device.bytes_per_s
        compute_s += flops_s
        memory_s += bytes_s
        step_s += max(flops_s, bytes_s) + group.calls * device.call_s
    return step_s, compute_s, memory_s


def busy_shares(task: TaskProfile, device: DeviceProfile) -> tuple[float, float]:
    """Shares of the device's compute and bandwidth that the task keeps busy when alone."""
    step_s, compute_s, memory_s = busy_times(task, device)
    return compute_s / step_s, memory_s / step_s


class Predictor:
    """Speeds of tasks on devices, from profiles and observations.

    >>> slow = DeviceProfile("slow", "s", 0, {"float32": 1e9}, 1e9, 0.0)
    >>> fast = DeviceProfile("fast", "f", 0, {"float32": 4e9}, 4e9, 0.0)
    >>> task = TaskProfile("t", 1, 0, 0, 0, [Operators("mm", "float32", 1, 1e8, 1e6)])
    >>> predictor = Predictor([slow, fast])
    >>> predictor.observe(task, slow, steps_per_s=8.0)  # The roofline said 10.
    >>> predictor.predict(task, fast).steps_per_s
    32.0
    """

    def __init__(self, devices: list[DeviceProfile]) -> None:
        self._devices = {device.kind: device for device in devices}
        self._observed: dict[tuple[str, str], float] = {}
        self._errors: list[float] = []

    def know(self, devices: Iterable[DeviceProfile]) -> None:
        """Take in devices that have come, or were measured again."""
        self._devices |= {device.kind: device for device in devices}

    def device(self, kind: str) -> DeviceProfile | None:
        return self._devices.get(kind)

    def observe(self, task: TaskProfile, device: DeviceProfile, steps_per_s: float) -> None:
        """Learn a measured speed. First compare it with the prediction that it replaces."""
        before = self.predict(task, device)
        if not before.observed and self._efficiency(task):
            self._errors.append(abs(before.steps_per_s / steps_per_s - 1))
        known = self._observed.get((task.type, device.kind))
        if known is not None:
            steps_per_s = known + OBSERVATION_WEIGHT * (steps_per_s - known)
        self._observed[task.type, device.kind] = steps_per_s

    def predict(self, task: TaskProfile, device: DeviceProfile) -> Prediction:
        """Return the observation if there is one, else the roofline times the learned efficiency."""
        known = self._observed.get((task.type, device.kind), task.steps_per_s.get(device.kind))
        if known is not None:
            return Prediction(known, 0.0, observed=True)
        efficiencies = self._efficiency(task)
        efficiency = statistics.median(efficiencies) if efficiencies else 1.0
        return Prediction(efficiency / busy_times(task, device)[0], self.error(), observed=False)

    def observations(self) -> tuple[list[tuple[str, str, float]], list[float]]:
        """Return the observed speeds, by type and kind, and the errors of checked predictions."""
        return [(*key, speed) for key, speed in self._observed.items()], list(self._errors)

    def restore(self, speeds: Iterable[tuple[str, str, float]], errors: Iterable[float]) -> None:
        """Take in the observations of an earlier predictor."""
        self._observed |= {(type_, kind): speed for type_, kind, speed in speeds if speed > 0}
        self._errors += errors

    def error(self) -> float:
        """Return the mean relative error of the checked predictions."""
        return statistics.fmean(self._errors) if self._errors else ERROR_PRIOR

    def _efficiency(self, task: TaskProfile) -> list[float]:
        """Observed speed against the roofline, on each kind where this task ran."""
        speeds = dict(task.steps_per_s)
        speeds |= {kind: v for (name, kind), v in self._observed.items() if name == task.type}
        return [
            speed * busy_times(task, self._devices[kind])[0]
            for kind, speed in sorted(speeds.items())
            if kind in self._devices
        ]
