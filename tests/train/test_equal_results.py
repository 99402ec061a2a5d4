"""Many devices compute what one computes with the same batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shoal
import shoal.train
from shoal.train.group import batch_split
from tests.train import models
from tests.train.models import KINDS, adamw, largest_difference, made, one_device

STEPS, SAMPLES = 4, 16
pytestmark = pytest.mark.usefixtures("lease")

#: name -> arguments of worker_groups, micro-batches in a group
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "data x2": ({"groups": 2}, 1),
    "data x4": ({"groups": 4}, 1),
    "accumulated": ({"groups": 2}, 3),
    "stages x2": ({"groups": 1, "devices": 2}, 4),
    "stages x3": ({"groups": 1, "devices": 3}, 4),
    "hybrid 2x2": ({"groups": 2, "devices": 2}, 3),
    "ragged": ({"groups": [[3, 0], [1]]}, 2),
    # Device 3 has less than half the speed of the others.
    "unequal data x2": ({"groups": [[0], [3]]}, 1),
    "unequal stages x2": ({"groups": [[3, 0]]}, 4),
    "unequal stages x3": ({"groups": [[0, 3, 1]]}, 4),
    "unequal hybrid": ({"groups": [[0, 3], [1, 2]]}, 3),
}


def combinations(kind: str, other: str) -> list[Any]:
    """All layouts of the first kind; of the second the hybrid one, and the rest when there is time."""
    quick = [(kind, name) for name in LAYOUTS] + [(other, "hybrid 2x2")]
    rest = [(other, name) for name in LAYOUTS if name != "hybrid 2x2"]
    return quick + [pytest.param(*pair, marks=pytest.mark.slow) for pair in rest]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def trained(
    kind: str,
    layout: dict[str, Any],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    samples: int = SAMPLES,
    **options: Any,
) -> tuple[list[float], nn.Module, list[tuple[int, ...]]]:
    model = made(kind)
    with shoal.train.worker_groups(**layout) as groups:
        with shoal.train.Trainer(
            model, KINDS[kind][1], optimizer(model), groups, **options
        ) as trainer:
            steps = [trainer.step(KINDS[kind][2](step, samples)) for step in range(STEPS)]
    return [s.loss for s in steps], model, [s.shares for s in steps]


def parts(groups: int, micros: int) -> Callable[[int], Sequence[Sequence[int]]]:
    def of(samples: int) -> Sequence[Sequence[int]]:
        return [
            batch_split.chunk_sizes(n, micros) for n in batch_split.chunk_sizes(samples, groups)
        ]

    return of


@pytest.mark.parametrize(("kind", "name"), combinations("cnn", "bert"))
def test_the_same_bits_as_one_device_that_adds_up_the_same_parts(kind: str, name: str) -> None:
    """Sums in the same order are the same; batch normalisation sees each part by itself."""
    layout, micros = LAYOUTS[name]
    count = len(layout["groups"]) if isinstance(layout["groups"], list) else layout["groups"]
    losses, model, _ = trained(kind, layout, micro_batches=micros, balance=False, schedule="1f1b")
    expected, reference = one_device(kind, SAMPLES, STEPS, parts(count, micros))
    assert losses == pytest.approx(expected, abs=1e-12)
    assert largest_difference(model, reference) == 0
    assert next(model.parameters()).device.type == "cpu"  # brought back


@pytest.mark.parametrize("name", ["stages x2", "stages x3", "hybrid 2x2"])
def test_gradients_that_are_put_off_are_the_same_but_for_rounding(name: str) -> None:
    layout, micros = LAYOUTS[name]
    losses, model, _ = trained("cnn", layout, sgd, micro_batches=micros, balance=False)
    expected, reference = one_device(
        "cnn", SAMPLES, STEPS, parts(layout["groups"], micros), optimizer=sgd
    )
    assert losses == pytest.approx(expected, abs=1e-5)
    assert largest_difference(model, reference) < 1e-5


@pytest.mark.parametrize(("kind", "name"), combinations("gpt", "bert"))
def test_the_same_as_one_device_with_one_large_batch(kind: str, name: str) -> None:
    layout, micros = LAYOUTS[name]
    losses, model, _ = trained(kind, layout, sgd, micro_batches=micros)
    expected, reference = one_device(kind, SAMPLES, STEPS, optimizer=sgd)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert largest_difference(model, reference) < 1e-5


@pytest.mark.parametrize("layout", [{"groups": 3}, {"groups": 2, "devices": 2}])
def test_optimizer_state_that_the_groups_divide_is_gathered(layout: dict[str, Any]) -> None:
    """Each group keeps the state of its own part; who asks for it gets all, as with one device."""
    model, reference = made("gpt"), made("gpt")
    optimizer, expected = adamw(model), adamw(reference)
    with shoal.train.worker_groups(**layout) as groups:
        with shoal.train.Trainer(model, models.token_loss, optimizer, groups) as trainer:
            for step in range(2):
                trainer.step(models.tokens(step, SAMPLES))
            in_the_middle = copy.deepcopy(optimizer.state_dict())
    for step in range(2):
        inputs, targets = models.tokens(step, SAMPLES)
        models.token_loss(reference(inputs), targets).backward()
        expected.step()
        expected.zero_grad()
    wanted = expected.state_dict()["state"]
    for found in (in_the_middle["state"], optimizer.state_dict()["state"]):
        assert found.keys() == wanted.keys()
        for place, state in wanted.items():
            assert float(found[place]["step"]) == float(state["step"])
            torch.testing.assert_close(
                found[place]["exp_avg"].cpu(), state["exp_avg"], atol=1e-5, rtol=1e-3
            )


def test_a_trainer_can_be_closed_twice() -> None:
    model = made("gpt")
    with shoal.train.worker_groups(2) as groups:
        with shoal.train.Trainer(model, models.token_loss, adamw(model), groups) as trainer:
            trainer.step(models.tokens(0, SAMPLES))
            trainer.close()
    assert next(model.parameters()).device.type == "cpu"


def test_state_that_must_survive_a_loss_is_not_sharded() -> None:
    model = made("gpt")
    with shoal.train.worker_groups(2) as groups:
        with pytest.raises(ValueError, match="needs all of it in every group"):
            shoal.train.Trainer(
                model, None, adamw(model), groups, on_lost="continue", divide_update=True
            )


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_unequal_shares_give_the_same_result(kind: str) -> None:
    losses, model, divisions = trained(kind, {"groups": 3}, sgd, batch_limits=(None, 5, 1))
    expected, reference = one_device(kind, SAMPLES, STEPS, optimizer=sgd)
    assert all(d[2] <= 1 and d[0] >= 10 for d in divisions)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert largest_difference(model, reference) < 1e-5


def test_unequal_shares_of_a_model_with_batch_normalisation() -> None:
    """Each share is normalised by itself, and counts by its samples: the same bits as one device."""
    limits = (None, 5, 2)
    losses, model, divisions = trained("cnn", {"groups": 3}, balance=False, batch_limits=limits)
    assert set(divisions) == {(9, 5, 2)}
    expected, reference = one_device("cnn", SAMPLES, STEPS, lambda _: [[9], [5], [2]])
    assert losses == pytest.approx(expected, abs=1e-12)
    assert largest_difference(model, reference) == 0


@pytest.mark.parametrize("layout", [{"groups": 2}, {"groups": 2, "devices": 2}])
def test_batch_normalisation_keeps_the_first_groups_statistics(layout: dict[str, Any]) -> None:
    _, model, _ = trained("cnn", layout, micro_batches=2, balance=False, schedule="1f1b")
    reference = made("cnn")
    optimizer = adamw(reference)
    twin = made("cnn")  # the second group: the same weights, statistics of its own
    for step in range(STEPS):
        x, y = models.pictures(step, SAMPLES)
        twin.load_state_dict(
            {
                k: v
                for k, v in reference.state_dict().items()
                if k in dict(reference.named_parameters())
            },
            strict=False,
        )
        pieces = list(zip(x.split(4), y.split(4), strict=True))
        for i, (px, py) in enumerate(pieces):
            side = reference if i < 2 else twin
            (torch.nn.functional.cross_entropy(side(px), py) * 0.25).backward()
        for p, q in zip(reference.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None
            p.grad += q.grad
            q.grad = None
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(model, reference, buffers=True) < 1e-5


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_both_schedules_compute_the_same(schedule: str) -> None:
    losses, _, _ = trained("bert", {"groups": 1, "devices": 2}, micro_batches=4, schedule=schedule)
    expected, _ = one_device("bert", SAMPLES, STEPS, parts(1, 4))
    assert losses == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("layout", [{"groups": 2}, {"groups": 2, "devices": 2}])
def test_clipping_sees_all_gradients(layout: dict[str, Any]) -> None:
    losses, model, _ = trained("bert", layout, sgd, clip_norm=0.05)
    expected, reference = one_device(
        "bert",
        SAMPLES,
        STEPS,
        optimizer=sgd,
        after_backward=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05),
    )
    assert losses == pytest.approx(expected, abs=1e-5)
    assert largest_difference(model, reference) < 1e-5


def test_a_learning_rate_schedule_reaches_all_groups() -> None:
    model, reference = made("gpt"), made("gpt")
    ours, theirs = sgd(model), sgd(reference)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.3) for o in (ours, theirs)]
    with shoal.train.worker_groups(2) as groups:
        with shoal.train.Trainer(model, models.token_loss, ours, groups) as trainer:
            for step in range(STEPS):
                trainer.step(models.tokens(step, SAMPLES))
                schedules[0].step()
    for step in range(STEPS):
        x, y = models.tokens(step, SAMPLES)
        models.token_loss(reference(x), y).backward()
        theirs.step()
        theirs.zero_grad()
        schedules[1].step()
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] != 0.05
    assert largest_difference(model, reference) < 1e-5


def test_the_optimizer_goes_on_where_it_was() -> None:
    """State from before the training is used, and afterwards lies beside the model again."""
    model, reference = made("gpt"), made("gpt")
    ours, theirs = adamw(model), adamw(reference)
    for m, o in ((model, ours), (reference, theirs)):
        x, y = models.tokens(9, SAMPLES)
        models.token_loss(m(x), y).backward()
        o.step()
        o.zero_grad()
    with shoal.train.worker_groups(1, devices=2) as groups:
        with shoal.train.Trainer(model, models.token_loss, ours, groups) as trainer:
            trainer.step(models.tokens(0, SAMPLES))
    x, y = models.tokens(0, SAMPLES)
    models.token_loss(reference(x), y).backward()
    theirs.step()
    theirs.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert ours.state[p][key].device.type == "cpu"
            torch.testing.assert_close(ours.state[p][key], theirs.state[q][key])


class LinearDropout(nn.Linear):
    """One unit: the measured times decide where a model of more than two is cut, and so who draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("layout", [{"groups": 2}, {"groups": 1, "devices": 2}])
