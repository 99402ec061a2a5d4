"""Answers "why does it wait?" for leases and tasks that wait or run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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
    task: returns request and state of the task that a member means by a text, if there is one.
    """

    def __init__(
        self, admitting: Admitting, task: Callable[[Principal, str], tuple[str, str] | None]
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
        name, state = task or (name, "running")
        if admitting.waits(name):
            return await self._explain(name, ask)
        if state == "suspended":
            text = "others go first; its memory is on the host, and its program waits"
            found = [Reason(Code.SUSPENDED, text)]
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

    async def _explain(
        self, name: str, ask: admission_messages.AskWhy
    ) -> admission_messages.WhyAnswer:
        waiting = self._admitting.admission.waiting[name]
        needs = _changed(waiting.ask.needs, ask)
        if needs is not None:
            check(LeaseRequest(needs.devices, needs.memory_bytes, needs.fraction, needs.kind))
        why = await self._admitting.why(name, needs, ask.limit_s)
        return admission_messages.WhyAnswer(name, "held" if waiting.holds else "waiting", why)


def _changed(needs: Needs, ask: admission_messages.AskWhy) -> Needs | None:
    """Return the needs with what `--if` changes; None: it changes nothing."""
    if ask.devices is None and ask.memory_bytes is None and ask.kind is None:
        return None
    changed = replace(needs, devices=ask.devices or needs.devices, kind=ask.kind or needs.kind)
    if ask.memory_bytes is not None:
        changed = replace(changed, memory_bytes=ask.memory_bytes, fraction=None)
    return changed
