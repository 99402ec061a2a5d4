"""Messages of people: events, and what somebody with a browser may ask."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.people.draw import PLACES_MAX, PROOF_BYTES_MAX, TICKETS_MAX, TITLE_CHARS_MAX
from shoal.people.event import ENTRANTS_MAX, Approval, Ended, Standing, State
from shoal.people.rules import Kind, Rule
from shoal.pool.base.limits import HISTORY_SHOWN_MAX, PEOPLE_ROWS_MAX
from shoal.pool.wire.message_fields import Count, Name, Text

EventId = Annotated[str, Meta(max_length=16)]
Title = Annotated[str, Meta(max_length=TITLE_CHARS_MAX)]
Hash = Annotated[str, Meta(max_length=64)]
Minutes = Annotated[float, Meta(gt=0, le=7 * 24 * 60)]
Rows = Annotated[int, Meta(ge=0, le=ENTRANTS_MAX)]


class EventCondition(msgspec.Struct, frozen=True):
    """Closes an event: at a Unix time, with so many free devices, or with so many requests."""

    kind: Kind
    value: Annotated[float, Meta(ge=0, le=1e11)]


class OpenEvent(msgspec.Struct, frozen=True, tag=True):
    """Admin → head: open an event."""

    title: Title
    places: Annotated[int, Meta(ge=1, le=PLACES_MAX)]
    rule: Rule = "draw"
    conditions: Annotated[list[EventCondition], Meta(max_length=8)] = []
    approval: Approval = "everyone"
    capacity: Annotated[int, Meta(ge=1, le=ENTRANTS_MAX)] = ENTRANTS_MAX
    devices: Annotated[int, Meta(ge=1, le=32)] = 1
    memory_bytes: Count | None = None  # of each device
    minutes: Minutes = 60.0


class ListEvents(msgspec.Struct, frozen=True, tag=True):
    """Anybody → head: which events are there? The newest first; `after` is the last one of a page."""

    after: EventId | None = None


class ShowEvent(msgspec.Struct, frozen=True, tag=True):
    """Anybody → head: how is this event? `first` is the first row of its people."""

    event: EventId
    first: Rows = 0


class Enrol(msgspec.Struct, frozen=True, tag=True):
    """Anybody → head: I see this code. A guest, who is no member, also says a name."""

    code: Name
    name: Name = ""


class AskPlace(msgspec.Struct, frozen=True, tag=True):
    """Anybody → head: I want a place. `own` is 16 bytes of the entrant's, in hex."""

    event: EventId
    own: Name
    minutes: Minutes | None = None


class WithdrawPlace(msgspec.Struct, frozen=True, tag=True):
    """Entrant → head: I do not want a place any more."""

    event: EventId


class Decide(msgspec.Struct, frozen=True, tag=True):
    """Admin → head: approve or refuse an entrant."""

    event: EventId
    name: Name
    approve: bool = True
    tickets: Annotated[int, Meta(ge=1, le=TICKETS_MAX)] = 1
    match: Hash = ""  # the version that the sender saw; empty: any


class CloseEvent(msgspec.Struct, frozen=True, tag=True):
    """Admin → head: fix the list now."""

    event: EventId
    match: Hash = ""  # the version that the sender saw; empty: any


class DrawEvent(msgspec.Struct, frozen=True, tag=True):
    """Admin → head: make the result now, and close first if need be."""

    event: EventId
    match: Hash = ""  # the version that the sender saw; empty: any


class CancelEvent(msgspec.Struct, frozen=True, tag=True):
    """Admin → head: end it without a result."""

    event: EventId
    match: Hash = ""  # the version that the sender saw; empty: any


class ShowScreen(msgspec.Struct, frozen=True, tag=True):
    """Admin → head: which code does the screen show now?"""

    event: EventId


class AskProof(msgspec.Struct, frozen=True, tag=True):
    """Anybody → head: how can I check this draw?"""

    event: EventId


EventRequest = (
    OpenEvent | ListEvents | ShowEvent | Enrol | AskPlace | WithdrawPlace | Decide | CloseEvent
    | DrawEvent | CancelEvent | ShowScreen | AskProof
)  # fmt: skip


#: A guest has a code to join with; devices are waited for, kept, or free for others again.
GrantState = Literal["join", "waiting", "open", "over"]


