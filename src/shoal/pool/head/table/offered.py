"""What is made of the lease table, and made again only where the table has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.pool.head.table.parts import Device
from shoal.tasks.offer_index import OfferIndex
from shoal.tasks.room import Offer


@dataclass(slots=True)
class Offered:
    """The index of present devices, and which devices have changed."""

    version: int = 0  # grows with every change of a device
    versions: dict[int, int] = field(default_factory=dict)  # of the last change, by device
    ended: set[int] = field(default_factory=set)  # leases, since the last `drain`
    _changed: set[int] = field(default_factory=set)  # devices, likewise
    _index: OfferIndex = field(default_factory=OfferIndex)
    _stale: set[int] = field(default_factory=set)  # devices whose offers are to be made again
    _silent: tuple[str, ...] | None = None

    def touch(self, number: int) -> None:
        """Note that something of a device has changed."""
        self.version += 1
        self.versions[number] = self.version
        self._changed.add(number)
        self._stale.add(number)

    def drain(self) -> tuple[set[int], set[int]]:
        """Return the devices that have changed, and the leases that have ended, since the last call."""
        changed, self._changed = self._changed, set()
        ended, self.ended = self.ended, set()
        return changed, ended

    def index(self, offer: Callable[[int], Offer | None]) -> OfferIndex:
        """Return the index. `offer` tells what a device offers; None: it is not there."""
        for number in self._stale:
            found = offer(number)
            if found is None:
                self._index.remove(number)
            else:
                self._index.put(found)
        self._stale.clear()
        return self._index

    def presence_changed(self) -> None:
        self._silent = None

    def silent(self, devices: Mapping[int, Device]) -> tuple[str, ...]:
        """Return the names of devices whose nodes are silent."""
        if self._silent is None:
            self._silent = tuple(d.name for d in devices.values() if not d.present)
        return self._silent
