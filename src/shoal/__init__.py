"""Shoal turns the GPUs of many machines into one PyTorch device.

>>> import torch
>>> x = torch.randn(4096, 4096, device="shoal")
"""

from __future__ import annotations

import sys
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
    from shoal import memory, task
    from shoal.device.leases import Lease, connect, device_info
    from shoal.device.sharing import Handle, acquire, open, release, share, shares, unshare
    from shoal.pool.client.tasks import Task, submit
    from shoal.pool.local.local_pool import Pool, up

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
    "Task",
    "acquire",
    "connect",
    "device_info",
    "memory",
    "open",
    "release",
    "share",
    "shares",
    "submit",
    "task",
    "unshare",
    "up",
]

#: Parts of the package that are used as `shoal.part.name`.
_MODULES = ("memory", "task")
#: Public names that need torch: imported when first used, so that `import shoal` stays quick.
_LAZY = {
    "Lease": "shoal.device.leases",
    "connect": "shoal.device.leases",
    "device_info": "shoal.device.leases",
    "Handle": "shoal.device.sharing",
    "acquire": "shoal.device.sharing",
    "open": "shoal.device.sharing",
    "release": "shoal.device.sharing",
    "share": "shoal.device.sharing",
    "shares": "shoal.device.sharing",
    "unshare": "shoal.device.sharing",
    "Task": "shoal.pool.client.tasks",
    "submit": "shoal.pool.client.tasks",
    "Pool": "shoal.pool.local.local_pool",
    "up": "shoal.pool.local.local_pool",
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


if "torch" in sys.modules:
    # A program that imports Shoal after torch has asked for the device's name. Where torch comes
    # later, its entry point sees that Shoal was imported.
    from shoal.device import registration

    registration.register()
