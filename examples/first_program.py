"""The first program of README.md: a model learns on a shoal device."""

import torch

device = "shoal"  # joins $SHOAL_POOL, or starts a pool on this machine
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(
    device
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
points = torch.rand(512, 2, device=device)
wanted = (points - 0.5).norm(dim=1, keepdim=True)  # distance from the centre of a square
for step in range(201):
    loss = torch.nn.functional.mse_loss(model(points), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.5f}  on {loss.device}")
