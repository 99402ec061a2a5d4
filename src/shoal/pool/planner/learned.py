"""What the planner's side of a head has learned, as it is kept over a restart: pure."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

import msgspec

from shoal.pool.base import limits
from shoal.pool.planner.facts import Knowledge
from shoal.schedule.model.predictor import TaskProfile

_log = logging.getLogger(__name__)


class Learned(msgspec.Struct, frozen=True):
    """Speeds are steps per second, alone on a kind of device or together there."""

    types: list[TaskProfile] = []
    speeds: list[tuple[str, str, float]] = []  # type, kind, speed
    errors: list[float] = []  # of checked predictions
    pairs: list[tuple[str, list[str], list[float]]] = []  # kind, types, speeds
    names: list[tuple[str, str, str]] = []  # owner, name of the task, type
    totals: list[tuple[str, str, float]] = []  # owner, name of the task, steps
    lasted: list[tuple[str, str, float]] = []  # owner, name of the task, seconds of its last run
    policy: dict[str, Any] = {}  # its own memory
    base: float | None = None  # Unix time at which the clock of that memory begins


def encode(learned: Learned) -> bytes:
    """Return the bytes to keep. Of too much, the policy's memory is left out, then all."""
    for shorter in (learned, msgspec.structs.replace(learned, policy={}, base=None)):
        data = msgspec.json.encode(shorter)
        if len(data) <= limits.LEARNED_BYTES_MAX:
            return data
    return b""


def decode(data: bytes) -> Learned:
    """Return what was kept. What another version wrote and this one cannot read is forgotten."""
    if not data:
        return Learned()
    try:
        return msgspec.json.decode(data, type=Learned)
    except msgspec.MsgspecError as error:
        _log.warning("what the planner had learned cannot be read: %s", error)
        return Learned()


def of_knowledge(knowledge: Knowledge) -> Learned:
    """Return what is known of types, without names and policy."""
    skip = max(0, len(knowledge.types) - limits.LEARNED_TYPES_MAX)
    types = dict(islice(knowledge.types.items(), skip, None))
    speeds, errors = knowledge.predictor.observations()
    return Learned(
        types=list(types.values()),
        speeds=[(type_, kind, speed) for type_, kind, speed in speeds if type_ in types],
        errors=errors,
        pairs=[
            (kind, list(members), list(rates))
            for (kind, members), rates in knowledge.pairs.items()
            if types.keys() >= set(members)
        ],
    )


def restore(knowledge: Knowledge, learned: Learned) -> None:
    """Take in what an earlier head knew of types."""
    knowledge.types |= {profile.type: profile for profile in learned.types}
    knowledge.predictor.restore(learned.speeds, learned.errors)
    for kind, members, rates in learned.pairs:
        if len(members) == len(rates):
            knowledge.pairs[kind, tuple(members)] = tuple(rates)
