"""Codes on a screen: this slot and the last are good, a photo is not, and guesses are hopeless."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pool.access import codes, screen_codes
from shoal.pool.access.codes import CodeError
from shoal.pool.base import limits

SECRET = bytes(range(32))
NOW = 1_000_000 * limits.EVENT_CODE_SLOT_S + 7.0


@given(st.floats(0, 4e9), st.floats(0, 600))
def test_two_slots_are_good(shown_at: float, later: float) -> None:
    typed = screen_codes.parse(screen_codes.write("K7Q", SECRET, shown_at))
    age = screen_codes.slot_at(shown_at + later) - screen_codes.slot_at(shown_at)
    verdict = screen_codes.judge(typed, SECRET, shown_at + later)
    assert verdict == (
        "good" if age < 2 else "expired" if age < screen_codes.OLD_SLOTS else "wrong"
    )


def test_a_code_is_of_one_event_and_one_secret() -> None:
    typed = screen_codes.parse(screen_codes.write("K7Q", SECRET, NOW))
    assert screen_codes.judge(typed, bytes(32), NOW) == "wrong"
    other = screen_codes.TypedCode("K7R", typed.slot_part)
    assert screen_codes.judge(other, SECRET, NOW) == "wrong"
    assert (
        screen_codes.judge(typed, SECRET, NOW - limits.EVENT_CODE_SLOT_S) == "wrong"
    )  # of the future


def test_a_code_can_be_typed() -> None:
    shown = screen_codes.write("K7Q", SECRET, NOW)
    assert len(shown) == 15
    sloppy = shown.lower().replace("0", "o").replace("1", "l").replace("-", " ")
    assert screen_codes.parse(sloppy) == screen_codes.parse(shown)
    with pytest.raises(CodeError, match="two groups"):
        screen_codes.parse(shown[:-1])
    wrong = shown[:-1] + ("0" if shown[-1] != "0" else "1")
    with pytest.raises(CodeError, match="typing error"):
        screen_codes.parse(wrong)


@given(st.text(max_size=40))
def test_any_text_is_a_code_or_an_error(anything: str) -> None:
    with contextlib.suppress(CodeError):
        assert len(screen_codes.parse(anything).event) == screen_codes.EVENT


def test_guesses_are_wrong() -> None:
    chosen = random.Random(1)
    for _ in range(20_000):
        guess = "".join(chosen.choices(codes.SYMBOLS, k=screen_codes.SLOT))
        assert screen_codes.judge(screen_codes.TypedCode("K7Q", guess), SECRET, NOW) == "wrong"
