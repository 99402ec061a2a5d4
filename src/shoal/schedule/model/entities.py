"""The scheduler's values: kinds of devices, pools and tasks.

Everything here is a plain value. Times are seconds (`_s`), memory is bytes (`_bytes`), work is
counted in training steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shoal.units import parse_bytes

#: Largest gang and longest co-location that any code below has to handle.
GANG_DEVICES_MAX = 4096
TOGETHER_MAX = 8
POOL_DEVICES_MAX = 1_000_000

_COUNT = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Kind:
    """A number of equal devices.

    `memory_bytes` 0 means unknown: then only the throughput table says what fits together.
    """

    name: str
    count: int
    memory_bytes: int = 0
    node_devices: int = 1  # Devices in one node: gangs are placed on as few nodes as possible.
    #: Number of the node of each device, where nodes are unequal; empty: `node_devices` says it.
    nodes: tuple[int, ...] = ()

    def node_of(self, device: int) -> int:
        """Return the node of a device; devices of a kind are numbered from 0."""
        return self.nodes[device] if self.nodes else device // self.node_devices


@dataclass(frozen=True, slots=True)
class Pool:
    """The devices to decide about, kinds in a fixed order.

    >>> Pool.parse("v100:8:16GiB,k80:24").devices
    32
    """

    kinds: tuple[Kind, ...]
    #: Owner -> most devices that the owner's tasks may hold at once. Owners not named are free.
    quotas: dict[str, int] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(kind.name for kind in self.kinds)

    @classmethod
    def parse(cls, text: str, quotas: dict[str, int] | None = None) -> Pool:
        """Read `kind:count[:memory],…` as the command line has it."""
        kinds: list[Kind] = []
        for part in text.split(","):
            fields = part.strip().split(":")
            if len(fields) not in (2, 3) or not fields[0] or not _COUNT.fullmatch(fields[1]):
                raise ValueError(f"{part!r} is not `kind:count[:memory]`, as in v100:8:16GiB")
            memory_bytes = parse_bytes(fields[2]) if len(fields) == 3 else 0
            kinds.append(Kind(fields[0], int(fields[1]), memory_bytes))
        names = [kind.name for kind in kinds]
        if len(set(names)) < len(names):
            raise ValueError(f"a kind is named twice in {text!r}; add its counts up")
        if sum(kind.count for kind in kinds) == 0:
            raise ValueError(f"{text!r} has no device at all")
        if sum(kind.count for kind in kinds) > POOL_DEVICES_MAX:
            raise ValueError(f"{text!r} has more than {POOL_DEVICES_MAX} devices")
        return cls(tuple(kinds), quotas or {})


@dataclass(frozen=True, slots=True)
class Task:
    """A program submitted to the pool, with its needs.

    `type` names its row in the throughput table; tasks of one type and gang size are alike but
    for their number of steps.
    """

    name: str
    type: str
    steps: float
    arrival_s: float = 0.0
    devices: int = 1  # A gang: all of them at once, or none.
    weight: float = 1.0
    deadline_s: float | None = None  # Seconds after arrival.
    kinds: frozenset[str] | None = None  # Any of these; None: any kind.
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Tasks and their positions in the file, so that an error can name the line."""

    tasks: list[Task]
    file: str
    lines: list[int]


class InputError(ValueError):
    """A trace or table that cannot be used. Names the file, the line and the field."""

    def __init__(self, file: str, line: int, field_name: str, problem: str) -> None:
        self.file, self.line, self.field, self.problem = file, line, field_name, problem
        super().__init__(f"{file}:{line}: {field_name}: {problem}")
