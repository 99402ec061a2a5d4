"""transformers: `Trainer` and `pipeline()`. See docs/upstream/transformers.md."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

import torch

from shoal.integrations.library import Library, another_accelerator

LIBRARY = Library(
    package="transformers",
    tested="5.23.0",
    versions=("5.23", "6"),
    instead='set ACCELERATE_TORCH_DEVICE=shoal for Trainer, and pass pipeline(device="shoal")',
)
LIBRARIES = {"transformers": LIBRARY}


@LIBRARY.after("transformers.training_args")
def trainer_device(training_args: Any) -> None:
    """Train on the device that accelerate chose. `use_cpu=True` makes accelerate choose the CPU."""

    def make(original: cached_property[torch.device]) -> cached_property[torch.device]:
        def _setup_devices(self: Any) -> torch.device:
            device = original.func(self)
            chosen = getattr(self.distributed_state, "device", device)
            if device.type == "cpu" and chosen.type == "shoal":
                self._n_gpu = 1
                return chosen
            return device

        return cached_property(_setup_devices)

    LIBRARY.wrap(training_args.TrainingArguments, "_setup_devices", make)


@LIBRARY.after("transformers.utils.import_utils")
def bfloat16(import_utils: Any) -> None:
    """Say that the accelerator computes in bfloat16: the list of those that do lacks shoal."""

    def make(original: Callable[[], bool]) -> Callable[[], bool]:
        @wraps(original)
        def is_torch_bf16_gpu_available() -> bool:
            return original() or (not another_accelerator() and LIBRARY.chooses_shoal())

        return is_torch_bf16_gpu_available

    LIBRARY.wrap(import_utils, "is_torch_bf16_gpu_available", make)


@LIBRARY.after("transformers.pipelines.base")
def pipeline_device(base: Any) -> None:
    """Leave a model on shoal there, and take shoal where the pipeline would take the CPU."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            call = signature.bind(self, *args, **kwargs)
            model = call.arguments["model"]
            if getattr(model, "hf_device_map", None) is None:
                call.arguments["device"] = _pipeline_device(model, call.arguments.get("device"))
            original(*call.args, **call.kwargs)
            # A device map names devices by number, of which the pipeline makes the CPU.
            if self.device.type == "cpu" and model.device.type == "shoal":
                self.device = model.device

        return __init__

    LIBRARY.wrap(base.Pipeline, "__init__", make)


def _pipeline_device(model: Any, device: Any) -> Any:
    if device is None and model.device.type == "shoal":
        return model.device
    number = 0 if device is None else device
    if isinstance(number, int) and number >= 0:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not distributed and not another_accelerator() and LIBRARY.chooses_shoal():
            return torch.device("shoal", number)
    return device