class GrantInfo(msgspec.Struct, frozen=True):
    """What an entrant who was granted a place has of the pool."""

    state: GrantState
    holder: Name = ""  # the member who has it; for a guest, who joined with its code
    devices: Annotated[list[Name], Meta(max_length=32)] = []  # kept for the holder
    until: float | None = None  # Unix time
    reasons: Annotated[list[Text], Meta(max_length=16)] = []  # why it waits


class PersonInfo(msgspec.Struct, frozen=True):
    """Somebody who is enrolled for an event, or asked for a place, or both."""

    name: Name
    member: bool
    standing: Standing | None  # None: not enrolled
    tickets: Count
    asked: bool
    ended: Ended | None = None
    reason: Name = ""  # of a struck-out request
    rank: Count = 0  # from 1; 0: none
    grant: GrantState | None = None  # of a granted place


class OwnEntry(msgspec.Struct, frozen=True):
    """What the asker has in this event."""

    name: Name
    standing: Standing | None
    receipt: Hash = ""  # of the request; empty: none
    own: Name = ""
    ended: Ended | None = None
    reason: Name = ""
    rank: Count = 0
    join: Text = ""  # a guest's join code; for a browser `shoal join CODE@HOST`
    grant: GrantInfo | None = None  # of a granted place


class EventTerms(msgspec.Struct, frozen=True):
    """What was decided when an event opened; nothing of it changes later."""

    event: EventId
    title: Title
    rule: Rule
    places: Count
    closes: Text
    approval: Approval
    capacity: Count
    devices: Count
    memory_bytes: Count | None
    minutes: float
    opened_at: float  # Unix time


class EventInfo(EventTerms, frozen=True, tag=True):
    """Head → anybody: like this."""

    state: State
    closed_at: float | None
    closed_by: Name
    enrolled: Count
    waiting: Count  # for approval
    requests: Count  # M
    remaining: Count  # N, once it is closed
    struck_out: Count  # M - N, once it is closed
    wrong_codes: Count
    commitment: Hash = ""  # of a draw
    list_hash: Hash = ""  # of a draw that is closed
    seed: Hash = ""  # of a draw that is done
    winners: Annotated[list[Name], Meta(max_length=PEOPLE_ROWS_MAX)] = []  # the first of them
    people: Annotated[list[PersonInfo], Meta(max_length=PEOPLE_ROWS_MAX)] = []
    more: bool = False  # more people follow this page
    mine: OwnEntry | None = None
    version: Hash = ""  # changes with the state, the people and their requests


class EventList(msgspec.Struct, frozen=True, tag=True):
    """Head → anybody: these."""

    events: Annotated[list[EventInfo], Meta(max_length=PEOPLE_ROWS_MAX)]
    more: bool = False


class Enrolled(msgspec.Struct, frozen=True, tag=True):
    """Head → entrant: you are associated with this event."""

    event: EventId
    title: Title
    name: Name
    standing: Standing
    commitment: Hash
    token: Name = ""  # a guest's, told once


class Receipt(msgspec.Struct, frozen=True, tag=True):
    """Head → entrant: keep this to check the draw."""

    event: EventId
    receipt: Hash
    commitment: Hash


class Screen(msgspec.Struct, frozen=True, tag=True):
    """Head → admin: show this."""

    code: Name
    valid_s: float  # until the screen shows another one


class ProofText(msgspec.Struct, frozen=True, tag=True):
    """Head → anybody: check it with `shoal draw verify`."""

    text: Annotated[str, Meta(max_length=PROOF_BYTES_MAX)]


EventAnswer = EventInfo | EventList | Enrolled | Receipt | Screen | ProofText

TokenScope = Literal["read", "full"]


class MakeTicket(msgspec.Struct, frozen=True, tag=True):
    """Member → head: a browser shall be signed in for me. The ticket is good once, for a minute."""


class Ticket(msgspec.Struct, frozen=True, tag=True):
    """Head → member: put it behind the # of the dashboard's address."""

    ticket: Name
    web: Text  # the dashboard's address; empty: none is known


class MakeToken(msgspec.Struct, frozen=True, tag=True):
    """Member → head: a token for a program that speaks HTTP."""

    label: Name
    scope: TokenScope = "read"
    ttl_s: Annotated[float, Meta(ge=1, le=366 * 86400)] = 30 * 86400.0


