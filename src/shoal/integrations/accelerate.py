"""accelerate: `Accelerator()`, `device_map="auto"` and float16. See docs/upstream/accelerate.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.integrations.library import Library

LIBRARY = Library(
    package="accelerate",
    tested="1.15.0",
    versions=("1.15", "2"),
    instead="set ACCELERATE_TORCH_DEVICE=shoal",
)
LIBRARIES = {"accelerate": LIBRARY}


@LIBRARY.after("accelerate.state")
def default_device(state: Any) -> None:
    """Choose shoal where nothing of accelerate's list is there. `cpu=True` never asks this."""

    def make(original: property) -> property:
        choose = _getter(original)

        def default_device(self: Any) -> torch.device:
            device: torch.device = choose(self)
            if device.type == "cpu" and LIBRARY.chooses_shoal():
                return torch.device("shoal")
            return device

        return property(default_device, doc=original.__doc__)

    LIBRARY.wrap(state.PartialState, "default_device", make)


@LIBRARY.after("accelerate.utils.modeling")
def max_memory(modeling: Any) -> None:
    """Count shoal's memory for `device_map="auto"`: number 0 is `shoal:0` to torch."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_max_memory(max_memory: dict[int | str, int | str] | None = None) -> Any:
            found = original(max_memory)
            others = any(name == "mps" or isinstance(name, int) for name in found)
            if max_memory is None and not others and LIBRARY.chooses_shoal():
                return {0: torch.shoal.mem_get_info(0)[0], **found}  # type: ignore[attr-defined]
            return found

        return get_max_memory

    LIBRARY.wrap(modeling, "get_max_memory", make)


@LIBRARY.after("accelerate.utils.modeling")
def grad_scaler(modeling: Any) -> None:
    """Scale gradients on the accelerator's device: accelerate's scaler is for CUDA, and off."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
            alone = distributed_type in (None, modeling.DistributedType.NO)
            if alone and modeling.AcceleratorState().device.type == "shoal":
                return torch.amp.GradScaler("shoal", **kwargs)
            return original(distributed_type, **kwargs)

        return get_grad_scaler

    LIBRARY.wrap(modeling, "get_grad_scaler", make)


@LIBRARY.after("accelerate.accelerator")
def float16_devices(accelerator: Any) -> None:
    """Add shoal to the devices that may compute in float16: a constant inside `__init__`."""
    function = accelerator.Accelerator.__init__
    code = function.__code__
    constants = tuple(
        (*value, "shoal")
        if isinstance(value, tuple) and "cuda" in value and "npu" in value
        else value
        for value in code.co_consts
    )
    if constants == code.co_consts:
        raise LookupError("Accelerator.__init__ has no list of devices for float16")
    function.__code__ = code.replace(co_consts=constants)
    LIBRARY.undo_by(lambda: setattr(function, "__code__", code))


def _getter(original: property) -> Callable[[Any], Any]:
    if original.fget is None:
        raise LookupError("PartialState.default_device cannot be read")
    return original.fget
