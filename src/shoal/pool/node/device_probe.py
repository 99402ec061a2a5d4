"""Asks an accelerator what it is, in a process that ends afterwards."""

from __future__ import annotations

import ctypes
import os
import socket
import uuid
from contextlib import suppress

from shoal import _core
from shoal.pool.base import limits
from shoal.pool.node import orders


def facts(device: str) -> orders.DeviceFacts:
    """Return a device's facts. Starts its runtime here, and in a child that is gone on return.

    The child's context is what the device's free memory falls by: no driver says it otherwise.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()  # before the runtime starts
    if pid == 0:
        ours.close()
        _start_when_told(device, theirs)
    theirs.close()
    try:
        free_bytes, total_bytes = _core.start_device(device)
        context_bytes = 0
        with suppress(OSError):  # the child did not start it in time: its context is unknown
            ours.settimeout(limits.PROBE_DEVICE_S / 2)
            ours.send(b"!")
            if ours.recv(1):
                context_bytes = max(0, free_bytes - _core.device_bytes(device)[0])
    finally:
        ours.close()
        os.waitpid(pid, 0)
    name, capability = _name(device)
    return orders.DeviceFacts(
        name[: limits.NAME_CHARS_MAX], total_bytes, context_bytes, capability, _uuid(device)
    )


def _start_when_told(device: str, line: socket.socket) -> None:
    try:
        if line.recv(1):
            _core.start_device(device)
            line.send(b"!")
            line.recv(1)  # until the other side has looked
    finally:
        os._exit(0)


def _name(device: str) -> tuple[str, tuple[int, int]]:
    """Return the device's own name of itself, and its compute capability if it has one."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        name, major, minor = _core.cuda_facts(int(index))
        if name:
            return name, (major, minor)
    import torch

    properties = torch.get_device_module(kind).get_device_properties(int(index))
    major, minor = getattr(properties, "major", 0), getattr(properties, "minor", 0)
    return str(properties.name), (int(major), int(minor))


def _uuid(device: str) -> str:
    """Return the name by which NVML knows the device; "" if the driver does not say.

    Their numbers differ: NVML does not know CUDA_VISIBLE_DEVICES.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return ""
    with suppress(OSError, AttributeError):  # no such library (ROCm), or an old one
        driver = ctypes.CDLL(os.environ.get("SHOAL_CUDA_DRIVER") or "libcuda.so.1")
        found = (ctypes.c_ubyte * 16)()
        handle = ctypes.c_int()
        failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), int(index))
        if not failed and driver.cuDeviceGetUuid_v2(found, handle) == 0:
            return f"GPU-{uuid.UUID(bytes=bytes(found))}"
    return ""
