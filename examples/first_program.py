"""A first program: a model learns on a shoal device."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1)).to("shoal")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
points = torch.rand(512, 2, device="shoal")
for step in range(201):
    loss = nn.functional.mse_loss(model(points), points.norm(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.5f}  on {loss.device}")
