"""Events as people see them: everything public, and what the asker has in them."""

from __future__ import annotations

from itertools import islice

from shoal.pool.base import limits
from shoal.pool.head.people.event_grants import EventGrants
from shoal.pool.head.people.event_store import Kept
from shoal.pool.wire import people_messages as people
from shoal.pool.wire.roles import Principal


def entry_of(kept: Kept, who: Principal, grants: EventGrants) -> people.OwnEntry | None:
    """Return what somebody has in an event; None if that is nothing."""
    event = kept.event
    name = who.name
    if not name or (who.event and who.event != event.settings.event):
        return None
    entrant, request = event.entrants.get(name), event.requests.get(name)
    if entrant is None and request is None:
        return None
    outcome = event.outcomes.get(name)
    return people.OwnEntry(
        name,
        entrant.standing if entrant else None,
        event.receipt(name) if request else "",
        request.own if request else "",
        outcome.ended if outcome else None,
        outcome.reason if outcome else "",
        outcome.rank if outcome else 0,
        "" if name in kept.grants else kept.joins.get(name, ""),
        grants.info(kept, name),
    )


def _person(kept: Kept, name: str, grants: EventGrants) -> people.PersonInfo:
    event = kept.event
    entrant, outcome = event.entrants.get(name), event.outcomes.get(name)
    return people.PersonInfo(
        name,
        entrant is None or entrant.member,  # only a member can ask without being enrolled
        entrant.standing if entrant else None,
        entrant.tickets if entrant else 1,
        name in event.requests,
        outcome.ended if outcome else None,
        outcome.reason if outcome else "",
        outcome.rank if outcome else 0,
        grants.state(kept, name),
    )


def info(
    kept: Kept, first: int, mine: people.OwnEntry | None, grants: EventGrants
) -> people.EventInfo:
    """Return an event with a page of its people: entrants first, then who asked from outside."""
    event, settings = kept.event, kept.event.settings
    is_draw = settings.rule == "draw"
    outside = [n for n in event.requests if n not in event.entrants]
    names = [*event.entrants, *outside]
    page = list(islice(names, first, first + limits.PEOPLE_ROWS_MAX))
    return people.EventInfo(
        settings.event, settings.title, settings.rule, settings.places, settings.terms().closes,
        settings.approval, settings.capacity, settings.devices, settings.memory_bytes,
        settings.minutes, settings.opened_at, event.state, event.closed_at, event.closed_by,
        len(event.entrants), sum(e.standing == "waiting" for e in event.entrants.values()),
        len(event.requests), len(event.entries), len(event.struck_out), event.wrong_codes,
        event.commitment if is_draw else "", event.list_hash if is_draw else "",
        event.seed if is_draw and event.state == "done" else "",
        event.winners[: limits.PEOPLE_ROWS_MAX], [_person(kept, name, grants) for name in page],
        len(names) > first + len(page), mine, kept.version,
    )  # fmt: skip
