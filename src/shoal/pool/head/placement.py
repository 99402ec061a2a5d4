"""Chooses the devices of a request: a pure function of what is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.pool.base import limits
from shoal.tasks.room import Needs, Offer, in_order, is_of_kind, kinds, pick
from shoal.units import show_bytes, typed_bytes


class LeaseRefused(Exception):
    """The request cannot be granted: all reasons, and whatever would help."""

    final = False  # True: other devices, or more of them, would change nothing

    def __init__(
        self, summary: str, reasons: Sequence[str] = (), unblock: Sequence[str] = ()
    ) -> None:
        super().__init__(summary)
        self.summary, self.reasons, self.unblock = summary, list(reasons), list(unblock)

    def __str__(self) -> str:
        lines = [self.summary, *_listed(self.reasons)]
        if self.unblock:
            lines += ["what would help:", *_listed(self.unblock)]
        return "\n".join(lines)


def _listed(texts: Sequence[str]) -> list[str]:
    more = len(texts) - limits.REASONS_SHOWN_MAX
    shown = [f"  - {text}" for text in texts[: limits.REASONS_SHOWN_MAX]]
    return [*shown, f"  - and {more} more"] if more > 0 else shown


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for."""

    count: int = 1
    memory_bytes: int | None = None  # of each device; None: what there is, from a floor up
    fraction: float | None = None  # of each device's memory, instead of memory_bytes
    kind: str | None = None  # "a100|v100": any of these, anywhere in the device's kind
    client: str = ""
    until: float | None = None  # in the caller's clock
    avoid: frozenset[int] = frozenset()  # session numbers that the client cannot take
    owner: str = ""  # whose quota counts; "": the client's own
    only: frozenset[int] | None = None  # device numbers to choose from; None: all
    reservation: str = ""  # what the table reserved under this key is for this request

    @property
    def accountable(self) -> str:
        return self.owner or self.client

    @property
    def needs(self) -> Needs:
        return Needs(self.count, self.memory_bytes, self.fraction, self.kind, self.only)


def check(request: Request) -> None:
    """Refuse what no pool could grant."""
    if request.memory_bytes is not None and request.memory_bytes < 1:
        raise LeaseRefused(f"memory must be at least 1 byte (got {request.memory_bytes}).")
    if request.memory_bytes is not None and request.fraction is not None:
        raise LeaseRefused(
            "the request has an amount of memory and a fraction. Ask for one of them."
        )
    if request.fraction is not None and not 0 < request.fraction <= 1:
        raise LeaseRefused(
            f"a fraction of memory must be above 0 and at most 1 (got {request.fraction})."
        )
    if request.kind is not None and not kinds(request.kind):
        raise LeaseRefused(
            f"{request.kind!r} names no kind of device. Ask for example for 'a100|v100'."
        )
    if not 1 <= request.count <= limits.DEVICES_PER_LEASE_MAX:
        raise LeaseRefused(
            f"devices must be from 1 to {limits.DEVICES_PER_LEASE_MAX} (got {request.count})."
        )


def choose(request: Request, offers: Sequence[Offer], silent: Sequence[str] = ()) -> list[Offer]:
    """The devices for `request`, by number. Those with fewest sessions and most free memory first;
    several of one node before the same number from many, as their copies stay inside of it.

    `silent` names devices that no lease gets now, because their node is silent.
    """
    check(request)
    if request.only is not None:
        offers = [o for o in offers if o.number in request.only]
    suitable = [o for o in offers if is_of_kind(o.kind, request.kind)]
    fitting = in_order(request.needs, suitable)
    if len(fitting) < request.count:
        raise _refused(request, offers, suitable, fitting, silent)
    return pick(request.count, fitting)


# --- refusals --------------------------------------------------------------------------------------


def _refused(
    request: Request,
    offers: Sequence[Offer],
    suitable: Sequence[Offer],
    fitting: Sequence[Offer],
    silent: Sequence[str],
) -> LeaseRefused:
    """Return a refusal with the reason for every device, and what would change it."""
    asked, were = (
        ("1 device", "was") if request.count == 1 else (f"{request.count} devices", "were")
    )
    if len(suitable) < request.count:
        kind = f" of kind {request.kind}" if request.kind is not None else ""
        of_kind = " of that kind" if kind else ""
        summary = f"{asked}{kind} {were} asked for, the pool has {len(suitable)}{of_kind}."
    else:
        wanted = f"{asked} with {_wanted(request)} free"
        summary = f"{wanted} {were} asked for; of {len(suitable)}, {len(fitting)} have that."
    reasons = [f"{name}: its node does not answer" for name in silent]
    right = {o.number for o in suitable}
    enough = {o.number for o in fitting}
    for offer in offers:
        if offer.number not in right:
            reasons.append(f"{offer.name}: its kind is {offer.kind}, not {request.kind}")
        elif offer.number not in enough:
            reasons.append(f"{offer.name}: {_free(offer)}")
    return LeaseRefused(summary, reasons, _remedies(request, offers, suitable, fitting, silent))


def _wanted(request: Request) -> str:
    if request.fraction is not None:
        return f"{request.fraction:.0%} of their memory"
    return "any memory" if request.memory_bytes is None else show_bytes(request.memory_bytes)


def _free(offer: Offer) -> str:
    free = f"{show_bytes(offer.free_bytes)} of {show_bytes(offer.memory_bytes)} free"
    if offer.sessions == 0:
        return f"{free}, and nobody uses it"
    return f"{free}; {offer.sessions} session(s) hold the rest"


def _remedies(
    request: Request,
    offers: Sequence[Offer],
    suitable: Sequence[Offer],
    fitting: Sequence[Offer],
    silent: Sequence[str],
) -> list[str]:
    found = []
    if fitting:
        found.append(f"fewer devices: devices={len(fitting)}")
    if len(suitable) >= request.count:
        most_bytes = sorted((o.free_bytes for o in suitable), reverse=True)[request.count - 1]
        if most_bytes > 0:
            found.append(f'less memory: memory="{typed_bytes(most_bytes)}"')
    empty = [replace(o, free_bytes=o.memory_bytes, sessions=0) for o in suitable]
    if sum(o.share_bytes(request.needs) > 0 for o in empty) >= request.count:
        used = [o.name for o in suitable if o.share_bytes(request.needs) == 0 and o.sessions > 0]
        found.append(
            f"waiting until programs end that use {', '.join(used[: limits.REASONS_SHOWN_MAX])}"
        )
    if request.kind is not None:
        right = {o.number for o in suitable}
        others = [o for o in offers if o.number not in right and o.share_bytes(request.needs) > 0]
        if len(others) + len(fitting) >= request.count:
            kinds_there = sorted({o.kind for o in others})
            found.append(
                f"another kind: the pool has {', '.join(kinds_there[: limits.REASONS_SHOWN_MAX])}"
            )
    if silent:
        found.append("the silent nodes: `shoal status` shows them")
    if len(suitable) < request.count or not found:
        what = "more devices" if len(suitable) < request.count else "larger devices"
        found.append(f"a pool with {what}: shoal up --device … --device …, or shoal node")
    return found
