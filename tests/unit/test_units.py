"""Sizes in bytes: what is shown can be read again."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import DeviceSpecError
from shoal.units import SIZE_BYTES_MAX, parse_bytes, show_bytes


@given(st.integers(0, SIZE_BYTES_MAX // 2))
def test_a_shown_size_is_read_again_within_its_four_digits(size_bytes: int) -> None:
    assert parse_bytes(show_bytes(size_bytes)) == pytest.approx(size_bytes, rel=6e-4, abs=1)


@given(st.integers(0, 1023), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_whole_units_are_exact(count: int, unit: str) -> None:
    power = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[unit]
    assert parse_bytes(f"{count}{unit}") == count * 2**power
    if count:
        assert show_bytes(count * 2**power) == f"{count} {unit}"


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_an_error_that_quotes_it(text: str) -> None:
    with suppress(DeviceSpecError):
        assert 0 <= parse_bytes(text) <= SIZE_BYTES_MAX
        return
    with pytest.raises(DeviceSpecError) as raised:
        parse_bytes(text)
    assert repr(text) in str(raised.value)
