"""Teach the parts of torch that handle devices by name what `shoal` is.

`register()` runs at `import torch` and must stay cheap. `adopt()` runs once the device is wanted: a
guest keeps torch's own functions.
"""

from __future__ import annotations

from typing import Any

import torch

NAME = "shoal"
#: Before torch's own entry for named backends, which refuses a device that is not available yet.
_PRIORITY = 19
_adopted = False


def register() -> None:
    """Let torch.load restore tensors to the device, also where that is its first use."""
    torch.serialization.register_package(_PRIORITY, _tag, _restore)


def adopt() -> None:
    """Add the device to torch.distributed, torch.multiprocessing and nn.DataParallel."""
    global _adopted
    if _adopted:
        return
    _adopted = True
    from shoal.device import data_parallel, pickling

    data_parallel.install()
    pickling.register()
    if torch.distributed.is_available():
        devices = [NAME]
        torch.distributed.Backend.register_backend(NAME, _process_group, devices=devices)


def _tag(storage: Any) -> str | None:
    if storage.device.type != NAME:
        return None
    return f"{NAME}:{storage.device.index or 0}"


def _restore(storage: Any, location: str) -> Any:
    if location != NAME and not location.startswith(f"{NAME}:"):
        return None
    from shoal.device import leases

    count = len(leases.device_info())
    device = torch.device(location)
    if (device.index or 0) > count:  # shoal:0 is the whole, also of a lease with one device
        raise RuntimeError(
            f"this file has tensors of {location}, and the lease has {count} device(s). Load them to "
            f'the whole lease: torch.load(file, map_location="{NAME}")'
        )
    return storage.to(device=device)


def _process_group(*arguments: Any) -> torch.distributed.ProcessGroup:
    from shoal.device.collectives import HostGroup

    return HostGroup(*arguments)
