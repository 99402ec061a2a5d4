"""The draw: a commitment before, a seed after, and a proof that anyone can recompute. Pure.

A proof is a text of lines, and every hash is the SHA-256 of lines of that text, byte for byte:

    shoal draw 1                    ┐
    event K7Q                       │
    title GPU hour                  │ terms: published when the event opens
    places 2                        │
    closes when an admin says so    │
    opened 2026-11-18T20:00:00Z     ┘
    commitment <hash>               of the terms and the seed's line
    entry ana 1 <bytes>             member, tickets, the entrant's own bytes; sorted by member
    out ben not-enrolled            requests that were struck out, with the reason; sorted by member
    list <hash>                     of the commitment's line and the lines of entries and struck-out
    seed <64 hex digits>            shown after the list is published
    rank 1 ana <value>              everybody in order; the first `places` win

The key of a draw is the hash of the seed's and the list's lines. The value of a ticket is the hash of
"key <key>" and "ticket <member> <number>". A member has the least of its tickets' values, and the
least value wins.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.errors import ShoalError

FIRST_LINE = "shoal draw 1"
SEED_BYTES = 32
OWN_BYTES = 16
TICKETS_MAX = 100
PLACES_MAX = 10_000
ENTRIES_MAX = 5_000
TITLE_CHARS_MAX = 80
PROOF_BYTES_MAX = 2**21 - 2**16  # an answer of the head holds it
MEMBER = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
EVENT = re.compile(r"[0-9A-Z]{1,16}")
REASON = re.compile(r"[a-z]+(?:-[a-z]+)*")
_HASH = re.compile(r"[0-9a-f]{64}")
_OWN = re.compile(rf"[0-9a-f]{{{2 * OWN_BYTES}}}")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


class ProofError(ShoalError):
    """A proof is not right. The text names the line and what it should be."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is fixed when an event opens."""

    event: str
    title: str
    places: int
    closes: str  # the published condition, in words
    opened: str  # ISO 8601, UTC

    def lines(self) -> str:
        return _text(
            FIRST_LINE,
            f"event {self.event}",
            f"title {self.title}",
            f"places {self.places}",
            f"closes {self.closes}",
            f"opened {self.opened}",
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One entrant of a draw. `own` is bytes that the entrant chose, in hex."""

    member: str
    tickets: int
    own: str

    def line(self) -> str:
        return f"entry {self.member} {self.tickets} {self.own}"


@dataclass(frozen=True, slots=True)
class StruckOut:
    """A request that does not take part, and why."""

    member: str
    reason: str

    def line(self) -> str:
        return f"out {self.member} {self.reason}"


@dataclass(frozen=True, slots=True)
class Rank:
    member: str
    value: str


@dataclass(frozen=True, slots=True)
class Proof:
    """All that a draw publishes."""

    terms: Terms
    commitment: str
    entries: tuple[Entry, ...]
    struck_out: tuple[StruckOut, ...]
    list_hash: str
    seed: str
    ranks: tuple[Rank, ...]

    @property
    def winners(self) -> list[str]:
        return [rank.member for rank in self.ranks[: self.terms.places]]

    def text(self) -> str:
        return (
            self.terms.lines()
            + _text(f"commitment {self.commitment}")
            + _listed(self.entries, self.struck_out)
            + _text(f"list {self.list_hash}", f"seed {self.seed}")
            + _text(*(f"rank {i} {r.member} {r.value}" for i, r in enumerate(self.ranks, 1)))
        )


def _text(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _listed(entries: Iterable[Entry], struck_out: Iterable[StruckOut]) -> str:
    return _text(
        *(e.line() for e in sorted(entries, key=lambda e: e.member)),
        *(s.line() for s in sorted(struck_out, key=lambda s: s.member)),
    )


def commit(terms: Terms, seed: str) -> str:
    """Return the commitment that is published before anyone enters."""
    return _hash(terms.lines() + _text(f"seed {seed}"))


def receipt(event: str, member: str, own: str) -> str:
    """Return what an entrant keeps: it belongs to this member and these bytes in this event.

    The tickets are left out, because an admin may still change them before the close.
    """
    return _hash(_text(f"event {event}", f"member {member}", f"bytes {own}"))


def hash_list(commitment: str, entries: Iterable[Entry], struck_out: Iterable[StruckOut]) -> str:
    """Return the hash of the published list, after which nothing changes."""
    return _hash(_text(f"commitment {commitment}") + _listed(entries, struck_out))


def rank(seed: str, list_hash: str, entries: Iterable[Entry]) -> tuple[Rank, ...]:
    """Return all entrants in order; the first ones win."""
    start = hashlib.sha256(f"key {_hash(_text(f'seed {seed}', f'list {list_hash}'))}\n".encode())

    def value(member: str, ticket: int) -> str:
        made = start.copy()
        made.update(f"ticket {member} {ticket}\n".encode())
        return made.hexdigest()

    ranks = [
        Rank(e.member, min(value(e.member, j) for j in range(1, e.tickets + 1))) for e in entries
    ]
    return tuple(sorted(ranks, key=lambda r: (r.value, r.member)))


def prove(
    terms: Terms, seed: str, entries: Sequence[Entry], struck_out: Sequence[StruckOut]
) -> Proof:
    """Draw, and return everything that others need to check it."""
    commitment = commit(terms, seed)
    listed = tuple(sorted(entries, key=lambda e: e.member))
    out = tuple(sorted(struck_out, key=lambda s: s.member))
    list_hash = hash_list(commitment, listed, out)
    ranks = rank(seed, list_hash, listed)
    return Proof(terms, commitment, listed, out, list_hash, seed, ranks)


class _Lines:
    """Reads a proof line by line and names the line of an error."""

    def __init__(self, text: str) -> None:
        *self._lines, rest = text.split("\n")
        self.number = 0
        if rest:
            raise ProofError("the proof does not end with a line break: its end is missing")

    def error(self, what: str) -> ProofError:
        return ProofError(f"line {self.number}: {what}")

    def starts(self, word: str) -> bool:
        return self.number < len(self._lines) and self._lines[self.number].startswith(f"{word} ")

    @property
    def left(self) -> bool:
        return self.number < len(self._lines)

    def next(self) -> str:
        self.number += 1
        if self.number > len(self._lines):
            raise self.error("the proof ends too early")
        return self._lines[self.number - 1]

    def after(self, word: str) -> str:
        line = self.next()
        if not line.startswith(f"{word} "):
            raise self.error(f"it should begin with {word!r} (got {line[:60]!r})")
        return line[len(word) + 1 :]

    def matching(self, word: str, pattern: re.Pattern[str]) -> str:
        return self.match(self.after(word), pattern, word)

    def match(self, value: str, pattern: re.Pattern[str], what: str) -> str:
        if not pattern.fullmatch(value):
            raise self.error(f"this is not a valid {what}: {value[:80]!r}")
        return value

    def words(self, word: str, count: int) -> list[str]:
        found = self.after(word).split(" ")
        if len(found) != count:
            raise self.error(f"{word!r} has {count} words after it (got {len(found)})")
        return found

    def number_up_to(self, value: str, largest: int, what: str) -> int:
        found = int(self.match(value, _NUMBER, what))
        if found > largest:
            raise self.error(f"{what}: at most {largest} (got {found})")
        return found


def check_title(title: str) -> str:
    """Return the title of an event, or raise ProofError."""
    if not 1 <= len(title) <= TITLE_CHARS_MAX or not title.isprintable() or title != title.strip():
        raise ProofError(
            f"a title has 1 to {TITLE_CHARS_MAX} printable characters in one line (got {title!r})"
        )
    return title


def read(text: str) -> Proof:
    """Read a proof without judging its hashes."""
    lines = _Lines(text)
    if lines.next() != FIRST_LINE:
        raise lines.error(f"this is not a proof of a draw: it should begin with {FIRST_LINE!r}")
    event = lines.matching("event", EVENT)
    title = check_title(lines.after("title"))
    places = lines.number_up_to(lines.after("places"), PLACES_MAX, "number of places")
    closes = lines.after("closes")
    terms = Terms(event, title, places, closes, lines.matching("opened", _TIME))
    commitment = lines.matching("commitment", _HASH)
    entries: list[Entry] = []
    while lines.starts("entry"):
        member, tickets, own = lines.words("entry", 3)
        lines.match(member, MEMBER, "member")
        count = lines.number_up_to(tickets, TICKETS_MAX, "number of tickets")
        entries.append(Entry(member, count, lines.match(own, _OWN, "entrant's own bytes")))
        if len(entries) > ENTRIES_MAX:
            raise lines.error(f"a draw has at most {ENTRIES_MAX} entries")
        if len(entries) > 1 and entries[-2].member >= member:
            raise lines.error(f"{member} is not in order, or is there twice")
    struck: list[StruckOut] = []
    names = {e.member for e in entries}
    while lines.starts("out"):
        member, reason = lines.words("out", 2)
        lines.match(member, MEMBER, "member")
        struck.append(StruckOut(member, lines.match(reason, REASON, "reason")))
        if len(struck) > 1 and struck[-2].member >= member:
            raise lines.error(f"{member} is not in order, or is there twice")
        if member in names:
            raise lines.error(f"{member} takes part and is struck out")
    list_hash = lines.matching("list", _HASH)
    seed = lines.matching("seed", _HASH)
    ranks: list[Rank] = []
    while lines.left:
        number, member, value = lines.words("rank", 3)
        if number != str(len(ranks) + 1):
            raise lines.error(f"rank {len(ranks) + 1} should follow (got {number[:20]!r})")
        ranks.append(Rank(member, lines.match(value, _HASH, "value")))
    return Proof(terms, commitment, tuple(entries), tuple(struck), list_hash, seed, tuple(ranks))


def verify(data: bytes, commitment: str = "", receipts: Sequence[str] = ()) -> Proof:
    """Recompute a draw from its proof. Raise ProofError with the exact difference.

    `commitment` and `receipts` are what the reader noted before the draw.

    >>> proof = shoal.people.draw.verify(Path("proof.txt").read_bytes())
    >>> proof.winners
    ['ana', 'eva']
    """
    if len(data) > PROOF_BYTES_MAX:
        raise ProofError(f"a proof has at most {PROOF_BYTES_MAX} bytes (got {len(data)})")
    try:
        proof = read(data.decode())
    except UnicodeDecodeError as error:
        raise ProofError(f"byte {error.start} is not UTF-8 text") from None
    _check_hash("commitment", "the terms and the seed", proof.commitment,
                commit(proof.terms, proof.seed))  # fmt: skip
    _check_hash("list", "the commitment and the list", proof.list_hash,
                hash_list(proof.commitment, proof.entries, proof.struck_out))  # fmt: skip
    right = rank(proof.seed, proof.list_hash, proof.entries)
    if len(right) != len(proof.ranks):
        raise ProofError(f"{len(right)} entrants have {len(proof.ranks)} ranks")
    for number, (found, wanted) in enumerate(zip(proof.ranks, right, strict=True), 1):
        if found != wanted:
            raise ProofError(
                f"rank {number} is {wanted.member} with {wanted.value}; the proof says "
                f"{found.member} with {found.value}"
            )
    if commitment and commitment != proof.commitment:
        raise ProofError(
            f"the commitment before the draw was {commitment}; the proof has {proof.commitment}"
        )
    known = {receipt(proof.terms.event, e.member, e.own) for e in proof.entries}
    for one in receipts:
        if one not in known:
            raise ProofError(f"no entry of this draw belongs to the receipt {one}")
    return proof


def _check_hash(name: str, of: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ProofError(f"{of} hash to {wanted}; the proof's {name} is {found}")
