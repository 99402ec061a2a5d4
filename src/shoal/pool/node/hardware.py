"""What a device is and offers, and the libraries that its workers compute with."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from shoal.pool.base import limits
from shoal.pool.node.spec import DeviceSpec, cpu_model, host_memory_bytes


def memory_bytes(device: str) -> int:
    """Return the memory of a device that sessions may have."""
    if device == "cpu":
        return host_memory_bytes() * 8 // 10
    import torch

    index = torch.device(device).index or 0
    module = torch.get_device_module(torch.device(device))
    return int(module.get_device_properties(index).total_memory)


def kind(spec: DeviceSpec) -> str:
    """Return the text that a request's `kind=` must match."""
    if spec.kind or spec.device == "cpu":
        return spec.kind or "cpu"
    return model(spec)


def model(spec: DeviceSpec) -> str:
    """Return the device's own name of itself."""
    if spec.device == "cpu":
        return cpu_model()[: limits.NAME_CHARS_MAX]
    import torch

    module = torch.get_device_module(torch.device(spec.device))
    name = module.get_device_name(torch.device(spec.device).index or 0)
    return str(name)[: limits.NAME_CHARS_MAX]


def load_libraries(spec: DeviceSpec) -> None:
    """Load torch's libraries and the core, so that every forked worker has them.

    A CPU device does without torch's Python package, whose import takes two seconds: a pool starts,
    and recovers after a fault, that much sooner.
    """
    if spec.device == "cpu":
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("torch is missing. Type: pip install torch==2.13.0")
        for name in ("libtorch_global_deps.so", "libtorch_python.so"):
            ctypes.CDLL(str(Path(found.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    else:
        import torch  # noqa: F401

    from shoal import _core  # noqa: F401
