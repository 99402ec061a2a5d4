"""This build beside another one, in one run: `python -m bench.builds ../other-checkout`.

Both checkouts are set up (`make setup`). Each has a program of its own; their bursts alternate, and a
figure is the median of the ratios of neighbouring bursts. Exit code 1 if this build is slower than
allowed: 2 % in the geometric mean of the training steps, 3 % in that of the issue costs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import click

TRAINING_MAX, ISSUE_MAX = 1.02, 1.03
# Runs in either checkout, with its own `bench.models` and `bench.operators`.
_PROGRAM = """
import json, sys, time
import torch, shoal
from bench.models import PROGRAMS, Trainer
from bench.operators import bodies

torch.set_num_threads(1)

def training(program, burst_s):
    torch.manual_seed(0)
    trainer = Trainer(program.model(), program.batch(), "shoal")
    def burst():
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

    def __init__(self, checkout: Path, burst_s: float) -> None:
        self._process = subprocess.Popen(
            [checkout / ".venv/bin/python", "-c", _PROGRAM, str(burst_s)],
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


@click.command(help=__doc__)
@click.argument("checkout", type=click.Path(exists=True, path_type=Path))
@click.option("--rounds", default=12, show_default=True, help="Bursts of this build per figure.")
@click.option("--burst", default=0.3, show_default=True, help="Seconds of a burst of training.")
def main(checkout: Path, rounds: int, burst: float) -> None:
    other = Build(checkout.resolve(), burst)
    ours = Build(Path(__file__).resolve().parents[1], burst)
    found: dict[str, float] = {}
    for name in ours.names:
        found[name] = compare(name, ours, other, rounds)
        click.echo(f"{name:32} {found[name]:.3f} × the other build's time")
    ours.close()
    other.close()
    from bench.models import PROGRAMS

    programs = [p.name for p in PROGRAMS]
    training = statistics.geometric_mean(found[n] for n in programs)
    issue = statistics.geometric_mean(v for n, v in found.items() if n not in programs)
    click.echo(f"training, geometric mean: {training:.3f} (at most {TRAINING_MAX})")
    click.echo(f"issue cost, geometric mean: {issue:.3f} (at most {ISSUE_MAX})")
    sys.exit(0 if training <= TRAINING_MAX and issue <= ISSUE_MAX else 1)


if __name__ == "__main__":
    main()
