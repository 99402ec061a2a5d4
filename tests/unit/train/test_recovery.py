"""What a trainer remembers of losses."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.train.group.devices import Member
from shoal.train.group.errors import GroupLostError
from shoal.train.group.groups import WorkerGroup
from shoal.train.step.recovery import Recovery, named


@pytest.fixture
def groups() -> Iterator[list[WorkerGroup]]:
    made = [
        WorkerGroup(i, [Member(torch.device("cpu"), name, 0, 0) for name in names])
        for i, names in enumerate([["cpu/0", "same"], ["cpu/1"], ["cpu/11", "same"]])
    ]
    yield made
    for group in made:
        group.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("device cpu/1 of this lease was lost: its worker process ended. Call", [1]),
        ("shoal device cpu/11 was lost: it gave no sign of life", [2]),
        ("device same of this lease was lost: whose?", []),
        ("device elsewhere was lost", []),
        ("something else", []),
    ],
)
def test_an_error_that_names_a_device_blames_its_group(
    text: str, expected: list[int], groups: list[WorkerGroup]
) -> None:
    assert [g.index for g in named(text, groups)] == expected


def test_an_operator_that_failed_elsewhere_blames_the_group_it_ran_in(
    groups: list[WorkerGroup],
) -> None:
    text = (
        "index out of range\n[shoal] raised by aten::embedding, called at x.py:3, on device cpu/1"
    )
    replicas: Any = [SimpleNamespace(group=group) for group in groups]
    recovery = Recovery(replicas, "stop", 1.0, lambda: None, lambda slot: None)
    assert recovery._culprit(0, IndexError(text)) is groups[1]
    assert recovery._culprit(0, IndexError("index out of range in self")) is groups[0]


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
