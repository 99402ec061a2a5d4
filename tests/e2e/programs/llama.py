"""Generates with a small Llama and its KV cache: greedy, sampled and by beams; prints the tokens."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

device = sys.argv[1]
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=89, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
model = LlamaForCausalLM(config).to(device).eval()
prompt = torch.randint(3, 89, (2, 7), generator=torch.Generator().manual_seed(1)).to(device)
mask = torch.ones_like(prompt)
common = {"attention_mask": mask, "max_new_tokens": 12, "use_cache": True}
print(model.generate(prompt, do_sample=False, **common).tolist())
torch.manual_seed(5)
print(model.generate(prompt, do_sample=True, top_k=20, temperature=0.8, **common).tolist())
print(model.generate(prompt, do_sample=False, num_beams=3, **common).tolist())
