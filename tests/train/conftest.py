"""A pool of four devices that the tests here share; one of them is slow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shoal
from shoal.device import session

DEVICES = ["cpu,memory=512MiB,threads=1"] * 3 + ["cpu,memory=512MiB,threads=1,speed=0.45,name=slow"]


@pytest.fixture(scope="session")
def four_devices() -> Iterator[shoal.Pool]:
    with shoal.up(DEVICES) as pool:
        yield pool


@pytest.fixture
def pool(four_devices: shoal.Pool) -> Iterator[shoal.Pool]:
    """The shared pool; this program's lease on it ends with the test."""
    yield four_devices
    lease = session.current()
    if lease is not None:
        lease.close()


@pytest.fixture
def lease(pool: shoal.Pool) -> Iterator[shoal.Lease]:
    with shoal.connect(pool.url, devices=4) as four:
        yield four
