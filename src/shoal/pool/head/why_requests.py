"""Answers "why does it wait?" for leases and tasks that wait or run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from shoal.pool.base import limits
from shoal.pool.head.admitting import Admitting
from shoal.pool.head.placement import Request as LeaseRequest
from shoal.pool.head.placement import check
from shoal.pool.head.requests import Route, Routes
from shoal.pool.head.session_ends import Client
from shoal.pool.wire import admission_messages, messages
from shoal.pool.wire.roles import Principal, Role
from shoal.tasks.reasons import Code, Reason, Why
from shoal.tasks.room import Needs


class WhyRequests:
    """Args:
    task: returns request, state and reasons of the task that a member means, if there is one.
    """

    def __init__(
        self,
        admitting: Admitting,
        task: Callable[[Principal, str], tuple[str, str, list[Reason]] | None],
    ) -> None:
        self._admitting = admitting
        self._task = task

    def routes(self) -> Routes:
        return {admission_messages.AskWhy: Route(Role.USER, self._answer)}

    async def _answer(
        self, client: Client, ask: admission_messages.AskWhy
    ) -> admission_messages.WhyAnswer | messages.Refusal:
        name, admitting = ask.request, self._admitting
        task = self._task(client.principal, name)
        name, state, found = task or (name, "running", [])
        if admitting.waits(name):
            why = await self._explain(name, ask)
            own = [
                r for r in found if r.code in (Code.SUSPENDED, Code.PREEMPTING, Code.CANNOT_SUSPEND)
            ]
            why = msgspec.structs.replace(why, reasons=[*own, *why.reasons])
            return admission_messages.WhyAnswer(name, state if task else self._state(name), why)
        if state == "suspended":
            return admission_messages.WhyAnswer(name, state, Why(False, found, []))
        if admitting.knows(name) or (task is not None and state not in ("waiting", "held")):
            return admission_messages.WhyAnswer(name, state, Why(False, [], []))
        if task is not None:  # it was submitted a moment ago
            soon = Reason(Code.PLACING, "it takes its place in line at this moment")
            return admission_messages.WhyAnswer(name, state, Why(False, [soon], []))
        waiting = sorted(admitting.admission.waiting)[: limits.REASONS_SHOWN_MAX]
        known = f"these wait: {', '.join(waiting)}" if waiting else "nothing waits now"
        text = f"no request {name!r} waits or runs here; {known}"
        return messages.refusal(text, "no-such-task", ["shoal queue --all lists tasks"])

    def _state(self, name: str) -> str:
        """Return the state of a lease that waits."""
        return "held" if self._admitting.admission.waiting[name].holds else "waiting"

    async def _explain(self, name: str, ask: admission_messages.AskWhy) -> Why:
        waiting = self._admitting.admission.waiting[name]
        needs = _changed(waiting.ask.needs, ask)
        if needs is not None:
            check(LeaseRequest(needs.devices, needs.memory_bytes, needs.fraction, needs.kind))
        return await self._admitting.why(name, needs, ask.limit_s)


def _changed(needs: Needs, ask: admission_messages.AskWhy) -> Needs | None:
    """Return the needs with what `--if` changes; None: it changes nothing."""
    if ask.devices is None and ask.memory_bytes is None and ask.kind is None:
        return None
    changed = replace(needs, devices=ask.devices or needs.devices, kind=ask.kind or needs.kind)
    if ask.memory_bytes is not None:
        changed = replace(changed, memory_bytes=ask.memory_bytes, fraction=None)
    return changed
