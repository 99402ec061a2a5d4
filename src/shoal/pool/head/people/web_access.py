"""Who a browser or a program that speaks HTTP is: tickets, claims, tokens, and what they may send.

The web process has no rights of its own. It hands on the token of each person, and the head finds the
person. A token is 32 random bytes; the head keeps only its hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shoal.errors import ProtocolError, ShoalError
from shoal.pool.base import limits
from shoal.pool.base.clock import Clock, Randomness
from shoal.pool.head import audit_log
from shoal.pool.head.requests import Changed, Requests, Route, Routes
from shoal.pool.head.session_ends import Client
from shoal.pool.head.store import Store
from shoal.pool.wire import admission_messages, messages, roles
from shoal.pool.wire import people_messages as people
from shoal.pool.wire import task_messages as tasks
from shoal.pool.wire.roles import Principal, Role

#: Messages that a token with the scope "read" may send.
READS = frozenset(
    {
        messages.AskStatus, messages.AskProfiles, messages.ReadAudit, messages.ListClients,
        people.ListEvents, people.ShowEvent, people.AskProof, people.ShowScreen, people.ListTokens,
        people.AskHistory, tasks.AskTasks, tasks.ReadLog, tasks.AskFiles, tasks.ReadFile,
        admission_messages.AskWhy,
    }
)  # fmt: skip
#: Messages that come from a browser at all: nothing of a lease, which belongs to its connection.
ALLOWED = READS | {
    messages.MakeCode, messages.RevokeClient, messages.Measure, people.OpenEvent, people.Enrol,
    people.AskPlace, people.WithdrawPlace, people.Decide, people.CloseEvent, people.DrawEvent,
    people.CancelEvent, tasks.ChangeTask, people.MakeToken, people.RevokeToken, people.ApproveBrowser,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredToken:
    token_id: str
    owner: str
    event: str  # of a guest; else ""
    kind: str  # "token" or "browser"
    scope: people.TokenScope
    label: str
    made: float
    expires: float


@dataclass(slots=True)
class Claim:
    """A browser that asks to be signed in."""

    secret_hash: bytes
    expires: float
    approved_by: str | None = None


def _hash(token: str) -> bytes:
    return hashlib.sha256(b"shoal token " + token.encode()).digest()


class WebAccess:
    """Args:
    role_of: the role of a member, or None if it is not one any more.
    """

    def __init__(
        self, store: Store, clock: Clock, random: Randomness, role_of: Callable[[str], Role | None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._random = random
        self._role_of = role_of
        self._tokens: dict[bytes, StoredToken] = {
            row[0]: StoredToken(*row[1:])
            for row in store.rows(
                "SELECT hash, token_id, owner, event, kind, scope, label, made, expires FROM tokens"
            )
        }
        self._tickets: dict[bytes, tuple[str, float]] = {}
        self._claims: dict[str, Claim] = {}
        self._version = int(clock.now() * 1000)  # also grows when the head starts again
        self._access = 1
        self._topics: deque[tuple[int, str]] = deque(maxlen=limits.WEB_TOPICS_MAX)
        self._changed = asyncio.Event()
        self._web = ""  # the dashboard's address
        self.requests: Requests | None = None  # the table of all handlers; set when it is complete

    def routes(self) -> Routes:
        return {
            people.MakeTicket: Route(Role.USER, self._make_ticket),
            people.MakeToken: Route(Role.USER, self._make_token),
            people.ListTokens: Route(Role.USER, self._list),
            people.RevokeToken: Route(Role.USER, self._revoke),
            people.ApproveBrowser: Route(Role.USER, self._approve_browser),
            people.WebAsk: Route(Role.OWNER, self._web_ask),
            people.WebSignIn: Route(Role.OWNER, self._sign_in),
            people.WebClaim: Route(Role.OWNER, self._claim),
            people.WebWho: Route(Role.OWNER, self._who),
            people.WebSignOut: Route(Role.OWNER, self._sign_out),
            people.WebWatch: Route(Role.OWNER, self._watch),
        }

    # --- changes -----------------------------------------------------------------------------------

    def notify(self, topic: str) -> None:
        """Say to all browsers that something has changed."""
        self._version += 1
        self._topics.append((self._version, topic))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _watch(self, client: Client, ask: people.WebWatch) -> people.WebChange:
        if ask.web:
            self._web = ask.web
        if ask.version == self._version:
            try:
                async with asyncio.timeout(limits.WEB_WATCH_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
        kept = [topic for version, topic in self._topics if version > ask.version]
        missed = ask.version > self._version or self._version - ask.version > len(kept)
        topics = ["all"] if missed else list(dict.fromkeys(kept))
        if len(topics) > 16:
            topics = ["all"]
        return people.WebChange(self._version, topics, self._access)

    # --- who it is ---------------------------------------------------------------------------------

    def _find(self, token: str) -> tuple[Principal, StoredToken | None]:
        """Return the bearer of a token. Nobody in particular without one; an error if it is no good."""
        if not token:
            return roles.guest("", ""), None
        stored = self._tokens.get(_hash(token))
        if stored is None or stored.expires <= self._clock.now():
            raise ProtocolError("you are signed out. Sign in again with: shoal open")
        if stored.event:
            return roles.guest(stored.owner, stored.event), stored
        role = self._role_of(stored.owner)
        if role is None:
            raise ProtocolError(f"{stored.owner} is not a member of this pool any more")
        return roles.member(stored.owner, role), stored

    async def _who(self, client: Client, ask: people.WebWho) -> people.WebPerson | messages.Refusal:
        try:
            who, stored = self._find(ask.token)
        except ProtocolError as error:
            return messages.refusal(str(error))
        return self._person(who, stored)

    def _person(
        self, who: Principal, stored: StoredToken | None, token: str = ""
    ) -> people.WebPerson:
        scope = stored.scope if stored else "full"
        expires = stored.expires if stored else 0.0
        return people.WebPerson(who.name, who.highest, scope, expires, who.event, token)

    async def _web_ask(self, client: Client, ask: people.WebAsk) -> messages.FromHead | None:
        """Answer what a person asks through the web process, with that person's rights."""
        assert self.requests is not None
        try:
            who, stored = self._find(ask.token)
            body = messages.FROM_CLIENT.decode(ask.body)
            if type(body) not in ALLOWED:
                raise ProtocolError(f"a browser does not send {type(body).__name__}")
            if stored is not None and stored.scope == "read" and type(body) not in READS:
                raise ProtocolError("this token may only read. Make one with --scope full")
            return await self.requests.answer(Client(client.channel, who), body)
        except msgspec.MsgspecError as error:
            return messages.refusal(f"this is not a request: {error}")
        except Changed as error:
            return messages.refusal(str(error), "changed")
        except ShoalError as error:
            return messages.refusal(str(error))

    # --- signing in --------------------------------------------------------------------------------

    async def _make_ticket(self, client: Client, ask: people.MakeTicket) -> people.Ticket:
        now = self._clock.now()
        self._tickets = {h: t for h, t in self._tickets.items() if t[1] > now}
        if len(self._tickets) >= limits.TICKETS_MAX:
            raise ProtocolError("too many sign-in links wait to be used; try again in a minute")
        ticket = self._random.token(24)
        self._tickets[_hash(ticket)] = (client.principal.owner, now + limits.TICKET_S)
        return people.Ticket(ticket, self._web)

    async def _sign_in(
        self, client: Client, ask: people.WebSignIn
    ) -> people.WebPerson | messages.Refusal:
        now = self._clock.now()
        key = _hash(ask.ticket)
        owner, expires = self._tickets.pop(key, ("", 0.0))
        for digits, claim in list(self._claims.items()):
            if claim.secret_hash == key and claim.approved_by is not None:
                owner, expires = claim.approved_by, claim.expires
                del self._claims[digits]
            elif claim.secret_hash == key and claim.expires > now:
                return messages.refusal("nobody has approved this browser yet")
        if expires <= now:
            return messages.refusal(
                "this sign-in link was used before, or is older than a minute. Type: shoal open"
            )
        role = self._role_of(owner)
        if role is None:
            return messages.refusal(f"{owner} is not a member of this pool any more")
        token, stored = await self._add(
            owner, "", "browser", "full", "a browser", limits.BROWSER_SESSION_S
        )
        return self._person(roles.member(owner, role), stored, token)

    async def _sign_out(self, client: Client, ask: people.WebSignOut) -> messages.Done:
        key = _hash(ask.token)
        if key in self._tokens:
            self._drop([key], self._tokens[key].owner, "this browser session")
        return messages.Done()

    async def _claim(self, client: Client, ask: people.WebClaim) -> people.WebClaimed:
        now = self._clock.now()
        self._claims = {d: c for d, c in self._claims.items() if c.expires > now}
        if len(self._claims) >= limits.CLAIMS_MAX:
            raise ProtocolError("too many browsers ask to sign in; try again in some minutes")
        while (digits := self._random.text("0123456789", 6)) in self._claims:
            pass
        secret = self._random.token(24)
        self._claims[digits] = Claim(_hash(secret), now + limits.CLAIM_S)
        return people.WebClaimed(digits, secret)

    async def _approve_browser(self, client: Client, ask: people.ApproveBrowser) -> messages.Done:
        claim = self._claims.get(ask.digits)
        if claim is None or claim.expires <= self._clock.now() or claim.approved_by is not None:
            raise ProtocolError(f"no browser shows {ask.digits[:3]}-{ask.digits[3:]} now")
        claim.approved_by = client.principal.owner
        self._store.write_audit(self._clock.now(), client.name, "sign in", "a browser")
        return messages.Done(f"the browser is signed in as {client.principal.owner}")

    def guest_token(self, event: str, name: str) -> str:
        """Make the token of a guest of an event, who may look at it and ask for a place."""
        token, _, _ = self._prepare(
            name, event, "browser", "full", f"guest of {event}", limits.GUEST_SESSION_S
        )
        return token

    # --- tokens ------------------------------------------------------------------------------------

    def _prepare(
        self, owner: str, event: str, kind: str, scope: people.TokenScope, label: str, ttl_s: float
    ) -> tuple[str, StoredToken, object]:
        """Make a token, and queue its row."""
        now = self._clock.now()
        self._tokens = {h: t for h, t in self._tokens.items() if t.expires > now}
        mine = [h for h, t in self._tokens.items() if (t.owner, t.event) == (owner, event)]
        if len(mine) >= limits.TOKENS_PER_OWNER_MAX:
            raise ProtocolError(
                f"{owner} has {len(mine)} tokens and browser sessions, which is the limit. End some "
                "with: shoal token revoke"
            )
        token = self._random.token(32)
        stored = StoredToken(
            self._random.text("0123456789abcdef", 8),
            owner,
            event,
            kind,
            scope,
            label,
            now,
            now + ttl_s,
        )
        key = _hash(token)
        self._tokens[key] = stored

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM tokens WHERE expires <= ?", (now,))
            row = (key, stored.token_id, owner, event, kind, scope, label, now, stored.expires)
            db.execute("INSERT INTO tokens VALUES (?,?,?,?,?,?,?,?,?)", row)
            if kind == "token":
                audit_log.append(db, now, owner, "token", f"{stored.token_id} to {scope}: {label}")

        return token, stored, self._store.change(write, promise=False)

    async def _add(
        self, owner: str, event: str, kind: str, scope: people.TokenScope, label: str, ttl_s: float
    ) -> tuple[str, StoredToken]:
        token, stored, _ = self._prepare(owner, event, kind, scope, label, ttl_s)
        await self._store.flushed()
        return token, stored

    async def _make_token(self, client: Client, ask: people.MakeToken) -> people.Token:
        token, stored = await self._add(
            client.principal.owner, "", "token", ask.scope, ask.label, ask.ttl_s
        )
        return people.Token(token, stored.expires)

    async def _list(self, client: Client, ask: people.ListTokens) -> people.TokenList:
        who = client.principal
        seen = [
            people.TokenInfo(t.token_id, t.owner, t.label, t.kind, t.scope, t.made, t.expires)
            for t in self._tokens.values()
            if not t.event and (t.owner == who.owner or who.may(Role.ADMIN))
        ]
        return people.TokenList(sorted(seen, key=lambda t: -t.made)[: limits.PEOPLE_ROWS_MAX])

    async def _revoke(self, client: Client, ask: people.RevokeToken) -> messages.Done:
        who = client.principal
        for key, stored in self._tokens.items():
            mine = stored.owner == who.owner or who.may(Role.ADMIN)
            if stored.token_id == ask.token_id and mine:
                self._drop([key], client.name, f"token {stored.token_id} of {stored.owner}")
                await self._store.flushed()
                return messages.Done(f"{stored.token_id} is revoked")
        raise ProtocolError(f"there is no token {ask.token_id}. `shoal token list` shows yours.")

    def revoke_member(self, name: str) -> None:
        """End all tokens and browser sessions of somebody."""
        keys = [key for key, stored in self._tokens.items() if stored.owner == name]
        self._tickets = {h: t for h, t in self._tickets.items() if t[0] != name}
        if keys:
            self._drop(keys, "head", f"all tokens of {name}")

    def _drop(self, keys: list[bytes], actor: str, detail: str) -> None:
        for key in keys:
            del self._tokens[key]
        now = self._clock.now()

        def write(db: sqlite3.Connection) -> None:
            db.executemany("DELETE FROM tokens WHERE hash = ?", [(key,) for key in keys])
            audit_log.append(db, now, actor, "revoke", detail)

        self._store.change(write, promise=False)
        self._access += 1
        self.notify("access")
