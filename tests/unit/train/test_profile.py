"""What a profile says of a model's units."""

from __future__ import annotations

import torch
from torch import nn

from shoal.train.model.profile import profile


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.plain = nn.Linear(4, 4)
        self.statistics = nn.BatchNorm1d(4)
        self.activation = nn.ReLU()
        self.watched = nn.Linear(4, 4)
        self.counted = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x.sum()


def test_units_that_a_copy_of_their_weights_would_not_serve_are_not_shared() -> None:
    model = Mixed()
    model.watched.weight.register_hook(lambda grad: None)
    model.counted.bias.register_post_accumulate_grad_hook(lambda p: None)
    x = torch.randn(3, 4)
    found = profile(model, lambda: model(x), torch.device("cpu"))
    shareable = {unit.name: unit.shareable for unit in found.units}
    assert shareable == {
        "first": False,  # the last uses its weights
        "plain": True,
        "statistics": False,
        "activation": True,
        "watched": False,
        "counted": False,
        "frozen": True,
        "tied": False,
    }
