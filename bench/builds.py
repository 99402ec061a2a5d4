"""This build beside another one, in one run: `python -m bench.builds ../other-checkout`.

Both checkouts are set up (`make setup`). Each has a program of its own; their bursts alternate, and a
ratio is the median over neighbouring bursts. Where a program's memory lies is worth some per cent for
its whole life, so several pairs of programs run, and a figure is the median of their ratios. Exit code
1 if this build is slower than allowed: 2 % in the geometric mean of the training steps, 3 % in that of
the issue costs.

On a busy machine, root can add --realtime: no other program runs on a burst's cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import click

TRAINING_MAX, ISSUE_MAX = 1.02, 1.03
ISSUE_ROUNDS = 5  # for one of training
# Runs in either checkout, with its own models and operators.
_PROGRAM = """
import contextlib, json, os, sys, time
from pathlib import Path
import torch, shoal
from bench.models import PROGRAMS, Trainer

try:
    from bench.device.operators import bodies
except ImportError:  # before bench had rooms
    from bench.operators import bodies

torch.set_num_threads(1)

def family(pid):
    yield pid
    with contextlib.suppress(OSError):  # it has just ended
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from family(int(child))

def set_policy(policy, priority):
    for pid in family(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setscheduler(int(thread), policy, os.sched_param(priority))

@contextlib.contextmanager
def undisturbed():
    if sys.argv[2] == "realtime":
        set_policy(os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        if sys.argv[2] == "realtime":
            set_policy(os.SCHED_OTHER, 0)

def training(program, burst_s):
    torch.manual_seed(0)
    trainer = Trainer(program.model(), program.batch(), "shoal")
    def burst():
        with undisturbed():
            trainer.step()
            trainer.read_loss()
            steps, start = 0, time.perf_counter()
            while time.perf_counter() - start < burst_s:
                for _ in range(3):
                    trainer.step()
                trainer.read_loss()
                steps += 3
            return (time.perf_counter() - start) / steps
    return burst

def issue(body):
    def burst():
        with undisturbed():
            for _ in range(100):
                body()
            torch.shoal.synchronize()
            start = time.perf_counter()
            for _ in range(1000):
                body()
            took = time.perf_counter() - start
            torch.shoal.synchronize()
        return took / 1000
    return burst

with shoal.up(devices=["cpu,threads=1"]) as pool, shoal.connect(pool.url):
    kinds = {p.name: training(p, float(sys.argv[1])) for p in PROGRAMS}
    kinds |= {name: issue(body) for name, body in bodies("shoal").items()}
    for burst in kinds.values():
        burst()
    print(json.dumps(list(kinds)), flush=True)
    for line in sys.stdin:
        print(json.dumps(kinds[json.loads(line)]()), flush=True)
"""


class Build:
    """A program of one checkout that runs bursts when told."""

    def __init__(self, checkout: Path, burst_s: float, mode: str) -> None:
        self._process = subprocess.Popen(
            [checkout / ".venv/bin/python", "-c", _PROGRAM, str(burst_s), mode],
            cwd=checkout, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.names: list[str] = self._read()

    def burst(self, name: str) -> float:
        """Run one burst. Return the seconds of one step, or of issuing one operator."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(name) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self):  # type: ignore[no-untyped-def]
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def compare(name: str, ours: Build, other: Build, rounds: int) -> float:
    """Return the median ratio of times, this build's over the other's."""
    ratios = []
    for _ in range(rounds):
        before = other.burst(name)
        mine = ours.burst(name)
        after = other.burst(name)
        ratios.append(2 * mine / (before + after))
    return statistics.median(ratios)


def compare_all(ours: Build, other: Build, rounds: int, programs: set[str]) -> dict[str, float]:
    """Return all ratios of one pair of programs. A burst of issuing is short: there are more."""
    return {
        name: compare(name, ours, other, rounds if name in programs else ISSUE_ROUNDS * rounds)
        for name in ours.names
    }


@click.command(help=__doc__)
@click.argument("checkout", type=click.Path(exists=True, path_type=Path))
@click.option("--runs", default=5, show_default=True, help="Pairs of programs.")
@click.option("--rounds", default=4, show_default=True, help="Bursts of training in one run.")
@click.option("--burst", default=0.3, show_default=True, help="Seconds of a burst of training.")
@click.option("--realtime", is_flag=True, help="Run bursts at real-time priority (as root).")
def main(checkout: Path, runs: int, rounds: int, burst: float, realtime: bool) -> None:
    from bench.models import PROGRAMS

    programs = {p.name for p in PROGRAMS}
    mode = "realtime" if realtime else "shared"
    found: list[dict[str, float]] = []
    for _ in range(runs):
        other = Build(checkout.resolve(), burst, mode)
        ours = Build(Path(__file__).resolve().parents[1], burst, mode)
        found.append(compare_all(ours, other, rounds, programs))
        ours.close()
        other.close()
    figures = {name: statistics.median(run[name] for run in found) for name in found[0]}
    for name, ratio in figures.items():
        click.echo(f"{name:32} {ratio:.3f} × the other build's time")
    training = statistics.geometric_mean(v for n, v in figures.items() if n in programs)
    issue = statistics.geometric_mean(v for n, v in figures.items() if n not in programs)
    click.echo(f"training, geometric mean: {training:.3f} (at most {TRAINING_MAX})")
    click.echo(f"issue cost, geometric mean: {issue:.3f} (at most {ISSUE_MAX})")
    sys.exit(0 if training <= TRAINING_MAX and issue <= ISSUE_MAX else 1)


if __name__ == "__main__":
    main()
