"""What a trainer remembers of losses."""

from __future__ import annotations

import pytest

from shoal.train.errors import GroupLostError
from shoal.train.recovery import Recovery


def test_a_loss_that_is_raised_again_on_its_way_to_the_user_counts_once() -> None:
    recovery = Recovery([], "save", 1.0, lambda: None, lambda slot: None)
    first, second = (GroupLostError(group, ["cpu/0"], 3, "killed") for group in range(2))
    for error in (first, first, second):
        with pytest.raises(GroupLostError):
            recovery.go_on_without(error)
    assert recovery.lost == [first, second]
