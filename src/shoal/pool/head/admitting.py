"""The head's shell around admission: keeps it in step with the lease table, and carries out its word.

Waiting leases and tasks come here by `add`. When a request is admitted, its `book` is called: it books
the devices in the lease table (a lease, or a reservation) and returns what it booked, or None if that
failed; then the request waits again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shoal.pool.base import limits
from shoal.pool.base.clock import Clock
from shoal.pool.base.histogram import Histogram
from shoal.pool.head.leases import Granted, LeaseTable
from shoal.tasks import explain_wait, forecast, requests
from shoal.tasks.admission import Admission
from shoal.tasks.reasons import Code, Reason, Why
from shoal.tasks.requests import Ask, Input, Output
from shoal.tasks.room import Needs
from shoal.tasks.rules import DEFAULT, find

_log = logging.getLogger(__name__)

#: Books devices for an admitted request. Returns bytes by device number; None: it did not work.
Book = Callable[[tuple[int, ...]], Mapping[int, int] | None]


class Memory(Protocol):
    """What admission must not forget when the head ends: in the store."""

    def uses(self) -> list[tuple[str, float, float]]: ...
    def save_uses(self, uses: Sequence[tuple[str, float]], now: float) -> None: ...
    def estimate_errors(self) -> list[float]: ...
    def add_estimate_error(self, ratio: float) -> None: ...


@dataclass(slots=True)
class _Asker:
    book: Book
    expired: Callable[[], None]


class Admitting:
    """Times are Unix time: estimates are shown to people.

    Call `changed` after every change of the lease table; it is cheap to call often.
    """

    def __init__(
        self, table: LeaseTable, memory: Memory, clock: Clock, rule: str = DEFAULT
    ) -> None:
        self.admission = Admission(find(rule))
        self.errors = forecast.Errors()
        self.waited = Histogram()  # from the request to its devices
        self._table = table
        self._memory = memory
        self._clock = clock
        self._askers: dict[str, _Asker] = {}
        self._leases: dict[int, str] = {}  # requests that hold leases, by lease
        # Devices of which admission believes what the table may not say.
        self._doubtful: set[int] = set()
        self._todo: list[Output] = []  # outputs that were not carried out yet: none may be dropped
        self._busy = False  # outputs are being carried out
        self._due = False  # … and something has changed meanwhile
        self._saved = 0.0
        self._places: dict[str, int] = {}
        self._places_at = 0.0  # monotonic
        self.admission.uses.restore(memory.uses())
        self.errors.ratios.extend(memory.estimate_errors())

    # --- requests ----------------------------------------------------------------------------------

    def add(
        self, ask: Ask, book: Book, expired: Callable[[], None], holds: tuple[Reason, ...] = ()
    ) -> None:
        """Take in a request. `book` may be called before this returns."""
        self._askers[ask.request] = _Asker(book, expired)
        self._todo += self._synchronize()
        self._carry_out(requests.Asked(ask, holds))

    def hold(self, request: str, reason: Reason) -> None:
        """Let a waiting request take no part; it may have one hold of each code."""
        self._carry_out(requests.Held(request, reason))

    def release(self, request: str, code: Code = Code.HELD) -> None:
        self._carry_out(requests.Released(request, code))

    def withdraw(self, request: str) -> None:
        """Forget a request that waits or was admitted."""
        self._askers.pop(request, None)
        self.errors.forget(request)
        self._carry_out(requests.Withdrawn(request))

    def ended(self, request: str) -> None:
        """Note that a request gave back what it had booked."""
        self._askers.pop(request, None)
        self._todo += self._synchronize()
        self._carry_out(requests.Ended(request))

    def holds_lease(self, request: str, lease: int) -> None:
        """Note that what a request booked is a lease: it ends with that."""
        self._leases[lease] = request

    def restore(self, granted: Granted) -> None:
        """Take over a lease of an earlier head."""
        request = f"lease-{granted.lease}"
        shares = {share.device: share.memory_bytes for share in granted.shares}
        ask = Ask(request, granted.accountable, Needs(len(shares)))
        self._doubtful.update(shares)
        self._leases[granted.lease] = request
        self.admission.step(
            requests.Granted(request, shares, granted.until, ask), self._clock.now()
        )

    def place(self, request: str, devices: tuple[int, ...]) -> bool:
        """Admit a waiting request on these devices, as a plan says. Return whether that worked."""
        self._carry_out(requests.Planned(request, devices))
        return request in self.admission.holdings

    def leave_to_planner(
        self, until: float, idle: Iterable[int] = (), placed: Iterable[str] = ()
    ) -> None:
        """Let a planner decide until then. The rule fills idle devices with what has no place."""
        self._carry_out(requests.Planning(until, frozenset(idle), frozenset(placed)))

    def holds_now(self, request: str, shares: Mapping[int, int]) -> None:
        """Note what an admitted request holds now: nothing while it is suspended."""
        if request in self.admission.holdings:
            self._doubtful.update(shares)
            self.admission.step(requests.Granted(request, shares), self._clock.now())
        self._carry_out(None)

    def line_up_again(self, ask: Ask, book: Book) -> None:
        """Let an admitted request wait again: it was suspended. `book` lets it go on."""
        self._askers[ask.request] = _Asker(book, lambda: None)
        self._todo += self._synchronize()
        self._carry_out(requests.Returned(ask))

    def expect(self, request: str, end: float) -> None:
        """Note when a request that has devices will probably give them back. It decides nothing."""
        holding = self.admission.holdings.get(request)
        if holding is not None:
            holding.ask = replace(holding.ask, probably_s=max(0.0, end - holding.since))

    def adopt(self, ask: Ask, shares: Mapping[int, int]) -> None:
        """Take over a request that holds devices since an earlier head."""
        self._doubtful.update(shares)
        self.admission.step(requests.Granted(ask.request, shares, None, ask), self._clock.now())
        self._carry_out(None)

    # --- the lease table ---------------------------------------------------------------------------

    def changed(self) -> None:
        """Look at the table again: devices came or went, leases ended, quotas changed."""
        self._carry_out(None)

    def tick(self) -> None:
        """Time has passed. Call it about once a second."""
        self._carry_out(requests.Tick())
        now = self._clock.now()
        if now - self._saved >= limits.USES_SAVE_S:
            self._saved = now
            self._memory.save_uses(self.admission.uses.items(now), now)

    def _synchronize(self) -> list[Output]:
        """Show admission what has changed in the table."""
        now, admission = self._clock.now(), self.admission
        outputs: list[Output] = []
        for owner in self._table.quotas.drain():
            quota = self._table.quotas[owner]
            outputs += admission.step(requests.Quota(owner, quota.devices, quota.memory_bytes), now)
        changed, ended = self._table.offered.drain()
        fresh, gone = [], []
        for number in sorted(changed | self._doubtful):
            offer, known = self._table.offer(number), admission.offers.get(number)
            if offer is None and known is not None:
                gone.append(number)
            elif offer is not None and offer != known:
                fresh.append(offer)
        self._doubtful.clear()
        missing = self._table.silent
        if fresh or gone or missing != admission.missing:
            outputs += admission.step(requests.Capacity(tuple(fresh), tuple(gone), missing), now)
        for lease in ended:
            request = self._leases.pop(lease, None)
            if request is not None:
                self._askers.pop(request, None)
                outputs += admission.step(requests.Ended(request), now)
        return outputs

    def _carry_out(self, event: Input | None) -> None:
        """Step, and do what follows. What changes meanwhile is looked at when that is done."""
        if self._busy:
            if event is not None:
                # Only from inside of `book` or `expired`; they end or withdraw requests at most.
                self._later(event)
            self._due = True
            return
        self._busy = True
        try:
            self._todo += self._synchronize()
            if event is not None:
                self._todo += self.admission.step(event, self._clock.now())
            while self._todo or self._due:
                if not self._todo:
                    self._due = False
                    self._todo += self._synchronize()
                    continue
                self._todo += self._do(self._todo.pop(0))
        finally:
            self._busy = False

    def _later(self, event: Input) -> None:
        with contextlib.suppress(RuntimeError):  # no loop: a test without one
            asyncio.get_running_loop().call_soon(self._carry_out, event)

    def _do(self, output: Output) -> list[Output]:
        now, request = self._clock.now(), output.request
        asker = self._askers.get(request)
        if isinstance(output, requests.Expire):
            self._askers.pop(request, None)
            self.errors.forget(request)
            if asker is not None:
                asker.expired()
            return []
        shares = asker.book(output.devices) if asker is not None else None
        if shares is None:
            if asker is None:
                return self.admission.step(requests.Withdrawn(request), now)
            return self.admission.step(requests.NotGranted(request), now)
        holding = self.admission.holdings.get(request)
        if holding is not None and holding.waiting is not None:
            self.waited.add(max(0.0, now - holding.waiting.asked))
        ratio = self.errors.started(request, now)
        if ratio is not None:
            self._memory.add_estimate_error(ratio)
        self._doubtful.update(shares)
        outputs = self.admission.step(requests.Granted(request, shares), now)
        return outputs + self._synchronize()

    def longest_wait_s(self) -> float:
        """Return how long the oldest request has waited."""
        now = self._clock.now()
        return max((now - one.asked for one in self.admission.waiting.values()), default=0.0)

    # --- why ---------------------------------------------------------------------------------------

    def knows(self, request: str) -> bool:
        return request in self.admission.waiting or request in self.admission.holdings

    def waits(self, request: str) -> bool:
        return request in self.admission.waiting

    def position(self, request: str) -> int:
        """Return the place in line of a waiting request, from 1."""
        return explain_wait.position(self.admission, request, self._clock.now())

    def positions(self) -> dict[str, int]:
        """Return the place of every waiting request: cheaper than one by one."""
        return explain_wait.positions(self.admission, self._clock.now())

    def recent_position(self, request: str) -> int:
        """Return a place in line as of at most a second ago: for many that are shown theirs."""
        at_once = self.admission.place(request)
        if at_once is not None:
            return at_once
        now = self._clock.monotonic()
        if now - self._places_at > 1.0 or request not in self._places:
            self._places, self._places_at = self.positions(), now
        return self._places[request]

    def why_without_estimate(self, request: str, place: int) -> Why:
        """Explain a waiting request at once, without running ahead."""
        now = self._now()
        found = explain_wait.reasons(self.admission, request, now, place)
        never = any(reason.never for reason in found)
        return Why(never, found, explain_wait.remedies(self.admission, request, found, now))

    def _now(self) -> float:
        """Return the time in whole seconds: what is free is worked out once for all who ask."""
        return float(int(self._clock.now()))

    def reasons(self, request: str, place: int | None = None) -> list[Reason]:
        return explain_wait.reasons(self.admission, request, self._now(), place)

    async def dry_run(self, ask: Ask, holds: Sequence[Reason]) -> Why:
        """Explain a request that nobody has made, as if it came now."""
        now, frozen = self._clock.now(), self.admission.copy()
        frozen.planning = self.admission.planning
        return await asyncio.to_thread(forecast.dry_run, frozen, ask, holds, now, self.errors)

    async def why(
        self, request: str, needs: Needs | None = None, limit_s: float | None = None
    ) -> Why:
        """Explain a request, in a thread: it runs admission ahead. KeyError: it is not known."""
        if not self.knows(request):
            raise KeyError(request)
        now, frozen = self._clock.now(), self.admission.copy()
        frozen.planning = self.admission.planning
        errors = forecast.Errors(self.errors.ratios.copy())
        found = await asyncio.to_thread(forecast.why, frozen, request, now, errors, needs, limit_s)
        asked_as_is = needs is None and limit_s is None
        if found.estimate is not None and asked_as_is and self.waits(request):
            self.errors.given(request, now, found.estimate.start)
        return found
