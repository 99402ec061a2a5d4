"""Trains a CNN with BatchNorm and Dropout, evaluates it, saves and reloads it; prints losses."""

import io
import sys

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.skip(x)
        return F.relu(y, inplace=True)


device = torch.device(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(
    Block(3, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
generator = torch.Generator().manual_seed(2)
images = torch.randn(24, 3, 16, 16, generator=generator)
labels = torch.randint(0, 5, (24,), generator=generator)
for step in range(6):
    part = slice(8 * (step % 3), 8 * (step % 3) + 8)
    x, y = images[part].to(device, non_blocking=True), labels[part].to(device)
    optimizer.zero_grad(set_to_none=True)
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")
buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
buffer.seek(0)
model.load_state_dict(torch.load(buffer, map_location=device))
model.eval()
with torch.inference_mode():
    print(f"{criterion(model(images.to(device)), labels.to(device)).item():.6f}")
