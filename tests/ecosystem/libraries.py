"""The cases of `tests.ecosystem.cases`, how they choose a device, and how a test runs one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.programs import ROOT

#: How a library comes to choose shoal, for the page.
REPLACED = "`shoal.integrations`"
FOLLOWS = "the program names it"
TORCH = "`torch.accelerator`"
_DROPPED = ("SHOAL_", "ACCELERATE_", "XDG_", "HF_", "LT_", "PL_")


@dataclass(frozen=True)
class Precision:
    """What the layers of a model compute in on shoal, and how close the results are to the CPU's."""

    dtype: str = "float32"  # "" where none is recorded
    tolerance: float = 1e-5  # relative and absolute
    compared: int | None = None  # how many values are; None: all
    scaler: bool = False  # whether a gradient scaler must be at work


FULL = Precision()
UNRECORDED = Precision("")
BF16 = Precision("bfloat16", 1e-3)
#: A scaler skips the first steps until its scale fits, so only the first loss is comparable.
FP16 = Precision("float16", 1e-2, 1, True)


@dataclass(frozen=True)
class Case:
    """One call of a library, as a user writes it."""

    name: str  # file and function in tests.ecosystem.cases
    library: str  # its distribution
    call: str  # what the user writes
    precision: Precision = UNRECORDED
    how: str = REPLACED  # how shoal is chosen


def _cases(library: str, file: str, calls: dict[str, tuple[Any, ...]]) -> list[Case]:
    return [Case(f"{file}:{name}", library, *rest) for name, rest in calls.items()]


CASES = [
    *_cases("accelerate", "accelerate", {
        "accelerator": ("Accelerator()", FULL),
        "bf16": ('Accelerator(mixed_precision="bf16")', BF16),
        "fp16": ('Accelerator(mixed_precision="fp16")', FP16),
        "device_map": ("infer_auto_device_map(model)",),
    }),
    *_cases("transformers", "transformers", {
        "trainer": ("Trainer(…)", FULL),
        "trainer_bf16": ("TrainingArguments(bf16=True)", BF16),
        "trainer_fp16": ("TrainingArguments(fp16=True)", FP16),
        "pipeline": ("pipeline(…)",),
        "pipeline_number": ("pipeline(device=0)",),
        "pipeline_named": ("pipeline(model=model_on_shoal)",),
        "pipeline_device_map": ('pipeline(device_map="auto")',),
        "device_map": ('from_pretrained(device_map="auto")',),
        "generate": ("model.generate(…)", UNRECORDED, FOLLOWS),
    }),
    *_cases("trl", "transformers", {"trl": ("SFTTrainer(…), with its default bfloat16", BF16)}),
    *_cases("peft", "transformers", {"peft": ("Trainer(get_peft_model(…)), save and load", FULL)}),
    *_cases("lightning", "lightning", {
        "trainer": ('Trainer(accelerator="auto")', FULL),
        "trainer_named": ('Trainer(accelerator="shoal")', FULL),
        "trainer_bf16": ('Trainer(precision="bf16-mixed")', BF16),
        "trainer_fp16": ('Trainer(precision="16-mixed")', FP16),
        "fabric": ('Fabric(accelerator="auto")', FULL),
        "fabric_named": ('Fabric(accelerator="shoal")', FULL),
        "fabric_bf16": ('Fabric(precision="bf16-mixed")', BF16),
        "fabric_fp16": ('Fabric(precision="16-mixed")', FP16),
    }),
    *_cases("pytorch-lightning", "lightning", {
        "old_trainer": ('Trainer(accelerator="auto")', FULL),
        "old_trainer_bf16": ('Trainer(accelerator="shoal", precision="bf16-mixed")', BF16),
        "old_fabric": ('Fabric(accelerator="auto")', FULL),
        "old_fabric_bf16": ('Fabric(accelerator="shoal", precision="bf16-mixed")', BF16),
    }),
    *_cases("sentence-transformers", "others", {"sentence_transformers": ("SentenceTransformer(…)",)}),
    *_cases("diffusers", "others", {
        "diffusers": ("get_device()", UNRECORDED, TORCH),
        "diffusers_offload": ("enable_model_cpu_offload()", UNRECORDED, TORCH),
    }),
    *_cases("torch_geometric", "others", {"torch_geometric": ('torch_geometric.device("auto")',)}),
    *_cases("timm", "others", {"timm": ("--device shoal", UNRECORDED, FOLLOWS)}),
    *_cases("torchmetrics", "others", {"torchmetrics": ("metric.to(device)", UNRECORDED, FOLLOWS)}),
    *_cases("torchdata", "others", {
        "torchdata": ('PinMemory(pin_memory_device="shoal")', UNRECORDED, FOLLOWS),
    }),
]  # fmt: skip

#: Cases that run out of memory on a device of 64 MiB, and whose library must notice.
MEMORY_CASES = [
    *_cases("accelerate", "accelerate", {
        "batch_size": ("find_executable_batch_size", UNRECORDED, "the error's text"),
    }),
    *_cases("transformers", "transformers", {
        "auto_find_batch_size": ("auto_find_batch_size=True", UNRECORDED, "the error's text"),
    }),
    *_cases("lightning", "lightning", {"batch_size": ("Tuner.scale_batch_size",)}),
    *_cases("pytorch-lightning", "lightning", {"old_batch_size": ("Tuner.scale_batch_size",)}),
]  # fmt: skip


def need(case: Case) -> None:
    """Skip a test whose library is missing. Where everything must be there, fail instead."""
    # transformers trains, and maps a model to devices, by means of accelerate.
    needed = [case.library, *(["accelerate"] if case.name.startswith("transformers:") else [])]
    try:
        for library in needed:
            importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError as missing:
        reason = f"{missing.name} is not installed; run: make test-ecosystem"
        if "SHOAL_ECOSYSTEM_RESULTS" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)


def run(
    case: Case, mode: str, *, asked: dict[str, str], timeout_s: float = 110.0
) -> dict[str, Any]:
    """Run a case in a process of its own, with `asked` as the only variables of Shoal."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_DROPPED)}
    with tempfile.TemporaryDirectory(prefix="ecosystem-") as home:
        variables = {"HOME": home, "TMPDIR": home, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [sys.executable, "-m", "tests.ecosystem.case", case.name, mode],
            env={**kept, **variables, **asked},
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found
