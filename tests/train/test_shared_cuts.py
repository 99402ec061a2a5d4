"""Units that two stages share: computed now by the one, now by the other, with one device's results."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
import shoal.train
from shoal.train.model import build
from shoal.train.model.pipeline import PipelineReplica
from shoal.train.model.profile import ModelProfile
from shoal.train.model.stage_costs import Cut
from shoal.train.model.stages import Weights
from tests.train.conftest import CutAt
from tests.train.models import largest_difference
from tests.train.test_equal_results import sgd

STEPS, SAMPLES = 4, 24


class Block(nn.Module):
    """Layers of all kinds whose gradients are deferred, and some whose are not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(2, 2, 3, padding=1)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(self.norm(x))).view(-1, 2, 4)
        return x + self.conv(y).flatten(1) * self.frozen


class Blocks(nn.Module):
    """Units 0 to 6: first, blocks, last. The last uses the first one's weights, too."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.last(x + first) + x @ self.first.weight


def batch(step: int, samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(samples, 4, generator=g), torch.randn(samples, 4, generator=g)


def made(again: bool = False) -> Blocks:
    torch.manual_seed(0)
    return Blocks(again)


def one_device(sizes: Sequence[int], clip_norm: float | None = None) -> tuple[list[float], Blocks]:
    model = made()
    optimizer = sgd(model)
    losses = []
    for step, samples in enumerate(sizes):
        x, y = batch(step, samples)
        loss = F.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Stage and weight (its number of values) of all copies that were used."""
    seen: set[tuple[int, int]] = set()
    copy_for = Weights.copy_for

    def noted(self: Weights, stage: int, weight: torch.Tensor, device: torch.device) -> Any:
        seen.add((stage, weight.numel()))
        return copy_for(self, stage, weight, device)

    monkeypatch.setattr(Weights, "copy_for", noted)
    return seen


def layout_of(name: str) -> dict[str, Any]:
    groups, devices = name.split("x")
    return {"groups": int(groups), "devices": int(devices)}


@pytest.mark.usefixtures("lease")
@pytest.mark.parametrize(
    ("layout", "cuts", "options"),
    [
        ("1x2", [Cut(4, 1, 2)], {}),
        ("1x2", [Cut(4, 2, 3)], {"clip_norm": 0.5}),
        ("1x2", [Cut(4, 1, 1)], {"schedule": "zero-bubble-lean"}),
        ("1x3", [Cut(3, 1, 2), Cut(5, 1, 1)], {}),
        ("2x2", [Cut(4, 1, 2)], {}),
        ("2x2", [Cut(4, 2, 1)], {"clip_norm": 0.5, "bucket_bytes": 64, "divide_update": False}),
    ],
)
def test_shared_units_give_what_one_device_gives(
    cut_at: CutAt,
    copies: set[tuple[int, int]],
    layout: str,
    cuts: list[Cut],
    options: dict[str, Any],
) -> None:
    cut_at(*cuts)
    sizes = [SAMPLES, SAMPLES, 5, SAMPLES]  # also with fewer micro-batches than planned
    model = made()
    with shoal.train.worker_groups(**layout_of(layout)) as groups:
        options = {"micro_batches": 4, **options}
        with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups, **options) as trainer:
            losses = [trainer.step(batch(step, n)).loss for step, n in enumerate(sizes)]
            evaluated = trainer.evaluate(batch(9))
    assert (1, 64) in copies  # a block's linear layer, at the stage that does not own it
    expected, reference = one_device(sizes, options.get("clip_norm"))
    assert losses == pytest.approx(expected, abs=1e-5)
    assert largest_difference(model, reference) < 1e-5
    x, y = batch(9)
    assert evaluated == pytest.approx(F.mse_loss(reference(x), y).item(), abs=1e-5)


@pytest.mark.usefixtures("lease")
@pytest.mark.parametrize(
    ("again", "autocast", "within"), [(True, None, 1e-5), (False, torch.bfloat16, 2e-2)]
)
def test_with_checkpointing_and_mixed_precision(
    cut_at: CutAt, again: bool, autocast: torch.dtype | None, within: float
) -> None:
    cut_at(Cut(4, 1, 2))
    model = made(again)
    with shoal.train.worker_groups(1, 2) as groups:
        options: dict[str, Any] = {"micro_batches": 4, "autocast": autocast}
        with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups, **options) as trainer:
            for step in range(STEPS):
                trainer.step(batch(step))
    _, reference = one_device([SAMPLES] * STEPS)
    assert largest_difference(model, reference) < within


