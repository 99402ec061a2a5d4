"""`torch.shoal`: what `torch.cuda` is for CUDA."""

from __future__ import annotations

import sys
from typing import Any

import torch

from shoal import _core
from shoal.device import inductor
from shoal.device.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_peak_memory_stats,
    traffic,
)
from shoal.device.random import (
    default_generator,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from shoal.device.streams import Event, Stream, current_stream, default_stream, set_stream, stream

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_generator",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
    "traffic",
    "whole_rnn",
]


def is_available() -> bool:
    """Return whether torch and libraries may pick the device by themselves.

    That is so once the user asked for a pool (SHOAL_DEFAULT=1, SHOAL_POOL, `shoal join`) or the program
    has named the device. Naming it works either way: it starts a pool where none is joined.

    >>> device = "shoal" if torch.shoal.is_available() else "cpu"
    """
    return _core.wanted()


def is_initialized() -> bool:
    """Return whether this program holds a lease.

    >>> x = torch.ones(2, device="shoal")
    >>> torch.shoal.is_initialized()
    True
    """
    return _core.device_count() > 0


def init() -> None:
    """Join $SHOAL_POOL or start a pool, unless there is a lease already.

    >>> torch.shoal.init()
    """
    _lazy_init()


def _lazy_init() -> None:
    from shoal.device import leases

    leases.ensure()


def _is_in_bad_fork() -> bool:
    # torch asks this at every seed, also in a guest, which must not pay for the modules of a lease.
    leases = sys.modules.get("shoal.device.leases")
    return leases is not None and leases.in_bad_fork()


def device_count() -> int:
    """One, or, where the lease has several devices, the whole (0) and each of them (from 1).

    Opens no connection: without a lease it is one, or zero in a program that has not asked for Shoal.

    >>> for index in range(torch.shoal.device_count()):
    ...     print(torch.shoal.get_device_name(index))
    """
    return _core.device_count() or int(is_available())


def current_device() -> int:
    """Return the index of the device that `torch.device("shoal")` means in this thread.

    >>> torch.shoal.current_device()
    0
    """
    return _core.current_device()


def _index(device: Any = None) -> int:
    """Return the index of a device given as int, string, torch.device or None (the current one)."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    wanted = torch.device(device)
    if wanted.type != "shoal":
        raise ValueError(f"expected a shoal device, got {wanted}")
    return current_device() if wanted.index is None else wanted.index


def set_device(device: Any) -> None:
    """Make a device the one that `torch.device("shoal")` means in this thread.

    >>> torch.shoal.set_device("shoal:1")
    >>> torch.shoal.set_device(0)
    """
    index = _index(device)
    count = _core.device_count() or 1
    if not 0 <= index < count:
        raise RuntimeError(
            f"shoal:{index} does not exist: the lease has {count} device(s). Lease more with "
            "shoal.connect(devices=N)."
        )
    _core.want()
    _core.set_device(index)


def _exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        _core.set_device(index)
    return before


def _maybe_exchange_device(index: int) -> int:
    return _exchange_device(index)


class device:
    """Context manager: `with torch.shoal.device(1): …`.

    >>> with torch.shoal.device(1):
    ...     torch.ones(2, device="shoal").device
    device(type='shoal', index=1)
    """

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _core.set_device(self.prev_idx)


class device_of(device):
    """Context manager: the device of a tensor, if it is on one of ours.

    >>> with torch.shoal.device_of(x):
    ...     y = torch.empty(2, device="shoal")  # where x is
    """

    def __init__(self, obj: torch.Tensor) -> None:
        on_shoal = obj.device.type == "shoal"
        super().__init__(obj.device.index if on_shoal else current_device())


def synchronize(device: Any = None) -> None:
    """Wait until the device has done everything so far, and raise its errors.

    >>> y = x @ x  # returns at once
    >>> torch.shoal.synchronize()
    """
    if _is_in_bad_fork():
        _lazy_init()  # raises
    if is_initialized():
        _core.synchronize(_index(device))


def get_device_properties(device: Any = None) -> Any:
    """Return what the pool knows about the device; of a GPU also its load, heat and power (`gpu`).

    >>> torch.shoal.get_device_properties().total_memory
    """
    import msgspec

    from shoal.device import leases
    from shoal.pool.local import local_pool

    devices = leases.device_info()
    index = _index(device)
    if index == 0 and len(devices) > 1:
        return leases.whole(devices)
    device_info = devices[index - 1]
    lease = leases.current()
    if device_info.device == "cpu" or lease is None:
        return device_info
    now = {d.number: d.gpu for d in local_pool.describe(lease.url)}
    return msgspec.structs.replace(device_info, gpu=now.get(device_info.number))


def get_device_name(device: Any = None) -> str:
    """Return the device's name in its pool.

    >>> print(torch.shoal.get_device_name())
    """
    return str(get_device_properties(device).name)


def get_device_capability(device: Any = None) -> tuple[int, int]:
    capability: tuple[int, int] = get_device_properties(device).capability
    return capability


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes of mixed precision; `torch.autocast` asks.

    >>> torch.bfloat16 in torch.shoal.get_amp_supported_dtype()
    True
    """
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported() -> bool:
    """Return whether the device computes in bfloat16: every device does.

    >>> torch.shoal.is_bf16_supported()
    True
    """
    return True


def whole_rnn(whole: bool | None = None) -> bool:
    """Return whether recurrent layers run whole on the device, or in steps.

    Whole is fast, but has no second derivative. Returns the setting; sets it first if one is given.

    >>> before = torch.shoal.whole_rnn(False)  # step by step: with a second derivative
    """
    if whole is not None:
        _core.set_whole_rnn(whole)
    return _core.whole_rnn()


#: torch.serialization looks for this name.
_utils = torch._utils


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    # torch.utils.checkpoint keeps the state of random numbers only where this says so.
    if name == "_initialized":
        return is_initialized()
    if name in inductor.NAMES:
        return inductor.part(name)
    raise AttributeError(f"module 'torch.shoal' has no attribute {name!r}")