class Token(msgspec.Struct, frozen=True, tag=True):
    """Head → member: the only time that it is told."""

    token: Name
    expires: float  # Unix time


class ListTokens(msgspec.Struct, frozen=True, tag=True):
    """Member → head: which tokens and browser sessions are mine? An admin sees everybody's."""


class TokenInfo(msgspec.Struct, frozen=True):
    token_id: Name
    owner: Name
    label: Name
    kind: Name  # "token" or "browser"
    scope: TokenScope
    made: float  # Unix time
    expires: float  # Unix time


class TokenList(msgspec.Struct, frozen=True, tag=True):
    """Head → member: these."""

    tokens: Annotated[list[TokenInfo], Meta(max_length=PEOPLE_ROWS_MAX)]


class RevokeToken(msgspec.Struct, frozen=True, tag=True):
    """Member → head: end this token or browser session. An admin may end everybody's."""

    token_id: Name


class ApproveBrowser(msgspec.Struct, frozen=True, tag=True):
    """Member → head: the browser that shows these six digits is mine; sign it in."""

    digits: Annotated[str, Meta(max_length=6)]


AccessRequest = MakeTicket | MakeToken | ListTokens | RevokeToken | ApproveBrowser
AccessAnswer = Ticket | Token | TokenList


class WebAsk(msgspec.Struct, frozen=True, tag=True):
    """Web process → head: the bearer of this token asks that. `body` is a message of a client."""

    token: Name  # "" of a stranger
    body: Annotated[bytes, Meta(max_length=64 * 1024)]


class WebSignIn(msgspec.Struct, frozen=True, tag=True):
    """Web process → head: a browser shows this ticket, or the claim that it asked for."""

    ticket: Name


class WebClaim(msgspec.Struct, frozen=True, tag=True):
    """Web process → head: a browser asks to be signed in by a member."""


class WebClaimed(msgspec.Struct, frozen=True, tag=True):
    """Head → web process: show these digits; the browser keeps the claim."""

    digits: Name
    claim: Name


class WebWho(msgspec.Struct, frozen=True, tag=True):
    """Web process → head: whose token is this?"""

    token: Name


class WebPerson(msgspec.Struct, frozen=True, tag=True):
    """Head → web process: this person's. `token` is new after a sign-in."""

    name: Name
    role: Name
    scope: TokenScope
    expires: float  # Unix time
    event: Name = ""  # of a guest
    token: Name = ""


class WebSignOut(msgspec.Struct, frozen=True, tag=True):
    """Web process → head: the bearer of this token signs out."""

    token: Name


class WebWatch(msgspec.Struct, frozen=True, tag=True):
    """Web process → head: answer when something has changed since `version`, or after a while."""

    version: Count
    web: Text = ""  # where the dashboard is


class WebChange(msgspec.Struct, frozen=True, tag=True):
    """Head → web process: look again."""

    version: Count
    topics: Annotated[list[Name], Meta(max_length=16)]
    access: Count  # grows when a token or session ends


WebRequest = WebAsk | WebSignIn | WebClaim | WebWho | WebSignOut | WebWatch
WebAnswer = WebClaimed | WebPerson | WebChange


class AskHistory(msgspec.Struct, frozen=True, tag=True):
    """Member → head: how was the pool in the last hours?"""

    device: Count | None = None  # None: all, with few samples of the first of them


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One moment of a device."""

    at: float  # Unix time
    granted_bytes: Count
    used_bytes: Count
    calls_per_s: float


class DeviceSamples(msgspec.Struct, frozen=True):
    device: Count
    samples: list[Sample]


class Span(msgspec.Struct, frozen=True):
    """A session on a device; `until` is None while it lasts."""

    device: Count
    session: Count
    client: Name
    program: Text
    since: float
    until: float | None


class History(msgspec.Struct, frozen=True, tag=True):
    """Head → member: like this."""

    samples: list[Sample]  # of the device that was asked for
    spans: list[Span]
    devices: Annotated[list[DeviceSamples], Meta(max_length=HISTORY_SHOWN_MAX)] = []


PeopleRequest = EventRequest | AccessRequest | WebRequest | AskHistory
PeopleAnswer = EventAnswer | AccessAnswer | WebAnswer | History
