"""Pipeline schedules: the order of each stage's work. Pure lists, checked before use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

#: The fraction of a backward pass that computes the gradients of weights, unless it is measured.
WEIGHT_FRACTION = 0.5
#: Simulated steps; the first half only fills the stages.
SIMULATED_STEPS = 6


class InvalidSchedule(ValueError):
    """The schedule waits for itself, or leaves work out."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """Work for one micro-batch on the stage whose list holds it.

    A backward pass computes the gradients of the stage's inputs and weights. It computes those of the
    inputs alone if the list has an instruction for the weights' gradients.
    """

    kind: Literal["forward", "backward", "weight"]
    micro: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro}"


#: One list of instructions for each stage, in the order of the stages.
Schedule = tuple[tuple[Instruction, ...], ...]


def forward(micro: int) -> Instruction:
    return Instruction("forward", micro)


def backward(micro: int) -> Instruction:
    return Instruction("backward", micro)


def weight(micro: int) -> Instruction:
    return Instruction("weight", micro)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Compute all forwards, then all backwards. Keep every micro-batch's activations."""
    _positive(stages, micro_batches)
    micros = range(micro_batches)
    one = tuple(forward(m) for m in micros) + tuple(backward(m) for m in micros)
    return (one,) * stages


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B: stage s keeps at most `stages - s` micro-batches.

    >>> [" ".join(map(str, line)) for line in one_forward_one_backward(2, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    return _alternating(stages, micro_batches, [stages - s - 1 for s in range(stages)])


def zero_bubble(stages: int, micro_batches: int) -> Schedule:
    """1F1B whose later stages defer the gradients of their weights. No stage waits for those, so the
    previous stage continues sooner, and the deferred work fills the idle time.

    Each stage starts as many micro-batches as it can until the first comes back. Between steps, the
    deferred work of later stages fills the time until the next step's first micro-batch reaches them:
    with `enough` micro-batches no stage ever waits. Every stage keeps at most so many.

    >>> [" ".join(map(str, line)) for line in zero_bubble(2, 3)]
    ['F0 F1 F2 B0 B1 B2', 'F0 B0 F1 B1 F2 B2 W0 W1 W2']
    """
    ahead = [2 * (stages - s) - 2 for s in range(stages)]
    return _deferring(_alternating(stages, micro_batches, ahead))


def enough(stages: int) -> int:
    """Return the fewest micro-batches with which no stage waits in `zero_bubble`."""
    return 2 * stages - 1


def zero_bubble_lean(stages: int, micro_batches: int) -> Schedule:
    """The same with as many micro-batches in flight as 1F1B: every stage keeps at most as many as there
    are stages. In each step the first stage waits for its first one to come back.

    >>> [" ".join(map(str, line)) for line in zero_bubble_lean(2, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 W0 F2 B2 W1 W2']
    """
    return _deferring(one_forward_one_backward(stages, micro_batches))


def _alternating(stages: int, micro_batches: int, ahead: Sequence[int]) -> Schedule:
    """Compute so many forwards first in each stage, then forward and backward alternately."""
    _positive(stages, micro_batches)
    lines = []
    for most in ahead:
        first = min(most, micro_batches)
        line = [forward(m) for m in range(first)]
        for m in range(micro_batches - first):
            line += [forward(m + first), backward(m)]
        line += [backward(m) for m in range(micro_batches - first, micro_batches)]
        lines.append(tuple(line))
    return tuple(lines)


def _deferring(base: Schedule) -> Schedule:
    """Move the gradients of weights, in all stages but the first, to where the stage would wait. This
    assumes that a forward, gradients of inputs and gradients of weights take the same time."""
    stages = len(base)
    lines: list[list[Instruction]] = [[] for _ in base]
    deferred: list[deque[Instruction]] = [deque() for _ in base]
    left = [deque(line) for line in base]
    free_at = [0] * stages
    done: dict[tuple[int, str, int], int] = {}
    now = 0
    while any(left) or any(deferred):
        for stage in range(stages):
            if free_at[stage] > now:
                continue
            chosen = _choose(stage, stages, left[stage], deferred[stage], done, now)
            if chosen is None:
                continue
            lines[stage].append(chosen)
            # The first stage computes both kinds of gradients at once: no stage waits for it.
            took = 2 if stage == 0 and chosen.kind == "backward" else 1
            free_at[stage] = done[stage, chosen.kind, chosen.micro] = now + took
            if stage > 0 and chosen.kind == "backward":
                deferred[stage].append(weight(chosen.micro))
        now += 1
    return tuple(tuple(line) for line in lines)


def _choose(
    stage: int,
    stages: int,
    left: deque[Instruction],
    deferred: deque[Instruction],
    done: dict[tuple[int, str, int], int],
    now: int,
) -> Instruction | None:
    """Return what a free stage does now: work that others wait for, if it is possible."""
    if left and len(deferred) <= 2 * stage:
        need = _need(stage, stages, left[0])
        if need is None or done.get(need, now + 1) <= now:
            return left.popleft()
    return deferred.popleft() if deferred else None


SCHEDULES = {
    "zero-bubble": zero_bubble,
    "zero-bubble-lean": zero_bubble_lean,
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
}
#: Schedules that take less memory, to try if one does not fit.
LEANER = {"zero-bubble": "zero-bubble-lean", "zero-bubble-lean": "1f1b"}


def defers(name: str) -> bool:
    """Return whether the schedule of that name defers gradients of weights."""
    return name.startswith("zero-bubble")


@lru_cache(maxsize=64)
def make(name: str, stages: int, micro_batches: int) -> Schedule:
    """Return the schedule of that name, checked."""
    if name not in SCHEDULES:
        raise InvalidSchedule(f"{name!r} is not a schedule; use one of {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[name](stages, micro_batches)
    check(schedule, micro_batches)
    return schedule


def _positive(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise InvalidSchedule(
            f"a schedule needs at least one stage and one micro-batch (got {stages} and "
            f"{micro_batches})"
        )


def check(schedule: Schedule, micro_batches: int) -> None:
    """Raise unless every stage does all work once and one thread can issue all of it."""
    wanted = sorted((k, m) for k in ("backward", "forward") for m in range(micro_batches))
    for stage, line in enumerate(schedule):
        if sorted((i.kind, i.micro) for i in line if i.kind != "weight") != wanted:
            raise InvalidSchedule(f"stage {stage} does not do every micro-batch exactly once")
        for i, instruction in enumerate(line):
            if instruction.kind == "weight" and backward(instruction.micro) not in line[:i]:
                raise InvalidSchedule(f"stage {stage} has {instruction} before its backward pass")
    issue_order(schedule)


def split(line: Sequence[Instruction]) -> frozenset[int]:
    """Return the micro-batches whose weights' gradients are deferred."""
    return frozenset(i.micro for i in line if i.kind == "weight")


def in_flight(line: Sequence[Instruction]) -> int:
    """Return the most micro-batches that a stage keeps tensors of at once."""
    apart = split(line)
    kept = most = 0
    for instruction in line:
        if instruction.kind == "forward":
            kept += 1
        elif instruction.kind == "weight" or instruction.micro not in apart:
            kept -= 1
        most = max(most, kept)
    return most


@dataclass(frozen=True, slots=True)
class Issue:
    """What the thread issues next: a forward pass through all stages, or work of one stage."""

    instruction: Instruction
    stage: int  # of a forward pass: the last


@lru_cache(maxsize=64)
def issue_order(schedule: Schedule) -> tuple[Issue, ...]:
    """Return an order in which one thread can issue everything, each stage's work in its own order.
    Devices run behind the thread, so work that it issues later for one device delays no other."""
    stages = len(schedule)
    at = [0] * stages
    done: set[tuple[int, str, int]] = set()
    order: list[Issue] = []

    def issue(stage: int, instruction: Instruction) -> None:
        done.add((stage, instruction.kind, instruction.micro))
        at[stage] += 1

    def next_of(stage: int) -> Instruction | None:
        return schedule[stage][at[stage]] if at[stage] < len(schedule[stage]) else None

    while any(next_of(stage) for stage in range(stages)):
        before = len(order)
        for stage in reversed(range(stages)):
            while (one := next_of(stage)) is not None and one.kind != "forward":
                if one.kind == "backward" and _need(stage, stages, one) not in done:
                    break
                order.append(Issue(one, stage))
                issue(stage, one)
        ahead = {next_of(stage) for stage in range(stages)}
        common = ahead.pop() if len(ahead) == 1 else None
        if common is not None and common.kind == "forward":
            order.append(Issue(common, stages - 1))
            for stage in range(stages):
                issue(stage, common)
        if len(order) == before:
            stuck = [(s, next_of(s)) for s in range(stages)]
            waits = ", ".join(f"stage {s} at {one}" for s, one in stuck if one is not None)
            raise InvalidSchedule(f"the schedule waits for itself: {waits}")
    return tuple(order)


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of a step in a row of steps, and those in which each stage works."""

    total_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The fraction of the stages' time in which they wait."""
        whole = self.total_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0


def simulate(
    schedule: Schedule,
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    transfer_s: float = 0.0,
) -> Timing:
    """Simulate some steps in a row. A stage begins the next step when it has finished its work of this
    one. Seconds are by stage and micro-batch."""
    stages = len(schedule)
    apart = [split(line) for line in schedule]
    clock = [0.0] * stages
    busy = [0.0] * stages
    ends: list[float] = []

    def run(stage: int, instruction: Instruction, done: dict[tuple[int, str, int], float]) -> None:
        start = clock[stage]
        need = _need(stage, stages, instruction)
        if need is not None and need[0] != stage:
            start = max(start, done[need] + transfer_s)
        seconds = forward_s if instruction.kind == "forward" else backward_s
        took = seconds[stage][instruction.micro]
        if instruction.kind == "weight":
            took *= WEIGHT_FRACTION
        elif instruction.kind == "backward" and instruction.micro in apart[stage]:
            took *= 1 - WEIGHT_FRACTION
        clock[stage] = start + took
        busy[stage] += took
        done[stage, instruction.kind, instruction.micro] = clock[stage]

    for _ in range(SIMULATED_STEPS):
        done: dict[tuple[int, str, int], float] = {}
        for issue in issue_order(schedule):
            every = range(stages) if issue.instruction.kind == "forward" else (issue.stage,)
            for stage in every:
                run(stage, issue.instruction, done)
        ends.append(max(clock, default=0.0))
    filling = SIMULATED_STEPS // 2
    each_s = (ends[-1] - ends[filling - 1]) / (SIMULATED_STEPS - filling)
    return Timing(each_s, tuple(seconds / SIMULATED_STEPS for seconds in busy))


def _need(stage: int, stages: int, instruction: Instruction) -> tuple[int, str, int] | None:
    """Return what must be done before, besides the stage's own earlier instructions."""
    if instruction.kind == "weight":
        return (stage, "backward", instruction.micro)
    if instruction.kind == "forward":
        return (stage - 1, "forward", instruction.micro) if stage > 0 else None
    if stage == stages - 1:
        return (stage, "forward", instruction.micro)
    return (stage + 1, "backward", instruction.micro)
