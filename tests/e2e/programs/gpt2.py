"""Trains a small GPT-2 from Hugging Face transformers; prints the loss of every step."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

device = sys.argv[1]
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
model = GPT2LMHeadModel(config).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
for step in range(6):
    batch = torch.randint(0, 97, (4, 32), generator=torch.Generator().manual_seed(step)).to(device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"{loss.item():.6f}")
