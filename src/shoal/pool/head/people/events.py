"""Events at the head: enrols, closes, draws, and opens what the result grants.

Every change is made on a copy, written, and only then seen: see `event_store`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from shoal.errors import ProtocolError
from shoal.people import draw
from shoal.people.event import Event, EventError, Settings
from shoal.people.rules import Condition, Facts
from shoal.pool.access import codes, screen_codes
from shoal.pool.access.codes import CodeError
from shoal.pool.base import limits
from shoal.pool.base.clock import Clock, Randomness
from shoal.pool.head.people.event_grants import EventGrants
from shoal.pool.head.people.event_store import EventStore, Grant, Kept
from shoal.pool.head.people.event_views import entry_of, info
from shoal.pool.head.requests import Changed, Route, Routes
from shoal.pool.head.session_ends import Client
from shoal.pool.head.store import StoreError
from shoal.pool.wire import people_messages as people
from shoal.pool.wire.roles import Principal, Role

_log = logging.getLogger(__name__)


class Events:
    """Args:
    facts: what the rules need to know of these members.
    devices_free: how many devices nobody holds.
    guest_token: makes the token of a guest of an event.
    join_code: makes the code with which a guest who was granted a place joins; "" if nobody can.
    notify: called after every change.
    """

    def __init__(
        self,
        store: EventStore,
        grants: EventGrants,
        clock: Clock,
        random: Randomness,
        facts: Callable[[list[str]], Mapping[str, Facts]],
        devices_free: Callable[[], int],
        guest_token: Callable[[str, str], str],
        join_code: Callable[[], Awaitable[str]],
        notify: Callable[[str], None],
    ) -> None:
        self._store = store
        self._grants = grants
        self._clock = clock
        self._random = random
        self._facts = facts
        self._devices_free = devices_free
        self._guest_token = guest_token
        self._join_code = join_code
        self._notify = notify
        self._kept = store.load()
        for kept in self._kept.values():
            grants.take_effect(kept)
        self._locks: dict[str, asyncio.Lock] = {}

    def routes(self) -> Routes:
        return {
            people.OpenEvent: Route(Role.ADMIN, self._open),
            people.ListEvents: Route(Role.GUEST, self._list),
            people.ShowEvent: Route(Role.GUEST, self._show),
            people.Enrol: Route(Role.GUEST, self._enrol),
            people.AskPlace: Route(Role.GUEST, self._ask),
            people.WithdrawPlace: Route(Role.GUEST, self._withdraw),
            people.Decide: Route(Role.ADMIN, self._decide),
            people.CloseEvent: Route(Role.ADMIN, self._close),
            people.DrawEvent: Route(Role.ADMIN, self._draw),
            people.CancelEvent: Route(Role.ADMIN, self._cancel),
            people.ShowScreen: Route(Role.ADMIN, self._screen),
            people.AskProof: Route(Role.GUEST, self._proof),
        }

    async def watch(self) -> None:
        """Close events whose condition is met, and make results that are due, for ever."""
        while True:
            await asyncio.sleep(limits.EVENT_TICK_S)
            now = self._clock.now()
            for event in self._grants.expire(now):
                self._notify(f"event {event}")
            for event in list(self._kept):
                try:
                    await self._tick(event, now)
                except (EventError, StoreError) as error:
                    _log.warning("event %s: %s", event, error)  # again at the next tick

    async def _tick(self, event: str, now: float) -> None:
        found = self._kept[event].event
        condition = found.met(now, self._devices_free() if found.state == "open" else 0)
        if condition is not None:
            await self._close_now(event, condition.text())
        elif found.due(now):
            await self._finish(event)
        await self._save_grants(event)

    def revoke(self, name: str) -> None:
        """Strike out a member who was revoked from every open event."""
        for event, kept in self._kept.items():
            if kept.event.state == "open" and name in kept.event.entrants:
                kept.revoke(name)  # the certificate is refused anyway, whatever the disk says
                self._notify(f"event {event}")

    # --- the state ---------------------------------------------------------------------------------

    def _find(self, event: str) -> Kept:
        found = self._kept.get(event)
        if found is None:
            raise ProtocolError(f"there is no event {event}. `shoal event list` shows all of them.")
        return found

    @asynccontextmanager
    async def _change(
        self, event: str, actor: str, action: str, detail: str, match: str = ""
    ) -> AsyncIterator[Kept]:
        """Give a copy to change. It is written, then seen by everybody; an error changes nothing."""
        async with self._locks.setdefault(event, asyncio.Lock()):
            before = self._find(event)
            if match not in ("", before.version):
                raise Changed(f'the event "{before.event.settings.title}"')
            after = before.copy()
            yield after
            await self._store.save(before, after, actor, action, detail, self._clock.now())
            self._kept[event] = after
        self._notify(f"event {event}")

    # --- requests ----------------------------------------------------------------------------------

    async def _open(self, client: Client, ask: people.OpenEvent) -> people.EventInfo:
        if (
            sum(k.event.state in ("open", "closed") for k in self._kept.values())
            >= limits.EVENTS_MAX
        ):
            raise ProtocolError(
                f"{limits.EVENTS_MAX} events are open, which is the limit. "
                "End some with: shoal event cancel"
            )
        draw.check_title(ask.title)
        now = self._clock.now()
        conditions = tuple(Condition(c.kind, c.value) for c in ask.conditions)
        for condition in conditions:
            if condition.kind == "time" and condition.value <= now:
                raise ProtocolError(f"the event would close in the past: {condition.text()}")
        settings = Settings(
            self._free_id(), ask.title, ask.places, ask.rule, conditions, ask.approval, now,
            ask.capacity, ask.devices, ask.memory_bytes, ask.minutes,
        )  # fmt: skip
        kept = Kept(Event(settings, self._hex(draw.SEED_BYTES)), bytes.fromhex(self._hex(32)))
        detail = f'{settings.event} "{ask.title}": {ask.places} place(s) by {ask.rule}'
        if ask.rule == "draw":
            detail += f"; commitment {kept.event.commitment}"
        await self._store.save(None, kept, client.name, "event open", detail, now)
        self._kept[settings.event] = kept
        await self._forget_old()
        self._notify(f"event {settings.event}")
        return self._info(client.principal, kept)

    def _hex(self, count: int) -> str:
        return self._random.text("0123456789abcdef", 2 * count)

    def _free_id(self) -> str:
        while (made := self._random.text(codes.SYMBOLS, screen_codes.EVENT)) in self._kept:
            pass
        return made

    async def _forget_old(self) -> None:
        if len(self._kept) <= limits.EVENTS_MAX:
            return
        over = next(e for e, k in self._kept.items() if k.event.state in ("done", "cancelled"))
        await self._store.forget(over)
        del self._kept[over]

    async def _list(self, client: Client, ask: people.ListEvents) -> people.EventList:
        newest = list(reversed(self._kept))
        if client.principal.event:
            newest = [client.principal.event]
        if ask.after is not None:
            self._find(ask.after)
            newest = newest[newest.index(ask.after) + 1 :]
        page = [
            self._info(client.principal, self._kept[e]) for e in newest[: limits.PEOPLE_ROWS_MAX]
        ]
        return people.EventList(page, len(newest) > len(page))

    async def _show(self, client: Client, ask: people.ShowEvent) -> people.EventInfo:
        if self._is_owed_a_code(client.principal, ask.event):
            await self._give_code(client.principal.name, ask.event)
        return self._info(client.principal, self._find(ask.event), ask.first)

    def _is_owed_a_code(self, who: Principal, event: str) -> bool:
        kept = self._find(event)
        outcome = kept.event.outcomes.get(who.name)
        granted = outcome is not None and outcome.ended == "granted"
        return who.event == event and granted and who.name not in kept.joins

    async def joined(self, code: str, name: str) -> None:
        """Give a newcomer the grant of the guest whose code it joined with."""
        for event, kept in list(self._kept.items()):
            for guest in [g for g, join in kept.joins.items() if join == code]:
                detail = f"{event}: {guest} joined as {name}"
                try:
                    async with self._change(event, name, "grant", detail) as after:
                        after.grants[guest] = Grant(name)
                except StoreError as error:  # the next head finds it with the member's row
                    _log.warning("event %s: %s", event, error)
                self._grants.take_effect(self._find(event))
                await self._save_grants(event)

    async def _give_code(self, name: str, event: str) -> None:
        """Make a guest's join code when the guest looks: it does not expire before it is seen."""
        async with self._change(event, "head", "code", f"{event}: for {name}") as kept:
            if name not in kept.joins:
                made = await self._join_code()
                if made:
                    kept.joins[name] = made

    async def _enrol(self, client: Client, ask: people.Enrol) -> people.Enrolled:
        try:
            typed = screen_codes.parse(ask.code)
        except CodeError as error:
            raise ProtocolError(str(error)) from None
        now = self._clock.now()
        kept = self._kept.get(typed.event)
        verdict = screen_codes.judge(typed, kept.secret if kept else bytes(32), now)
        if kept is not None and verdict == "expired":
            raise ProtocolError("the screen shows another code by now; scan or type that one.")
        if kept is None or verdict != "good":
            if kept is not None:
                kept.event.wrong_codes += (
                    1  # written with the next change: losing some does not matter
                )
            raise ProtocolError("the code is wrong. Type the one that the screen shows now.")
        return await self._enrol_in(client.principal, typed.event, ask.name, now)

    async def _enrol_in(
        self, who: Principal, event: str, wished: str, now: float
    ) -> people.Enrolled:
        if who.event and who.event != event:
            raise ProtocolError("this browser is a guest of another event; use a private window")
        is_guest = not who.may(Role.USER)
        token = ""
        async with self._locks.setdefault(event, asyncio.Lock()):
            before = self._find(event)
            name = who.name
            if is_guest and not who.event:
                name = self._grants.free_name(wished, before.event.entrants)
            after = before.copy()
            entrant = after.event.enrol(name, not is_guest, now)
            if name not in before.event.entrants:
                detail = f"{event}: {name} is {entrant.standing}"
                await self._store.save(before, after, name, "enrol", detail, now)
                self._kept[event] = after
            if is_guest and not who.event:
                token = self._guest_token(event, name)
        self._notify(f"event {event}")
        settings = after.event.settings
        commitment = after.event.commitment if settings.rule == "draw" else ""
        return people.Enrolled(event, settings.title, name, entrant.standing, commitment, token)

    def _entrant_name(self, who: Principal, event: str) -> str:
        if not who.name:
            raise ProtocolError("enter the code of the event's screen first")
        if who.event and who.event != event:
            raise ProtocolError("this browser is a guest of another event; use a private window")
        return who.name

    async def _ask(self, client: Client, ask: people.AskPlace) -> people.Receipt:
        name = self._entrant_name(client.principal, ask.event)
        async with self._change(ask.event, name, "request", f"{ask.event}: {name}") as kept:
            receipt = kept.event.ask(name, ask.own, self._clock.now(), ask.minutes)
        commitment = kept.event.commitment if kept.event.settings.rule == "draw" else ""
        return people.Receipt(ask.event, receipt, commitment)

    async def _withdraw(self, client: Client, ask: people.WithdrawPlace) -> people.EventInfo:
        name = self._entrant_name(client.principal, ask.event)
        async with self._change(ask.event, name, "withdraw", f"{ask.event}: {name}") as kept:
            kept.event.withdraw(name)
        return self._info(client.principal, kept)

    async def _decide(self, client: Client, ask: people.Decide) -> people.EventInfo:
        action = "approve" if ask.approve else "refuse"
        detail = f"{ask.event}: {ask.name}, {ask.tickets} ticket(s)"
        async with self._change(ask.event, client.name, action, detail, ask.match) as kept:
            kept.event.decide(ask.name, ask.approve, ask.tickets)
        return self._info(client.principal, kept)

    async def _close(self, client: Client, ask: people.CloseEvent) -> people.EventInfo:
        await self._close_now(ask.event, client.name, ask.match)
        return self._info(client.principal, self._find(ask.event))

    async def _draw(self, client: Client, ask: people.DrawEvent) -> people.EventInfo:
        if self._find(ask.event).event.state == "open":
            await self._close_now(ask.event, client.name, ask.match)
        elif ask.match not in ("", self._find(ask.event).version):
            raise Changed(f'the event "{self._find(ask.event).event.settings.title}"')
        if self._find(ask.event).event.state != "done":
            await self._finish(ask.event)
        return self._info(client.principal, self._find(ask.event))

    async def _cancel(self, client: Client, ask: people.CancelEvent) -> people.EventInfo:
        what = "event cancel"
        async with self._change(ask.event, client.name, what, ask.event, ask.match) as kept:
            kept.event.cancel()
        return self._info(client.principal, kept)

    async def _screen(self, client: Client, ask: people.ShowScreen) -> people.Screen:
        kept = self._find(ask.event)
        now = self._clock.now()
        code = screen_codes.write(ask.event, kept.secret, now)
        return people.Screen(code, screen_codes.valid_for_s(now))

    async def _proof(self, client: Client, ask: people.AskProof) -> people.ProofText:
        return people.ProofText(self._find(ask.event).event.proof().text())

    # --- close and result --------------------------------------------------------------------------

    async def _close_now(self, event: str, by: str, match: str = "") -> None:
        found = self._find(event).event
        holders = self._grants.holders(found)
        facts = self._facts(list(found.requests))
        async with self._change(event, by, "event close", event, match) as kept:
            kept.event.close(self._clock.now(), by, facts, holders)
        done = self._find(event).event
        if done.due(self._clock.now()):
            await self._finish(event)

    async def _finish(self, event: str) -> None:
        """Make the result, and open what it grants, in one transaction."""
        async with self._change(event, "head", "event done", event) as kept:
            if kept.event.state == "done":
                return
            loop = asyncio.get_running_loop()
            outcomes = await loop.run_in_executor(None, kept.event.finish)
            self._grants.open(kept, [o for o in outcomes if o.ended == "granted"])
        self._grants.take_effect(self._find(event))
        await self._save_grants(event)

    async def _save_grants(self, event: str) -> None:
        """Write which grants of an event began: what is kept for whom, and until when."""
        began = self._grants.unsaved(event)
        if not began:
            return
        detail = f"{event}: {', '.join(sorted(began))}"[: limits.TEXT_CHARS_MAX]
        async with self._change(event, "head", "grant", detail) as kept:
            kept.grants.update(began)
        self._grants.saved(event, began)

    def _info(self, who: Principal, kept: Kept, first: int = 0) -> people.EventInfo:
        return info(kept, first, entry_of(kept, who, self._grants), self._grants)
