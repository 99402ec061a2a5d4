"""The issue lock: one after another, but nobody waits for a thread that does not come back."""

from __future__ import annotations

import threading

from shoal.train.group.issue_lock import UNLOCKED_PASSES, IssueLock

LONG_S = 60.0


def test_one_after_another() -> None:
    lock = IssueLock(LONG_S)
    inside, most, done = 0, 0, []
    count = threading.Lock()

    def work(number: int) -> None:
        nonlocal inside, most
        for _ in range(50):
            with lock.held():
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


def test_a_thread_that_waits_too_long_goes_ahead_and_then_none_waits_for_a_while() -> None:
    lock = IssueLock(patience_s=0.001)
    holds, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock.held():
            holds.set()
            leave.wait(LONG_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(LONG_S)
    with lock.held():
        assert not leave.is_set()  # it got in while the other still holds it
    for _ in range(UNLOCKED_PASSES):
        with lock.held():
            assert thread.is_alive()
    leave.set()
    thread.join(LONG_S)


def test_an_error_releases_the_lock() -> None:
    lock = IssueLock(LONG_S)
    for _ in range(2):
        try:
            with lock.held():
                raise KeyError
        except KeyError:
            pass
    with lock.held():
        pass
