"""Which devices a request gets: a pure function of what is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.pool.limits import DEVICES_PER_LEASE_MAX


class LeaseRefused(Exception):
    """The request cannot be granted; the text says why and what would help."""


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
        """What `request` would take of this device; 0 if that is not free."""
        if request.fraction is not None:
            wanted = max(1, int(self.memory_bytes * request.fraction))
        elif request.memory_bytes is not None:
            wanted = request.memory_bytes
        else:
            wanted = max(1, self.free_bytes)
        return wanted if wanted <= self.free_bytes else 0


def check(request: Request) -> None:
    """Refuses what no pool could grant."""
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
    """The alternatives of "a100|v100", in lower case."""
    return [part.strip().lower() for part in text.split("|") if part.strip()]


def is_of_kind(kind: str, wanted: str | None) -> bool:
    """
    >>> is_of_kind("NVIDIA A100-SXM4-40GB", "a100|v100")
    True
    """
    return wanted is None or any(k in kind.lower() for k in kinds(wanted))


def choose(request: Request, offers: Sequence[Offer]) -> list[Offer]:
    """The devices for `request`, by number. Those with fewest sessions and most free memory first;
    several of one node before the same number from many, as their copies stay inside of it.
    """
    check(request)
    if request.count > DEVICES_PER_LEASE_MAX:
        raise LeaseRefused(
            f"{request.count} devices were asked for; a lease has at most {DEVICES_PER_LEASE_MAX}. "
            "Ask for fewer."
        )
    suitable = [o for o in offers if is_of_kind(o.kind, request.kind)]
    if request.count < 1 or request.count > len(suitable):
        raise LeaseRefused(_too_few(request, offers, suitable))
    fitting = sorted(
        (o for o in suitable if o.share_bytes(request) > 0),
        key=lambda o: (o.sessions, -o.free_bytes, o.number),
    )
    if len(fitting) < request.count:
        raise LeaseRefused(_too_little(request, suitable, len(fitting)))
    together = [
        [o for o in fitting if o.node == node][: request.count]
        for node in dict.fromkeys(o.node for o in fitting)
    ]
    whole = next((group for group in together if len(group) == request.count), None)
    return sorted(whole or fitting[: request.count], key=lambda o: o.number)


def _too_few(request: Request, offers: Sequence[Offer], suitable: Sequence[Offer]) -> str:
    if request.kind is None:
        return (
            f"{request.count} devices were asked for, the pool has {len(offers)}. Ask for fewer, "
            "or start the pool with more."
        )
    there = ", ".join(sorted({o.kind for o in offers})) or "no device"
    return (
        f"{request.count} device(s) of kind {request.kind} were asked for, the pool has "
        f"{len(suitable)} of that kind (it has: {there}). Ask for another kind or for fewer."
    )


def _too_little(request: Request, suitable: Iterable[Offer], fitting: int) -> str:
    if request.fraction is not None:
        wanted = f"{request.fraction:.0%} of their memory"
    elif request.memory_bytes is not None:
        wanted = f"{request.memory_bytes} bytes"
    else:
        wanted = "any memory"
    free = ", ".join(f"{o.name}: {o.free_bytes} of {o.memory_bytes} bytes free" for o in suitable)
    return (
        f"{request.count} device(s) with {wanted} free were asked for, {fitting} have that ({free}). "
        "Ask for less memory, or wait until another program ends."
    )
