"""A program for the stand-in: it trains on Shoal's device as on the local CPU."""

from __future__ import annotations

import copy

import torch

torch.manual_seed(0)


class Model(torch.nn.Module):
    """A layer of each kind that accelerators treat in their own way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 12)
        self.recurrent = torch.nn.LSTM(12, 12, batch_first=True)
        self.convolution = torch.nn.Conv1d(12, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        hidden = self.norm(self.convolution(hidden.transpose(1, 2))).relu().mean(2)
        return self.head(hidden)


def train(model: Model, device: str) -> list[float]:
    """Return the losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    numbers = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(6):
        tokens = torch.randint(0, 20, (4, 7), generator=numbers)
        loss = torch.nn.functional.cross_entropy(
            model(tokens.to(device, non_blocking=True)), tokens[:, 0].to(device)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


local = Model()
remote = copy.deepcopy(local).to("shoal")
expected, found = train(local, "cpu"), train(remote, "shoal")
torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)
print("equal")
