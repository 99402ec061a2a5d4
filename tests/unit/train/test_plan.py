"""The choice of groups and stages: by predicted time, within memory, with its reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.train.model.partition import CannotPartition
from shoal.train.model.plan import Choice, choose, layouts
from shoal.train.model.stage_costs import StageDevice, Unit

MiB = 2**20


def units(count: int = 8, weight: int = MiB, activation: int = MiB) -> list[Unit]:
    return [Unit(f"block.{i}", 0.001, 0.002, weight, activation, 1000) for i in range(count)]


def pieces(micro_batches: int) -> Callable[[int], int]:
    """So many micro-batches wherever there are stages."""
    return lambda stages: micro_batches if stages > 1 else 1


def chosen(made: list[Unit], devices: list[StageDevice], batch: int = 32) -> Choice:
    return choose(made, devices, batch, batch, micro_batches=pieces(4))


def text(choice: Choice) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(choice.table())
    return capture.get()


def test_what_fits_is_copied() -> None:
    choice = chosen(units(weight=1000), [StageDevice()] * 4)
    assert choice.best.name == "4 x 1"
    assert "exchange" in text(choice)


def test_what_does_not_fit_is_cut() -> None:
    device = StageDevice(memory_bytes=30 * MiB)
    choice = chosen(units(), [device] * 2)
    assert choice.best.name == "1 x 2"
    assert "does not fit" in text(choice)
    assert "bubble" in choice.best.why


def test_both_at_once() -> None:
    devices = [StageDevice(memory_bytes=30 * MiB)] * 4
    choice = choose(units(), devices, 32, 32, micro_batches=pieces(4), link_bytes_per_s=1e11)
    assert choice.best.name == "2 x 2"


def test_large_gradients_over_a_slow_link_are_not_exchanged() -> None:
    heavy = units(weight=200 * MiB, activation=0)
    choice = choose(
        heavy, [StageDevice()] * 2, 32, 32, micro_batches=pieces(8), link_bytes_per_s=1e9
    )
    assert choice.best.name in ("1 x 2", "1 x 1")


def test_a_useless_device_is_left_out() -> None:
    heavy = units(weight=100 * MiB, activation=0)
    slow = StageDevice(speed=0.01)
    choice = choose(
        heavy, [StageDevice(), slow], 32, 32, micro_batches=pieces(4), link_bytes_per_s=1e8
    )
    assert choice.best.layout == ((0,),)


def test_nothing_fits() -> None:
    with pytest.raises(CannotPartition, match="does not fit"):
        chosen(units(), [StageDevice(memory_bytes=MiB)] * 2)


def test_unequal_devices_share_unequally() -> None:
    choice = chosen(units(), [StageDevice(), StageDevice(speed=0.5)], 30)
    assert choice.best.name == "2 x 1"
    assert "20:10" in choice.best.why


@given(st.integers(1, 12))
def test_layouts_use_each_device_at_most_once(count: int) -> None:
    for layout in layouts(count):
        used = [place for group in layout for place in group]
        assert len(set(used)) == len(used)
        assert max(used) < count
