"""The directory of memory that programs share: its owners, its openers and its writers.

Pure: events in, instructions out. The shell around it (share_server.py) keeps the memory itself.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from dataclasses import dataclass, field

from shoal.errors import ShareError
from shoal.pool.base import limits
from shoal.pool.wire import share_messages

OWNER = 1  # the number of a share's owner among its participants; 0 is none


@dataclass(frozen=True)
class Party:
    """A program with a lease, as its node knows it."""

    client: str
    lease: int
    epoch: int
    pid: int


@dataclass(frozen=True)
class Participant:
    """A program that has the memory: its owner, or one that has opened it."""

    number: int
    party: Party
    key_hash: bytes


@dataclass
class Share:
    id: str
    secret_hash: bytes
    bytes: int
    mode: share_messages.ShareMode
    layout: share_messages.ShareLayout
    participants: dict[int, Participant] = field(default_factory=dict)
    holder: int = 0  # in mode "exclusive": who has it alone
    waiting: deque[int] = field(default_factory=deque)
    next_number: int = OWNER

    @property
    def owner(self) -> Participant:
        return self.participants[OWNER]

    def info(self) -> share_messages.ShareInfo:
        """Return what the owner's programs may know of it."""
        readers = [p.party.pid for n, p in self.participants.items() if n != OWNER]
        holder = self.participants.get(self.holder)
        return share_messages.ShareInfo(
            self.id, self.owner.party.client, self.owner.party.pid, self.owner.party.epoch,
            self.bytes, self.mode, readers, holder.party.pid if holder else 0, self.layout.dtype,
            self.layout.sizes,
        )  # fmt: skip


# --- instructions for the shell --------------------------------------------------------------------


@dataclass(frozen=True)
class Publish:
    """Write into the share's control page who holds it."""

    share: str
    holder: int


@dataclass(frozen=True)
class Granted:
    """Notify a participant that waited: it holds the share now."""

    share: str
    participant: int


@dataclass(frozen=True)
class Forget:
    """Close a participant's line."""

    share: str
    participant: int


@dataclass(frozen=True)
class Revoke:
    """Mark the share as revoked in its control page, and close it."""

    share: str
    waiting: tuple[int, ...]  # participants that will not get it


Instruction = Publish | Granted | Forget | Revoke


