"""Estimate and bound of a waiting request: admission itself, run ahead on a copy.

The estimate lets everything that holds devices end when it probably does, and nobody else come. The
bound is the same without the others in line, and with ends that are as early as they can be.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median

import msgspec

from shoal.tasks import explain_wait
from shoal.tasks.admission import Admission
from shoal.tasks.reasons import Bound, Code, Estimate, Reason, Remedy, Why
from shoal.tasks.requests import Admit, Ask, Ended, Granted, Withdrawn
from shoal.tasks.room import Needs
from shoal.tasks.rules.rule import UNKNOWN_S

#: After so many admissions the rest of the line is taken to go on as fast.
ADMISSIONS_MAX = 200
ERRORS_KEPT = 40
FREE = "nobody else waits or comes, and programs end by their limits"
UNKNOWN = "; those without a limit may end at any moment"


@dataclass(slots=True)
class Errors:
    """How far past estimates were off."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=ERRORS_KEPT))
    _given: dict[str, tuple[float, float]] = field(default_factory=dict)  # when, and the start

    def given(self, request: str, now: float, start: float) -> None:
        """Note the first estimate of a request that a person or program saw."""
        self._given.setdefault(request, (now, start))

    def started(self, request: str, now: float) -> float | None:
        """Note when a request started. Return how far its estimate was off: 0.1 is a tenth."""
        given = self._given.pop(request, None)
        if given is None:
            return None
        waited_s = max(1.0, now - given[0])
        ratio = abs(now - given[1]) / waited_s
        self.ratios.append(ratio)
        return ratio

    def forget(self, request: str) -> None:
        self._given.pop(request, None)

    @property
    def ratio(self) -> float | None:
        return round(median(self.ratios), 3) if self.ratios else None


def why(
    admission: Admission, request: str, now: float, errors: Errors, needs: Needs | None = None,
    limit_s: float | None = None,
) -> Why:  # fmt: skip
    """Explain a waiting request; with `needs` or `limit_s`, as if it had asked for these.

    >>> why(admission, "lease-7", now, errors).reasons[0].code  # doctest: +SKIP
    <Code.BUSY: 'busy'>
    """
    if (needs is not None or limit_s is not None) and request in admission.waiting:
        planning, admission = admission.planning, admission.copy()
        admission.planning = planning  # the reasons are those of now
        ask = admission.waiting[request].ask
        admission.change(
            request, replace(ask, needs=needs or ask.needs, limit_s=limit_s or ask.limit_s)
        )
    found = explain_wait.reasons(admission, request, now)
    never = any(reason.never for reason in found)
    estimate = bound = None
    if not never:
        start = estimate_start(admission, request, now)
        if start is not None:
            end = _end(admission, request, start, probable=True)
            estimate = Estimate(start, end, errors.ratio)
            bound = _bound(admission, request, now)
    return Why(never, found, explain_wait.remedies(admission, request, found, now), estimate, bound)


def dry_run(
    admission: Admission, ask: Ask, holds: Iterable[Reason], now: float, errors: Errors
) -> Why:
    """Explain a request that nobody has made. Without a reason it would start at once."""
    supposed = admission.copy()
    supposed.planning = admission.planning
    supposed.suppose(ask, holds, now)
    found = why(supposed, ask.request, now, errors)
    reasons = [reason for reason in found.reasons if reason.code is not Code.PLACING]
    # It has no name to type yet.
    unblock = [
        Remedy(one.text) if ask.request in (one.command or "") else one for one in found.unblock
    ]
    return msgspec.structs.replace(found, reasons=reasons, unblock=unblock)


def estimate_start(admission: Admission, request: str, now: float) -> float | None:
    """Return when a request probably starts, if nobody else comes. None: nobody knows."""
    waiting = admission.waiting.get(request)
    if waiting is None:
        return now
    if waiting.holds:
        return None
    place = explain_wait.position(admission, request, now)
    return _run_ahead(admission.copy(), request, now, place, probable=True)


def _bound(admission: Admission, request: str, now: float) -> Bound | None:
    alone = admission.copy()
    for other in list(alone.waiting):
        if other != request:
            alone.drop(other)
    start = _run_ahead(alone, request, now, 1, probable=False)
    if start is None:
        return None
    unknown = any(h.ask.limit_s is None and h.until is None for h in alone.holdings.values())
    return Bound(start, _end(admission, request, start), FREE + (UNKNOWN if unknown else ""))


def _end(
    admission: Admission, request: str, start: float, *, probable: bool = False
) -> float | None:
    one = admission.waiting.get(request) or admission.holdings.get(request)
    lasts_s = None
    if one is not None:
        lasts_s = one.ask.estimated_s if probable else one.ask.lasts_s
    return None if lasts_s is None else start + lasts_s


def _run_ahead(
    ahead: Admission, request: str, now: float, place: int, *, probable: bool
) -> float | None:
    """Run a copy ahead until it admits the request. Return when that is."""
    at, admitted = now, 0
    for waiting in list(ahead.waiting.values()):  # what may be tried again soon may be tried now
        if waiting.not_before > now:
            ahead.change(waiting.ask.request, waiting.ask)
    outputs = ahead.step(Withdrawn(""), at)
    while True:
        for output in outputs:
            if isinstance(output, Admit):
                if output.request == request:
                    return at
                admitted += 1
                shares = ahead.holdings[output.request].shares_bytes
                ahead.step(Granted(output.request, shares), at)
        if admitted >= ADMISSIONS_MAX:
            return at + (at - now) * max(0, place - admitted) / admitted
        if not ahead.holdings:
            return None
        name, at = _next_end(ahead, at, probable=probable)
        if math.isinf(at):
            return None
        ahead.free(ahead.holdings[name].shares_bytes)
        outputs = ahead.step(Ended(name), at)


def _next_end(ahead: Admission, at: float, *, probable: bool) -> tuple[str, float]:
    ends: Iterable[tuple[float, str]] = (
        (h.expected_end(at, UNKNOWN_S) if probable else h.ends(at), name)
        for name, h in ahead.holdings.items()
    )
    end, name = min(ends)
    return name, end
