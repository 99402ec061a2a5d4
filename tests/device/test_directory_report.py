"""What the core's directory of segments says of itself, and how memory.check() shows it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import shoal
from shoal import _core


@pytest.fixture
def two() -> Iterator[tuple[torch.device, torch.device]]:
    with shoal.up(["cpu,memory=64MiB,threads=1"] * 2) as pool:
        with shoal.connect(pool.url, devices=2):
            yield torch.device("shoal:1"), torch.device("shoal:2")


def test_steps_name_the_segment_and_the_members(two: tuple[torch.device, torch.device]) -> None:
    x, y = torch.ones(1000, device=two[0]), torch.ones(1000, device=two[1])
    assert _core.copy_later(y, x)
    assert y.sum().item() == 1000
    copy = f"fetch {y.data_ptr():#x} as a copy of {x.data_ptr():#x} from member 0 on member 1"
    report = _core.directory_report()
    assert copy in report.steps
    assert report.violation == ""
    assert shoal.memory.check() >= 2


def test_a_violation_is_raised_with_the_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.ones(1, device="shoal").item() == 1
    report = SimpleNamespace(violation="the sum is wrong", steps=["free 0x1", "fetch 0x2"])
    monkeypatch.setattr(_core, "directory_report", lambda: report)
    with pytest.raises(RuntimeError, match="the sum is wrong") as raised:
        shoal.memory.check()
    assert str(raised.value).splitlines()[1:] == ["  free 0x1", "  fetch 0x2"]
