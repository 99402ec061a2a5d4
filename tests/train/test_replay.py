"""Groups with equal micro-batches: the program runs once, and each group computes its own result."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
import shoal.train
from shoal.train.group import devices, replay
from shoal.train.group.errors import GroupError
from shoal.train.group.step_events import Aborted

SAMPLES = 12


class Counted(nn.Module):
    """A small model that counts, over all its copies, how often its code runs."""

    calls = 0

    def __init__(self, extra: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4)
        )
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return self.body(x if self.extra is None else self.extra(x))


def batch(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 6, generator=generator), torch.arange(samples) % 4


def trained(
    groups: int, steps: int, extra: Any = None, samples: int = SAMPLES, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Losses, weights and running statistics, and why a pass could not be replayed."""
    torch.manual_seed(0)
    model = Counted(extra)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with shoal.train.worker_groups(groups) as formed:
        trainer = shoal.train.Trainer(model, F.cross_entropy, optimizer, formed, **options)
        with trainer:
            losses = [trainer.step(batch(samples)).loss for _ in range(steps)]
            why = trainer._steps.replay.failure
    return losses, {k: v.clone() for k, v in model.state_dict().items()}, why


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group runs the program itself."""
    monkeypatch.setattr(
        replay.ReplayPolicy, "classes", lambda self, kinds: [[i] for i in range(len(kinds))]
    )


@pytest.mark.parametrize(
    "options", [{}, {"micro_batches": 2}, {"divide_update": False}, {"on_lost": "continue"}]
)
def test_the_program_runs_once_and_the_result_is_the_same_bit_for_bit(
    lease: shoal.Lease, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    steps, micro_batches = 6, options.get("micro_batches", 1)
    Counted.calls = 0
    losses, state, _ = trained(3, steps, balance=False, **options)
    replayed = Counted.calls
    alone(monkeypatch)
    Counted.calls = 0
    expected_losses, expected, _ = trained(3, steps, balance=False, **options)
    assert Counted.calls == 3 * steps * micro_batches
    assert replayed == steps * micro_batches
    assert losses == expected_losses
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_what_a_pass_makes_is_freed_in_every_group(lease: shoal.Lease) -> None:
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with shoal.train.worker_groups(2) as groups:
        with shoal.train.Trainer(
            model, F.cross_entropy, optimizer, groups, balance=False
        ) as trainer:
            used = []
            for _ in range(8):
                trainer.step(batch())
                trainer.synchronize()
                used.append([torch.shoal.memory_allocated(g.device) for g in groups])
    assert used[3:] == [used[3]] * 5


def test_constants_of_a_pass_go_to_every_device(
    lease: shoal.Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(6.0).to(x.device) + torch.zeros(6, device=x.device)

    Counted.calls = 0
    losses, state, _ = trained(2, 5, shifted, balance=False)
    assert Counted.calls == 5
    alone(monkeypatch)
    expected_losses, expected, _ = trained(2, 5, shifted, balance=False)
    assert losses == expected_losses
    assert all(torch.equal(state[name], value) for name, value in expected.items())


KEPT: dict[str, torch.Tensor] = {}


def kept(x: torch.Tensor) -> torch.Tensor:
    """Uses a tensor that the first pass on a device has made."""
    key = str(x.device)
    if key not in KEPT:
        KEPT[key] = torch.ones(6, device=x.device)
    return x * KEPT[key]


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (lambda x: x * float(x.abs().max().item() > 0), "value is read"),
        (lambda x: x[x[:, 0] > -100], "depends on values"),
        (lambda x: x + torch.rand(6, device=x.device, generator=_generator(x)), "generator"),
        (kept, "neither a weight nor of the batch"),
    ],
    ids=["reads a value", "shape by data", "own generator", "keeps a tensor"],
)
def test_a_pass_that_cannot_be_replayed_runs_in_every_group(
    lease: shoal.Lease, monkeypatch: pytest.MonkeyPatch, extra: Any, why: str
) -> None:
    KEPT.clear()
    _GENERATORS.clear()
    losses, state, failure = trained(2, 5, extra, balance=False)
    assert re.search(why, failure)
    alone(monkeypatch)
    KEPT.clear()
    _GENERATORS.clear()
    expected_losses, expected, _ = trained(2, 5, extra, balance=False)
    assert losses == expected_losses
    assert all(torch.equal(state[name], value) for name, value in expected.items())


class Memory(nn.Module):
    """Keeps something of every pass for the next one, as an attribute or as a buffer."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        if buffer:
            self.register_buffer("memory", torch.zeros(6))
        else:
            self.memory: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x if self.memory is None else x + self.memory
        self.memory = seen.detach().mean(0)
        return self.layer(seen)  # type: ignore[no-any-return]


