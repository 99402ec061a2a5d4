"""What the lease table holds and reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Device:
    """One device of the pool."""

    number: int
    name: str
    memory_bytes: int
    kind: str = ""
    node: str = ""
    elastic: bool = False  # its server lets sessions grow into what nobody booked
    context_bytes: int = 0  # that each session but one takes on top: an accelerator's context
    present: bool = True  # False: its node is silent; sessions may run, new ones do not start


@dataclass(frozen=True, slots=True)
class Share:
    """A session's part of a device."""

    device: int
    session: int
    memory_bytes: int  # booked: it always gets so much
    limit_bytes: int = 0  # of an elastic share: it may grow to this where nobody booked it

    @property
    def part(self) -> tuple[int, int]:
        """What tells it from all others that are held: sessions are of a whole lease."""
        return self.device, self.session


@dataclass(frozen=True, slots=True)
class Granted:
    lease: int
    epoch: int  # grows with every lease: a holder that comes back late has a lower one
    shares: tuple[Share, ...]
    client: str = ""
    until: float | None = None  # in the caller's clock
    owner: str = ""  # whose quota counts; "": the client's own

    @property
    def accountable(self) -> str:
        return self.owner or self.client


@dataclass(frozen=True, slots=True)
class Held:
    """What a device server says it has a grant or a worker for."""

    device: int
    session: int
    lease: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Shares that a lease no longer has. `ended`: they were its last."""

    lease: int
    shares: tuple[Share, ...]
    ended: bool
