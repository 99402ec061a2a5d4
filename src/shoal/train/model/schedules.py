"""Pipeline schedules: which micro-batch a stage computes when. Pure lists, checked before use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

#: The part of a backward pass that computes the gradients of weights, where it is not measured.
WEIGHT_PART = 0.5
#: Steps that are run on paper; the first half only fills the stages.
SIMULATED_STEPS = 6


class InvalidSchedule(ValueError):
    """The schedule would wait for itself, or leaves work out."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One piece of a micro-batch's work on the stage whose list holds it.

    A backward pass computes the gradients of what came into the stage and of its weights; or only
    the former, if the list has the weights' gradients as an instruction of their own.
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
    return _alternating(stages, micro_batches, [stages - s - 1 for s in range(stages)])


def zero_bubble(stages: int, micro_batches: int) -> Schedule:
    """1F1B whose later stages put the gradients of their weights off, for nobody waits for those: the
    stage before goes on sooner, and what was put off fills the time in which there is nothing else.

    Each stage starts as many micro-batches as it can until the first comes back. Where steps follow
    each other, what later stages have put off fills the time until the next step's first micro-batch
    comes to them: with `enough` micro-batches nobody ever waits. Every stage keeps at most so many.

    >>> [" ".join(map(str, line)) for line in zero_bubble(2, 3)]
    ['F0 F1 F2 B0 B1 B2', 'F0 B0 F1 B1 F2 B2 W0 W1 W2']
    """
    ahead = [2 * (stages - s) - 2 for s in range(stages)]
    return _putting_off(_alternating(stages, micro_batches, ahead))


def enough(stages: int) -> int:
    """The micro-batches from which on nobody waits in `zero_bubble`."""
    return 2 * stages - 1


def zero_bubble_lean(stages: int, micro_batches: int) -> Schedule:
    """The same with the micro-batches under way that 1F1B has: every stage keeps at most as many as
    there are stages, and in each step the first waits for its first one to come back.

    >>> [" ".join(map(str, line)) for line in zero_bubble_lean(2, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 W0 F2 B2 W1 W2']
    """
    return _putting_off(one_forward_one_backward(stages, micro_batches))


def _alternating(stages: int, micro_batches: int, ahead: Sequence[int]) -> Schedule:
    """Each stage computes so many forwards first, then a forward and a backward in turn."""
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


def _putting_off(base: Schedule) -> Schedule:
    """`base` with the gradients of weights of all stages but the first put where these would wait, on
    paper: a forward, the gradients of inputs and those of weights take the same time."""
    stages = len(base)
    lines: list[list[Instruction]] = [[] for _ in base]
    put_off: list[deque[Instruction]] = [deque() for _ in base]
    left = [deque(line) for line in base]
    free_at = [0] * stages
    done: dict[tuple[int, str, int], int] = {}
    now = 0
    while any(left) or any(put_off):
        for stage in range(stages):
            if free_at[stage] > now:
                continue
            chosen = _choose(stage, stages, left[stage], put_off[stage], done, now)
            if chosen is None:
                continue
            lines[stage].append(chosen)
            # The first stage computes both kinds of gradients at once: nobody waits for it.
            took = 2 if stage == 0 and chosen.kind == "backward" else 1
            free_at[stage] = done[stage, chosen.kind, chosen.micro] = now + took
            if stage > 0 and chosen.kind == "backward":
                put_off[stage].append(weight(chosen.micro))
        now += 1
    return tuple(tuple(line) for line in lines)


def _choose(
    stage: int,
    stages: int,
    left: deque[Instruction],
    put_off: deque[Instruction],
    done: dict[tuple[int, str, int], int],
    now: int,
) -> Instruction | None:
    """What a stage that is free does now: what others wait for, if it can be done."""
    if left and len(put_off) <= 2 * stage:
        need = _need(stage, stages, left[0])
        if need is None or done.get(need, now + 1) <= now:
            return left.popleft()
    return put_off.popleft() if put_off else None


SCHEDULES = {
    "zero-bubble": zero_bubble,
    "zero-bubble-lean": zero_bubble_lean,
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
}
#: What takes less memory, in the order in which it is tried where a schedule does not fit.
LEANER = {"zero-bubble": "zero-bubble-lean", "zero-bubble-lean": "1f1b"}


def defers(name: str) -> bool:
    """Whether the schedule of that name computes gradients of weights apart."""
    return name.startswith("zero-bubble")


@lru_cache(maxsize=64)
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
    """Raises unless every stage does all work once and the whole can be issued to its end."""
    wanted = sorted((k, m) for k in ("backward", "forward") for m in range(micro_batches))
    for stage, line in enumerate(schedule):
        if sorted((i.kind, i.micro) for i in line if i.kind != "weight") != wanted:
            raise InvalidSchedule(f"stage {stage} does not do every micro-batch exactly once")
        for i, instruction in enumerate(line):
            if instruction.kind == "weight" and backward(instruction.micro) not in line[:i]:
                raise InvalidSchedule(f"stage {stage} has {instruction} before its backward pass")
    issue_order(schedule)


def split(line: Sequence[Instruction]) -> frozenset[int]:
    """Micro-batches whose weights' gradients are computed apart."""
    return frozenset(i.micro for i in line if i.kind == "weight")


def in_flight(line: Sequence[Instruction]) -> int:
    """The most micro-batches of which a stage keeps something at once."""
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
    """What one thread issues next: a forward pass through all stages, or work of one stage."""

    instruction: Instruction
    stage: int  # of a forward pass: the last


@lru_cache(maxsize=64)
def issue_order(schedule: Schedule) -> tuple[Issue, ...]:
    """An order in which one thread can issue everything, each stage's work in its own order. Devices
    run behind: what is issued later for another device holds none up."""
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
    """How long a step takes where steps follow each other, and how much of it each stage works."""

    total_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The part of the stages' time in which they wait."""
        whole = self.total_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0


def simulate(
    schedule: Schedule,
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    transfer_s: float = 0.0,
) -> Timing:
    """Runs the schedule on paper, some steps in a row: a stage begins the next one when it has done
    its part of this one. Seconds are by stage and micro-batch."""
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
            took *= WEIGHT_PART
        elif instruction.kind == "backward" and instruction.micro in apart[stage]:
            took *= 1 - WEIGHT_PART
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
    settled = SIMULATED_STEPS // 2
    each_s = (ends[-1] - ends[settled - 1]) / (SIMULATED_STEPS - settled)
    return Timing(each_s, tuple(seconds / SIMULATED_STEPS for seconds in busy))


def _need(stage: int, stages: int, instruction: Instruction) -> tuple[int, str, int] | None:
    """What must be done before, apart from the stage's own earlier instructions."""
    if instruction.kind == "weight":
        return (stage, "backward", instruction.micro)
    if instruction.kind == "forward":
        return (stage - 1, "forward", instruction.micro) if stage > 0 else None
    if stage == stages - 1:
        return (stage, "forward", instruction.micro)
    return (stage + 1, "backward", instruction.micro)
