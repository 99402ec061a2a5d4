"""The loss scale: halves after an overflow, grows after a long time without one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.train.gradients.scaling import LossScale


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_scale_is_what_the_overflows_make_it(steps: list[bool], interval: int) -> None:
    scale = LossScale(interval=interval)
    expected, good = 2.0**16, 0
    for overflowed in steps:
        scale.learn(overflowed)
        good = 0 if overflowed else good + 1
        expected *= 0.5 if overflowed else 2.0 if good and good % interval == 0 else 1.0
        assert scale.value == expected
