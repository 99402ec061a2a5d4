"""The profile of a device: a value that is stored, sent and shown. Needs neither torch nor numpy.

Every number is bounded, because profiles come from files and from other machines.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Name = Annotated[str, Meta(max_length=64)]
#: A rate or an amount that was measured: finite and not negative.
_Measured = Annotated[float, Meta(ge=0, le=1e18)]


class DeviceProfile(msgspec.Struct, frozen=True):
    """A device's configuration and measured speed."""

    kind: _Name
    identity: Annotated[str, Meta(max_length=512)]  # Equal devices share one measurement.
    memory_bytes: Annotated[int, Meta(ge=0, le=2**62)]
    # By dtype: of a large matrix product.
    flops_per_s: Annotated[dict[_Name, _Measured], Meta(max_length=16)]
    bytes_per_s: _Measured  # Of its own memory: of a large copy, reads and writes counted.
    call_s: _Measured  # Cost of a call that computes next to nothing.
    # Bytes/s into this device, from `host` and from other devices of its node, where measured.
    links: Annotated[dict[_Name, _Measured], Meta(max_length=64)] = {}
    to_host_bytes_per_s: _Measured = 0.0  # 0: not measured.
    speed: Annotated[float, Meta(gt=0, le=1)] = 1.0  # As declared; the measurement shows it.
    measured_at: _Measured = 0.0  # Unix time.


def identity_of(hardware: str, device: str, threads: int, speed: float, torch: str) -> str:
    """Equal for devices that can be expected to be equally fast.

    >>> identity_of("Tesla T4", "cuda:1", 8, 1.0, "2.13.0")
    'Tesla T4 | cuda | torch 2.13.0'
    """
    kind = device.partition(":")[0]
    parts = [hardware, kind]
    if kind == "cpu":  # There, threads are what it computes with.
        parts.append(f"threads {threads}")
    if speed < 1:
        parts.append(f"speed {speed:g}")
    return " | ".join([*parts, f"torch {torch}"])[:512]
