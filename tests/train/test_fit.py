"""`fit` from data to checkpoints, and its parts in a loop written by hand."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
import shoal.train
from tests.train.models import largest_difference
from tests.train.test_equal_results import sgd

pytestmark = pytest.mark.usefixtures("lease")


def made() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, Path]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", (x.sum(1) > 0).astype(np.int64))
    return tmp_path / "x.npy", tmp_path / "y.npy"


def by_hand(
    data: tuple[Path, Path], epochs: int, gamma: float = 1.0
) -> tuple[list[float], nn.Module]:
    """What one device computes, in ten lines of plain torch."""
    model = made()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    losses = []
    for epoch in range(epochs):
        loader = shoal.train.load(data, 16, seed=3)
        loader.load_state_dict({"epoch": epoch, "batches": 0, "seed": 3})
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize(
    "layout", [{"groups": 1}, {"groups": 2}, {"groups": 1, "devices": 2}, {"groups": "auto"}]
)
def test_fit_learns_what_one_device_learns(
    data: tuple[Path, Path], tmp_path: Path, layout: dict[str, Any]
) -> None:
    model = made()
    optimizer = sgd(model)
    tables: list[Any] = []
    history = shoal.train.fit(
        model, F.cross_entropy, optimizer, data, **layout, epochs=2, batch_size=16, seed=3,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), validation=data,
        report=tmp_path / "report.html", trace=tmp_path / "trace.json", progress=False,
        tell=tables.append,
    )  # fmt: skip
    expected, reference = by_hand(data, 2, 0.9)
    assert history.losses == pytest.approx(expected, abs=1e-5)
    assert largest_difference(model, reference) < 1e-5
    x, y = (torch.from_numpy(np.load(path)) for path in data)
    assert [step for step, _ in history.validation] == [7, 14]
    assert history.validation[-1][1] == pytest.approx(F.cross_entropy(model(x), y).item(), abs=1e-5)
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert (tmp_path / "trace.json").stat().st_size > 1000
    assert len(tables) == (layout["groups"] == "auto")


def test_the_choice_of_groups_is_shown_as_a_table(
    data: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without being asked to: options, what they would take, and why."""
    model = made()
    history = shoal.train.fit(
        model, F.cross_entropy, sgd(model), data, groups="auto", devices=2, batch_size=16
    )
    told, progress = capsys.readouterr()
    for part in ("groups x stages", "2 x 1", "1 x 2", "1 x 1", "▶", "compute", "ms"):
        assert part in told, told
    assert f"{history.steps} steps in" in progress


class Stop(Exception):
    pass


def interrupted(at: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    calls = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > at:
            raise Stop
        return F.cross_entropy(output, target)

    return loss


@pytest.mark.parametrize("stop", [3, 7, 10])
def test_a_training_goes_on_in_the_middle_of_an_epoch(
    data: tuple[Path, Path], tmp_path: Path, stop: int
) -> None:
    def run(loss: Any) -> tuple[shoal.train.History, nn.Module]:
        model = made()
        optimizer = sgd(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        history = shoal.train.fit(
            model, loss, optimizer, data, epochs=2, batch_size=16, seed=3, scheduler=schedule,
            checkpoint=tmp_path / "run", checkpoint_every=1, progress=False,
        )  # fmt: skip
        return history, model

    with pytest.raises((shoal.train.GroupError, Stop)):
        run(interrupted(stop))
    history, model = run(F.cross_entropy)
    expected, reference = by_hand(data, 2, 0.9)
    assert history.losses == pytest.approx(expected, abs=1e-6)
    assert largest_difference(model, reference) < 1e-6
    again, _ = run(F.cross_entropy)  # nothing is left to do
    assert again.losses == history.losses


def test_a_lost_group_leaves_a_checkpoint_of_the_last_whole_step(
    data: tuple[Path, Path], tmp_path: Path, lease: shoal.Lease
) -> None:
    victim = lease.worker_pids[0]

    class Kill(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Kill.calls += 1
            if Kill.calls == 9:
                os.kill(victim, signal.SIGKILL)
            return x

    def model_of(killer: nn.Module) -> nn.Module:
        model = made()
        model.append(killer)  # type: ignore[operator]
        return model

    def run(model: nn.Module) -> shoal.train.History:
        return shoal.train.fit(
            model, F.cross_entropy, sgd(model), data, groups=[[0], [1]], epochs=2, batch_size=16,
            seed=3, checkpoint=tmp_path / "run", progress=False,
        )  # fmt: skip

    expected, _ = by_hand(data, 2)
    with pytest.raises(shoal.train.GroupLostError) as raised:
        run(model_of(Kill()))
    assert any("call fit again" in note for note in raised.value.__notes__)
    saved = shoal.train.latest(tmp_path / "run")
    assert saved is not None
    assert 3 <= saved.step <= 8  # the model's code runs once a step or, of parts that differ, twice
    shoal.connect(lease.url, devices=2)
    history = run(model_of(nn.Identity()))
    assert history.losses == pytest.approx(expected, abs=1e-5)


def test_it_stops_when_nothing_gets_better(data: tuple[Path, Path]) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    history = shoal.train.fit(
        model, F.cross_entropy, optimizer, data, epochs=50, batch_size=50, early_stop=2,
        validation=data, progress=False,
    )  # fmt: skip
    assert len(history.validation) == 3
    assert "no better loss" in history.stopped


def test_parts_in_a_loop_written_by_hand(data: tuple[Path, Path], tmp_path: Path) -> None:
    model = made()
    optimizer = sgd(model)
    loader = shoal.train.load(data, 16, seed=3)
    checkpoints = shoal.train.Checkpoints(tmp_path / "run")
    losses = []
    with shoal.train.worker_groups(2) as groups:
        with shoal.train.Trainer(model, F.cross_entropy, optimizer, groups) as trainer:
            for batch in shoal.train.Feed(loader, trainer.prepare):
                losses.append(trainer.step(batch).loss)
            checkpoints.save(shoal.train.snapshot(model, optimizer, trainer.steps))
    expected, reference = by_hand(data, 1)
    assert losses == pytest.approx(expected, abs=1e-5)
    saved = checkpoints.latest()
    assert saved is not None
    other = made()
    shoal.train.restore(saved, other)
    assert largest_difference(other, reference) < 1e-5


def test_groups_are_threads_with_devices() -> None:
    with shoal.train.worker_groups(2, devices=2) as groups:
        names = groups.call(lambda group: (group.index, len(group.devices)))
        assert names == [(0, 2), (1, 2)]
        where = groups.call(lambda group: torch.ones(2, device="shoal").device == group.device)
        assert where == [True, True]

        def fail(group: shoal.train.WorkerGroup) -> None:
            raise LookupError("gone")

        with pytest.raises(shoal.train.GroupError, match=r"group 0 \(cpu/0.*LookupError: gone"):
            groups.call(fail)
