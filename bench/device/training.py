"""Training steps: the same program on the local CPU and on a shoal device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from bench.figures import Figure, slowdown
from bench.measure import Plan, Spread, compare, geometric_mean, loop
from bench.models import PROGRAMS, Program, Trainer

GROUP = "training"
MEAN_TARGET = 1.00
EACH_TARGET = {"MLP": 1.15, "CNN": 1.15, "GPT": 1.15, "LSTM": 1.5}
CHECKED_STEPS = 20


def pair_of_trainers(program: Program) -> tuple[Trainer, Trainer]:
    """The same weights and the same data on both sides."""
    torch.manual_seed(0)
    model, batch = program.model(), program.batch()
    return Trainer(copy.deepcopy(model), batch, "cpu"), Trainer(model, batch, "shoal")


def waits(trainer: Trainer, steps: int = 10) -> float:
    """How often a step waits for the device. Nothing in these programs needs to."""
    before = torch.shoal.traffic()["round_trips"]
    for _ in range(steps):
        trainer.step()
    return (torch.shoal.traffic()["round_trips"] - before) / steps


def measure(plan: Plan, tell: Callable[[str], None]) -> tuple[list[Figure], dict[str, bool]]:
    figures, checks = [], {}
    for program in PROGRAMS:
        tell(program.name)
        local, ours = pair_of_trainers(program)
        for _ in range(CHECKED_STEPS):
            local.step()
            ours.step()
        checks[f"{program.name}: loss after {CHECKED_STEPS} steps equal bit for bit"] = (
            local.read_loss() == ours.read_loss()
        )
        pair = compare(
            loop(local.step, local.read_loss), loop(ours.step, ours.read_loss), plan, least=5
        )
        note = f"loss read once in {pair.iterations} steps; {waits(ours):g} other waits a step"
        figures.append(slowdown(GROUP, program.name, pair, EACH_TARGET[program.kind], note))
    mean = geometric_mean([figure.ratio.median for figure in figures])
    figures.append(
        Figure(
            group=GROUP,
            name="geometric mean",
            what="shoal / local time",
            ratio=Spread(mean, mean, mean),
            target=MEAN_TARGET,
        )
    )
    figures.append(read_every_step(plan, tell))
    return figures, checks


def read_every_step(plan: Plan, tell: Callable[[str], None]) -> Figure:
    """A loop that waits for the loss in each step gives the overlap of client and device away."""
    program = next(p for p in PROGRAMS if p.name == "GPT small")
    tell("GPT small, loss read every step")
    local, ours = pair_of_trainers(program)

    def body(trainer: Trainer) -> Callable[[], None]:
        def step() -> None:
            trainer.step()
            trainer.read_loss()

        return step

    pair = compare(
        loop(body(local), local.read_loss), loop(body(ours), ours.read_loss), plan, least=5
    )
    name = "GPT small, loss read every step"
    return slowdown(GROUP, name, pair, None, "not in the mean")
