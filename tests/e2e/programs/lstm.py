"""Trains a language model with an embedding, an LSTM and truncated backpropagation; prints losses."""

import sys

import torch
from torch import nn

device = sys.argv[1]
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 31)

    def forward(self, x, state=None):
        out, state = self.lstm(self.embed(x), state)
        return self.head(out), state


model = Model().to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
text = torch.randint(0, 31, (4, 61), generator=torch.Generator().manual_seed(3)).to(device)
state = None
for start in range(0, 60, 10):
    x, y = text[:, start : start + 10], text[:, start + 1 : start + 11]
    logits, state = model(x, state)
    state = tuple(s.detach() for s in state)
    loss = nn.functional.cross_entropy(logits.reshape(-1, 31), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    print(f"{loss.item():.6f}")
