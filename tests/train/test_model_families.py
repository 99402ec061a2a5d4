"""Hugging Face models of many families, their code as it is: whatever the layout, they train as on one
device. All of it takes minutes, so most is left to `make test-all`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
import shoal.train
from shoal.train.model.stage_costs import Cut
from tests.train.conftest import CutAt
from tests.train.models import largest_difference
from tests.train.test_equal_results import sgd

pytestmark = pytest.mark.usefixtures("lease")

VOCABULARY, LENGTH, CLASSES, SAMPLES, STEPS = 50, 16, 5, 8, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "groups": {"groups": 2},
    "stages": {"groups": 1, "devices": 2},
    "both": {"groups": 2, "devices": 2},
}
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQUENCES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0,
    "decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "forced_eos_token_id": 2,
}  # fmt: skip


def text() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def sentences() -> dict[str, torch.Tensor]:
    return {**text(), "labels": torch.randint(2, (SAMPLES,))}


def pictures() -> dict[str, torch.Tensor]:
    labels = torch.randint(CLASSES, (SAMPLES,))
    return {"pixel_values": torch.randn(SAMPLES, 3, 32, 32), "labels": labels}


def sound() -> dict[str, torch.Tensor]:
    labels = torch.randint(VOCABULARY, (SAMPLES, 8))
    return {"input_features": torch.randn(SAMPLES, 80, 64), "labels": labels}


Batch = Callable[[], dict[str, torch.Tensor]]
#: name -> model class, configuration class, its values, batches
FAMILIES: dict[str, tuple[str, str, dict[str, Any], Batch]] = {
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"n_embd": 32, "n_layer": 4, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0,
         "attn_pdrop": 0}, text,
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQUENCES, text),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16,
         "dropout_rate": 0, "decoder_start_token_id": 0}, text,
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_key_value_heads": 1}, text),
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig",
        {**SMALL, "num_key_value_heads": 1, "num_local_experts": 2}, text,
    ),
    "gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        {**SMALL, "num_key_value_heads": 1, "head_dim": 16}, text,
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SMALL, "num_key_value_heads": 1}, text),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL, text),
    "bloom": (
        "BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 3, "n_head": 2}, text,
    ),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 64,
         "word_embed_proj_dim": 32, "dropout": 0.0}, text,
    ),
    "mamba": (
        "MambaForCausalLM", "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, text,
    ),
    "albert": (  # one layer that runs three times
        "AlbertForSequenceClassification", "AlbertConfig",
        {**SMALL, **UNDROPPED, "embedding_size": 16, "classifier_dropout_prob": 0.0}, sentences,
    ),
    "vit": (
        "ViTForImageClassification", "ViTConfig",
        {**SMALL, **UNDROPPED, "image_size": 32, "patch_size": 8, "num_labels": CLASSES}, pictures,
    ),
    "swin": (
        "SwinForImageClassification", "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1],
         "num_heads": [2, 2], "window_size": 4, "num_labels": CLASSES, "drop_path_rate": 0.0},
        pictures,
    ),
    "convnext": (
        "ConvNextForImageClassification", "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "num_labels": CLASSES},
        pictures,
    ),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {**SEQUENCES, "num_mel_bins": 80, "max_source_positions": 32}, sound,
    ),
}  # fmt: skip


def made(name: str, checkpointed: bool) -> nn.Module:
    import transformers

    model_class, config_class, values, _ = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{"vocab_size": VOCABULARY, **values})
    model: Any = getattr(transformers, model_class)(config).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Weight decay for matrices only, and a learning rate that changes in every step."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)


def one_device(model: nn.Module, data: list[Any]) -> list[float]:
    optimizer, schedule = adamw(model)
    losses = []
    for batch in data:
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


QUICK = {("mixtral", "groups", False), ("gpt2", "stages", True), ("bart", "both", False)}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
    for case in [(name, layout, False) for name in FAMILIES for layout in LAYOUTS]
    + [(name, layout, True) for name in ("gpt2", "llama", "vit") for layout in LAYOUTS]
]


@pytest.mark.parametrize(("name", "layout", "checkpointed"), CASES)
def test_a_family_trains_as_on_one_device(name: str, layout: str, checkpointed: bool) -> None:
    model = made(name, checkpointed)
    torch.manual_seed(1)
    data = [FAMILIES[name][3]() for _ in range(STEPS)]
    expected = one_device(copy.deepcopy(model), data)
    optimizer, schedule = adamw(model)
    with shoal.train.worker_groups(**LAYOUTS[layout]) as groups:
        with shoal.train.Trainer(model, None, optimizer, groups) as trainer:
            losses = []
            for batch in data:
                losses.append(trainer.step(batch).loss)
                schedule.step()
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_the_same_wherever_it_is_cut(name: str, cut_at: CutAt) -> None:
    """Which cut is chosen depends on the machine: so all of them, also those that share a unit."""
    batch = FAMILIES[name][3]()
    expected = made(name, False)
    reference = sgd(expected)
    for _ in range(2):
        expected(**batch).loss.backward()
        reference.step()
        reference.zero_grad()

    def differs() -> float:
        model = made(name, False)
        with shoal.train.worker_groups(2, 2) as groups:
            with shoal.train.Trainer(model, None, sgd(model), groups, micro_batches=3) as trainer:
                for _ in range(2):
                    trainer.step(batch)
        return largest_difference(model, expected)

    found = {"the middle": differs()}
    units = cut_at.units
    cuts = [Cut(at) for at in range(1, len(units))]
    cuts += [Cut(at, 1, 1) for at in range(2, len(units)) if units[at - 1].shareable]
    for cut in cuts:
        cut_at(cut)
        found[f"{units[cut.at].name}, {cut.shared} shared"] = differs()
    assert {cut: far for cut, far in found.items() if not far < 1e-5} == {}
