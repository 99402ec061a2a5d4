"""Addresses, names and amounts as users write them."""

from __future__ import annotations

import pytest

from shoal.cli.common import ago
from shoal.cli.top import Rate, rates
from shoal.errors import DeviceSpecError, PoolError
from shoal.pool.base import paths
from shoal.pool.base.addresses import join_address, split_address
from shoal.pool.head.enrolment import source_of
from shoal.pool.node.spec import parse_memory
from shoal.pool.wire import messages
from shoal.units import show_bytes


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1", "10.0.0.1", 7433),
        ("host:80", "host", 80),
        ("[::1]:80", "::1", 80),
        ("::1", "::1", 7433),
        ("[fe80::1]", "fe80::1", 7433),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize("text", ["", ":80", "host:", "host:x", "host:70000", "host:-1", "[::1]:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(PoolError, match="is not an address"):
        split_address(text)


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 33, "-x", "ü"])
def test_names_that_would_not_do_for_files(name: str) -> None:
    with pytest.raises(PoolError):
        paths.check_name(name)


def test_amounts_of_memory() -> None:
    assert parse_memory("8GiB") == (8 * 2**30, None)
    assert parse_memory("25%") == (None, 0.25)
    assert parse_memory(0.5) == (None, 0.5)
    assert parse_memory(4096) == (4096, None)
    assert parse_memory(None) == (None, None)
    for wrong in ("x%", "lots"):
        with pytest.raises(DeviceSpecError):
            parse_memory(wrong)


def test_amounts_for_people() -> None:
    texts = [show_bytes(n) for n in (0, 1023, 1024, 160 * 2**20, 1000 * 2**20, 2**40)]
    assert texts == ["0 B", "1023 B", "1 KiB", "160 MiB", "1000 MiB", "1 TiB"]
    assert [ago(s) for s in (-1, 59, 60, 7200, 86400 * 3)] == ["0 s", "59 s", "1 min", "2 h", "3 d"]


def test_tries_of_one_host_are_counted_together() -> None:
    assert source_of("10.0.0.1") == "10.0.0.1"
    assert source_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff") != source_of("2001:db8:0:1::1")
    assert source_of("nonsense") == "nonsense"


def status(now: float, *calls: int, epoch: int = 1) -> messages.PoolStatus:
    """Of a lease with so many calls on each of its devices."""
    sessions = [
        messages.SessionInfo(
            7, 1, epoch, "ana", "x", device, 1, 0.0,
            messages.SessionUse(device, 7, 0, count, 0, 10 * count),
        )
        for device, count in enumerate(calls)
    ]  # fmt: skip
    return messages.PoolStatus("p", "0", 1, 0.0, now, "", [], [], sessions)


def test_rates_are_of_the_same_session() -> None:
    assert rates(None, status(1.0, 5)) == {}
    assert rates(status(1.0, 5), status(3.0, 9)) == {(0, 7): Rate(2.0, 0.0, 20.0)}
    assert rates(status(1.0, 5, epoch=1), status(3.0, 9, epoch=2)) == {}
    assert rates(status(1.0, 9), status(3.0, 5))[0, 7].calls == 0
    both = rates(status(1.0, 5, 50), status(3.0, 9, 60))
    assert {device: rate.calls for (device, _), rate in both.items()} == {0: 2.0, 1: 5.0}