@pytest.mark.parametrize("buffer", [False, True])
def test_what_a_pass_keeps_for_the_next_is_kept_in_every_group(
    lease: shoal.Lease, monkeypatch: pytest.MonkeyPatch, buffer: bool
) -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = Memory(buffer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with shoal.train.worker_groups(2) as groups:
            with shoal.train.Trainer(
                model, F.cross_entropy, optimizer, groups, balance=False
            ) as trainer:
                return [trainer.step(batch()).loss for _ in range(6)]

    found = losses()
    alone(monkeypatch)
    assert found == losses()


_GENERATORS: dict[str, torch.Generator] = {}


def _generator(x: torch.Tensor) -> torch.Generator:
    key = str(x.device)
    if key not in _GENERATORS:
        _GENERATORS[key] = torch.Generator(x.device).manual_seed(7)
    return _GENERATORS[key]


def test_micro_batches_that_differ_are_not_replayed(lease: shoal.Lease) -> None:
    Counted.calls = 0
    trained(2, 5, samples=11, balance=False)
    assert Counted.calls == 2 * 5


def test_an_error_in_a_replayed_pass_names_its_group_and_line(lease: shoal.Lease) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    good = torch.zeros(8, 2, dtype=torch.long), torch.zeros(8, dtype=torch.long)
    bad = good[0].clone(), good[1]
    bad[0][-1, 0] = 99  # a sample of the second group
    with shoal.train.worker_groups(2) as groups:
        with shoal.train.Trainer(
            model, F.cross_entropy, optimizer, groups, balance=False
        ) as trainer:
            for _ in range(4):
                trainer.step(good)
            with pytest.raises(GroupError, match="index out of range") as caught:
                trainer.step(bad)
            assert caught.value.group == 1
            assert "called at" in str(caught.value)
            assert caught.value.device == groups[1].members[0].name
            assert (caught.value.operator or "").startswith("aten::")
            assert ".py:" in (caught.value.line or "")
            before = trainer.step(good).loss
            assert trainer.step(good).loss < before


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_replay_bit_for_bit(
    lease: shoal.Lease, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Views, in-place operators, random numbers and reductions in random order."""
    choice = random.Random(seed)
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.clone().mul_(1.5).add_(x),
        lambda x: x.t().contiguous().t(),
        lambda x: F.dropout(x, 0.3),
        lambda x: torch.cat([x[:, 3:], x[:, :3]], dim=1),
        lambda x: x - x.mean(0, keepdim=True).expand_as(x),
        lambda x: torch.where(x > 0, x, x.new_zeros(())),
        lambda x: torch.stack(x.unbind(1), 1).sigmoid(),
        lambda x: x.sort(dim=1).values,
    ]
    chosen = [choice.choice(steps) for _ in range(6)]

    def extra(x: torch.Tensor) -> torch.Tensor:
        for step in chosen:
            x = step(x)
        return x

    losses, state, _ = trained(2, 6, extra, balance=False)
    alone(monkeypatch)
    expected_losses, expected, _ = trained(2, 6, extra, balance=False)
    assert losses == expected_losses
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_a_thread_that_works_for_another_group_lets_go_of_its_device(lease: shoal.Lease) -> None:
    """A device that is given up in the middle is not waited for until its connection gives it up."""
    device, pid = torch.device("shoal:1"), lease.worker_pids[0]
    x = torch.ones(4, device=device)
    torch.accelerator.synchronize(device)

    def given_up() -> None:
        raise Aborted

    os.kill(pid, signal.SIGSTOP)
    try:
        loss = devices.Reading(x.sum())
        with pytest.raises(Aborted):
            loss.value_unless(given_up)
        with pytest.raises(Aborted):
            devices.synchronize_unless(device, given_up)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert loss.value_unless(lambda: None) == 4
