"""How well shares follow devices whose speed wanders: `python -m bench.train.shares`.

First the times that two devices work in each step are recorded, with a division that stays. Then
policies are replayed on them: what would a step have taken that waits for the slower of both? All are
compared with *hindsight*, which divides every step so that both end together, and which nobody can
know beforehand: what a policy misses of it is the noise of single steps, and what it learns too late.
With `--slowdown` the second device becomes half as fast in the middle of what was recorded.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import click
import torch
from rich.console import Console
from rich.table import Table

import shoal
import shoal.train
from bench.train.peers import MODELS, adamw, loss_of, made, shares
from shoal.train.group.batch_split import Divider

Times = list[tuple[float, ...]]
LAG = 1  # steps whose times are not known when a batch is divided, beside the last one
FIXED = 0.08  # of a time that does not depend on samples
WARM_UP_S = {"CNN": 0.02, "GPT": 0.004, "MLP": 0.002}  # of a device, with a size that is new to it
STEPS = {"CNN": 300, "GPT": 80, "MLP": 250}
STEPS_BEFORE, STEPS_AFTER = 20, 8  # of a slowdown


@dataclass(slots=True)
class Stays(Divider):
    """A division that stays, and remembers what it was told."""

    division: tuple[int, ...] = ()
    told: Times = field(default_factory=list)

    def shares(self, total: int) -> tuple[int, ...]:
        return self.division

    def observe(self, counts: Sequence[int], seconds: Sequence[float | None]) -> None:
        if all(s is not None for s in seconds):
            self.told.append(tuple(s or 0.0 for s in seconds))


def recorded(model_name: str, speeds: Sequence[float]) -> tuple[tuple[int, ...], Times]:
    """A division by speed, and the devices' times of many steps with it."""
    model, batch = made(model_name)
    stays = Stays(2, division=tuple(shares(len(batch[0]), speeds)))
    specs = [f"cpu,threads=1,memory=3GiB,speed={s}" for s in speeds]
    with shoal.up(specs) as pool, shoal.connect(pool.url, devices=2):
        with shoal.train.worker_groups(2) as groups:
            with shoal.train.Trainer(model, loss_of, adamw(model), groups) as trainer:
                trainer.step(batch)
                trainer._division._divider = stays
                for _ in range(STEPS[model_name] + 10):
                    trainer.step(batch)
    return stays.division, stays.told[10:]


def replayed(
    divider: Divider, division: tuple[int, ...], times: Times, warm_up_s: float
) -> list[float]:
    """What each step would have taken with the divider's shares."""
    unknown: deque[tuple[tuple[int, ...], list[float]]] = deque()
    warm: set[tuple[int, int]] = set()
    steps = []
    for step in times:
        counts = divider.split(sum(division))
        parts = [
            seconds * (FIXED + (1 - FIXED) * n / before)
            + (warm_up_s if (device, n) not in warm else 0.0)
            for device, (seconds, n, before) in enumerate(zip(step, counts, division, strict=True))
        ]
        warm |= set(enumerate(counts))
        steps.append(max(parts))
        unknown.append((counts, parts))
        if len(unknown) > LAG:
            divider.observe(*unknown.popleft())
    return steps


def hindsight(division: Sequence[int], times: Times) -> list[float]:
    total = sum(division)
    return [total / sum(n / s for n, s in zip(division, step, strict=True)) for step in times]


def after_slowdown(division: tuple[int, ...], times: Times, warm_up_s: float) -> list[float]:
    """Of hindsight's speed, step by step after the second device became half as fast; medians over
    many places of what was recorded."""
    found = []
    whole = STEPS_BEFORE + STEPS_AFTER
    for begin in range(0, len(times) - whole, 8):
        piece = times[begin : begin + STEPS_BEFORE]
        piece += [(a, 2 * b) for a, b in times[begin + STEPS_BEFORE : begin + whole]]
        steps = replayed(Divider(2), division, piece, warm_up_s)
        best = hindsight(division, piece)
        found.append([b / s for b, s in zip(best, steps, strict=True)][STEPS_BEFORE:])
    return [statistics.median(step) for step in zip(*found, strict=True)]


@click.command()
@click.option("--model", multiple=True, type=click.Choice(list(MODELS)), help="Default: all.")
@click.option("--slowdown", is_flag=True, help="What happens when a device becomes slower.")
def main(model: tuple[str, ...], slowdown: bool) -> None:
    """Prints what shares reach of what could be known only afterwards."""
    torch.set_num_threads(1)
    table = Table(
        "devices", "ms a step", "division that stays", "ours", title="of hindsight's speed"
    )
    lines = []
    for name in model or MODELS:
        for slow in (1.0, 0.45):
            division, times = recorded(name, (1.0, slow))
            best = statistics.fmean(hindsight(division, times))
            stays = statistics.fmean(max(step) for step in times)
            believed = (1.0, slow) if slow < 1 else None
            ours = replayed(Divider(2, speeds=believed), division, times, WARM_UP_S[name])
            of_best = best / statistics.fmean(ours)
            row = (f"{name}, 1 and {slow}", f"{stays * 1e3:.1f}")
            table.add_row(*row, f"{best / stays:.3f}", f"{of_best:.3f}")
            if slowdown and slow == 1.0:
                steps = after_slowdown(division, times, WARM_UP_S[name])
                lines.append(f"{name}, after a slowdown: " + " ".join(f"{s:.2f}" for s in steps))
    console = Console()
    console.print(table)
    for line in lines:
        console.print(line)


if __name__ == "__main__":
    main()
