"""What a test needs from the machine, and what happens where it is missing."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

#: The Debian package of each command. `.ci/run` installs all of them.
PACKAGES = {
    "bwrap": "bubblewrap", "ip": "iproute2", "cc": "gcc", "mount": "mount", "unshare": "util-linux",
}  # fmt: skip


def in_ci() -> bool:
    return os.environ.get("SHOAL_CI", "0") not in ("", "0")


def command(name: str) -> str:
    """Return the path of a command. Without it, skip the test and name its package."""
    found = shutil.which(name)
    if found is None:
        absent(f"the Debian package {PACKAGES[name]} is missing; run: apt install {PACKAGES[name]}")
    return found


def absent(reason: str) -> NoReturn:
    """Skip the test. Where everything can be installed, fail instead."""
    if in_ci():
        pytest.fail(reason)
    pytest.skip(reason)
