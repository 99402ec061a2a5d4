"""Gradient partitions: complete, of one kind, and balanced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.gradients.buckets import Item, make_buckets

items = st.lists(
    st.builds(Item, st.integers(0, 1000), st.sampled_from(["float32", "bfloat16"])), max_size=40
)


@given(items, st.integers(1, 5), st.integers(1, 2000))
def test_every_gradient_has_one_owner(made: list[Item], owners: int, limit: int) -> None:
    buckets = make_buckets(made, owners, limit)
    assert sorted(i for b in buckets for i in b.items) == list(range(len(made)))
    for bucket in buckets:
        assert 0 <= bucket.owner < owners
        assert bucket.size_bytes == sum(made[i].size_bytes for i in bucket.items)
        assert len({made[i].kind for i in bucket.items}) == 1
        assert bucket.size_bytes <= limit or len(bucket.items) == 1
        assert list(bucket.items) == sorted(bucket.items)


@given(items, st.integers(1, 5), st.integers(1, 2000))
def test_partitions_are_balanced(made: list[Item], owners: int, limit: int) -> None:
    buckets = make_buckets(made, owners, limit)
    load = [sum(b.size_bytes for b in buckets if b.owner == o) for o in range(owners)]
    assert max(load) - min(load) <= max((b.size_bytes for b in buckets), default=0)


def test_a_slow_owner_gets_less() -> None:
    buckets = make_buckets([Item(1)] * 30, 2, 1, weights=[1.0, 0.5])
    assert sum(b.owner == 0 for b in buckets) == 20


def test_wrong_counts_are_refused() -> None:
    for owners, size, weights in [(0, 1, None), (1, 0, None), (2, 1, [1.0]), (1, 1, [0.0])]:
        with pytest.raises(ValueError, match=r"\d"):
            make_buckets([Item(1)], owners, size, weights)
