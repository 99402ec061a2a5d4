"""All reasons of a waiting request, each with its numbers, and what would help."""

from __future__ import annotations

from dataclasses import replace

from shoal.tasks.admission import Admission
from shoal.tasks.backfill import Room
from shoal.tasks.reasons import Code, Numbers, Reason, Remedy
from shoal.tasks.requests import Ask, Waiting
from shoal.tasks.room import Needs, Offer, in_order, suitable
from shoal.units import counted, show_bytes, typed_bytes

NAMES_SHOWN = 5


def reasons(
    admission: Admission, request: str, now: float, place: int | None = None
) -> list[Reason]:
    """Return why a request waits: never nothing, as long as it does.

    Args:
        place: its place in line, if the caller knows it; from 1.
    """
    waiting = admission.waiting.get(request)
    if waiting is None:
        if request not in admission.holdings:
            raise KeyError(request)
        text = "it has its devices and starts"
        since_s = max(0.0, now - admission.holdings[request].since)
        return [Reason(Code.STARTING, text, {"since_s": since_s})]
    found = [*waiting.holds.values()]
    found += _of_the_pool(admission, waiting.ask, now)
    found += _of_the_owner(admission, waiting.ask)
    blocked = bool(found)
    ahead = (place if place is not None else position(admission, request, now)) - 1
    if ahead > 0 and not waiting.holds:
        others = "1 request goes" if ahead == 1 else f"{ahead} requests go"
        text = f"{others} first: {admission.rule.explain(ahead, waiting.ask)}"
        found.append(Reason(admission.rule.precedes, text, {"requests_ahead": ahead}))
    if not blocked:
        found += _on_the_way(admission, waiting, ahead, now)
    return found


def position(admission: Admission, request: str, now: float) -> int:
    """Return the place in line, from 1, among requests that are not held."""
    at_once = admission.place(request)
    if at_once is not None:
        return at_once
    place = 1
    for waiting in admission.in_turn(now):
        if waiting.ask.request == request:
            return place
        place += not waiting.holds
    raise KeyError(request)


def positions(admission: Admission, now: float) -> dict[str, int]:
    """Return the place of every waiting request."""
    found, place = {}, 1
    for waiting in admission.in_turn(now):
        found[waiting.ask.request] = place
        place += not waiting.holds
    return found


def _of_the_pool(admission: Admission, ask: Ask, now: float) -> list[Reason]:
    """Return what the devices lack. Thousands may wait for the same: it is worked out once for all."""
    seen, key = admission.room(now).base.seen, ("lack", ask.needs, admission.missing)
    if key not in seen:
        seen[key] = _lacks(admission, ask.needs, now)
    return [*seen[key]]


def _lacks(admission: Admission, needs: Needs, now: float) -> list[Reason]:
    found = []
    if admission.missing:
        names = _listed(list(admission.missing))
        text = f"the nodes of {names} do not answer"
        found.append(Reason(Code.DEVICES_MISSING, text, {"devices": len(admission.missing)}))
    if not admission.offers:
        missing = bool(admission.missing)
        return [*found, Reason(Code.NO_DEVICES, "the pool has no device now", {}, not missing)]
    usable = suitable(needs, admission.offers.values())
    able = [o for o in usable if o.could_hold(needs)]
    hopeless = not admission.missing
    if len(usable) < needs.devices:
        kind = f" of kind {needs.kind}" if needs.kind is not None else ""
        text = f"it needs {counted(needs.devices, 'device')}{kind}; the pool has {len(usable)}"
        numbers: Numbers = {"devices_needed": needs.devices, "devices": len(usable)}
        return [*found, Reason(Code.TOO_FEW_DEVICES, text, numbers, hopeless)]
    if len(able) < needs.devices:
        most = max(o.memory_bytes for o in usable)
        assert needs.memory_bytes is not None
        text = (
            f"it needs {show_bytes(needs.memory_bytes)} on {counted(needs.devices, 'device')}; "
            f"{len(able)} of "
            f"{len(usable)} are that large, the largest has {show_bytes(most)}"
        )
        numbers = {"memory_bytes": needs.memory_bytes, "largest_bytes": most, "devices": len(able)}
        return [*found, Reason(Code.TOO_LARGE, text, numbers, hopeless)]
    room = admission.room(now)
    if not room.choose(Ask("", "", needs)):
        found.append(_busy(room, needs, able))
    return found


def _busy(room: Room, needs: Needs, able: list[Offer]) -> Reason:
    free = [o for o in able if room.choose(Ask("", "", _only(needs, o)))]
    where = f"{needs.kind}: " if needs.kind is not None else ""
    wanted = f" with {show_bytes(needs.memory_bytes)}" if needs.memory_bytes is not None else ""
    text = f"{where}{len(free)} of {len(able)} devices{wanted} are free, it needs {needs.devices}"
    numbers: Numbers = {
        "devices_needed": needs.devices, "devices_free": len(free), "devices": len(able),
    }  # fmt: skip
    if needs.memory_bytes is not None:
        numbers["memory_bytes"] = needs.memory_bytes
        numbers["most_free_bytes"] = max(room.offers[o.number].free_bytes for o in able)
    return Reason(Code.BUSY, text, numbers)


