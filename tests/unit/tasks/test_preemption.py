"""What gives way to a more urgent request."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.tasks.preemption import Runs, make_room
from shoal.tasks.requests import Ask, Priority
from shoal.tasks.room import Needs, Offer

LEVELS = st.sampled_from(list(Priority))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Ask, tuple[float, ...], dict[int, Offer], list[Runs]]:
    """Devices of 100 bytes, and what runs on them."""
    free = dict.fromkeys(range(draw(st.integers(1, 4))), 100)
    runs = []
    for number in range(draw(st.integers(0, 6))):
        alone = draw(st.booleans())
        count = draw(st.integers(1, len(free)))
        amount = draw(st.sampled_from([20, 50, 100]))
        devices = [d for d in free if free[d] >= amount][:count]
        if devices:
            for device in devices:
                free[device] -= amount
            ask = Ask(f"r{number}", "o", Needs(len(devices), amount, alone=alone), draw(LEVELS))
            key = (draw(st.floats(0, 9)),)
            runs.append(Runs(ask, key, dict.fromkeys(devices, amount), draw(st.booleans())))
    offers = {d: Offer(d, str(d), "n", "k", 100, left, 0) for d, left in free.items()}
    needs = Needs(draw(st.integers(1, 3)), draw(st.sampled_from([20, 60, 100])),
                  alone=draw(st.booleans()))  # fmt: skip
    return Ask("new", "o", needs, draw(LEVELS)), (draw(st.floats(0, 9)),), offers, runs


@given(worlds())
def test_only_less_urgent_ones_stop_and_there_is_room_then(
    world: tuple[Ask, tuple[float, ...], dict[int, Offer], list[Runs]],
) -> None:
    ask, key, offers, runs = world
    stop = make_room(ask, key, offers, runs)
    assert len({r.ask.request for r in stop}) == len(stop)
    for one in stop:
        assert one.movable
        assert one.ask.priority < ask.priority
        assert one.key > key
    if not stop:
        return
    left = [r for r in runs if r not in stop]
    room = 0
    for number, offer in offers.items():
        freed = sum(r.shares_bytes.get(number, 0) for r in stop)
        taken = any(r.ask.needs.alone and number in r.shares_bytes for r in left)
        after = replace(offer, free_bytes=offer.free_bytes + freed)
        room += bool(after.share_bytes(ask.needs)) and not (ask.needs.alone and taken)
    assert room >= ask.needs.devices


@given(worlds())
def test_where_all_may_stop_an_empty_pool_would_do(
    world: tuple[Ask, tuple[float, ...], dict[int, Offer], list[Runs]],
) -> None:
    ask, _, offers, runs = world
    low = [replace(r, ask=replace(r.ask, priority=Priority.LOW), movable=True) for r in runs]
    stop = make_room(replace(ask, priority=Priority.HIGH), (-1.0,), offers, low)
    fits_now = sum(
        bool(o.share_bytes(ask.needs))
        and not (ask.needs.alone and any(r.ask.needs.alone and n in r.shares_bytes for r in runs))
        for n, o in offers.items()
    )
    if fits_now < ask.needs.devices <= len(offers):
        assert stop
