"""Cutting models: their code as it is, wherever every forward pass comes by."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
import shoal.train
from shoal.train.model.profile import candidates
from tests.train.models import largest_difference
from tests.train.test_equal_results import sgd

pytestmark = pytest.mark.usefixtures("lease")


class Unet(nn.Module):
    """Skips from the first half to the second, of which one is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(4, 6), nn.Linear(6, 8)
        self.middle = nn.Linear(8, 8)
        self.up2, self.up1 = nn.Linear(16, 6), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.down1(x))
        b = torch.tanh(self.down2(a))
        y = self.middle(b)
        y = torch.tanh(self.up2(torch.cat([y, b], dim=-1)))
        y = y + a.mean(dim=-1, keepdim=True)
        return self.up1(torch.cat((y, a), dim=-1))


class Marked(nn.Module):
    """No modules to cut at, but a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.w1)
        shoal.train.cut("second half")
        return x @ self.w2 + x


class SaysWhere(nn.Module):
    """Moves what a later stage makes to the device of an earlier stage's tensor, as many models do:
    on one device that is where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.place = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device
        y = torch.tanh(x @ self.w1)
        shoal.train.cut("second half")
        places = torch.arange(4, device=device)
        place = self.place[places].to(device).sum(0) + self.place.to(device=y.device)[0]
        if y.device != self.w2.device:
            raise RuntimeError(f"{y.device} is not {self.w2.device}")
        return (y + place) @ self.w2


