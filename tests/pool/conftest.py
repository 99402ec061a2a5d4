"""A pool of two unequal devices that the tests here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shoal
from shoal.device import leases

MiB = 2**20


@pytest.fixture(scope="session")
def unequal_pool() -> Iterator[shoal.Pool]:
    with shoal.up(
        [
            "cpu,memory=256MiB,host=0,disk=0,threads=1,name=left",
            "cpu,memory=128MiB,host=0,disk=0,speed=0.5,threads=1,name=right",
        ]
    ) as pool:
        yield pool


@pytest.fixture
def pool(unequal_pool: shoal.Pool) -> Iterator[shoal.Pool]:
    """The shared pool; this program's lease on it ends with the test."""
    yield unequal_pool
    lease = leases.current()
    if lease is not None:
        lease.close()
