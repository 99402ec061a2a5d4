"""Sums up what a worker counted: a pure function from the counters to a `SessionProfile`.

The worker runs a client's calls, so its numbers are bounded here and no name of it is trusted.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from shoal.pool.base.limits import PROFILE_COUNT_MAX, PROFILED_OPERATORS_MAX
from shoal.pool.wire import profile_messages

#: By the numbers of the core.
STATES = ("running", "suspending", "suspended", "refused", "resuming")
#: `reader` and `host-full` are the device server's own; the others are the core's, by number.
REFUSALS = ("", "accelerator", "shares", "peers", "reader", "host-full")

#: torch's numbers of its dtypes.
DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32",
    "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16", "quint4x2",
    "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float8_e5m2",
    "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64",
)  # fmt: skip

#: In-place operators that are no step of an optimizer.
_NO_UPDATE = ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "set_")


class CallUse(NamedTuple):
    """What one prepared call has cost: a row of `_core.SessionBlock.uses`."""

    name: bytes
    hash: int
    dtype: int
    flops: int  # of one call
    bytes: int  # of one call
    updates: bool
    calls: int
    ns: int
    repeats: int


def steps(uses: Sequence[CallUse]) -> int:
    """Return how many training steps there were: how often an optimizer changed a parameter.

    Each of its calls changes the same memory once per step. A program without such calls repeats
    other ones: then it is how often the calls that take nine tenths of the time have all run.
    """
    updated = [use.repeats + 1 for use in uses if use.repeats > 0 and _is_update(use)]
    if updated:
        return round(statistics.median_low(updated))
    wanted_ns = 0.9 * sum(use.ns for use in uses)
    for use in sorted(uses, key=lambda use: -use.calls):
        wanted_ns -= use.ns
        if wanted_ns <= 0:
            return use.calls if use.calls > 1 else 0
    return 0


def _is_update(use: CallUse) -> bool:
    name = use.name.rpartition(b"::")[2].partition(b".")[0].decode("ascii", "replace")
    return use.updates and name.endswith("_") and name not in _NO_UPDATE


def type_of(uses: Sequence[CallUse], steps_done: int) -> str:
    """Return a hash of the prepared calls that belong to a step; "" before the third.

    Calls that come less often (logging, validation) do not belong to it.
    """
    if steps_done < 3:
        return ""
    hashes = sorted(use.hash for use in uses if use.hash and 2 * use.calls > steps_done)
    digest = hashlib.sha256(b"".join(h.to_bytes(8, "little") for h in hashes))
    return digest.hexdigest()[:16]


def operators(uses: Sequence[CallUse]) -> list[profile_messages.OperatorUse]:
    """Sum up by operator and dtype. Of too many, those that took least time become one."""
    sums: dict[tuple[str, str], list[int]] = {}
    for use in uses:
        total = sums.setdefault((_name(use.name), _dtype(use.dtype)), [0, 0, 0, 0])
        for index, value in enumerate(
            (use.calls, use.ns, use.calls * use.flops, use.calls * use.bytes)
        ):
            total[index] = min(total[index] + value, PROFILE_COUNT_MAX)
    by_time = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
    kept = by_time[: PROFILED_OPERATORS_MAX - 1]
    found = [profile_messages.OperatorUse(*key, *total) for key, total in kept]
    rest = [total for _, total in by_time[PROFILED_OPERATORS_MAX - 1 :]]
    if rest:
        all_others = [min(sum(column), PROFILE_COUNT_MAX) for column in zip(*rest, strict=True)]
        found.append(profile_messages.OperatorUse("others", "", *all_others))
    return found


def _name(raw: bytes) -> str:
    text = raw.decode("ascii", "replace")
    return "".join(c if c.isprintable() and c != "�" else "?" for c in text)


def _dtype(number: int) -> str:
    return DTYPES[number] if number < len(DTYPES) else ""


def bounded(count: int) -> int:
    return max(0, min(count, PROFILE_COUNT_MAX))
