"""Which running tasks give their devices to a more urgent one that waits. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.tasks.requests import Ask
from shoal.tasks.room import Offer, in_order, pick, suitable


@dataclass(frozen=True, slots=True)
class Runs:
    """A task with devices. `movable`: it can be suspended in place, or asked to yield."""

    ask: Ask
    key: tuple[float, ...]  # its place by the rule: lower goes first
    shares_bytes: Mapping[int, int]  # by device
    movable: bool


def make_room(
    ask: Ask, key: tuple[float, ...], offers: Mapping[int, Offer], runs: Sequence[Runs]
) -> list[Runs]:
    """Return what has to stop so that a waiting request has room; empty: nothing would make room.

    Only tasks of a lower priority stop, and only those that the rule puts behind. The fewest do, the
    least urgent first.

    >>> low = Runs(Ask("low", "ana", Needs()), (9.0,), {0: 100}, movable=True)
    >>> device = Offer(0, "gpu-0", "node", "a100", 100, 0, 1)
    >>> [r.ask.request for r in make_room(Ask("big", "ben", priority=1), (1.0,), {0: device}, [low])]
    ['low']
    """
    behind = [r for r in runs if r.movable and r.ask.priority < ask.priority and r.key > key]
    behind.sort(key=lambda r: (r.ask.priority, [-k for k in r.key]))
    stops: dict[int, list[Runs]] = {}
    freed: list[Offer] = []
    for offer in suitable(ask.needs, offers.values()):
        found = _on_device(ask, offer, [r for r in runs if offer.number in r.shares_bytes], behind)
        if found is not None:
            stops[offer.number], room = found
            freed.append(replace(room, sessions=len(stops[offer.number])))  # the fewest first
    chosen = pick(ask.needs.devices, in_order(ask.needs, freed))
    wanted = {r.ask.request: r for offer in chosen for r in stops[offer.number]}
    return list(wanted.values())


def _on_device(
    ask: Ask, offer: Offer, there: Sequence[Runs], behind: Sequence[Runs]
) -> tuple[list[Runs], Offer] | None:
    """Return what stops on one device, and what it then offers; None: there is no room even so."""
    able = [r for r in behind if r in there]
    stop: list[Runs] = []
    if ask.needs.alone:
        stop = [r for r in able if r.ask.needs.alone]
        if any(r.ask.needs.alone for r in there if r not in stop):
            return None
    room = offer
    for runs in [*stop, *(r for r in able if r not in stop)]:
        if runs not in stop:
            if room.share_bytes(ask.needs):
                break
            stop.append(runs)
        free = min(room.memory_bytes, room.free_bytes + runs.shares_bytes[offer.number])
        room = replace(room, free_bytes=free)
    return (stop, room) if room.share_bytes(ask.needs) else None
