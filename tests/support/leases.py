"""The pool and lease that device tests share, made anew if a test lost them.

`TRANSPORT=network pytest tests/device` reaches the device over TCP and TLS, as from another machine.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

import torch

import shoal
from shoal.device import leases
from tests.support.standing import StandingPool

#: Large enough for every device test, small enough to share a machine.
DEVICES = ["cpu,memory=6GiB,threads=1"]


class SharedLease:
    """One lease for many tests. `ensure()` before each use."""

    def __init__(self) -> None:
        self._pool: shoal.Pool | None = None
        self._standing: StandingPool | None = None
        by_network = os.environ.get("TRANSPORT") == "network"
        self._transport: Literal["auto", "network"] = "network" if by_network else "auto"

    def __enter__(self) -> SharedLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        if self._pool is not None:
            self._pool.close()
        if self._standing is not None:
            self._standing.__exit__(None, None, None)

    def ensure(self) -> shoal.Lease:
        """The lease of the shared pool; a new one if it ended, was lost, or is another's."""
        url = self._url()
        lease = leases.current()
        if lease is None or lease.url != url or not _answers():
            lease = shoal.connect(url, transport=self._transport)
        torch.shoal.set_device(0)
        return lease

    def _url(self) -> str:
        if self._transport == "network":
            if self._standing is None:
                directory = Path(tempfile.mkdtemp(prefix="shoal-test-"))
                self._standing = StandingPool(directory, *DEVICES, listen=True)
                os.environ["SHOAL_IDENTITY"] = str(self._standing.join("tester").path)
            return self._standing.network_url
        if self._pool is None or not self._pool.running:
            self._pool = shoal.up(DEVICES)
        return self._pool.url

    def release(self) -> None:
        """Gives the lease back, for tests that need the program without one."""
        lease = leases.current()
        if lease is not None:
            lease.close()


def _answers() -> bool:
    try:
        torch.shoal.synchronize()
    except shoal.DeviceLostError:
        return False
    except RuntimeError:
        return True  # an error of an earlier test's operator: the device itself is well
    return True
