"""What a request needs, what devices offer, and which devices it gets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: A request that names no memory books this, or a quarter of a smaller device.
FLOOR_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Needs:
    """What a request asks for. Equal needs are answered alike."""

    devices: int = 1
    memory_bytes: int | None = None  # of each device; None: what there is
    fraction: float | None = None  # of each device's memory, instead of memory_bytes
    kind: str | None = None  # "a100|v100": any of these, anywhere in the device's kind
    only: frozenset[int] | None = None  # device numbers to choose from; None: all
    alone: bool = False  # without another such request on its devices, unless the planner says so

    @property
    def asks_no_amount(self) -> bool:
        return self.memory_bytes is None and self.fraction is None


@dataclass(frozen=True, slots=True)
class Offer:
    """A device as placement sees it."""

    number: int
    name: str
    node: str
    kind: str
    memory_bytes: int
    free_bytes: int
    sessions: int
    elastic: bool = False  # its server lets sessions grow into what nobody booked

    @property
    def floor_bytes(self) -> int:
        """Return what is booked for a request that names no amount, where sessions are elastic."""
        return max(1, min(FLOOR_BYTES, self.memory_bytes // 4))

    def share_bytes(self, needs: Needs) -> int:
        """Return the bytes that a request would take of this device; 0 if they are not free."""
        if needs.fraction is not None:
            wanted = max(1, int(self.memory_bytes * needs.fraction))
        elif needs.memory_bytes is not None:
            wanted = needs.memory_bytes
        elif self.elastic:
            wanted = self.floor_bytes
        else:
            wanted = max(1, self.free_bytes)
        return wanted if wanted <= self.free_bytes else 0

    def could_hold(self, needs: Needs) -> bool:
        """Return whether the device has the memory, were it empty."""
        if needs.fraction is not None or needs.memory_bytes is None:
            return self.memory_bytes > 0
        return needs.memory_bytes <= self.memory_bytes


def kinds(text: str) -> list[str]:
    """Return the alternatives of "a100|v100", in lower case."""
    return [part.strip().lower() for part in text.split("|") if part.strip()]


def is_of_kind(kind: str, wanted: str | None) -> bool:
    """
    >>> is_of_kind("NVIDIA A100-SXM4-40GB", "a100|v100")
    True
    """
    return wanted is None or any(k in kind.lower() for k in kinds(wanted))


def suitable(needs: Needs, offers: Iterable[Offer]) -> list[Offer]:
    """Return the devices that a request may use at all, whatever is free on them."""
    return [
        o
        for o in offers
        if (needs.only is None or o.number in needs.only) and is_of_kind(o.kind, needs.kind)
    ]


def in_order(needs: Needs, offers: Iterable[Offer]) -> list[Offer]:
    """Return the offers with room for a share, the best first: fewest sessions, then most free."""
    fitting = (o for o in offers if o.share_bytes(needs) > 0)
    return sorted(fitting, key=lambda o: (o.sessions, -o.free_bytes, o.number))


def pick(count: int, fitting: Sequence[Offer]) -> list[Offer]:
    """Choose `count` of the offers, which are in order. Several of one node come before the same
    number from many, as their copies stay inside of it. Empty if there are too few."""
    if len(fitting) < count:
        return []
    by_node: dict[str, list[Offer]] = {}
    for offer in fitting:
        by_node.setdefault(offer.node, []).append(offer)
    whole = next((group for group in by_node.values() if len(group) >= count), fitting)
    return sorted(whole[:count], key=lambda o: o.number)
