"""The pool and lease that device tests share, made anew if a test lost them."""

from __future__ import annotations

from types import TracebackType

import torch

import shoal
from shoal.device import session

#: Large enough for every device test, small enough to share a machine.
DEVICES = ["cpu,memory=6GiB,threads=1"]


class SharedLease:
    """One lease for many tests. `ensure()` before each use."""

    def __init__(self) -> None:
        self._pool: shoal.Pool | None = None

    def __enter__(self) -> SharedLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()
        if self._pool is not None:
            self._pool.close()

    def ensure(self) -> shoal.Lease:
        """The lease of the shared pool; a new one if it ended, was lost, or is another's."""
        if self._pool is None or not self._pool.running:
            self._pool = shoal.up(DEVICES)
        lease = session.current()
        if lease is None or lease.url != self._pool.url or not _answers():
            lease = shoal.connect(self._pool.url)
        torch.shoal.set_device(0)
        return lease

    def release(self) -> None:
        """Gives the lease back, for tests that need the program without one."""
        lease = session.current()
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
