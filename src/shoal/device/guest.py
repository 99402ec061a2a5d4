"""What torch answers in a guest: a program that has Shoal installed and has not asked for it.

Torch takes the mere name of the device for an accelerator, in C++ and without asking us. Its Python
functions are few, so until the device is wanted they are replaced by ones that answer as torch does
where there is no accelerator. The first lease puts torch's own functions back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal import _core

#: What torch's C++ says of every function below, but for those in _ANSWERS.
_NO_ACCELERATOR = "Cannot access accelerator device when none is available."
_NO_DEVICE = -1

_RAISING = (
    "emptyCache", "emptyHostCache", "exchangeDevice", "getDeviceCapability", "getDeviceIndex",
    "getDeviceStats", "getMemoryInfo", "getStream", "isAllocatorInitialized", "maybeExchangeDevice",
    "resetAccumulatedStats", "resetPeakStats", "setStream", "synchronizeDevice",
)  # fmt: skip
_ANSWERS = {
    "getAccelerator": None,
    "hooks_device_count": _NO_DEVICE,
    "hooks_exchange_device": _NO_DEVICE,
    "hooks_get_current_device": _NO_DEVICE,
    "hooks_maybe_exchange_device": _NO_DEVICE,
    "hooks_set_current_device": None,
}
_PREFIX = "_accelerator_"

_replaced: list[tuple[Any, str, Any]] = []  # where, name, torch's own


def hide() -> None:
    """Make torch answer as if there were no accelerator, until the program wants the device."""
    for name in _RAISING:
        _replace(torch._C, _PREFIX + name, _raise)
    for name, answer in _ANSWERS.items():
        _replace(torch._C, _PREFIX + name, lambda *_, answer=answer: answer)
    _replace(torch._C, _PREFIX + "setDeviceIndex", _set_device_index)
    _replace(torch.autograd, "_supported_activities", _activities)


def show() -> None:
    """Restore torch's own functions."""
    while _replaced:
        where, name, own = _replaced.pop()
        setattr(where, name, own)


def _replace(where: Any, name: str, answer: Callable[..., Any]) -> None:
    own = getattr(where, name)

    def ask(*arguments: Any) -> Any:
        return own(*arguments) if _core.wanted() else answer(*arguments)

    ask.__name__ = name
    _replaced.append((where, name, own))
    setattr(where, name, ask)


def _raise(*_: Any) -> None:
    raise RuntimeError(_NO_ACCELERATOR)


def _set_device_index(index: int) -> None:
    if index >= 0:
        _raise()


def _activities() -> set[Any]:
    """Return what the profiler can record without a device: the CPU."""
    return {torch._C._profiler.ProfilerActivity.CPU}
