"""Trains from a DataLoader with worker processes and pinned memory; prints the loss of each epoch."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Squares(Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int):
        x = torch.linspace(-1, 1, 600) * (index % 7)
        return {"x": x, "y": torch.tensor(float(index % 7) ** 2)}


if __name__ == "__main__":
    device = sys.argv[1]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, test = random_split(Squares(), [80, 16], torch.Generator().manual_seed(0))
    loader = DataLoader(
        train, 16, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    for _ in range(3):
        total = torch.zeros((), device=device)
        for batch in loader:
            x = batch["x"].to(device, non_blocking=True)
            y = batch["y"].to(device, non_blocking=True)
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"{total.item():.5f}")
    model.eval()
    with torch.no_grad():
        worst = max(
            (model(b["x"].to(device)).squeeze(1) - b["y"].to(device)).abs().max().item()
            for b in DataLoader(test, 8)
        )
    print(f"{worst:.5f}")
