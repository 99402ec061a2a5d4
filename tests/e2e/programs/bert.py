"""Trains a small BERT classifier with padding masks; prints losses, then accuracy."""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification

device = sys.argv[1]
torch.manual_seed(0)
config = BertConfig(
    vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=64, max_position_embeddings=40, num_labels=3,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config).to(device).train()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(1)
ids = torch.randint(1, 101, (16, 20), generator=generator)
mask = (torch.arange(20) < torch.randint(5, 21, (16, 1), generator=generator)).long()
labels = torch.randint(0, 3, (16,), generator=generator)
for step in range(5):
    rows = slice(8 * (step % 2), 8 * (step % 2) + 8)
    out = model(
        input_ids=ids[rows].to(device),
        attention_mask=mask[rows].to(device),
        labels=labels[rows].to(device),
    )
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    print(f"{out.loss.item():.6f}")
model.eval()
with torch.no_grad():
    guess = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.argmax(-1)
print((guess == labels.to(device)).float().mean().item())
