"""Why a request waits: a closed list of codes, and the objects that `shoal why --json` prints.

docs/tasks.md has the table of codes; a test compares it with this file.
"""

from __future__ import annotations

import enum

import msgspec

#: By name; the name ends with the unit, or says what is counted.
Numbers = dict[str, int | float]


class Code(enum.StrEnum):
    # held back
    HELD = "held"
    AFTER = "after"
    NO_RUNNER = "no-runner"
    # the pool
    NO_DEVICES = "no-devices"
    DEVICES_MISSING = "devices-missing"
    TOO_FEW_DEVICES = "too-few-devices"
    TOO_LARGE = "too-large"
    BUSY = "busy"
    # the owner
    QUOTA_DEVICES = "quota-devices"
    QUOTA_MEMORY = "quota-memory"
    # the others
    EARLIER = "earlier"
    OUTBID = "outbid"
    SHARE_USED = "share-used"
    PRIORITY = "priority"
    KEPT_FREE = "kept-free"
    NO_LIMIT = "no-limit"
    CANNOT_SUSPEND = "cannot-suspend"
    # on the way
    PLACING = "placing"
    PREEMPTING = "preempting"
    STARTING = "starting"
    SUSPENDED = "suspended"


#: Reasons that nothing in today's pool or quota can change.
NEVER = frozenset({Code.NO_DEVICES, Code.TOO_FEW_DEVICES, Code.TOO_LARGE})


class Reason(msgspec.Struct, frozen=True):
    """`numbers` have their unit in the name: devices, devices_free, memory_bytes, waited_s."""

    code: Code
    text: str
    numbers: Numbers = {}
    never: bool = False  # as the pool and the quotas are, this does not go away


class Remedy(msgspec.Struct, frozen=True):
    """What would help. `command` is what to type; None: nothing that its owner can type."""

    text: str
    command: str | None = None


class Estimate(msgspec.Struct, frozen=True):
    """Unix times. `error_ratio`: the median error of past estimates over the time really waited."""

    start: float
    end: float | None
    error_ratio: float | None


class Bound(msgspec.Struct, frozen=True):
    """The earliest start and end if nobody else asked. Unix times."""

    start: float
    end: float | None
    assumes: str


class Why(msgspec.Struct, frozen=True):
    """The answer to "why does it wait?"."""

    never: bool
    reasons: list[Reason]
    unblock: list[Remedy]
    estimate: Estimate | None = None
    bound: Bound | None = None
