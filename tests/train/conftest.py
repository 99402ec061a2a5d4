"""A pool of four devices that the tests here share; one of them is slow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

import shoal
from shoal.device import leases
from shoal.train.model import build
from shoal.train.model.stage_costs import Cut, Limits, Stage, StageDevice, Unit, make_stage

DEVICES = ["cpu,memory=512MiB,threads=1"] * 3 + ["cpu,memory=512MiB,threads=1,speed=0.45,name=slow"]


@pytest.fixture(scope="session")
def four_devices() -> Iterator[shoal.Pool]:
    with shoal.up(DEVICES) as pool:
        yield pool


@pytest.fixture
def pool(four_devices: shoal.Pool) -> Iterator[shoal.Pool]:
    """The shared pool; this program's lease on it ends with the test."""
    yield four_devices
    lease = leases.current()
    if lease is not None:
        lease.close()


@pytest.fixture
def lease(pool: shoal.Pool) -> Iterator[shoal.Lease]:
    with shoal.connect(pool.url, devices=4) as four:
        yield four


class CutAt:
    """Cuts every model at these places, whatever its units cost; the middle if there are none."""

    def __init__(self) -> None:
        self.units: Sequence[Unit] = ()  # of the model that was cut last
        self._cuts: tuple[Cut, ...] = ()

    def __call__(self, *cuts: Cut) -> None:
        self._cuts = cuts

    def partition(
        self, units: Sequence[Unit], devices: Sequence[StageDevice], limits: Limits
    ) -> tuple[tuple[Stage, ...], Limits]:
        self.units = units
        cuts = self._cuts or (Cut(len(units) // 2),)
        for cut in cuts:
            assert all(unit.shareable for unit in units[cut.early : cut.at])
        edges = itertools.pairwise([Cut(0), *cuts, Cut(len(units))])
        stages = [
            make_stage(units, a, b, i, devices[i], 1, limits) for i, (a, b) in enumerate(edges)
        ]
        return tuple(stages), limits


@pytest.fixture
def cut_at(monkeypatch: pytest.MonkeyPatch) -> CutAt:
    made = CutAt()
    monkeypatch.setattr(build, "partition_fitting", made.partition)
    return made
