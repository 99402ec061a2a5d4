"""Messages about requests that wait, between a client and the head."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.pool.base.limits import DEVICES_PER_LEASE_MAX
from shoal.pool.wire.message_fields import Count, Name
from shoal.tasks.reasons import Why
from shoal.tasks.spec import TaskSpec


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Head → client: your request for a lease waits. `Lease` or `Refusal` follows in the end."""

    request: Name
    place: Count  # in line, from 1
    why: Why


class AskWhy(msgspec.Struct, frozen=True, tag=True):
    """Client → head: why does this request wait? With needs: as if it had asked for these."""

    request: Name
    devices: Annotated[int, Meta(ge=1, le=DEVICES_PER_LEASE_MAX)] | None = None
    memory_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    kind: Annotated[str, Meta(max_length=256)] | None = None
    limit_s: Annotated[float, Meta(gt=0, lt=10 * 365 * 86400)] | None = None


class AskDryRun(msgspec.Struct, frozen=True, tag=True):
    """Client → head: would this task wait, if I submitted it now, and why?"""

    spec: TaskSpec


class WhyAnswer(msgspec.Struct, frozen=True, tag=True):
    """Head → client: therefore."""

    request: Name
    state: Name  # of a task: one of its states; of a lease: waiting, held or running
    why: Why


FromClient = AskWhy | AskDryRun
FromHead = Waiting | WhyAnswer
