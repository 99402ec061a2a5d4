"""The code on an event's screen. It changes every 30 s, so that a photo of it is worthless later. Pure.

A code is 14 symbols: 3 name the event, 10 (50 bits) belong to the event and the slot of 30 s, and the
last one is a check. This slot and the one before are good. 50 bits need no lock-out: see
docs/decisions/0037-event-codes-need-no-lock-out.md.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Literal

from shoal.pool.access.codes import _ALIKE, SYMBOLS, CodeError, _symbols
from shoal.pool.base import limits

EVENT, SLOT, CHECK = 3, 10, 1
LENGTH = EVENT + SLOT + CHECK
GROUP = 7
OLD_SLOTS = 20  # an older code of this event is called expired for ten minutes; then it is wrong

Verdict = Literal["good", "expired", "wrong"]


@dataclass(frozen=True, slots=True)
class TypedCode:
    event: str
    slot_part: str


def slot_at(now: float) -> int:
    return int(now // limits.EVENT_CODE_SLOT_S)


def valid_for_s(now: float) -> float:
    """Return the seconds until the screen shows another code."""
    return limits.EVENT_CODE_SLOT_S - now % limits.EVENT_CODE_SLOT_S


def _slot_part(event: str, secret: bytes, slot: int) -> str:
    made = hmac.digest(secret, f"shoal event {event} {slot}".encode(), "sha256")
    return _symbols(made, SLOT)


def _check_symbol(body: str) -> str:
    return _symbols(hashlib.sha256(b"shoal event code " + body.encode()).digest(), CHECK)


def write(event: str, secret: bytes, now: float) -> str:
    """Return the code that the screen shows now."""
    body = event + _slot_part(event, secret, slot_at(now))
    whole = body + _check_symbol(body)
    return f"{whole[:GROUP]}-{whole[GROUP:]}"


def parse(text: str) -> TypedCode:
    """Read a code. Case, blanks and dashes do not matter, nor does O for 0 or I for 1."""
    whole = "".join(text.upper().split()).replace("-", "").translate(_ALIKE)
    if len(whole) != LENGTH or any(c not in SYMBOLS for c in whole):
        raise CodeError(
            f"this is not the code of an event, which has {LENGTH} letters and digits in two groups. "
            "Type the one that the screen shows now."
        )
    if _check_symbol(whole[:-CHECK]) != whole[-CHECK:]:
        raise CodeError("the code has a typing error; read it again from the screen.")
    return TypedCode(whole[:EVENT], whole[EVENT:-CHECK])


def judge(typed: TypedCode, secret: bytes, now: float) -> Verdict:
    """Compare a code with the ones of this slot and the last."""
    current = slot_at(now)
    for age in range(OLD_SLOTS):
        part = _slot_part(typed.event, secret, current - age)
        if hmac.compare_digest(typed.slot_part, part):
            return "good" if age < 2 else "expired"
    return "wrong"
