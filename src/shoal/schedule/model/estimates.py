"""The throughput table that policies read, from profiles."""

from __future__ import annotations

import numpy as np

from shoal.schedule.model.device_profile import DeviceProfile
from shoal.schedule.model.predictor import Predictor, TaskProfile, busy_shares
from shoal.schedule.model.throughputs import Throughputs


def throughputs(
    tasks: list[TaskProfile], devices: list[DeviceProfile], predictor: Predictor
) -> Throughputs:
    """The table that policies read, from what is known of tasks on one device of each kind."""
    kinds = {device.kind: device for device in devices}
    shape = (len(tasks), len(kinds))
    alone, memory_bytes, busy = np.zeros(shape), np.zeros(shape), np.zeros((*shape, 2))
    for row, task in enumerate(tasks):
        for place, device in enumerate(kinds.values()):
            alone[row, place] = predictor.predict(task, device).steps_per_s
            memory_bytes[row, place] = task.memory_bytes()
            busy[row, place] = busy_shares(task, device)
    rows = [(task.type, 1) for task in tasks]
    return Throughputs(tuple(kinds), rows, alone, memory_bytes, busy, source="profiles")
