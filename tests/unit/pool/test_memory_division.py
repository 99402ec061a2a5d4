"""How sessions divide a device's memory: properties of the pure function, and a model of workers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.pool.node.memory_division import SessionMemory, divide

MiB = 2**20
DEVICE = 1024 * MiB


@st.composite
def sessions(draw: st.DrawFn) -> list[SessionMemory]:
    """Sessions as a device server may have them: what is booked fits, and so does what is in use."""
    found: list[SessionMemory] = []
    booked_left = used_left = DEVICE
    for number in range(draw(st.integers(1, 6))):
        booked = draw(st.integers(0, booked_left))
        booked_left -= booked
        elastic = draw(st.booleans())
        limit = draw(st.integers(0, used_left))
        used = draw(st.integers(0, limit))
        used_left -= limit
        most = DEVICE if elastic else booked
        found.append(
            SessionMemory(
                number,
                booked,
                most,
                min(limit, most),
                min(used, most),
                draw(st.integers(0, DEVICE)),
                draw(st.one_of(st.just(0), st.integers(0, 2 * DEVICE))),
                draw(st.floats(0, 100)),
            )
        )
    return found


@given(sessions())
def test_limits_and_what_is_in_use_fit_the_device(known: list[SessionMemory]) -> None:
    division = divide(DEVICE, known, patience_s=30)
    held = sum(max(division.limits_bytes[s.session], s.used_bytes) for s in known)
    assert held <= DEVICE
    for one in known:
        assert 0 <= division.limits_bytes[one.session] <= one.most_bytes
        assert division.limits_bytes[one.session] <= division.ceilings_bytes[one.session]


@given(sessions())
def test_everybody_comes_to_what_he_booked(known: list[SessionMemory]) -> None:
    """Workers that shrink when they are told end up with limits that cover what they booked."""
    for _ in range(len(known) + 2):
        division = divide(DEVICE, known, patience_s=30)
        known = [
            replace(
                s,
                limit_bytes=division.limits_bytes[s.session],
                used_bytes=min(s.used_bytes, division.limits_bytes[s.session]),
            )
            for s in known
        ]
    for one in known:
        assert one.limit_bytes >= one.booked_bytes


@given(sessions())
def test_a_call_that_waits_alone_is_served_once_the_others_have_shrunk(
    known: list[SessionMemory],
) -> None:
    known = [replace(s, wanted_bytes=0) for s in known]
    first = known[0]
    ceiling = divide(DEVICE, known, 30).ceilings_bytes[first.session]
    known[0] = first = replace(first, wanted_bytes=ceiling)
    for _ in range(3):
        division = divide(DEVICE, known, patience_s=30)
        known = [
            replace(
                s,
                limit_bytes=division.limits_bytes[s.session],
                used_bytes=min(s.used_bytes, division.limits_bytes[s.session]),
            )
            for s in known
        ]
    assert known[0].limit_bytes >= min(first.wanted_bytes, first.most_bytes)


def test_one_elastic_session_has_the_whole_device() -> None:
    assert divide(DEVICE, [SessionMemory(1, 256 * MiB, DEVICE, 0)], 30).limits_bytes == {1: DEVICE}


def test_a_newcomer_gets_memory_only_when_the_first_has_shrunk() -> None:
    first = SessionMemory(1, 256 * MiB, DEVICE, DEVICE, used_bytes=DEVICE)
    second = SessionMemory(2, 256 * MiB, DEVICE, 0)
    division = divide(DEVICE, [first, second], 30)
    assert division.limits_bytes[1] < DEVICE
    assert division.limits_bytes[2] == 0
    first = replace(first, limit_bytes=division.limits_bytes[1], used_bytes=512 * MiB)
    division = divide(DEVICE, [first, second], 30)
    assert division.limits_bytes[2] >= 256 * MiB


def test_of_two_calls_that_wait_for_each_other_the_later_one_fails() -> None:
    first = SessionMemory(1, 0, DEVICE, 512 * MiB, 500 * MiB, 0, 700 * MiB, waits_s=40)
    second = SessionMemory(2, 0, DEVICE, 512 * MiB, 500 * MiB, 0, 700 * MiB, waits_s=31)
    division = divide(DEVICE, [first, second], patience_s=30)
    assert division.ceilings_bytes[1] >= 700 * MiB
    assert division.ceilings_bytes[2] < 700 * MiB
    patient = divide(DEVICE, [first, replace(second, waits_s=1)], patience_s=30)
    assert patient.ceilings_bytes[2] >= 700 * MiB
