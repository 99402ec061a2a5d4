"""Turns: one after another, but nobody waits for who does not come back."""

from __future__ import annotations

import threading

from shoal.train.group.issue_lock import FREE_TURNS, Turns

LONG_S = 60.0


def test_one_after_another() -> None:
    turns = Turns(LONG_S)
    inside, most, done = 0, 0, []
    count = threading.Lock()

    def work(number: int) -> None:
        nonlocal inside, most
        for _ in range(50):
            with turns.turn():
                with count:
                    inside += 1
                    most = max(most, inside)
                with count:
                    inside -= 1
        done.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(done) == [0, 1, 2]
    assert most == 1


def test_who_waits_too_long_goes_ahead_and_then_nobody_waits_for_a_while() -> None:
    turns = Turns(patience_s=0.001)
    holds, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with turns.turn():
            holds.set()
            leave.wait(LONG_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(LONG_S)
    with turns.turn():
        assert not leave.is_set()  # it got in while the other still has its turn
    for _ in range(FREE_TURNS):
        with turns.turn():
            assert thread.is_alive()
    leave.set()
    thread.join(LONG_S)


def test_a_turn_ends_with_an_error() -> None:
    turns = Turns(LONG_S)
    for _ in range(2):
        try:
            with turns.turn():
                raise KeyError
        except KeyError:
            pass
    with turns.turn():
        pass
