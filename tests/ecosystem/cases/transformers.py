"""transformers' `Trainer`, `pipeline()`, `device_map="auto"` and `generate`; TRL and PEFT upon them."""

from __future__ import annotations

import tempfile
from typing import Any

from tests.ecosystem.cases import parts


def _arguments(cpu: bool, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": cpu,
        **more,
    }


def _finish(trainer: Any, model: Any, dtypes: parts.Dtypes) -> dict[str, Any]:
    trainer.train()
    scaler = trainer.accelerator.scaler
    return {
        "device": parts.place(model),
        "values": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "dtypes": dtypes.names(),
        "scaler": scaler is not None and scaler.is_enabled(),
    }


def _train(cpu: bool, **more: Any) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    model = parts.gpt2()
    dtypes = parts.Dtypes(model)
    arguments = TrainingArguments(**_arguments(cpu, **more))
    trainer = Trainer(model=model, args=arguments, train_dataset=parts.tokens())
    return _finish(trainer, model, dtypes)


def trainer(cpu: bool) -> dict[str, Any]:
    return _train(cpu)


def trainer_bf16(cpu: bool) -> dict[str, Any]:
    return _train(cpu, bf16=True)


def trainer_fp16(cpu: bool) -> dict[str, Any]:
    return _train(cpu, fp16=True)


def trl(cpu: bool) -> dict[str, Any]:
    """SFT with TRL's defaults, of which bfloat16 is one."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = parts.gpt2()
    dtypes = parts.Dtypes(model)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**_arguments(cpu)),
        train_dataset=Dataset.from_list([{"text": text} for text in parts.TEXTS]),
        processing_class=parts.tokenizer(),
    )
    return _finish(trainer, model, dtypes)


def peft(cpu: bool) -> dict[str, Any]:
    """Train an adapter, save it, and load it into a fresh model on the same device."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Trainer, TrainingArguments

    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(parts.gpt2(), config)
    dtypes = parts.Dtypes(model)
    arguments = TrainingArguments(**_arguments(cpu, learning_rate=1e-2))
    found = _finish(
        Trainer(model=model, args=arguments, train_dataset=parts.tokens()), model, dtypes
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(parts.gpt2().to(model.device), folder)
    assert parts.place(again) == found["device"]
    logits = _logits(again)
    assert logits == _logits(model.eval())
    return {**found, "values": found["values"] + logits}


def _logits(model: Any) -> list[float]:
    import torch

    tokens = torch.tensor([[5, 6, 7]], device=model.device)
    with torch.no_grad():
        values: list[float] = model(tokens).logits[0, -1].tolist()
    return values


def pipeline(cpu: bool) -> dict[str, Any]:
    return _pipe({"device": "cpu"} if cpu else {})


def pipeline_number(cpu: bool) -> dict[str, Any]:
    return _pipe({"device": -1 if cpu else 0})


def _pipe(device: dict[str, Any]) -> dict[str, Any]:
    from transformers import pipeline

    made = pipeline("text-generation", model=parts.gpt2(), tokenizer=parts.tokenizer(), **device)
    return {"device": parts.place(made.model), "values": _text(made), "inputs": str(made.device)}


def _text(pipe: Any) -> list[str]:
    found = pipe(parts.TEXTS[0], max_new_tokens=6, do_sample=False)
    return [found[0]["generated_text"]]


def pipeline_named(cpu: bool) -> dict[str, Any]:
    """A model that the program put on shoal by name stays there."""
    from transformers import pipeline

    model = parts.gpt2().to("shoal")
    device = {"device": "cpu"} if cpu else {}
    made = pipeline("text-generation", model=model, tokenizer=parts.tokenizer(), **device)
    return {"device": parts.place(made.model), "values": _text(made)}


def _saved() -> str:
    folder = tempfile.mkdtemp()
    parts.gpt2().save_pretrained(folder)
    parts.tokenizer().save_pretrained(folder)
    return folder


def device_map(cpu: bool) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(_saved(), device_map="cpu" if cpu else "auto")
    return {"device": parts.place(model), "values": _generated(model)}


def pipeline_device_map(cpu: bool) -> dict[str, Any]:
    from transformers import pipeline

    device = {"device": "cpu"} if cpu else {"device_map": "auto"}
    made = pipeline("text-generation", model=_saved(), **device)
    return {"device": parts.place(made.model), "values": _text(made)}


def _generated(model: Any) -> list[int]:
    import torch

    tokens = torch.tensor([[5, 6, 7]]).to(model.device)
    found: list[int] = model.generate(tokens, max_new_tokens=6, do_sample=False)[0].tolist()
    return found


def generate(cpu: bool) -> dict[str, Any]:
    model = parts.gpt2().to("cpu" if cpu else "shoal")
    return {"device": parts.place(model), "values": _generated(model)}


def auto_find_batch_size(cpu: bool) -> dict[str, Any]:
    """Train on a device of 64 MiB with a first batch that does not fit."""
    from transformers import Trainer, TrainingArguments

    model = parts.gpt2()
    samples = [{"input_ids": [5] * 32, "labels": [5] * 32}] * 2048
    arguments = TrainingArguments(
        **_arguments(cpu, per_device_train_batch_size=2048, max_steps=1, auto_find_batch_size=True)
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples)
    trainer.train()
    return {"device": parts.place(model), "values": [], "tried": [2048, trainer._train_batch_size]}