class Repeated(nn.Module):
    """A module that is called twice cannot begin a stage, its neighbours can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(self.first(x))))))


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass, with a value and a weight of the first
    stage in all of them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.last = nn.Linear(8, 4)

    def block(self, layer: nn.Module, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(layer(x) + 0.1 * first)
        return self.conv(y.unsqueeze(1)).squeeze(1) @ self.first.weight @ self.first.weight.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.first(x)
        for layer in self.blocks:
            x = checkpoint(self.block, layer, x, first, use_reentrant=self.reentrant)
        return self.last(x)


def trained(model: nn.Module, devices: int, **options: Any) -> list[list[str]]:
    with shoal.train.worker_groups(1, devices) as groups:
        with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups, **options) as trainer:
            for step in range(3):
                trainer.step(batch(step))
            return trainer.layout


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(12, 4, generator=g), torch.randn(12, 4, generator=g)


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        (Unet, 2),
        (Unet, 3),
        (Marked, 2),
        (SaysWhere, 2),
        (Repeated, 2),
        pytest.param(partial(Checkpointed, False), 2, id="checkpointed x2"),
        pytest.param(partial(Checkpointed, False), 3, id="checkpointed x3"),
    ],
)
def test_any_forward_can_be_cut(kind: Callable[[], nn.Module], devices: int) -> None:
    torch.manual_seed(0)
    model, reference = kind(), kind()
    reference.load_state_dict(model.state_dict())
    optimizer = sgd(reference)
    layout = trained(model, devices, micro_batches=3)
    assert len(layout[0]) == devices
    for step in range(3):
        x, y = batch(step)
        F.mse_loss(reference(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(model, reference) < 1e-5


def test_a_device_that_the_model_names_is_the_stages_own() -> None:
    """Gradients of a later stage's weights, of two groups: they were sent before they were whole,
    because an earlier stage's backward pass made a part of them."""
    torch.manual_seed(0)
    model, reference = SaysWhere(), SaysWhere()
    reference.load_state_dict(model.state_dict())
    optimizer = sgd(reference)
    with shoal.train.worker_groups(2, 2) as groups:
        options = {"micro_batches": 3, "divide_update": False}
        with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups, **options) as trainer:
            for step in range(3):
                trainer.step(batch(step))
                x, y = batch(step)
                F.mse_loss(reference(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert largest_difference(model, reference) < 1e-5


class Again(nn.Module):
    """One block that runs twice, each time checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, torch.tanh(x), use_reentrant=self.reentrant)
        return x


def test_a_checkpointed_block_that_runs_twice_in_groups() -> None:
    """Reentrant checkpointing makes its gradients twice: which of them is the last, nobody is told."""
    torch.manual_seed(0)
    model, reference = Again(False), Again(False)
    reference.load_state_dict(model.state_dict())
    optimizer = sgd(reference)
    with shoal.train.worker_groups(2) as groups:
        with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups) as trainer:
            trainer.step(batch(0))
        refused = Again(True)
        with shoal.train.Trainer(refused, F.mse_loss, sgd(refused), groups) as trainer:
            with pytest.raises(shoal.train.GroupError, match="use_reentrant=False"):
                trainer.step(batch(0))
    x, y = batch(0)
    F.mse_loss(reference(x), y).backward()
    optimizer.step()
    assert largest_difference(model, reference) < 1e-5


class SaysWhereByName(SaysWhere):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ self.w1)
        before = str(y.device)
        shoal.train.cut("second half")
        return (y + self.place.sum(0).to(before)) @ self.w2


def test_a_gradient_that_comes_twice_is_no_silent_mistake() -> None:
    model = SaysWhereByName()
    with shoal.train.worker_groups(2, 2) as groups:
        with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups, micro_batches=3) as trainer:
            with pytest.raises(shoal.train.GroupError, match="came twice in a step"):
                trainer.step(batch(0))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_refused_with_what_to_do() -> None:
    with pytest.raises(shoal.train.GroupError, match="use_reentrant=False"):
        trained(Checkpointed(True), 2, micro_batches=3)


def test_units_are_the_blocks_of_the_outermost_lists() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Tanh()))
            self.inner = nn.Module()
            self.inner.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 1) for _ in range(2))
            self.head = nn.Linear(1, 1)

    names = ["stem.0", "stem.1.0", "stem.1.1", "inner.blocks.0", "inner.blocks.1", "head"]
    assert candidates(Outer()) == names


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_models_as_they_come(name: str) -> None:
    import transformers

    torch.manual_seed(0)

    def made() -> nn.Module:
        if name == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=31, n_embd=16, n_layer=3, n_head=2, n_positions=16, resid_pdrop=0,
                embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2,
            )  # fmt: skip
            return transformers.GPT2LMHeadModel(config)
        config = transformers.LlamaConfig(
            vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=2, max_position_embeddings=16,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    model, reference = made(), made()
    reference.load_state_dict(model.state_dict())
    optimizer = sgd(reference)
    ids = torch.randint(31, (8, 10))
    data = {"input_ids": ids, "labels": ids}
    losses = []
    with shoal.train.worker_groups(2, devices=2) as groups:
        with shoal.train.Trainer(model, None, sgd(model), groups, micro_batches=2) as trainer:
            losses = [trainer.step(data).loss for _ in range(3)]
    for loss in losses:
        expected = reference(**data).loss
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(model, reference) < 1e-5


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = self.b(y)
        y.add_(1)
        return y + z


class Sometimes(nn.Module):
    """Leaves a block out when the sum of a batch is large."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.leave_out = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if self.leave_out else self.b(self.a(x))


def test_what_would_be_computed_wrong_is_refused() -> None:
    with pytest.raises(shoal.train.GroupError, match=r"add_ changes in place.*step|step.*add_"):
        trained(Changes(), 2)
    model = Sometimes()
    with shoal.train.worker_groups(1, 2) as groups:
        with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups) as trainer:
            trainer.step(batch(0))
            model.leave_out = True
            with pytest.raises(shoal.train.GroupError, match="without reaching 'b'"):
                trainer.step(batch(0))
            model.leave_out = False
            assert trainer.step(batch(0)).loss > 0


class Frozen(nn.Module):
    """Layers of all kinds whose weights' gradients are deferred, and some that may not be."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.shared = nn.Linear(8, 8)
        self.conv = nn.Conv1d(2, 4, 3, padding="same")
        self.conv2 = nn.Conv1d(4, 2, 3, padding=1, bias=False)
        self.weight = nn.Parameter(torch.randn(8, 4))  # as Hugging Face's Conv1D has it
        self.bias = nn.Parameter(torch.zeros(4))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.first(x)))
        x = self.shared(torch.tanh(self.shared(x)))
        x = self.conv2(torch.tanh(self.conv(x.view(-1, 2, 4)))).flatten(1)
        return torch.addmm(self.bias, x, self.weight)


@pytest.mark.parametrize("schedule", ["zero-bubble", "1f1b", "gpipe"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_layers_whose_gradients_are_put_off(schedule: str, autocast: Any) -> None:
    torch.manual_seed(0)
    model, reference = Frozen(), Frozen()
    reference.load_state_dict(model.state_dict())
    seen: list[torch.Tensor] = []
    model.shared.weight.register_hook(lambda grad: seen.append(grad))
    optimizer = sgd(reference)
    trained(model, 2, micro_batches=3, schedule=schedule, autocast=autocast)
    assert seen  # somebody watches: autograd's own way
    for step in range(3):
        x, y = batch(step)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            F.mse_loss(reference(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(model, reference) < (1e-5 if autocast is None else 2e-2)


def test_a_step_leaves_no_memory_behind() -> None:
    """Not even until the collector comes."""
    model = Unet()
    gc.disable()
    try:
        with shoal.train.worker_groups(1, 2) as groups:
            options = {"micro_batches": 4, "tell": lambda _: None}
            with shoal.train.Trainer(model, F.mse_loss, sgd(model), groups, **options) as trainer:
                used = []
                for step in range(6):
                    trainer.step(batch(step % 2))
                    trainer.synchronize()
                    used.append([torch.accelerator.memory_allocated(d) for d in groups[0].devices])
        assert used[2:] == [used[2]] * 4
    finally:
        gc.enable()
