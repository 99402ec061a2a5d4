"""What a trainer remembers of losses."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.errors import DeviceLostError, PeerLostError
from shoal.train.group.devices import Member
from shoal.train.group.errors import GroupLostError, device_at_fault
from shoal.train.group.groups import WorkerGroup
from shoal.train.step.recovery import Recovery, holders


@pytest.fixture
def groups() -> Iterator[list[WorkerGroup]]:
    made = [
        WorkerGroup(i, [Member(torch.device("cpu"), name, 0, 0) for name in names])
        for i, names in enumerate([["cpu/0", "same"], ["cpu/1"], ["cpu/11", "same"]])
    ]
    yield made
    for group in made:
        group.close()


def peer_lost(device: str, peer: str | None) -> PeerLostError:
    error = PeerLostError("lost", device)
    error.peer = peer
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (peer_lost("cpu/0", "cpu/1"), [1]),
        (DeviceLostError("it gave no sign of life", "cpu/11"), [2]),
        (DeviceLostError("whose?", "same"), []),
        (DeviceLostError("unknown", "elsewhere"), []),
        (DeviceLostError("device cpu/1 was lost: texts are not read"), []),
        (peer_lost("cpu/0", None), []),
    ],
)
def test_an_error_that_carries_a_device_blames_its_group(
    error: DeviceLostError, expected: list[int], groups: list[WorkerGroup]
) -> None:
    assert [g.index for g in holders(device_at_fault(error), groups)] == expected


def test_an_operator_that_failed_on_another_device_blames_its_group(
    groups: list[WorkerGroup],
) -> None:
    replicas: Any = [SimpleNamespace(group=group) for group in groups]
    recovery = Recovery(replicas, "stop", 1.0, lambda: None, lambda slot: None)
    error: Any = IndexError("index out of range in self")
    assert recovery._culprit(0, error) is groups[0]
    error.device = "cpu/1"
    assert recovery._culprit(0, error) is groups[1]
    wrapped = groups[1].error(error, 3)
    assert (wrapped.device, wrapped.group, wrapped.step) == ("cpu/1", 1, 3)


def test_the_core_passes_a_lost_device_behind_a_separator() -> None:
    error = DeviceLostError("shoal device cpu/0 was lost\x1fcpu/0")
    assert (str(error), error.device) == ("shoal device cpu/0 was lost", "cpu/0")
    assert copy.copy(error).device == "cpu/0"


def test_work_that_is_done_holds_nothing_any_more(groups: list[WorkerGroup]) -> None:
    class Batch:
        """Stands for a tensor on a device."""

    for _ in range(200):
        batch = Batch()
        gone = weakref.ref(batch)
        future = groups[0].call(lambda group, held=batch: None)  # type: ignore[misc]
        del batch
        future.result(10)
        assert gone() is None


def test_a_loss_that_is_raised_again_on_its_way_to_the_user_counts_once() -> None:
    recovery = Recovery([], "save", 1.0, lambda: None, lambda slot: None)
    first, second = (GroupLostError(group, ["cpu/0"], 3, "killed") for group in range(2))
    for error in (first, first, second):
        with pytest.raises(GroupLostError):
            recovery.go_on_without(error)
    assert recovery.lost == [first, second]
