"""What owners hold, and whether their quotas allow more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.pool.access.codes import Quota
from shoal.pool.head.placement import LeaseRefused
from shoal.pool.head.table.parts import Granted
from shoal.units import show_bytes


class Quotas(dict[str, Quota]):
    """The quota of each owner that has one."""

    def __init__(self, quotas: Mapping[str, Quota] | None = None) -> None:
        super().__init__(quotas or {})
        self._changed = set(self)

    def __setitem__(self, owner: str, quota: Quota) -> None:
        super().__setitem__(owner, quota)
        self._changed.add(owner)

    def drain(self) -> set[str]:
        """Return the owners whose quotas have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed


@dataclass(slots=True)
class Owned:
    """Counts what each owner holds, so that no request adds it up."""

    _held: dict[str, tuple[int, int]] = field(default_factory=dict)  # devices and bytes, by owner
    _aside_bytes: dict[str, int] = field(default_factory=dict)  # of suspended leases, by owner

    def count(self, granted: Granted, sign: int, *, aside: bool = False) -> None:
        """Add a lease (1), or take it out (-1). What is aside is suspended."""
        owner, total = granted.accountable, sum(s.memory_bytes for s in granted.shares)
        if aside:
            self._aside_bytes[owner] = self._aside_bytes.get(owner, 0) + sign * total
            if not self._aside_bytes[owner]:
                del self._aside_bytes[owner]
            return
        devices, held = self.of(owner)
        self._held[owner] = (devices + sign * len(granted.shares), held + sign * total)
        if not self._held[owner][0]:
            del self._held[owner]

    def of(self, owner: str) -> tuple[int, int]:
        """Return how many devices and bytes an owner holds; what is suspended does not count."""
        return self._held.get(owner, (0, 0))

    def check(self, owner: str, quota: Quota | None, devices: int, memory_bytes: int) -> None:
        """Raise LeaseRefused if so much more is over the quota."""
        over = self.over(owner, quota, devices, memory_bytes)
        if over is not None:
            raise over

    def over(
        self, owner: str, quota: Quota | None, devices: int, memory_bytes: int
    ) -> LeaseRefused | None:
        """Return why an owner may not hold so much more; None: it may."""
        if quota is None:
            return None
        held, held_bytes = self.of(owner)
        devices, total = held + devices, held_bytes + memory_bytes
        reasons = []
        if quota.devices is not None and devices > quota.devices:
            reasons.append(
                f"{owner} may hold {quota.devices} device(s) at once and would hold {devices}"
            )
        if quota.memory_bytes is not None and total > quota.memory_bytes:
            reasons.append(
                f"{owner} may hold {show_bytes(quota.memory_bytes)} at once and would hold "
                f"{show_bytes(total)}"
            )
        if not reasons:
            return None
        unblock = ["the end of another program of yours"] if held else []
        unblock += ["asking for less", "a larger quota: the pool's owner gives it with a new code"]
        return LeaseRefused(f"the quota of {owner} does not allow this.", reasons, unblock)

    def left_bytes(self, owner: str, quota: Quota | None) -> int:
        """Return how much more memory an owner may hold."""
        if quota is None or quota.memory_bytes is None:
            return 2**63
        held_bytes = self.of(owner)[1] + self._aside_bytes.get(owner, 0)
        return max(0, quota.memory_bytes - held_bytes)
