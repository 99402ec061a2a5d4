"""Pieces of a group's part: as many as its memory needs, and no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.train.step.micro_batches import FILL, Pieces

sizes = st.integers(0, 10**12)


@given(sizes, sizes, st.integers(1, 10**12), st.integers(1, 64))
def test_so_many_pieces_that_one_fits(fixed: int, activations: int, memory: int, now: int) -> None:
    pieces = Pieces()
    more = pieces.fit(0, now, fixed + activations, fixed, memory)
    found = pieces.of(0, now)
    if not more:
        assert found == now
        assert fixed + activations <= memory or fixed >= FILL * memory
        return
    assert found > now
    whole = activations * now  # what all samples together need
    assert fixed + whole / found <= FILL * memory * (1 + 1e-9)
    assert fixed + whole / (found - 1) > FILL * memory * (1 - 1e-9)


def test_what_was_learnt_is_kept() -> None:
    pieces = Pieces()
    assert pieces.fit(1, 1, 900, 100, 500)
    assert not pieces.fit(1, 3, 400, 100, 500)  # it fits now
    assert (pieces.of(1, 1), pieces.of(1, 8), pieces.of(0, 2)) == (3, 8, 2)


def test_pieces_are_doubled_down_to_single_samples() -> None:
    pieces = Pieces()
    seen = [1]
    while pieces.double(0, seen[-1], 5):
        seen.append(pieces.of(0, 1))
    assert seen == [1, 2, 4, 5]
