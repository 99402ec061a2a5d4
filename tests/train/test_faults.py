"""What breaks during training is named, or survived as documented; never a hang."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import shoal
import shoal.train
from shoal.train.group import devices
from tests.train import models
from tests.train.models import KINDS, largest_difference, made, one_device
from tests.train.test_equal_results import sgd, trained

SAMPLES = 12
LAYOUTS = [{"groups": 1}, {"groups": 2}, {"groups": 1, "devices": 2}]
IMAGES, CLASSES = torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
#: What is wrong -> the batch, and what the error says.
MALFORMED: dict[str, tuple[Any, str]] = {
    "numbers of samples": ((IMAGES, torch.zeros(5, dtype=torch.long)), "different numbers"),
    "ragged": (([IMAGES[0], torch.zeros(3, 8, 9)], CLASSES[:2]), "different numbers"),
    "empty": ((IMAGES[:0], CLASSES[:0]), "no samples"),
    "no target": ((IMAGES,), r"\(inputs, target\)"),
    "text": ("text", "first dimension counts samples; this one is str"),
    "nothing": (None, "this one is NoneType"),
    "type of the input": ((IMAGES.long(), CLASSES), "step 1.*Input type"),
    "type of the target": ((IMAGES, CLASSES.float()), "step 1.*target dtype"),
    "target out of range": ((IMAGES, CLASSES + 77), "step 1.*Target 77"),
    "channels": ((IMAGES[:, :2], CLASSES), "step 1.*3 channels"),
    "key": ({"y": IMAGES}, "step 1.*'y'"),
}
NAMED_WITHIN_S = 60.0  # 1 s on a quiet machine: see bench.train.faults


@pytest.fixture
def mortal(pool: shoal.Pool) -> Iterator[shoal.Lease]:
    """A lease whose workers the test may break: the pool makes new ones for the next."""
    with shoal.connect(pool.url, devices=3) as lease:
        yield lease


class Killer(nn.Module):
    """Sends a signal to a worker in the middle of a group's forward pass."""

    def __init__(self, pid: int, at: int, which: int) -> None:
        super().__init__()
        self.pid, self.at, self.signal, self.calls = pid, at, which, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            with suppress(ProcessLookupError):  # every group has a copy of this module
                os.kill(self.pid, self.signal)
        return x


def with_killer(pid: int, at: int, which: int = signal.SIGKILL) -> nn.Module:
    model = made("gpt")
    model.blocks.insert(2, Killer(pid, at, which))  # type: ignore[operator, union-attr]
    return model


def train(trainer: shoal.train.Trainer, steps: int) -> list[shoal.train.Step]:
    return [trainer.step(models.tokens(step, SAMPLES)) for step in range(steps)]


def train_until(trainer: shoal.train.Trainer, deadline: float) -> None:
    while time.monotonic() < deadline:
        trainer.step(models.tokens(9, SAMPLES))