def test_a_lost_group_of_shared_cuts(pool: shoal.Pool, cut_at: CutAt) -> None:
    """The survivor takes the user's model over, and its stages share on."""
    cut_at(Cut(4, 1, 2))
    model = made()
    with shoal.connect(pool.url, devices=4) as lease:
        with shoal.train.worker_groups(2, 2) as groups:
            options: dict[str, Any] = {"micro_batches": 4, "on_lost": "continue"}
            with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups, **options) as trainer:
                losses = [trainer.step(batch(step)).loss for step in range(2)]
                os.kill(lease.worker_pids[0], signal.SIGKILL)
                losses += [trainer.step(batch(step)).loss for step in (2, 3)]
                assert [error.group for error in trainer.lost] == [0]
    expected, reference = one_device([SAMPLES] * 4)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert largest_difference(model, reference) < 1e-5


@pytest.mark.usefixtures("lease")
def test_copies_leave_no_memory_behind(cut_at: CutAt) -> None:
    """Not even until the collector comes."""
    cut_at(Cut(4, 1, 2))
    model = made()
    gc.disable()
    try:
        with shoal.train.worker_groups(1, 2) as groups:
            options = {"micro_batches": 4}
            with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups, **options) as trainer:
                used = []
                for step in range(6):
                    trainer.step(batch(step % 2))
                    trainer.synchronize()
                    used.append([torch.accelerator.memory_allocated(d) for d in groups[0].devices])
        assert used[2:] == [used[2]] * 4
    finally:
        gc.enable()


class Convolutions(nn.Sequential):
    """The one in the middle has most of the cost; only the others have statistics."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(4, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 4, 3, padding=1), nn.BatchNorm2d(4),
        )  # fmt: skip


class Layers(nn.Sequential):
    """The one in the middle has most of the cost."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 64))


def costs(count: int, middle: int) -> list[float]:
    """Return the seconds of each unit's forward pass."""
    return [0.01 if unit == middle else 0.001 for unit in range(count)]


@pytest.mark.usefixtures("lease")
@pytest.mark.parametrize(
    ("kind", "shape", "middle"), [(Convolutions, (4, 16, 16), 3), (Layers, (64,), 1)]
)
def test_a_unit_with_most_of_the_cost_is_shared(
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[], nn.Module],
    shape: tuple[int, ...],
    middle: int,
) -> None:
    """Without sharing it, one stage would have several times the other's work."""
    # Devices that are alike, and costs that do not depend on what else the machine does.
    monkeypatch.setattr(build, "_speeds", lambda members: dict.fromkeys(members, 1.0))
    measure = build.profile

    def declared(*args: Any) -> ModelProfile:
        found = measure(*args)
        units = [
            replace(unit, forward_s=cost, backward_s=2 * cost)
            for unit, cost in zip(found.units, costs(len(found.units), middle), strict=True)
        ]
        return replace(found, units=tuple(units))

    monkeypatch.setattr(build, "profile", declared)
    torch.manual_seed(0)
    model, reference = kind(), kind()
    reference.load_state_dict(model.state_dict())
    optimizer = sgd(reference)
    samples = 16 if len(shape) > 1 else 512
    data = torch.randn(samples, *shape), torch.randn(samples, *shape)
    losses = []
    with shoal.train.worker_groups([[0, 1]]) as groups:
        options = {"micro_batches": 4}
        with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups, **options) as trainer:
            losses = [trainer.step(data).loss for _ in range(2)]
            replica = trainer._replicas[0]
            assert isinstance(replica, PipelineReplica)
            cut = replica.plan.stages[1].cut
    assert cut.early <= middle < cut.at
    assert 0 < cut.micros < 4
    for loss in losses:
        expected = 0.0
        for x, y in zip(data[0].chunk(4), data[1].chunk(4), strict=True):
            part = F.mse_loss(reference(x), y) / 4
            part.backward()  # type: ignore[no-untyped-call]
            expected += part.item()
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(expected, abs=1e-5)
    assert largest_difference(model, reference, buffers=True) < 1e-5


@pytest.mark.usefixtures("lease")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_schedules_with_the_bits_of_one_device_share_nothing(schedule: str) -> None:
    model = Layers()
    data = torch.randn(64, 64), torch.randn(64, 64)
    with shoal.train.worker_groups([[0, 1]]) as groups:
        options: dict[str, Any] = {"micro_batches": 4, "schedule": schedule}
        with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups, **options) as trainer:
            trainer.step(data)
            replica = trainer._replicas[0]
            assert isinstance(replica, PipelineReplica)
            assert all(stage.shared == 0 for stage in replica.plan.stages)