def unknown() -> ShareError:
    """Return the one answer to every wrong handle, which does not reveal what was wrong."""
    return ShareError(
        "no such shared memory: its owner has ended or taken it back, it belongs to another client of "
        "the pool, or the handle is not complete. Ask its owner for a new one: shoal.share(tensor)"
    )


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class ShareDirectory:
    """All shares of one node."""

    def __init__(self) -> None:
        self.shares: dict[str, Share] = {}

    # --- coming and going ----------------------------------------------------------------------

    def create(
        self,
        share_id: str,
        secret: str,
        key: str,
        party: Party,
        request: share_messages.ShareCreate,
    ) -> Share:
        """Add a share of `party`, which holds it if it is exclusive."""
        if share_id in self.shares:
            raise ShareError("this share exists already")
        owned = sum(_same_lease(s.owner.party, party) for s in self.shares.values())
        if owned >= limits.SHARES_PER_LEASE_MAX or len(self.shares) >= limits.SHARES_MAX:
            raise ShareError(
                f"a lease shares at most {limits.SHARES_PER_LEASE_MAX} tensors, a node at most "
                f"{limits.SHARES_MAX}. Take some back: shoal.unshare(handle)"
            )
        share = Share(share_id, digest(secret), request.bytes, request.mode, request.layout)
        self.shares[share_id] = share
        owner = self._add(share, party, key)
        if share.mode == "exclusive":
            share.holder = owner.number
        return share

    def open(self, share_id: str, secret: str, key: str, party: Party) -> tuple[Share, Participant]:
        """Another participant of a share: a program of the same owner that has its secret."""
        share = self.shares.get(share_id)
        expected = share.secret_hash if share is not None else digest("")
        right = hmac.compare_digest(expected, digest(secret))
        if share is None or not right or share.owner.party.client != party.client:
            raise unknown()
        if len(share.participants) >= limits.SHARE_PARTICIPANTS_MAX:
            raise ShareError(
                f"{limits.SHARE_PARTICIPANTS_MAX} programs have this memory open: that is the limit. "
                "Close some of them"
            )
        return share, self._add(share, party, key)

    def _add(self, share: Share, party: Party, key: str) -> Participant:
        participant = Participant(share.next_number, party, digest(key))
        share.participants[participant.number] = participant
        share.next_number += 1
        return participant

    def left(self, share_id: str, number: int) -> list[Instruction]:
        """Note that a participant is gone. The share ends with its owner."""
        share = self.shares.get(share_id)
        if share is None or number not in share.participants:
            return []
        if number == OWNER:
            return self._revoke(share)
        del share.participants[number]
        if number in share.waiting:
            share.waiting.remove(number)
        given_back = self._pass_on(share) if share.holder == number else []
        return [Forget(share_id, number), *given_back]

    def end(self, share_id: str, key: str) -> list[Instruction]:
        """End a participation. The share ends if it is its owner's."""
        share, participant = self._known(share_id, key)
        return self.left(share.id, participant.number)

    def lease_ended(self, lease: int, epoch: int) -> list[Instruction]:
        """Revoke the shares that an ended lease owned.

        What it had opened goes when its worker does: a holder that still runs must not be overtaken.
        """
        owned = [
            share
            for share in self.shares.values()
            if (share.owner.party.lease, share.owner.party.epoch) == (lease, epoch)
        ]
        return [step for share in owned for step in self._revoke(share)]

    def _revoke(self, share: Share) -> list[Instruction]:
        del self.shares[share.id]
        return [Revoke(share.id, tuple(share.waiting))]

    # --- one at a time -------------------------------------------------------------------------

    def acquire(self, share_id: str, key: str) -> tuple[int, list[Instruction]]:
        """Queue a participant for the share. It holds it when `Granted` comes."""
        share, participant = self._known(share_id, key)
        number = participant.number
        if share.mode != "exclusive":
            raise ShareError(
                "this memory is shared for reading: it needs no shoal.acquire(), and nobody writes"
            )
        if share.holder == number:
            return number, [Granted(share_id, number)]
        if number in share.waiting:
            raise ShareError("another thread of this program waits for it already")
        share.waiting.append(number)
        return number, self._pass_on(share) if share.holder == 0 else []

    def give_up(self, share_id: str, number: int) -> None:
        """Remove a participant from the queue."""
        share = self.shares.get(share_id)
        if share is not None and number in share.waiting:
            share.waiting.remove(number)

    def release(self, share_id: str, key: str) -> list[Instruction]:
        """Pass the share to the next in the queue, if this participant holds it."""
        share, participant = self._known(share_id, key)
        if participant.number in share.waiting:
            share.waiting.remove(participant.number)
        return self._pass_on(share) if share.holder == participant.number else []

    def _pass_on(self, share: Share) -> list[Instruction]:
        share.holder = share.waiting.popleft() if share.waiting else 0
        notices = [Granted(share.id, share.holder)] if share.holder else []
        return [Publish(share.id, share.holder), *notices]

    def _known(self, share_id: str, key: str) -> tuple[Share, Participant]:
        share = self.shares.get(share_id)
        wanted = digest(key)
        for participant in share.participants.values() if share is not None else ():
            if hmac.compare_digest(participant.key_hash, wanted):
                assert share is not None
                return share, participant
        raise unknown()

    # --- listing ------------------------------------------------------------------------------

    def of(self, client: str) -> list[share_messages.ShareInfo]:
        """List what the programs of this client share."""
        return [s.info() for s in self.shares.values() if s.owner.party.client == client]


def _same_lease(one: Party, other: Party) -> bool:
    return (one.lease, one.epoch) == (other.lease, other.epoch)
