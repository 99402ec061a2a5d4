"""A pool in simulated time around admission: what the head does, without the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.tasks.admission import Admission
from shoal.tasks.reasons import Reason
from shoal.tasks.requests import (
    Admit,
    Ask,
    Asked,
    Capacity,
    Ended,
    Expire,
    Granted,
    Held,
    Input,
    NotGranted,
    Output,
    Planned,
    Withdrawn,
)
from shoal.tasks.room import Offer
from shoal.tasks.rules import find


@dataclass
class Pool:
    """Books memory as the lease table does, and notes when each request started and ended."""

    rule: str
    devices: dict[int, Offer]
    now: float = 0.0
    started: dict[str, float] = field(default_factory=dict)
    over: dict[str, str] = field(default_factory=dict)  # how each request ended
    outputs: list[tuple[float, Output]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admission = Admission(find(self.rule))
        self.booked: dict[str, Mapping[int, int]] = {}
        self.step(Capacity(self.offers()))

    def offers(self) -> tuple[Offer, ...]:
        return tuple(
            replace(
                o,
                free_bytes=o.memory_bytes - sum(b.get(o.number, 0) for b in self.booked.values()),
                sessions=sum(o.number in b for b in self.booked.values()),
            )
            for o in self.devices.values()
        )

    def step(self, event: Input, *, refuse: bool = False) -> None:
        """Take in an event and answer what follows, `refuse`: the first admission fails."""
        todo = self.admission.step(event, self.now)
        while todo:
            output = todo.pop(0)
            self.outputs.append((self.now, output))
            if isinstance(output, Expire):
                self.end(output.request, "expired")
            elif refuse:
                refuse = False
                self.check_order(output.request)
                todo += self.admission.step(NotGranted(output.request), self.now)
            else:
                if not isinstance(event, Planned):
                    self.check_order(output.request)
                todo += self._grant(output)

    def check_order(self, request: str) -> None:
        """No request was admitted before one that is equal, came earlier and takes part."""
        admitted = self.admission.holdings[request].waiting
        assert admitted is not None
        for one in self.admission.waiting.values():
            if (
                not one.holds
                and one.not_before <= self.now
                and alike(one.ask) == alike(admitted.ask)
            ):
                assert one.asked > admitted.asked or one.number > admitted.number

    def _grant(self, admit: Admit) -> list[Output]:
        shares = dict(self.admission.holdings[admit.request].shares_bytes)
        assert tuple(shares) == admit.devices
        free = {o.number: o.free_bytes for o in self.offers()}
        assert all(0 < amount <= free[number] for number, amount in shares.items())
        assert admit.request not in self.started
        assert admit.request not in self.over
        self.started[admit.request] = self.now
        self.booked[admit.request] = shares
        more = self.admission.step(Granted(admit.request, shares), self.now)
        return more + self.admission.step(Capacity(self.offers()), self.now)

    def end(self, request: str, how: str) -> None:
        assert request not in self.over
        self.over[request] = how

    def ask(self, request: str, owner: str = "ana", **fields: object) -> None:
        self.step(Asked(Ask(request, owner, **fields)))  # type: ignore[arg-type]

    def finish(self, request: str) -> None:
        self.end(request, "ended")
        del self.booked[request]
        self.step(Capacity(self.offers()))
        self.step(Ended(request))

    def withdraw(self, request: str) -> None:
        self.end(request, "withdrawn")
        self.step(Withdrawn(request))

    def hold(self, request: str, reason: Reason) -> None:
        self.step(Held(request, reason))

    def plan(self, request: str, *devices: int) -> None:
        self.step(Planned(request, devices))


def alike(ask: Ask) -> tuple[object, ...]:
    return (
        ask.owner, ask.needs, ask.priority, ask.limit_s, ask.expected_s, ask.can_suspend, ask.by_plan
    )  # fmt: skip


def devices(*sizes: int, kind: str = "cpu", node: str = "n") -> dict[int, Offer]:
    return {i: Offer(i, f"d{i}", node, kind, size, size, 0) for i, size in enumerate(sizes)}
