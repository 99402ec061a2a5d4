"""How much of the devices each owner has used: device seconds that fade, with a half-life of a day."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

HALF_LIFE_S = 86400.0
SOON_S = 60.0
_FADE = math.log(2) / HALF_LIFE_S  # per second


@dataclass(slots=True)
class Use:
    """One owner's. `device_s` is as of `at`; `devices` are held since then."""

    device_s: float = 0.0
    at: float = 0.0
    devices: int = 0

    def now(self, now: float) -> float:
        fading = math.exp(-_FADE * max(0.0, now - self.at))
        return self.device_s * fading + self.devices * (1 - fading) / _FADE


@dataclass(slots=True)
class Uses:
    """
    >>> uses = Uses()
    >>> uses.hold("ana", 2, 0.0)
    >>> round(uses.of("ana", 10.0), 1)
    20.0
    """

    weights: dict[str, float] = field(default_factory=dict)
    _uses: dict[str, Use] = field(default_factory=dict)

    def of(self, owner: str, now: float) -> float:
        use = self._uses.get(owner)
        return use.now(now) if use is not None else 0.0

    def weight(self, owner: str) -> float:
        return self.weights.get(owner, 1.0)

    def hold(self, owner: str, devices: int, now: float) -> None:
        """Note that an owner holds so many devices more; fewer if that is negative."""
        use = self._uses.setdefault(owner, Use(at=now))
        use.device_s, use.at = use.now(now), max(now, use.at)
        use.devices += devices

    def copy(self) -> Uses:
        uses = {owner: replace(use) for owner, use in self._uses.items()}
        return Uses(dict(self.weights), uses)

    def soon(self, owner: str, now: float) -> float:
        """Return the use with the next minute of what is held: who has devices has had a turn."""
        use = self._uses.get(owner)
        return use.now(now) + SOON_S * use.devices if use is not None else 0.0

    def items(self, now: float) -> list[tuple[str, float]]:
        return [(owner, use.now(now)) for owner, use in self._uses.items()]

    def restore(self, known: Iterable[tuple[str, float, float]]) -> None:
        """Take over what an earlier head knew: owner, device seconds, and when that was."""
        for owner, device_s, at in known:
            self._uses[owner] = Use(device_s, at)
