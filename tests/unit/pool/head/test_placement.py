"""Which devices a request gets."""

from __future__ import annotations

import pytest

from shoal.pool.head.placement import LeaseRefused, Offer, Request, choose, is_of_kind


def offer(
    number: int, node: str = "a", kind: str = "cpu", free: int = 100, sessions: int = 0
) -> Offer:
    return Offer(number, f"d{number}", node, kind, 100, free, sessions)


@pytest.mark.parametrize(
    ("kind", "wanted", "matches"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100|v100", True),
        ("Tesla V100-PCIE-16GB", "a100 | V100", True),
        ("NVIDIA H100", "a100|v100", False),
        ("cpu", None, True),
        ("cpu", "|", False),
    ],
)
def test_kinds(kind: str, wanted: str | None, matches: bool) -> None:
    assert is_of_kind(kind, wanted) is matches


def test_kinds_decide_before_freedom_does() -> None:
    offers = [offer(0, kind="NVIDIA T4"), offer(1, kind="NVIDIA A100", free=50, sessions=2)]
    assert [o.number for o in choose(Request(kind="a100"), offers)] == [1]
    with pytest.raises(LeaseRefused, match="1 device of kind v100 was asked for, the pool has 0"):
        choose(Request(kind="v100"), offers)


def test_several_devices_come_from_one_node_if_it_has_them() -> None:
    offers = [offer(0, "a"), offer(1, "b", free=90), offer(2, "b", free=90)]
    assert [o.number for o in choose(Request(1), offers)] == [0]
    assert [o.number for o in choose(Request(2), offers)] == [1, 2]
    assert [o.number for o in choose(Request(3), offers)] == [0, 1, 2]


def test_a_fraction_is_of_the_whole_device() -> None:
    half = offer(0, free=60)
    assert half.share_bytes(Request(fraction=0.5).needs) == 50
    assert half.share_bytes(Request(fraction=0.7).needs) == 0
    with pytest.raises(LeaseRefused, match="70% of their memory"):
        choose(Request(fraction=0.7), [half])


@pytest.mark.parametrize(
    "request_",
    [Request(memory_bytes=0), Request(fraction=0.0), Request(1, 5, 0.5), Request(kind=" | ")],
)
def test_what_no_pool_can_grant(request_: Request) -> None:
    with pytest.raises(LeaseRefused):
        choose(request_, [offer(0)])


def test_a_refusal_gives_all_reasons_and_all_that_would_help() -> None:
    offers = [
        offer(0, kind="t4"),
        offer(1, kind="a100", free=30, sessions=2),
        offer(2, kind="a100", free=80, sessions=1),
        offer(3, kind="a100"),
    ]
    with pytest.raises(LeaseRefused) as caught:
        choose(Request(2, memory_bytes=90, kind="a100"), offers)
    assert caught.value.reasons == [
        "d0: its kind is t4, not a100",
        "d1: 30 B of 100 B free; 2 session(s) hold the rest",
        "d2: 80 B of 100 B free; 1 session(s) hold the rest",
    ]
    assert caught.value.unblock == [
        "fewer devices: devices=1",
        'less memory: memory="80"',
        "waiting until programs end that use d1, d2",
        "another kind: the pool has t4",
    ]
    # What helps does help.
    choose(Request(1, memory_bytes=90, kind="a100"), offers)
    choose(Request(2, memory_bytes=80, kind="a100"), offers)
    choose(Request(2, memory_bytes=90, kind="a100|t4"), offers)


def test_a_request_that_no_idle_device_could_hold_is_not_told_to_wait() -> None:
    with pytest.raises(LeaseRefused) as caught:
        choose(Request(1, memory_bytes=101), [offer(0, free=0, sessions=1)])
    assert caught.value.unblock == [
        "a pool with larger devices: shoal up --device … --device …, or shoal node"
    ]


def test_the_text_of_a_refusal_is_bounded() -> None:
    offers = [offer(n, free=0, sessions=1) for n in range(4000)]
    with pytest.raises(LeaseRefused, match="and 3992 more") as caught:
        choose(Request(1), offers)
    assert len(str(caught.value)) < 2000
