"""Loss scaling for float16, whose small gradients would become zero.

Shoal multiplies the loss by a scale before the backward pass and divides the gradients by it after the
exchange. If a gradient is not finite, the scale is too large, and the step is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from shoal.train.group.devices import Reading


@dataclass(slots=True)
class LossScale:
    """The scale, with the initial values of torch's GradScaler. Pure.

    >>> scale = LossScale()
    >>> scale.learn(overflowed=True)
    >>> scale.value
    32768.0
    """

    value: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000  # steps without an overflow before the scale grows
    _good: int = 0

    def learn(self, overflowed: bool) -> None:
        """Learn whether a gradient of a step was not finite."""
        self._good = 0 if overflowed else self._good + 1
        if overflowed:
            self.value *= self.backoff
        elif self._good == self.interval:
            self.value *= self.growth
            self._good = 0


def unscale(parameters: Iterable[nn.Parameter], scale: float) -> float:
    """Divide gradients by the scale, in place, and wait for them. Return how many devices found one
    that is not finite."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_device.setdefault(parameter.device, []).append(parameter.grad)
    found = []
    with torch.no_grad():
        for device, grads in by_device.items():
            bad = torch.zeros((), device=device)
            inverse = torch.full((), 1 / scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, bad, inverse)
            found.append(Reading(bad))
    return sum(reading.value() for reading in found)
