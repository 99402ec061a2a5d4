"""A status in pages is the status, of one moment."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LeaseError
from shoal.pool.base import limits
from shoal.pool.client.status import read
from shoal.pool.head.shown.status_pages import StatusPages
from shoal.pool.wire import frames, messages

ROWS = limits.STATUS_ROWS_PER_PAGE


def status(nodes: int, devices: int, sessions: int, processes: int, moment: int = 0) -> object:
    text = "x" * 40
    return messages.PoolStatus(
        "p", "1", 1, 0.0, float(moment), "",
        [messages.NodeInfo(f"n{i}-{moment}", "up", 8, 0.0) for i in range(nodes)],
        [
            messages.DeviceInfo(i, text, text, 80 << 30, moment, 3, 1.0, 1, text, text, text)
            for i in range(devices)
        ],
        [
            messages.SessionInfo(i, i, moment, text, text, i, 80 << 30, 0.0)
            for i in range(sessions)
        ],
        processes=[messages.ProcessInfo("worker", i, text) for i in range(processes)],
    )  # fmt: skip


class Head:
    """Answers as a head does, through the wire's own decoder."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.pages = StatusPages(make)  # type: ignore[arg-type]
        self.asked: list[messages.AskStatus] = []
        self.largest = 0
        self.before_page: Callable[[], None] = lambda: None

    def ask(self, request: messages.FromClient, timeout_s: float) -> messages.FromHead:
        assert isinstance(request, messages.AskStatus)
        self.asked.append(request)
        self.before_page()
        encoded = frames.encode(self.pages.page(request.page, request.version))
        self.largest = max(self.largest, len(encoded))
        found = messages.FROM_HEAD.decode(encoded[4:])
        return found


COUNTS = st.sampled_from([0, 1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 7])


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_the_pages_are_the_whole(a: int, b: int, c: int, d: int) -> None:
    whole = status(a, b, c, d)
    head = Head(lambda: whole)
    found = read(head)
    assert msgspec.structs.replace(found, version=0, page=0) == whole
    assert len(head.asked) == max(1, *(-(-n // ROWS) for n in (a, b, c, d)))
    assert found.following is None


def test_pages_of_two_moments_are_never_mixed() -> None:
    moment = [0]
    others = []

    def make() -> object:
        moment[0] += 1
        return status(3, 5 * ROWS, 10, 0, moment[0])

    head = Head(make)

    def crowd() -> None:
        """Others look as well, so the head forgets what we are reading: once."""
        if len(head.asked) == 3:
            others.extend(head.pages.page(0, 0) for _ in range(limits.STATUS_VERSIONS_KEPT))

    head.before_page = crowd
    found = read(head)
    assert len(found.devices) == 5 * ROWS
    assert {d.free_bytes for d in found.devices} == {int(found.now)}
    assert [d.number for d in found.devices] == list(range(5 * ROWS))
    assert len(others) == limits.STATUS_VERSIONS_KEPT


def test_ten_thousand_devices_fit_their_answers() -> None:
    head = Head(lambda: status(1250, 10_000, limits.SESSIONS_SHOWN_MAX, 20_000))
    assert len(read(head).devices) == 10_000
    assert head.largest < limits.ANSWER_BYTES_MAX / 2


@pytest.mark.parametrize(("page", "version"), [(1, 0), (7, 1), (10**9, 1), (1, 10**9)])
def test_pages_that_are_not_there_begin_again(page: int, version: int) -> None:
    pages = StatusPages(lambda: status(0, 2 * ROWS, 0, 0))  # type: ignore[arg-type, return-value]
    pages.page(0, 0)
    found = pages.page(page, version)
    assert (found.page, found.version, found.following) == (0, 2, 1)


def test_a_head_that_always_begins_again_is_given_up() -> None:
    moment = [0]

    class Restless(Head):
        def ask(self, request: messages.FromClient, timeout_s: float) -> messages.FromHead:
            moment[0] += 1
            found = super().ask(messages.AskStatus(), timeout_s)
            assert isinstance(found, messages.PoolStatus)
            return msgspec.structs.replace(found, version=moment[0])

    with pytest.raises(LeaseError, match="did not come whole"):
        read(Restless(lambda: status(0, ROWS + 1, 0, 0)), 0.2)