def test_dropout_repeats_with_the_seed(layout: dict[str, Any]) -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(LinearDropout(3, 32), nn.Linear(32, 2))
        torch.manual_seed(seed)
        x, y = torch.ones(8, 3), torch.ones(8, dtype=torch.long)
        with shoal.train.worker_groups(**layout) as groups:
            with shoal.train.Trainer(
                model, nn.functional.cross_entropy, sgd(model), groups, balance=False
            ) as trainer:
                return [trainer.step((x, y)).loss for _ in range(3)]

    assert losses(1) == losses(1) != losses(2)


def test_mixed_precision() -> None:
    losses, _, _ = trained("gpt", {"groups": 2, "devices": 2}, sgd, autocast=torch.bfloat16)
    expected, _ = one_device("gpt", SAMPLES, STEPS, optimizer=sgd)
    assert losses != expected
    assert losses == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("layout", [{"groups": 2}, {"groups": 1, "devices": 2}], ids=str)
def test_float16_with_a_scale(layout: dict[str, Any]) -> None:
    """Gradients that float16 would lose are kept; those that overflow change nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    twin = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.randn(8, 1)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 1e-6 * nn.functional.mse_loss(output.float(), target)

    def fast(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e4)

    expected, theirs = [], fast(twin)
    for _ in range(STEPS):
        value = loss(twin(x), y)
        theirs.zero_grad()
        value.backward()
        theirs.step()
        expected.append(value.item())
    optimizer = fast(model)
    with shoal.train.worker_groups(**layout) as groups:
        with shoal.train.Trainer(model, loss, optimizer, groups, autocast=torch.float16) as trainer:
            steps = [trainer.step((x, y)) for _ in range(STEPS)]
            assert [step.loss for step in steps] == pytest.approx(expected, rel=0.01)
            assert not any(step.skipped for step in steps)
            trainer.synchronize()
            before = [p.detach().cpu().clone() for p in model.parameters()]
            assert trainer.step((x, 1e9 * y)).skipped
            trainer.synchronize()
            for parameter, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(parameter.detach().cpu(), old)


def test_weights_that_are_not_samples() -> None:
    """A mean over tokens: parts count by their tokens, not by their sentences."""
    model = nn.Embedding(31, 31)
    twin = nn.Embedding(31, 31)
    twin.load_state_dict(model.state_dict())

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1)

    x, y = models.tokens(0, 8)
    y = y.clone()
    y[4:, 2:] = -1
    with shoal.train.worker_groups(2) as groups:
        with shoal.train.Trainer(
            model, loss, sgd(model), groups, weigh=lambda batch: (batch[1] >= 0).sum()
        ) as trainer:
            step = trainer.step((x, y))
    whole = loss(twin(x), y)
    assert step.loss == pytest.approx(whole.item(), abs=1e-6)
    whole.backward()
    sgd(twin).step()
    assert largest_difference(model, twin) < 1e-6


@pytest.mark.parametrize("layout", [{"groups": 3}, {"groups": 1, "devices": 2}])
def test_evaluation_is_that_of_one_device(layout: dict[str, Any]) -> None:
    model, reference = made("cnn"), made("cnn").eval()
    batch = models.pictures(0, 7)
    with shoal.train.worker_groups(**layout) as groups:
        with shoal.train.Trainer(model, KINDS["cnn"][1], adamw(model), groups) as trainer:
            loss = trainer.evaluate(batch)
    expected = nn.functional.cross_entropy(reference(batch[0]), batch[1]).item()
    assert loss == pytest.approx(expected, abs=1e-6)
    assert model.training
    assert largest_difference(model, reference, buffers=True) == 0
