"""One who joined a test's pool and says on its own data connections whatever the test wants. The pool
is the test module's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.pool.wire import tls
from tests.support.data_client import DataClient
from tests.support.standing import StandingPool


@pytest.fixture(scope="module")
def mallory(pool: StandingPool) -> tls.Identity:
    return pool.join("mallory")


@pytest.fixture
def raw(
    pool: StandingPool, mallory: tls.Identity, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DataClient]:
    monkeypatch.setenv("SHOAL_IDENTITY", str(mallory.path))
    with DataClient(mallory) as made:
        yield made
