"""Captures: what one device was told, told to another."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal import _core


@pytest.fixture
def two() -> Iterator[tuple[torch.device, torch.device]]:
    with shoal.up(["cpu,memory=128MiB,threads=1"] * 2) as pool:
        with shoal.connect(pool.url, devices=2):
            yield torch.device("shoal:1"), torch.device("shoal:2")


def sent(device: torch.device) -> int:
    return int(torch.shoal.traffic(device.index)["messages"])


def test_a_capture_is_replayed_with_other_values(
    two: tuple[torch.device, torch.device],
) -> None:
    x, y = (torch.arange(6.0, device=d).view(2, 3) + 10 * d.index for d in two)
    capture = _core.Capture(1)
    made = (x @ x.t()).relu().sum(0)
    view = made[1:]
    x.mul_(2)
    capture.stop()
    again = _core.Replay(capture, 2, ours=[x], theirs=[y], wanted=[made])
    expected = (y @ y.t()).relu().sum(0).cpu()
    doubled = (2 * y).cpu()
    again.until(capture.mark())
    replayed = again.tensor(made)
    assert replayed.device == two[1]
    assert torch.equal(replayed.cpu(), expected)
    assert torch.equal(y.cpu(), doubled)
    assert torch.equal(again.tensor(view).cpu(), expected[1:])
    assert again.tensor(view).untyped_storage().data_ptr() == replayed.data_ptr()


def test_what_was_freed_or_not_asked_for_is_freed(two: tuple[torch.device, torch.device]) -> None:
    x, y = (torch.ones(1000, device=d) for d in two)
    capture = _core.Capture(1)
    kept = (x + 1).sin()
    other = kept + 1
    capture.stop()
    before = torch.shoal.memory_allocated(2)
    again = _core.Replay(capture, 2, ours=[x], theirs=[y], wanted=[kept, other])
    again.until(capture.mark())
    replayed = again.tensor(kept)
    del again
    assert torch.shoal.memory_allocated(2) - before == replayed.nbytes
    del replayed, other
    assert torch.shoal.memory_allocated(2) == before


def test_nothing_is_told_to_the_other_device_before_it_is_known_to_be_possible(
    two: tuple[torch.device, torch.device],
) -> None:
    x, y = (torch.ones(4, device=d) for d in two)
    capture = _core.Capture(1)
    made = x + 1
    capture.stop()
    before = sent(two[1])
    for ours, theirs, wanted, why in (
        ([], [], [made], "neither a weight nor of the batch"),
        ([x], [torch.ones(5, device=two[1])], [made], "not laid out"),
        ([x], [torch.ones(4, device=two[0])], [made], "not laid out"),
        ([x], [y], [x], "not made by it"),
        ([x], [y], [], "keeps a tensor"),
        ([x], [], [made], "not as many"),
        ([x, x.view(2, 2)], [y, torch.ones(2, 2, device=two[1])], [made], "apart"),
    ):
        known = sent(two[1])
        with pytest.raises(ValueError, match=why):
            _core.Replay(capture, 2, ours=ours, theirs=theirs, wanted=wanted)
        assert sent(two[1]) == known
    with pytest.raises(ValueError, match="one lease"):
        _core.Replay(capture, 0, ours=[x], theirs=[y], wanted=[made])
    assert before <= sent(two[1])


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda x: x.sum().item(), "value is read"),
        (lambda x: x.nonzero(), "depends on values"),
        (lambda x: x.to("shoal:2"), "another device"),
        (lambda x: x.copy_(torch.zeros(4)), "changed by the host"),
        (lambda x: torch.zeros(2**20).to(x.device), "large tensor"),
        (lambda x: torch.accelerator.synchronize(x.device), "message"),
    ],
)
def test_what_depends_on_values_ends_a_capture(
    two: tuple[torch.device, torch.device], what: object, why: str
) -> None:
    x = torch.ones(4, device=two[0])
    capture = _core.Capture(1)
    assert callable(what)
    result = what(x)
    capture.stop()
    assert why in capture.failure
    with pytest.raises(ValueError, match=why):
        _core.Replay(capture, 2, ours=[], theirs=[], wanted=[])
    del result


def test_one_thread_captures_at_a_time_and_pauses(two: tuple[torch.device, torch.device]) -> None:
    x, y = (torch.ones(4, device=d) for d in two)
    capture = _core.Capture(1)
    assert _core.Capture(1).failure
    _core.Capture.pause()
    assert x.sum().item() == 4
    _core.Capture.resume()
    made = x * 3
    capture.stop()
    assert capture.failure == ""
    again = _core.Replay(capture, 2, ours=[x], theirs=[y], wanted=[made])
    again.until(capture.mark())
    assert again.tensor(made).tolist() == [3.0] * 4


def test_other_threads_make_and_free_tensors_meanwhile(
    two: tuple[torch.device, torch.device],
) -> None:
    x, y = (torch.arange(64.0, device=d) * d.index for d in two)
    stop = threading.Event()

    def churn() -> None:
        kept: list[torch.Tensor] = []
        while not stop.is_set():
            kept.append(torch.ones(64, device=two[0]) + 1)
            del kept[:-3]

    other = threading.Thread(target=churn)
    other.start()
    try:
        for _ in range(30):
            capture = _core.Capture(1)
            made = x
            for _ in range(20):
                made = (made * 0.5 + 1).sin()
                capture.mark()
            capture.stop()
            assert capture.failure == ""
            again = _core.Replay(capture, 2, ours=[x], theirs=[y], wanted=[made])
            again.until(capture.mark())
            expected = y
            for _ in range(20):
                expected = (expected * 0.5 + 1).sin()
            assert torch.equal(again.tensor(made), expected)
    finally:
        stop.set()
        other.join()
