"""Groups whose memory does not hold their sub-batch: micro-batches give the same result."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
import shoal.train

SAMPLES, WIDTH, STEPS = 256, 512, 4
#: A step of half the samples keeps some 8 MiB beside 1 MiB of weights.
ROOMY = "cpu,memory=64MiB,threads=1"
SWAPS = "cpu,memory=6MiB,host=64MiB,disk=0,threads=1"
FULL = "cpu,memory=6MiB,host=0,disk=0,threads=1"


def model_and_batches() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, WIDTH), *(nn.Tanh() for _ in range(30)), nn.Linear(WIDTH, 4)]
    made = [(torch.randn(SAMPLES, 8), torch.randint(4, (SAMPLES,))) for _ in range(STEPS)]
    return nn.Sequential(*layers), made


def one_device(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("small", [SWAPS, FULL], ids=["swaps", "full"])
def test_a_sub_batch_that_memory_does_not_hold_is_computed_in_micro_batches(
    small: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = model_and_batches()
    expected = one_device(copy.deepcopy(model), data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        caplog.at_level(logging.WARNING, "shoal.train"),
        shoal.up([ROOMY, small]) as pool,
        shoal.connect(pool.url, devices=2),
        shoal.train.worker_groups(2) as groups,
        shoal.train.Trainer(model, F.cross_entropy, optimizer, groups, balance=False) as trainer,
    ):
        losses = [trainer.step(batch).loss for batch in data]
    assert losses == pytest.approx(expected, rel=1e-5)
    said = [r.getMessage() for r in caplog.records if "micro-batches" in r.getMessage()]
    assert said
    assert all("group 1 (cpu/1 (shoal:2))" in text for text in said)


def test_a_validation_batch_that_memory_does_not_hold_is_computed_in_micro_batches() -> None:
    model, _ = model_and_batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4096, 8), torch.randint(4, (4096,))  # 8 MiB after the first layer
    expected = F.cross_entropy(model(x), y).item()
    with (
        shoal.up([ROOMY, FULL]) as pool,
        shoal.connect(pool.url, devices=2),
        shoal.train.worker_groups([[1]]) as groups,
        shoal.train.Trainer(model, F.cross_entropy, optimizer, groups) as trainer,
    ):
        assert trainer.evaluate((x, y)) == pytest.approx(expected, rel=1e-5)


def test_too_little_memory_for_a_single_sample_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(8, WIDTH * 512), nn.Tanh(), nn.Linear(WIDTH * 512, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 8), torch.randint(4, (4,))
    with shoal.up([FULL]) as pool, shoal.connect(pool.url), shoal.train.worker_groups(1) as groups:
        with pytest.raises((shoal.train.GroupError, torch.OutOfMemoryError), match="memory"):
            with shoal.train.Trainer(model, F.cross_entropy, optimizer, groups) as trainer:
                trainer.step(batch)


class Hungry(torch.optim.SGD):
    """Lacks memory when it updates: the other groups may have updated already."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        raise torch.OutOfMemoryError("no room for the state")


def test_an_update_that_lacks_memory_is_not_done_again() -> None:
    model, data = model_and_batches()
    with shoal.up([ROOMY] * 2) as pool, shoal.connect(pool.url, devices=2):
        with shoal.train.worker_groups(2) as groups:
            optimizer = Hungry(model.parameters(), lr=0.1)
            with shoal.train.Trainer(model, F.cross_entropy, optimizer, groups) as trainer:
                with pytest.raises(shoal.train.GroupError, match="no room for the state"):
                    trainer.step(data[0])
                assert trainer.steps == 1
