"""How soon a training names a worker that is killed or stopped: group, device and step.

Two groups train; a thread sends the signal in the middle of it and notes when. A device elsewhere
(here by the network's way over loopback) that is stopped is first named in the log, for its silence
may be the network's, and is lost when its connection gives it up. With on_lost="save" the error
waits until the others have let go of the step, and with "continue" there is none: what counts is
when the step was done without the lost group.

    python -m bench.train.faults [--rounds 5] [--output bench/results/train-faults.json]
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import torch
from tests.support.standing import StandingPool

import shoal
import shoal.train
from bench.models import Gpt
from bench.train import report
from shoal.train.step.recovery import OnLost

DEVICE = "cpu,threads=1,memory=256MiB"
VICTIM = 1
NAMED = re.compile(r"group 1 \(.*shoal:2\)+, step \d+: ")
#: Fault -> way of naming -> seconds of each round.
Results = dict[str, dict[str, list[float]]]
FAULTS = {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped"}
BATCH, CONTEXT, LETTERS = 8, 32, 64
WARM = 3
STRIKE_AFTER_S = 0.3
GIVE_UP_S = 30.0


class Named(logging.Handler):
    """When the log first named the silent device."""

    def __init__(self) -> None:
        super().__init__()
        self.at: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.at is None and NAMED.search(record.getMessage()):
            self.at = time.monotonic()


def trained_until_lost(
    trainer: shoal.train.Trainer, strike: Callable[[], None]
) -> tuple[float, shoal.train.GroupLostError]:
    """When the error came, or the training went on without the group; and what the error says."""
    text = torch.randint(LETTERS, (BATCH, CONTEXT + 1))
    batch = text[:, :-1], text[:, 1:]
    for _ in range(WARM):
        trainer.step(batch)
    threading.Timer(STRIKE_AFTER_S, strike).start()
    until = time.monotonic() + GIVE_UP_S
    while time.monotonic() < until:
        try:
            trainer.step(batch)
        except shoal.train.GroupLostError as error:
            return time.monotonic(), error
        if trainer.lost:  # it went on
            return time.monotonic(), trainer.lost[0]
    raise click.ClickException(f"nobody noticed within {GIVE_UP_S:g} s")


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def fault(
    connect: Callable[[], shoal.Lease], which: signal.Signals, on_lost: OnLost
) -> dict[str, float]:
    """Seconds from the signal to the error, and to the log's line if there was one."""
    lease = connect()
    victim = lease.worker_pids[VICTIM]
    model = Gpt(64, 2, 4, LETTERS, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters())
    struck: list[float] = []

    def strike() -> None:
        struck.append(time.monotonic())
        os.kill(victim, which)

    named = Named()
    logging.getLogger("shoal.train").addHandler(named)
    try:
        with shoal.train.worker_groups(2) as groups:
            trainer = shoal.train.Trainer(model, loss, optimizer, groups, on_lost=on_lost)
            with suppress(shoal.DeviceLostError), trainer:
                at, error = trained_until_lost(trainer, strike)
    finally:
        logging.getLogger("shoal.train").removeHandler(named)
        if which == signal.SIGSTOP:
            os.kill(victim, signal.SIGKILL)
        lease.close()
    if not NAMED.match(str(error)):
        raise click.ClickException(f"the error does not name group, device and step: {error}")
    found = {"error": at - struck[0]}
    if named.at is not None:
        found["log"] = named.at - struck[0]
    return found


def rounds_of(
    count: int,
    connect: Callable[[], shoal.Lease],
    which: signal.Signals,
    on_lost: OnLost,
    ready: Callable[[], None],
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for _ in range(count):
        ready()
        for key, seconds in fault(connect, which, on_lost).items():
            found.setdefault(key, []).append(seconds)
    return found


@click.command()
@click.option("--rounds", default=5)
@click.option("--output", type=click.Path(path_type=Path))
def main(rounds: int, output: Path | None) -> None:
    """Prints how soon a fault is named."""
    results: Results = {}
    with tempfile.TemporaryDirectory() as directory:
        with StandingPool(Path(directory), DEVICE, DEVICE, listen=True) as pool:
            os.environ["SHOAL_IDENTITY"] = str(pool.join("bench").path)

            def near() -> shoal.Lease:
                return shoal.connect(pool.url, devices=2, memory="200MiB")

            def far() -> shoal.Lease:
                return shoal.connect(
                    pool.network_url, devices=2, memory="200MiB", transport="network"
                )

            ways: list[tuple[str, Callable[[], shoal.Lease], OnLost]] = [
                ("on this machine", near, "stop"),
                ('on this machine, `on_lost="save"`', near, "save"),
                ('on this machine, `on_lost="continue"`', near, "continue"),
                ("reached by network", far, "stop"),
            ]
            for where, connect, on_lost in ways:
                for which, word in FAULTS.items():
                    results[f"{word}, {where}"] = rounds_of(
                        rounds, connect, which, on_lost, lambda: pool.until_whole(2)
                    )
    print("\n".join(report.faults(results)))
    if output is not None:
        output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
