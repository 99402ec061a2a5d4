"""What `shoal simulate` and `shoal why` have in common: a table, a pool and the rules of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from shoal.schedule.allocator.policy import Policy, policies
from shoal.schedule.formats.tables import read_table
from shoal.schedule.model.entities import TOGETHER_MAX, Pool
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.policies.shoal import BALANCE, Shoal

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--throughputs", type=click.Path(exists=True, dir_okay=False),
                 help="Speeds of each type of task on each kind of device."),
    click.option("--devices", metavar="KIND:COUNT[:MEMORY],…",
                 help="Devices of the pool, like v100:8:16GiB,k80:24."),
    click.option("--round", "round_s", default=360.0, show_default=True,
                 help="Seconds of a round."),
    click.option("--restart-cost", "restart_cost_s", default=0.0, show_default=True,
                 help="Seconds that a task loses when it resumes or moves."),
    click.option("--balance", default=BALANCE, show_default=True,
                 help="shoal: 0 is for completion time; more is for makespan and fairness."),
    click.option("--together", "together_max", default=2, show_default=True,
                 help="Most tasks that share a device."),
    click.option("--quota", "quotas", multiple=True, metavar="OWNER=DEVICES",
                 help="Most devices an owner holds at once."),
)  # fmt: skip


class BadInput(click.ClickException):
    """What was given cannot be used: exit code 2, as click has it for its own."""

    exit_code = 2


def options(command: Command) -> Command:
    """Add the options that describe the workload and the policy."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@contextmanager
def bad_input() -> Iterator[None]:
    """End the command with the text of an error about its input."""
    try:
        yield
    except ValueError as error:
        raise BadInput(str(error)) from None


def policy(name: str, balance: float) -> Policy:
    known = policies()
    if name not in known:
        raise BadInput(f"there is no policy {name!r}; there are: {', '.join(sorted(known))}")
    return Shoal(balance) if name == Shoal.name else known[name]()


def check_numbers(round_s: float, restart_cost_s: float, together_max: int, balance: float) -> None:
    if not 0 < round_s < float("inf"):
        raise BadInput(f"--round must be above 0 seconds (got {round_s}); try 360")
    if not 0 <= restart_cost_s < round_s:
        raise BadInput(
            f"--restart-cost must be shorter than a round of {round_s} s (got {restart_cost_s}), "
            "or a moved task would never progress. Use longer rounds"
        )
    if not 1 <= together_max <= TOGETHER_MAX:
        raise BadInput(f"--together must be from 1 to {TOGETHER_MAX} (got {together_max})")
    if not 0 <= balance < float("inf"):
        raise BadInput(f"--balance must be 0 or more (got {balance})")


def load(
    throughputs: str | None, devices: str | None, quotas: tuple[str, ...]
) -> tuple[Throughputs, Pool]:
    """Return the table and the pool. The ValueError for bad ones says what is wrong."""
    if throughputs is None or devices is None:
        missing = "--throughputs" if throughputs is None else "--devices"
        raise ValueError(f"Missing option '{missing}': a simulation needs it.")
    limits = {}
    for quota in quotas:
        owner, _, number = quota.partition("=")
        if not number.isdecimal() or len(number) > 9:
            raise ValueError(f"--quota {quota!r} is not OWNER=DEVICES, like ana=8")
        limits[owner] = int(number)
    return read_table(Path(throughputs)), Pool.parse(devices, limits)
