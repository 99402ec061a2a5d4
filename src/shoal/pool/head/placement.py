"""Chooses the devices of a request: a pure function of what is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.pool.base import limits
from shoal.units import show_bytes


class LeaseRefused(Exception):
    """The request cannot be granted: all reasons, and whatever would help."""

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
    memory_bytes: int | None = None  # of each device; None: all that is free
    fraction: float | None = None  # of each device's memory, instead of memory_bytes
    kind: str | None = None  # "a100|v100": any of these, anywhere in the device's kind
    client: str = ""
    until: float | None = None  # in the caller's clock
    avoid: frozenset[int] = frozenset()  # session numbers that the client cannot take


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

    def share_bytes(self, request: Request) -> int:
        """Return the bytes that `request` would take of this device; 0 if they are not free."""
        if request.fraction is not None:
            wanted = max(1, int(self.memory_bytes * request.fraction))
        elif request.memory_bytes is not None:
            wanted = request.memory_bytes
        else:
            wanted = max(1, self.free_bytes)
        return wanted if wanted <= self.free_bytes else 0


def check(request: Request) -> None:
    """Refuse what no pool could grant."""
    if request.memory_bytes is not None and request.memory_bytes < 1:
        raise LeaseRefused(f"{request.memory_bytes} bytes were asked for. Ask for at least one.")
    if request.memory_bytes is not None and request.fraction is not None:
        raise LeaseRefused(
            "an amount of memory and a fraction were asked for. Ask for one of them."
        )
    if request.fraction is not None and not 0 < request.fraction <= 1:
        raise LeaseRefused(
            f"a fraction of {request.fraction} was asked for. Ask for more than 0 and at most 1."
        )
    if request.kind is not None and not kinds(request.kind):
        raise LeaseRefused(
            f"{request.kind!r} names no kind of device. Ask for example for 'a100|v100'."
        )


def kinds(text: str) -> list[str]:
    """Return the alternatives of "a100|v100", in lower case."""
    return [part.strip().lower() for part in text.split("|") if part.strip()]


def is_of_kind(kind: str, wanted: str | None) -> bool:
    """
    >>> is_of_kind("NVIDIA A100-SXM4-40GB", "a100|v100")
    True
    """
    return wanted is None or any(k in kind.lower() for k in kinds(wanted))


def choose(request: Request, offers: Sequence[Offer], silent: Sequence[str] = ()) -> list[Offer]:
    """The devices for `request`, by number. Those with fewest sessions and most free memory first;
    several of one node before the same number from many, as their copies stay inside of it.

    `silent` names devices that no lease gets now, because their node is silent.
    """
    check(request)
    if not 1 <= request.count <= limits.DEVICES_PER_LEASE_MAX:
        raise LeaseRefused(
            f"devices must be from 1 to {limits.DEVICES_PER_LEASE_MAX} (got {request.count})."
        )
    suitable = [o for o in offers if is_of_kind(o.kind, request.kind)]
    fitting = sorted(
        (o for o in suitable if o.share_bytes(request) > 0),
        key=lambda o: (o.sessions, -o.free_bytes, o.number),
    )
    if len(fitting) < request.count:
        raise _refused(request, offers, suitable, fitting, silent)
    together = [
        [o for o in fitting if o.node == node][: request.count]
        for node in dict.fromkeys(o.node for o in fitting)
    ]
    whole = next((group for group in together if len(group) == request.count), None)
    return sorted(whole or fitting[: request.count], key=lambda o: o.number)


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
    reasons = [f"{name}: its node is not heard of" for name in silent]
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
            found.append(f"less memory: memory={most_bytes}, which is {show_bytes(most_bytes)}")
    empty = [replace(o, free_bytes=o.memory_bytes, sessions=0) for o in suitable]
    if sum(o.share_bytes(request) > 0 for o in empty) >= request.count:
        used = [o.name for o in suitable if o.share_bytes(request) == 0 and o.sessions > 0]
        found.append(
            f"waiting until programs end that use {', '.join(used[: limits.REASONS_SHOWN_MAX])}"
        )
    if request.kind is not None:
        right = {o.number for o in suitable}
        others = [o for o in offers if o.number not in right and o.share_bytes(request) > 0]
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
