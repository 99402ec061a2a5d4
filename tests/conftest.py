"""What all tests share: one thread on each side, one pool and one lease per pytest process."""

from __future__ import annotations

import os
import signal

# A run that was started in the background ignores Ctrl-C, and so would the programs it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch: with one thread on each side, sums are added in the same order on both.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("SHOAL_POOL", None)
os.environ.pop("SHOAL_BLOCKING", None)

# Before Shoal, too: with DEVICE=standin:MODE the devices of all pools are the stand-in's.
from tests.standin.plugin import STANDIN

# isort: split
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import shoal
from tests.support.leases import SharedLease

# A shared machine stalls now and then; a property is about values, never about time.
settings.register_profile(
    "shoal",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("shoal")


@pytest.fixture(scope="session")
def shared_lease() -> Iterator[SharedLease]:
    """The pool of this pytest process. Started by the first test that wants it."""
    with SharedLease() as shared:
        yield shared


@pytest.fixture
def device(shared_lease: SharedLease) -> Iterator[torch.device]:
    """A live shoal device. An error that a test leaves behind unraised is its own."""
    shared_lease.ensure()
    yield torch.device("shoal", 0)
    try:
        torch.shoal.synchronize()
    except shoal.DeviceLostError:
        pytest.fail("the test lost its device")


def pytest_configure(config: pytest.Config) -> None:
    if STANDIN is not None:
        config.pluginmanager.register(STANDIN)
