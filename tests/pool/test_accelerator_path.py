"""What a client does for a device that is no CPU, with a CPU device that it takes for one.

The worker's side of it is in test_accelerator_lanes.py, on the stand-in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from shoal import _core

SPEC = "cpu,memory=64MiB,threads=1"


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lease whose device has no memory that could be mapped, as an accelerator has none."""
    member = _core.MemberOptions

    def taken_for_an_accelerator(*, fds: list[int], **options: Any) -> _core.MemberOptions:
        os.close(fds[4])  # the arena
        return member(**{**options, "fds": fds[:4], "arena_bytes": 0, "is_cpu": False})

    monkeypatch.setattr(_core, "MemberOptions", taken_for_an_accelerator)
    with shoal.up([SPEC]) as pool, shoal.connect(pool.url):
        yield


def round_trips() -> int:
    return int(_core.traffic(0)["round_trips"])


def recorded() -> torch.Event:
    x = torch.randn(64, 64, device="shoal")
    y = x @ x
    event = torch.Event("shoal")
    event.record()
    torch.shoal.synchronize()
    assert y.isfinite().all().item()
    return event


def test_a_query_and_the_wait_for_an_event_send_no_message(accelerator: None) -> None:
    event = recorded()
    before = round_trips()
    assert event.query()
    assert torch.shoal.current_stream().query()
    event.synchronize()
    assert round_trips() == before


def test_transfers_and_results_are_those_of_local_torch(accelerator: None) -> None:
    """Without an arena: bytes go through the host region, both ways."""
    x = torch.randn(300, 300)
    pinned = x.pin_memory()
    assert torch.equal((x.to("shoal") @ pinned.to("shoal")).cpu(), x @ x)
    start, end = (torch.Event("shoal", enable_timing=True) for _ in range(2))
    start.record()
    (pinned.to("shoal") @ x.to("shoal")).sum().item()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0
