"""Sizes in bytes and counts: read from text, and shown to people."""

from __future__ import annotations

import re

from shoal.errors import DeviceSpecError

SIZE_BYTES_MAX = 2**60
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Read a size with a unit.

    >>> parse_bytes("160MiB"), parse_bytes("1.5 GB"), parse_bytes("4096")
    (167772160, 1500000000, 4096)
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise DeviceSpecError(f"{text!r} is not a size in bytes; write for example 160MiB or 2GB")
    size_bytes = float(match[1]) * _UNITS[match[2].lower()]
    if size_bytes > SIZE_BYTES_MAX:
        raise DeviceSpecError(f"{text!r} is more memory than a device can have")
    return int(size_bytes)


def counted(count: int, noun: str) -> str:
    """
    >>> counted(1, "device"), counted(2, "device")
    ('1 device', '2 devices')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def typed_bytes(size_bytes: int) -> str:
    """Write a size as people type it, rounded down to whole MiB.

    >>> typed_bytes(2**30), typed_bytes(56 * 2**20 + 1), typed_bytes(80)
    ('1GiB', '56MiB', '80')
    """
    if size_bytes < _UNITS["mib"]:
        return str(size_bytes)
    gib, rest_bytes = divmod(size_bytes, _UNITS["gib"])
    return f"{gib}GiB" if not rest_bytes else f"{size_bytes // _UNITS['mib']}MiB"


def show_bytes(size_bytes: float) -> str:
    """Write a size for people.

    >>> show_bytes(3 * 2**29)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB" if size_bytes < 1000 else f"{size_bytes:.0f} TiB"
