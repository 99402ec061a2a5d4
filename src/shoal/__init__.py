"""Shoal turns the GPUs of many machines into one PyTorch device.

>>> import torch
>>> x = torch.randn(4096, 4096, device="shoal")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.errors import (
    DeviceLostError,
    DeviceSpecError,
    LeaseError,
    PeerLostError,
    PoolError,
    PoolStartError,
    ShareError,
    ShareRevokedError,
    ShoalError,
)

if TYPE_CHECKING:
    from shoal import memory
    from shoal.device.session import Lease, connect, device_info
    from shoal.memory.sharing import Handle, acquire, open, release, share, shares, unshare
    from shoal.pool.local import Pool, up

__version__ = "0.1.0"

__all__ = [
    "DeviceLostError",
    "DeviceSpecError",
    "Handle",
    "Lease",
    "LeaseError",
    "PeerLostError",
    "Pool",
    "PoolError",
    "PoolStartError",
    "ShareError",
    "ShareRevokedError",
    "ShoalError",
    "acquire",
    "connect",
    "device_info",
    "memory",
    "open",
    "release",
    "share",
    "shares",
    "unshare",
    "up",
]

#: Parts of the package that are used as `shoal.part.name`.
_MODULES = ("memory",)
#: Public names that need torch: imported when first used, so that `import shoal` stays quick.
_LAZY = {
    "Lease": "shoal.device.session",
    "connect": "shoal.device.session",
    "device_info": "shoal.device.session",
    "Handle": "shoal.memory.sharing",
    "acquire": "shoal.memory.sharing",
    "open": "shoal.memory.sharing",
    "release": "shoal.memory.sharing",
    "share": "shoal.memory.sharing",
    "shares": "shoal.memory.sharing",
    "unshare": "shoal.memory.sharing",
    "Pool": "shoal.pool.local",
    "up": "shoal.pool.local",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        import importlib

        return importlib.import_module(f"shoal.{name}")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)
