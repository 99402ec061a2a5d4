"""Trainings that are killed, or whose disk fills, go on from the last whole checkpoint."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
import shoal.train
from tests.support import programs
from tests.support.disks import file_system
from tests.train.models import largest_difference
from tests.train.test_equal_results import sgd
from tests.train.test_fit import by_hand, data  # noqa: F401  (a fixture)

EPOCHS, STEPS = 12, 84  # by_hand's epochs have seven steps

KILLED = """
    import json, sys
    import torch.nn.functional as F
    import shoal.train
    from tests.train.test_fit import made
    from tests.train.test_equal_results import sgd

    calls = 0

    def loss(output, target):
        global calls
        calls += 1
        print(calls, flush=True)
        return F.cross_entropy(output, target)

    x, y, folder, epochs = sys.argv[1:]
    model = made()
    history = shoal.train.fit(
        model, loss, sgd(model), (x, y), epochs=int(epochs), batch_size=16, seed=3,
        checkpoint=folder, checkpoint_every=1, progress=False,
    )
    print(json.dumps({"losses": history.losses, "calls": calls}))
"""


def test_a_killed_program_goes_on_in_the_middle_of_an_epoch(
    data: tuple[Path, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    """SIGKILL, wherever it happens to be by then; started again, it ends with equal results."""
    arguments = (*map(str, data), str(tmp_path / "run"), str(EPOCHS))
    path = os.pathsep.join(sys.path)
    program = programs.start(KILLED, *arguments, PYTHONPATH=path)
    assert program.stdout is not None
    for line in program.stdout:
        if int(line) == 9:
            break
    program.kill()
    _, err = program.communicate()
    assert program.returncode == -signal.SIGKILL, err
    saved = shoal.train.latest(tmp_path / "run")
    assert saved is not None
    assert 0 < saved.step < STEPS
    out = programs.succeed(KILLED, *arguments, PYTHONPATH=path)
    found = json.loads(out.splitlines()[-1])
    assert found["calls"] == STEPS - saved.step  # nothing was done again
    expected, _ = by_hand(data, EPOCHS)
    assert found["losses"] == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that is full after 1 MiB."""
    with file_system(tmp_path / "small", "size=1m") as where:
        yield where


def wide() -> nn.Module:
    """Weights and momentum make a checkpoint of some 160 KiB."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 2000), nn.Tanh(), nn.Linear(2000, 2))


@pytest.mark.usefixtures("lease")
def test_a_disk_that_fills_during_a_checkpoint(
    data: tuple[Path, Path],  # noqa: F811
    small_disk: Path,
    tmp_path: Path,
) -> None:
    """The training says so, what is on the disk is whole, and with room it goes on to equal results."""

    def run(folder: Path, keep: int) -> tuple[shoal.train.History, nn.Module]:
        model = wide()
        history = shoal.train.fit(
            model, F.cross_entropy, sgd(model), data, epochs=2, batch_size=16, seed=3,
            checkpoint=folder, checkpoint_every=1, keep=keep, progress=False,
        )  # fmt: skip
        return history, model

    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(300 * 2**10))
    with pytest.raises(shoal.train.CheckpointError, match=r"could not be written.*[Nn]o space"):
        run(small_disk / "run", keep=50)
    saved = shoal.train.latest(small_disk / "run")
    assert saved is not None
    assert 1 <= saved.step < 14
    names = sorted(p.name for p in (small_disk / "run").iterdir())
    assert names == [f"step-{n:09d}" for n in range(1, saved.step + 1)]  # nothing half-written
    ballast.unlink()
    history, model = run(small_disk / "run", keep=2)
    assert len(list((small_disk / "run").iterdir())) == 2
    expected, reference = run(tmp_path / "elsewhere", keep=2)
    assert history.losses == expected.losses
    assert largest_difference(model, reference) == 0
