"""How a device is declared: `cpu`, `cuda:1`, `cpu,memory=160MiB,speed=0.5,name=slow,kind=t4`.

`host=` and `disk=` say how much more it may hold than its memory, in host memory and on disk.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile

import msgspec

from shoal.errors import DeviceSpecError
from shoal.units import parse_bytes

_OPTIONS = ("memory", "host", "disk", "paging", "speed", "threads", "name", "kind")
PAGING = ("next-use", "lru")
_DEVICE = re.compile(r"[a-z]+(:\d+)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A device as the pool offers it."""

    device: str  # torch's name of it: "cpu", "cuda:0"
    name: str
    memory_bytes: int | None = None  # None: all that the device has
    host_bytes: int | None = None  # of host memory, when the device is full; None: as `spill` says
    disk_bytes: int | None = None  # of disk, when that is full too
    paging: str = "next-use"  # "lru": on demand, least recently used first, to compare with
    speed: float = 1.0  # below 1 a CPU device takes 1/speed of the time
    threads: int | None = None  # None: follow OMP_NUM_THREADS, else all cores
    kind: str = ""  # what it is to `kind=` of a request; empty: what torch says


def parse_device(text: str, number: int = 0) -> DeviceSpec:
    """Read the declaration of a device; `number` is its index in the pool.

    >>> parse_device("cpu,memory=160MiB,speed=0.5,threads=1,name=slow").speed
    0.5
    """
    device, *options = [part.strip() for part in text.split(",")]
    if not _DEVICE.fullmatch(device):
        raise DeviceSpecError(
            f"{text!r}: {device!r} is not a device; write for example cpu or cuda:0"
        )
    if device.startswith("cpu:"):
        raise DeviceSpecError(f"{text!r}: a CPU device is written cpu; declare it once for each")
    device = _with_index(text, device)
    found: dict[str, str] = {}
    for option in options:
        key, separator, value = option.partition("=")
        if key not in _OPTIONS or not separator or not value:
            raise DeviceSpecError(
                f"{text!r}: {option!r} is not an option; use {', '.join(f'{o}=…' for o in _OPTIONS)}"
            )
        found[key] = value
    name = found.get("name", f"{device}/{number}" if device == "cpu" else device)
    if "name" in found and not _NAME.fullmatch(name):
        raise DeviceSpecError(f"{text!r}: a name is at most 64 letters, digits, '_', '.' or '-'")
    if "kind" in found and not _NAME.fullmatch(found["kind"]):
        raise DeviceSpecError(f"{text!r}: a kind is at most 64 letters, digits, '_', '.' or '-'")
    return DeviceSpec(
        device=device,
        name=name,
        memory_bytes=_memory(text, found["memory"]) if "memory" in found else None,
        host_bytes=parse_bytes(found["host"]) if "host" in found else None,
        disk_bytes=parse_bytes(found["disk"]) if "disk" in found else None,
        paging=_paging(text, found.get("paging", "next-use")),
        speed=_speed(text, found.get("speed", "1"), device),
        threads=_threads(text, found.get("threads")),
        kind=found.get("kind", ""),
    )


def parse_memory(memory: int | float | str | None) -> tuple[int | None, float | None]:
    """Read bytes, or a fraction of a device's memory, from "8GiB", "50%", 0.5 or bytes.

    >>> parse_memory("50%")
    (None, 0.5)
    """
    if isinstance(memory, str) and memory.strip().endswith("%"):
        try:
            return None, float(memory.strip()[:-1]) / 100
        except ValueError:
            raise DeviceSpecError(f"{memory!r} is not a fraction; write for example 50%") from None
    if isinstance(memory, str):
        return parse_bytes(memory), None
    return (None, memory) if isinstance(memory, float) else (memory, None)


class Spill(msgspec.Struct, frozen=True):
    """What a device may hold beyond its own memory."""

    host_bytes: int
    disk_bytes: int
    directory: str


def spill(spec: DeviceSpec, memory_bytes: int) -> Spill:
    """Return the declared amounts, or what the machine can spare.

    A CPU device that was given all of the host's memory gets no more of it.
    """
    directory = spill_directory()
    host = spec.host_bytes
    if host is None:
        has_own = spec.device != "cpu" or spec.memory_bytes is not None
        host = min(memory_bytes, host_memory_bytes() // 8) if has_own else 0
    disk = spec.disk_bytes
    if disk is None:
        try:
            disk = min(4 * memory_bytes, shutil.disk_usage(directory).free // 4)
        except OSError:
            disk = 0
    return Spill(host, disk, directory)


def spill_directory() -> str:
    """Return where full devices write: $SHOAL_SPILL_DIR, else the system's directory."""
    return os.environ.get("SHOAL_SPILL_DIR") or tempfile.gettempdir()


def _memory(text: str, value: str) -> int:
    amount = parse_bytes(value)
    if amount == 0:
        raise DeviceSpecError(
            f"{text!r}: memory must be above 0 (got {value}). Write for example "
            "memory=1GiB, or leave it out for all that the device has"
        )
    return amount


def _paging(text: str, value: str) -> str:
    if value not in PAGING:
        raise DeviceSpecError(
            f"{text!r}: paging must be one of {', '.join(PAGING)} (got {value!r})"
        )
    return value


def _with_index(text: str, device: str) -> str:
    """Return torch's full name of a device: `cuda` alone means the first one."""
    if device.partition(":")[0] == "mps":
        raise DeviceSpecError(
            f"{text!r}: mps cannot be offered. Shoal finds a tensor by the address of its storage, and "
            "on mps a storage is an object without one. Declare cpu instead"
        )
    return device if device == "cpu" or ":" in device else f"{device}:0"


def _speed(text: str, value: str, device: str) -> float:
    if device != "cpu" and value not in ("1", "1.0"):
        raise DeviceSpecError(
            f"{text!r}: speed= slows a CPU device down, to try unequal devices; {device} has its own. "
            "Leave it out"
        )
    try:
        speed = float(value)
    except ValueError:
        speed = 0.0
    if not 0.001 <= speed <= 1.0:
        raise DeviceSpecError(f"{text!r}: speed must be from 0.001 to 1 (got {value!r})")
    return speed


def _threads(text: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= 4096:
        raise DeviceSpecError(
            f"{text!r}: threads must be a whole number of at least 1 (got {value!r})"
        )
    return int(value)


def default_threads() -> int:
    """Return the default thread count of workers: OMP_NUM_THREADS, else all cores."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(text) if text.isdecimal() and int(text) > 0 else (os.cpu_count() or 1)


def host_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        with open("/proc/cpuinfo") as file:
            named = next((line for line in file if line.startswith("model name")), "")
    except OSError:
        named = ""
    return named.partition(":")[2].strip() or platform.processor() or platform.machine()
