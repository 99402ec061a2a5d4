"""Anonymous memory that processes pass by descriptor, sealed so that nobody can cut it short."""

from __future__ import annotations

import fcntl
import os

FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create(name: str, size: int, seals: int = FIXED_SIZE) -> int:
    """Return the descriptor of a new memory of `size` bytes with these seals."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd
