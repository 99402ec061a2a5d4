"""Tells torch about the device, once per process."""

from __future__ import annotations

import os

import torch
from torch.utils import backend_registration

import shoal
import shoal_autoload
from shoal.errors import DeviceLostError, PeerLostError, ShareError, ShareRevokedError
from shoal.pool.base import at_exit  # noqa: F401  (its place among exit handlers is this early)

NAME = "shoal"
_registered = False


def register() -> None:
    """Name PrivateUse1 `shoal` and attach `torch.shoal`. Start no process and take no lease."""
    global _registered
    if _registered:
        return
    _registered = True
    from shoal import _core
    from shoal.device import by_name, guest, module

    backend_registration.rename_privateuse1_backend(NAME)
    internal = [os.path.dirname(m.__file__ or "") + os.sep for m in (torch, shoal)]
    _core.register_device(DeviceLostError, PeerLostError, ShareError, ShareRevokedError, internal)
    torch._register_device_module(NAME, module)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    _core.set_blocking(os.environ.get("SHOAL_BLOCKING", "0") not in ("", "0"))
    _core.set_pool_starter(module._lazy_init)
    by_name.register()
    if shoal_autoload.asked():
        _core.want()
        from shoal import integrations  # a guest does without it

        by_name.adopt()
        integrations.install()
    elif shoal_autoload.other_accelerator():
        # The program imported Shoal. With the name, torch asks us and no longer the other
        # accelerator, and would take a "no" for a machine without any.
        _core.want()
    else:
        guest.hide()
