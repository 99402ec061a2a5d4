"""Tiny models, texts and measurements that the cases share."""

from __future__ import annotations

from typing import Any

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "fish",
    "sees",
    "eats",
    "likes",
    "big",
    "small",
    "red",
    "blue",
    "house",
    "tree",
    "and",
    "or",
]
TEXTS = [f"{WORDS[i % 16]} {WORDS[(3 * i + 1) % 16]} {WORDS[(5 * i + 2) % 16]}" for i in range(16)]


def seed() -> None:
    import torch

    torch.manual_seed(17)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]", *WORDS]
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[EOS]",
    )


def gpt2() -> Any:
    """Make a GPT-2 with random weights, the same ones each time.

    Without dropout: the order of samples and dropout share a generator on the CPU, and only there.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    seed()
    config = GPT2Config(
        vocab_size=32, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=4, pad_token_id=0,
        bos_token_id=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def tokens() -> list[dict[str, list[int]]]:
    """Make 16 samples of eight tokens, of which a language model predicts the next."""
    samples = [[(7 * i + 3 * j) % 27 + 5 for j in range(8)] for i in range(16)]
    return [{"input_ids": sample, "labels": sample} for sample in samples]


def mlp() -> Any:
    import torch

    seed()
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))


def points() -> Any:
    """Make a dataset of 32 points and the sums of their coordinates."""
    import torch

    x = torch.rand(32, 8, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Dtypes:
    """Records the dtypes in which the linear layers of a model computed."""

    def __init__(self, model: Any) -> None:
        import torch

        self.seen: set[str] = set()
        kinds: tuple[type, ...] = (torch.nn.Linear,)
        for module in model.modules():
            if isinstance(module, kinds) or type(module).__name__ == "Conv1D":
                module.register_forward_hook(self._see)

    def _see(self, module: Any, inputs: Any, output: Any) -> None:
        self.seen.add(str(output.dtype).removeprefix("torch."))

    def names(self) -> list[str]:
        return sorted(self.seen)


def place(model: Any) -> str:
    """Return the device of a model's parameters, or "several"."""
    devices = {str(p.device) for p in model.parameters()}
    return devices.pop() if len(devices) == 1 else "several"
