"""Join codes: what is written on them, and the registry that accepts them. Pure: time is passed in.

A code is 40 symbols in groups of eight: 3 name it, 16 are its secret (80 bits), 20 are the pin of the
head's certificate (100 bits), and the last one is a check, so that a typing error is noticed at once.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from dataclasses import dataclass, field

from shoal.pool.base import limits
from shoal.pool.wire.roles import Role

SYMBOLS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # no I, L, O, U: they are mistaken for others
_ALIKE = str.maketrans("ILO", "110")
ID, SECRET, PIN, CHECK = 3, 16, 20, 1
LENGTH = ID + SECRET + PIN + CHECK
GROUP = 8


class CodeError(ValueError):
    """The text is not a join code; the message says what to do."""


class JoinRefused(Exception):
    """The code is refused. The text says why, but never how nearly right the code was."""


@dataclass(frozen=True, slots=True)
class ParsedCode:
    code_id: str
    secret: str
    pin: str


def _symbols(data: bytes, count: int) -> str:
    number = int.from_bytes(data, "big")
    spare = len(data) * 8 - count * 5
    assert spare >= 0
    number >>= spare
    return "".join(SYMBOLS[(number >> 5 * i) & 31] for i in reversed(range(count)))


def pin_of(certificate_der: bytes) -> str:
    """Return the pin of the head's certificate."""
    return _symbols(hashlib.sha256(certificate_der).digest(), PIN)


def _check_symbol(body: str) -> str:
    return _symbols(hashlib.sha256(b"shoal code " + body.encode()).digest(), CHECK)


def write(code_id: str, secret: str, pin: str) -> str:
    """Return the text of a code."""
    body = code_id + secret + pin
    whole = body + _check_symbol(body)
    assert len(whole) == LENGTH
    return "-".join(whole[i : i + GROUP] for i in range(0, LENGTH, GROUP))


def parse(text: str) -> ParsedCode:
    """Read a code. Case, blanks and dashes do not matter, nor does O for 0 or I for 1."""
    whole = "".join(text.upper().split()).replace("-", "").translate(_ALIKE)
    if len(whole) != LENGTH or any(c not in SYMBOLS for c in whole):
        raise CodeError(
            f"this is not a join code, which has {LENGTH} letters and digits in groups of {GROUP}. "
            "`shoal code` on the head's machine prints a new one."
        )
    if _check_symbol(whole[:-1]) != whole[-1]:
        raise CodeError("the join code has a typing error; copy it again as it was printed.")
    return ParsedCode(whole[:ID], whole[ID : ID + SECRET], whole[ID + SECRET : -CHECK])


def hash_secret(secret: str) -> bytes:
    """Return the hash that the head keeps of a secret (80 random bits need no slow hash)."""
    return hashlib.sha256(b"shoal join " + secret.encode()).digest()


@dataclass(slots=True)
class Bucket:
    """Allows `size` failures at once and one more every `refill_s`."""

    size: int
    refill_s: float
    level: float = 0.0
    at: float = 0.0

    def _drain(self, now: float) -> None:
        self.level = max(0.0, self.level - max(0.0, now - self.at) / self.refill_s)
        self.at = max(self.at, now)

    def full(self, now: float) -> bool:
        self._drain(now)
        return self.level + 1 > self.size

    def add(self, now: float) -> None:
        self._drain(now)
        self.level += 1


@dataclass(slots=True)
class Limiter:
    """Wrong codes: few from one address, not too many from all together. Memory is bounded."""

    addresses: OrderedDict[str, Bucket] = field(default_factory=OrderedDict)
    together: Bucket = field(
        default_factory=lambda: Bucket(
            limits.WRONG_CODES_TOGETHER, limits.WRONG_CODE_TOGETHER_REFILL_S
        )
    )

    def blocked(self, address: str, now: float) -> bool:
        bucket = self.addresses.get(address)
        return self.together.full(now) or (bucket is not None and bucket.full(now))

    def failed(self, address: str, now: float) -> None:
        bucket = self.addresses.pop(address, None)
        if bucket is None:
            bucket = Bucket(limits.WRONG_CODES_PER_ADDRESS, limits.WRONG_CODE_REFILL_S)
        bucket.add(now)
        self.addresses[address] = bucket  # the newest last
        self.together.add(now)
        while len(self.addresses) > limits.ADDRESSES_REMEMBERED:
            self.addresses.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Quota:
    """What a client may hold at once, over all its leases."""

    devices: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class IssuedCode:
    code_id: str
    secret_hash: bytes
    role: str
    expires: float  # Unix time
    quota: Quota


@dataclass(slots=True)
class CodeRegistry:
    """Accepts each code once, before it expires."""

    codes: dict[str, IssuedCode] = field(default_factory=dict)
    limiter: Limiter = field(default_factory=Limiter)

    def issue(self, code: IssuedCode, now: float) -> None:
        self.codes = {i: c for i, c in self.codes.items() if c.expires > now}
        if len(self.codes) >= limits.CODES_MAX:
            raise JoinRefused(f"{limits.CODES_MAX} codes wait to be used; let some of them expire.")
        assert code.code_id not in self.codes
        self.codes[code.code_id] = code

    def accept(
        self, code_id: str, secret: str, role: str, address: str, now: float, monotonic: float
    ) -> IssuedCode:
        """Use a code up and return it. The refusal is the same, whatever is wrong.

        `role` is "node", or anything else for a client: the code says what a client may do.
        """
        if self.limiter.blocked(address, monotonic):
            raise JoinRefused("too many wrong codes came; wait a minute and try again.")
        code = self.codes.get(code_id)
        expected = code.secret_hash if code is not None else bytes(32)
        right = hmac.compare_digest(hash_secret(secret), expected)
        if code is None or not right or code.expires <= now:
            self.limiter.failed(address, monotonic)
            raise JoinRefused(
                "the code is wrong, was used before, or has expired. `shoal code` on the head's "
                "machine prints a new one."
            )
        if (code.role == Role.NODE) != (role == Role.NODE):
            raise JoinRefused(
                f"the code is for a {code.role}, not for a {role}. Use "
                f"{'`shoal node --join`' if code.role == Role.NODE else '`shoal join`'}, or let "
                f"`shoal code{' --node' if role == Role.NODE else ''}` print another."
            )
        del self.codes[code_id]
        return code
