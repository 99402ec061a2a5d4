"""What a session's worker has counted, on its way from the device server to the head."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.pool.base.limits import PROFILED_OPERATORS_MAX
from shoal.pool.wire.message_fields import Count, Name


class OperatorUse(msgspec.Struct, frozen=True):
    """What the calls of one operator and dtype have cost a session so far."""

    name: Name
    dtype: Name
    calls: Count
    ns: Count
    flops: Count
    bytes: Count


class SessionProfile(msgspec.Struct, frozen=True, tag=True):
    """Device server → agent → head: what a session's worker has counted. The client has no part in it.

    `task_type` is equal for programs that do the same: a hash of the prepared calls of their steps.
    """

    session: Count
    epoch: Count
    state: Name  # session_profile.STATES
    reason: Name = ""  # why it cannot be suspended: session_profile.REFUSALS
    task_type: Name = ""  # "": it has not repeated itself yet
    steps: Count = 0
    calls: Count = 0
    busy_ns: Count = 0
    used_bytes: Count = 0  # of the device
    away_bytes: Count = 0  # in swap space only
    host_bytes: Count = 0  # of host memory in use as swap space
    disk_bytes: Count = 0  # of the spill file in use
    peak_bytes: Count = 0  # most of the two together
    limit_bytes: Count = 0  # of the device, now
    operators: Annotated[list[OperatorUse], Meta(max_length=PROFILED_OPERATORS_MAX)] = []