def _of_the_owner(admission: Admission, ask: Ask) -> list[Reason]:
    over, found = admission.over_quota(ask), []
    quota = admission.quotas.get(ask.owner)
    if quota is None:
        return []
    devices, held_bytes = admission.held(ask.owner)
    if Code.QUOTA_DEVICES in over and quota.devices is not None:
        text = (
            f"{ask.owner} holds {devices} of {counted(quota.devices, 'device')}, this needs "
            f"{ask.needs.devices}"
        )
        numbers: Numbers = {
            "devices_held": devices, "devices_max": quota.devices,
            "devices_needed": ask.needs.devices,
        }  # fmt: skip
        never = ask.needs.devices > quota.devices
        found.append(Reason(Code.QUOTA_DEVICES, text, numbers, never))
    if Code.QUOTA_MEMORY in over and quota.memory_bytes is not None:
        asked = max(1, ask.needs.memory_bytes or 1) * ask.needs.devices
        text = (
            f"{ask.owner} holds {show_bytes(held_bytes)} of {show_bytes(quota.memory_bytes)}, this "
            f"needs {show_bytes(asked)}"
        )
        numbers = {
            "held_bytes": held_bytes, "max_bytes": quota.memory_bytes, "needed_bytes": asked,
        }  # fmt: skip
        found.append(Reason(Code.QUOTA_MEMORY, text, numbers, asked > quota.memory_bytes))
    return found


def _on_the_way(admission: Admission, waiting: Waiting, ahead: int, now: float) -> list[Reason]:
    """Return why a request waits for which there is room."""
    ask = waiting.ask
    if ask.by_plan and admission.planning.until > now:
        return [Reason(Code.PLACING, "there is room; the planner decides where it goes", {})]
    if waiting.not_before > now or ahead == 0:
        return [Reason(Code.PLACING, "there is room; its devices are being made ready", {})]
    text = "there is room, which is kept free for requests that go first"
    found = [Reason(Code.KEPT_FREE, text, {"requests_ahead": ahead})]
    if ask.limit_s is None:
        text = "it has no time limit, so it might delay them; with one it could go in between"
        found.append(Reason(Code.NO_LIMIT, text, {}))
    return found


# --- what would help -------------------------------------------------------------------------------


def remedies(admission: Admission, request: str, found: list[Reason], now: float) -> list[Remedy]:
    """Return what would help against these reasons."""
    waiting = admission.waiting.get(request)
    if waiting is None:
        return []
    ask, codes = waiting.ask, {reason.code for reason in found}
    helpful: list[Remedy] = []
    if Code.HELD in codes:
        helpful.append(Remedy("release it", f"shoal release {request}"))
    if Code.NO_RUNNER in codes:
        helpful.append(Remedy("start a runner for your tasks", "shoal runner"))
    if codes & {Code.BUSY, Code.TOO_FEW_DEVICES, Code.TOO_LARGE}:
        helpful += _less(admission, ask, now)
    if codes & {Code.NO_DEVICES, Code.TOO_FEW_DEVICES, Code.TOO_LARGE}:
        helpful.append(
            Remedy("a node with such devices; this prints its code", "shoal code --node")
        )
    if Code.DEVICES_MISSING in codes:
        helpful.append(Remedy("the silent nodes; this shows them", "shoal status"))
    if codes & {Code.QUOTA_DEVICES, Code.QUOTA_MEMORY}:
        if admission.held(ask.owner)[0]:
            helpful.append(Remedy(f"the end of another program of {ask.owner}"))
        helpful.append(Remedy("a larger quota: the pool's owner gives it with a new code"))
    if Code.NO_LIMIT in codes:
        helpful.append(
            Remedy("a time limit, to go in between", f"shoal why {request} --if limit=10m")
        )
    if Code.BUSY in codes:
        users = _users(admission, ask, now)
        if users:
            helpful.append(Remedy(f"the end of {_listed(users)}"))
    return helpful


def _less(admission: Admission, ask: Ask, now: float) -> list[Remedy]:
    """Return smaller requests that would fit now."""
    room, needs = admission.room(now), ask.needs
    seen, key = room.base.seen, ("less", needs)
    if key not in seen:
        seen[key] = _smaller(room, needs)
    fewer, most, others = seen[key]
    found = []
    if 0 < fewer < needs.devices:
        found.append(
            Remedy(f"fewer devices: {fewer}", f"shoal why {ask.request} --if devices={fewer}")
        )
    if needs.memory_bytes is not None and 0 < most < needs.memory_bytes:
        command = f"shoal why {ask.request} --if memory={typed_bytes(most)}"
        found.append(Remedy(f"less memory: {show_bytes(most)} of each device", command))
    if others:
        command = f"shoal why {ask.request} --if kind={others[0]}"
        found.append(Remedy(f"another kind: the pool has {_listed(others)}", command))
    return found


def _smaller(room: Room, needs: Needs) -> tuple[int, int, list[str]]:
    """Return on how many devices it would fit, with how much memory on all, and the other kinds."""
    open_to = [o for o in room.offers.values() if room.choose(Ask("", "", _only(needs, o)))]
    fewer = len(in_order(replace(needs, devices=1), open_to))
    usable, most, others = suitable(needs, room.offers.values()), 0, list[str]()
    if len(usable) >= needs.devices:
        most = sorted((o.free_bytes for o in usable), reverse=True)[needs.devices - 1]
    if needs.kind is not None:
        others = sorted({o.kind for o in room.offers.values()} - {o.kind for o in usable})
    return fewer, most, others


def _users(admission: Admission, ask: Ask, now: float) -> list[str]:
    """Return who holds devices that a request could use."""
    seen, key = admission.room(now).base.seen, ("users", ask.needs)
    if key not in seen:
        usable = {o.number for o in suitable(ask.needs, admission.offers.values())}
        seen[key] = [n for n, h in admission.holdings.items() if usable & h.shares_bytes.keys()]
    return [*seen[key]]


def _only(needs: Needs, offer: Offer) -> Needs:
    return replace(needs, devices=1, only=frozenset({offer.number}))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