@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("layout", "victim", "group"),
    [({"groups": 2}, 1, 1), ({"groups": 2}, 0, 0), ({"groups": [[0], [1, 2]]}, 2, 1)],
)
def test_a_lost_worker_is_named(
    mortal: shoal.Lease,
    layout: dict[str, Any],
    victim: int,
    group: int,
    which: signal.Signals,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the error; and in the log, whatever else may still wait for it."""
    model = made("gpt")
    with shoal.train.worker_groups(**layout) as groups:
        with shoal.train.Trainer(model, models.token_loss, sgd(model), groups) as trainer:
            train(trainer, 2)
            os.kill(mortal.worker_pids[victim], which)
            start = time.monotonic()
            with pytest.raises(shoal.train.GroupLostError) as raised:
                train_until(trainer, start + NAMED_WITHIN_S)
    assert raised.value.group == group
    assert raised.value.step is not None
    assert raised.value.step >= 2
    assert f"cpu/{victim}" in str(raised.value)
    assert raised.value.device == f"cpu/{victim}"
    if which == signal.SIGSTOP:  # of one that was killed the error may come first
        told = "\n".join(r.getMessage() for r in caplog.records if r.name == "shoal.train")
        assert re.search(rf"group {group} \(cpu/{victim} .*, step \d+: the worker is stopped", told)


@pytest.mark.parametrize(
    ("victim", "which"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_training_goes_on_with_the_others(
    mortal: shoal.Lease, victim: int, which: signal.Signals
) -> None:
    """Also when the lost group held the user's own model. The result is as if nothing happened."""
    expected, reference = one_device("gpt", SAMPLES, 6, optimizer=sgd)
    model = with_killer(mortal.worker_pids[victim], at=3, which=which)
    with shoal.train.worker_groups(3) as groups:
        with shoal.train.Trainer(
            model, models.token_loss, sgd(model), groups, on_lost="continue"
        ) as trainer:
            steps = train(trainer, 6)
            assert len(trainer.layout) == 2
    assert [e.group for e in trainer.lost] == [victim]
    assert [sum(s.shares) for s in steps] == [SAMPLES] * 6
    assert len(steps[-1].shares) == 2
    assert [s.loss for s in steps] == pytest.approx(expected, abs=1e-5)
    assert largest_difference(model, reference) < 1e-5


@pytest.mark.usefixtures("lease")
class TestWithoutLoss:
    def test_a_nan_is_named_before_it_reaches_the_weights(self) -> None:
        model, twin = made("cnn"), made("cnn")
        x, y = models.pictures(0, SAMPLES)
        x[7] = float("nan")
        with shoal.train.worker_groups(2) as groups:
            with shoal.train.Trainer(model, KINDS["cnn"][1], sgd(model), groups) as trainer:
                with pytest.raises(shoal.train.NotFiniteError, match=r"nan in group 1.*step 0"):
                    trainer.step((x, y))
                assert trainer.step(models.pictures(1, SAMPLES)).number == 0
        assert all(p.isfinite().all() for p in model.parameters())
        assert largest_difference(model, twin) > 0  # the good batch did train

    def test_a_nan_can_be_skipped(self) -> None:
        model, twin = made("gpt"), made("gpt")

        def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return models.token_loss(logits, target) * float("inf")

        with shoal.train.worker_groups(2) as groups:
            with shoal.train.Trainer(model, loss, sgd(model), groups, nan="skip") as trainer:
                assert all(step.skipped for step in train(trainer, 2))
        assert largest_difference(model, twin) == 0

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_malformed_batch_is_refused_and_the_next_one_trains(
        self, layout: dict[str, int]
    ) -> None:
        """A trainer that has refused all of them computes what one that saw none does."""
        model, twin = made("cnn"), made("cnn")
        with shoal.train.worker_groups(**layout) as groups:
            with shoal.train.Trainer(
                model, KINDS["cnn"][1], sgd(model), groups, balance=False
            ) as trainer:
                losses = [trainer.step(models.pictures(0, 8)).loss]
                for name, (batch, text) in MALFORMED.items():
                    with pytest.raises(shoal.train.TrainError, match=text) as raised:
                        trainer.step(batch)
                    if isinstance(raised.value, shoal.train.GroupError):
                        assert raised.value.step == 1, name
                losses.append(trainer.step(models.pictures(1, 8)).loss)
        with shoal.train.worker_groups(**layout) as groups:
            with shoal.train.Trainer(
                twin, KINDS["cnn"][1], sgd(twin), groups, balance=False
            ) as trainer:
                expected = [trainer.step(models.pictures(i, 8)).loss for i in range(2)]
        assert losses == expected
        assert largest_difference(model, twin) == 0

    @pytest.mark.parametrize("divided", [True, False])
    def test_an_optimizer_that_fails_is_named_with_its_group(self, divided: bool) -> None:
        class Failing(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                if self.param_groups[0]["params"][0].device.index == 2:
                    raise ArithmeticError("no step today")
                return super().step(closure)

        model = made("cnn")
        optimizer = Failing(model.parameters(), lr=0.1)
        with shoal.train.worker_groups(2) as groups:
            with shoal.train.Trainer(
                model, KINDS["cnn"][1], optimizer, groups, divide_update=divided, bucket_bytes=256
            ) as trainer:
                with pytest.raises(shoal.train.GroupError, match="no step today") as raised:
                    trainer.step(models.pictures(0, SAMPLES))
                assert (raised.value.group, raised.value.step) == (1, 0)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(
        ("key", "text"), [("labels", "the loss is one number"), ("input_ids", "step 1.*input_ids")]
    )
    def test_a_missing_key_is_named(self, layout: dict[str, int], key: str, text: str) -> None:
        model = made("bert")
        batch = {k: v for k, v in models.sentences(0, 8).items() if k != key}
        with shoal.train.worker_groups(**layout) as groups:
            with shoal.train.Trainer(model, None, sgd(model), groups) as trainer:
                trainer.step(models.sentences(1, 8))
                with pytest.raises(shoal.train.GroupError, match=text):
                    trainer.step(batch)
                assert trainer.step(models.sentences(0, 8)).loss > 0

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_fewer_samples_than_groups_or_micro_batches(self, layout: dict[str, int]) -> None:
        """The last batch of an epoch may be a single sample: some groups then get none."""
        losses, model, _ = trained("gpt", layout, sgd, samples=1)
        expected, reference = one_device("gpt", 1, 4, optimizer=sgd)
        assert losses == pytest.approx(expected, abs=1e-5)
        assert largest_difference(model, reference) < 1e-5

    def test_a_loss_that_was_never_computed_is_never_read(self) -> None:
        """Also by a thread that asks when another was told why."""
        device = torch.device("shoal", 1)
        with shoal.train.worker_groups(1):
            wrong = torch.ones(3, device=device)[torch.tensor([9], device=device)].sum()
            reading = devices.Reading(wrong)
            with pytest.raises(IndexError):
                devices.synchronize(device)
            for _ in range(2):
                with pytest.raises(IndexError):
                    reading.value()

    @pytest.mark.parametrize("devices", [1, 2])
    def test_an_error_in_the_model_names_group_device_and_step(self, devices: int) -> None:
        model = with_killer(os.getpid(), at=10**9)

        def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            raise KeyError("oops")

        with shoal.train.worker_groups(1, devices) as groups:
            with shoal.train.Trainer(model, loss, sgd(model), groups) as trainer:
                trainer.steps = 7
                with pytest.raises(shoal.train.GroupError, match="oops") as raised:
                    trainer.step(models.tokens(0, SAMPLES))
                assert (raised.value.group, raised.value.step) == (0, 7)
                assert raised.value.devices == tuple(str(m) for m in groups[0].members)
                assert isinstance(raised.value.__cause__, KeyError)

    def test_what_cannot_be_cut_says_where_it_could_be(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        with shoal.train.worker_groups(1, devices=2) as groups:
            with shoal.train.Trainer(model, nn.functional.mse_loss, sgd(model), groups) as trainer:
                with pytest.raises(shoal.train.CannotCut, match=r"shoal\.train\.cut\('name'\)"):
                    trainer.step((torch.ones(8, 2), torch.ones(8, 2)))

    def test_groups_that_do_not_exist(self) -> None:
        for wrong in ({"groups": [[0], [0]]}, {"groups": [[]]}, {"groups": 0}, {"groups": "many"}):
            with pytest.raises(shoal.train.TrainError):
                shoal.train.worker_groups(**wrong)  # type: ignore[arg-type]
        with pytest.raises(shoal.LeaseError, match="devices=9"):
            shoal.train.worker_groups(9)
