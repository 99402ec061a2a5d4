"""Pipeline schedules: which micro-batch a stage computes when. Pure lists, checked before use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


class InvalidSchedule(ValueError):
    """The schedule would wait for itself, or leaves work out."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """Forward or backward of one micro-batch on the stage whose list holds it."""

    kind: Literal["forward", "backward"]
    micro: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro}"


#: One list of instructions for each stage, in the order of the stages.
Schedule = tuple[tuple[Instruction, ...], ...]


def forward(micro: int) -> Instruction:
    return Instruction("forward", micro)


def backward(micro: int) -> Instruction:
    return Instruction("backward", micro)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards. Keeps every micro-batch's activations."""
    _positive(stages, micro_batches)
    micros = range(micro_batches)
    one = tuple(forward(m) for m in micros) + tuple(backward(m) for m in micros)
    return (one,) * stages


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B: stage s keeps at most `stages - s` micro-batches.

    >>> [" ".join(map(str, line)) for line in one_forward_one_backward(2, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    _positive(stages, micro_batches)
    lines = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, micro_batches)
        line = [forward(m) for m in range(ahead)]
        for m in range(micro_batches - ahead):
            line += [forward(m + ahead), backward(m)]
        line += [backward(m) for m in range(micro_batches - ahead, micro_batches)]
        lines.append(tuple(line))
    return tuple(lines)


SCHEDULES = {"1f1b": one_forward_one_backward, "gpipe": gpipe}


def make(name: str, stages: int, micro_batches: int) -> Schedule:
    """The schedule of that name, checked."""
    if name not in SCHEDULES:
        raise InvalidSchedule(f"{name!r} is no schedule; use one of {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[name](stages, micro_batches)
    check(schedule, micro_batches)
    return schedule


def _positive(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise InvalidSchedule(
            f"a schedule needs at least one stage and one micro-batch, not {stages} and "
            f"{micro_batches}"
        )


def check(schedule: Schedule, micro_batches: int) -> None:
    """Raises unless every stage does all work once and the whole runs to its end."""
    wanted = sorted((k, m) for k in ("backward", "forward") for m in range(micro_batches))
    for stage, line in enumerate(schedule):
        if sorted((i.kind, i.micro) for i in line) != wanted:
            raise InvalidSchedule(f"stage {stage} does not do every micro-batch exactly once")
    simulate(schedule, [1.0] * len(schedule), [1.0] * len(schedule))


def in_flight(line: Sequence[Instruction]) -> int:
    """The most micro-batches whose activations a stage keeps at once."""
    kept = most = 0
    for instruction in line:
        kept += 1 if instruction.kind == "forward" else -1
        most = max(most, kept)
    return most


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a schedule takes, and how much of that each stage works."""

    total_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The part of the stages' time in which they wait."""
        whole = self.total_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0


def simulate(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: float = 0.0,
) -> Timing:
    """Runs the schedule on paper. Raises `InvalidSchedule` if it waits for itself."""
    stages = len(schedule)
    done: dict[tuple[int, str, int], float] = {}
    clock = [0.0] * stages
    at = [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, line in enumerate(schedule):
            while at[stage] < len(line):
                instruction = line[at[stage]]
                need = _need(stage, stages, instruction)
                if need is not None and need not in done:
                    break
                start = clock[stage]
                if need is not None and need[0] != stage:
                    start = max(start, done[need] + transfer_s)
                took = (forward_s if instruction.kind == "forward" else backward_s)[stage]
                clock[stage] = start + took
                done[stage, instruction.kind, instruction.micro] = clock[stage]
                at[stage] += 1
                moved = True
    stuck = [s for s in range(stages) if at[s] < len(schedule[s])]
    if stuck:
        waits = ", ".join(f"stage {s} at {schedule[s][at[s]]}" for s in stuck)
        raise InvalidSchedule(f"the schedule waits for itself: {waits}")
    busy = tuple(
        sum((forward_s if i.kind == "forward" else backward_s)[s] for i in line)
        for s, line in enumerate(schedule)
    )
    return Timing(max(clock, default=0.0), busy)


def _need(stage: int, stages: int, instruction: Instruction) -> tuple[int, str, int] | None:
    """What must be done before, apart from the stage's own earlier instructions."""
    if instruction.kind == "forward":
        return (stage - 1, "forward", instruction.micro) if stage > 0 else None
    if stage == stages - 1:
        return (stage, "forward", instruction.micro)
    return (stage + 1, "backward", instruction.micro)
