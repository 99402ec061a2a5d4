"""Micro-batches of a group: as many as its memory needs, and no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.train.step.micro_batches import FILL, MicroBatchCounts

sizes = st.integers(0, 10**12)


@given(sizes, sizes, st.integers(1, 10**12), st.integers(1, 64))
def test_so_many_micro_batches_that_one_fits(
    fixed: int, activations: int, memory: int, now: int
) -> None:
    counts = MicroBatchCounts()
    more = counts.fit(0, now, fixed + activations, fixed, memory)
    found = counts.of(0, now)
    if not more:
        assert found == now
        assert fixed + activations <= memory or fixed >= FILL * memory
        return
    assert found > now
    whole = activations * now  # what all samples together need
    assert fixed + whole / found <= FILL * memory * (1 + 1e-9)
    assert fixed + whole / (found - 1) > FILL * memory * (1 - 1e-9)


def test_what_was_learnt_is_kept() -> None:
    counts = MicroBatchCounts()
    assert counts.fit(1, 1, 900, 100, 500)
    assert not counts.fit(1, 3, 400, 100, 500)  # it fits now
    assert (counts.of(1, 1), counts.of(1, 8), counts.of(0, 2)) == (3, 8, 2)


def test_micro_batches_are_doubled_down_to_single_samples() -> None:
    counts = MicroBatchCounts()
    seen = [1]
    while counts.double(0, seen[-1], 5):
        seen.append(counts.of(0, 1))
    assert seen == [1, 2, 4, 5]
