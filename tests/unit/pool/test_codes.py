"""Join codes: what is written is what is read, and the registry lets nobody in twice."""

from __future__ import annotations

import contextlib
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pool.access import codes
from shoal.pool.access.codes import Bucket, CodeError, CodeRegistry, IssuedCode, JoinRefused, Quota
from shoal.pool.base import limits

SYMBOLS = st.sampled_from(codes.SYMBOLS)


def text(length: int) -> st.SearchStrategy[str]:
    return st.text(SYMBOLS, min_size=length, max_size=length)


CODES = st.builds(codes.ParsedCode, text(codes.ID), text(codes.SECRET), text(codes.PIN))


@given(CODES, st.booleans())
def test_what_is_written_is_what_is_read(code: codes.ParsedCode, sloppy: bool) -> None:
    shown = codes.write(code.code_id, code.secret, code.pin)
    assert len(shown) == 44  # `shoal node --join CODE@255.255.255.255` fits a line of 80
    if sloppy:
        shown = shown.lower().replace("-", " ").replace("0", "o").replace("1", "l")
    assert codes.parse(shown) == code


@given(CODES, st.integers(0, codes.LENGTH - 1), SYMBOLS)
def test_a_wrong_symbol_is_nearly_always_told(code: codes.ParsedCode, at: int, symbol: str) -> None:
    shown = codes.write(code.code_id, code.secret, code.pin).replace("-", "")
    wrong = shown[:at] + symbol + shown[at + 1 :]
    try:
        parsed = codes.parse(wrong)
    except CodeError:
        return
    # One in 32 passes the check; then it is simply another code.
    assert parsed == code or wrong != shown


@given(st.text(max_size=80))
def test_any_text_is_a_code_or_an_error(anything: str) -> None:
    with contextlib.suppress(CodeError):
        assert len(codes.parse(anything).pin) == codes.PIN


def issued(code_id: str = "AAA", secret: str = "S" * 16, expires: float = 100.0) -> IssuedCode:
    return IssuedCode(code_id, codes.hash_secret(secret), "client", expires, Quota(devices=1))


def test_a_code_is_good_once() -> None:
    registry = CodeRegistry()
    registry.issue(issued(), now=0.0)
    assert registry.accept("AAA", "S" * 16, "client", "ip", 99.0, 0.0).quota == Quota(devices=1)
    with pytest.raises(JoinRefused, match="wrong, was used before, or has expired"):
        registry.accept("AAA", "S" * 16, "client", "ip", 99.0, 0.0)


def test_expired_and_wrong_codes_get_the_same_answer() -> None:
    registry = CodeRegistry()
    registry.issue(issued(), now=0.0)
    answers = set()
    for code_id, secret, now in (
        ("AAA", "S" * 16, 100.0), ("AAA", "T" * 16, 1.0), ("BBB", "S" * 16, 1.0), ("", "", 1.0),
    ):  # fmt: skip
        with pytest.raises(JoinRefused) as raised:
            registry.accept(code_id, secret, "client", f"ip{now}{code_id}", now, 0.0)
        answers.add(str(raised.value))
    assert len(answers) == 1
    assert registry.accept("AAA", "S" * 16, "client", "ip", 1.0, 0.0).code_id == "AAA"


def test_a_code_for_another_role_is_not_used_up() -> None:
    registry = CodeRegistry()
    registry.issue(issued(), now=0.0)
    with pytest.raises(JoinRefused, match="shoal join"):
        registry.accept("AAA", "S" * 16, "node", "ip", 1.0, 0.0)
    registry.accept("AAA", "S" * 16, "client", "ip", 1.0, 0.0)


def test_a_hundred_thousand_wrong_codes() -> None:
    """From many addresses, ten a second: memory stays bounded, and the right code is still good."""
    registry = CodeRegistry()
    registry.issue(issued(expires=1e9), now=0.0)
    refused = 0
    for i in range(100_000):
        secret = "".join(secrets.choice(codes.SYMBOLS) for _ in range(16))
        with pytest.raises(JoinRefused):
            registry.accept("AAA", secret, "client", f"10.{i % 65536}", 1.0, i * 0.1)
        refused += 1
    assert refused == 100_000
    assert len(registry.limiter.addresses) <= limits.ADDRESSES_REMEMBERED
    assert registry.accept("AAA", "S" * 16, "client", "home", 1.0, 20_000.0).code_id == "AAA"


def test_an_address_that_guesses_is_stopped_and_others_are_not() -> None:
    registry = CodeRegistry()
    registry.issue(issued(), now=0.0)
    for _ in range(100_000):
        with pytest.raises(JoinRefused):
            registry.accept("AAA", "wrong", "client", "evil", 1.0, 5.0)
    with pytest.raises(JoinRefused, match="wait"):
        registry.accept("AAA", "S" * 16, "client", "evil", 1.0, 5.0)
    assert registry.accept("AAA", "S" * 16, "client", "good", 1.0, 5.0).code_id == "AAA"


@given(st.lists(st.floats(0, 50), max_size=60))
def test_a_bucket_never_allows_more_than_its_rate(gaps: list[float]) -> None:
    bucket, now, allowed = Bucket(5, 2.0), 0.0, 0
    for gap in gaps:
        now += gap
        if not bucket.full(now):
            bucket.add(now)
            allowed += 1
        assert allowed <= 5 + now / 2.0 + 1


def test_codes_that_wait_are_bounded() -> None:
    registry = CodeRegistry()
    for i in range(limits.CODES_MAX):
        registry.issue(issued(str(i)), now=0.0)
    with pytest.raises(JoinRefused):
        registry.issue(issued("more"), now=0.0)
    registry.issue(issued("later", expires=300.0), now=200.0)  # the others have expired by then
    assert list(registry.codes) == ["later"]
