"""Leases that wait: granted in turn, withdrawn, explained. With a head and real connections."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.pool.client import lease_wait
from shoal.pool.client.head_connection import Connection
from shoal.pool.wire import admission_messages, messages
from tests.support import programs
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

MiB = 2**20
DEADLINE_S = 60.0


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[StandingPool]:
    with StandingPool(tmp_path, "cpu,memory=64MiB,threads=1") as made:
        yield made


def ask(memory_bytes: int, *, wait: bool = True, wait_s: float | None = None) -> messages.AskLease:
    return messages.AskLease(
        1, memory_bytes, [], program="test", wait=wait or wait_s is not None, wait_s=wait_s
    )


class Client:
    """A program that asks for memory of the one device."""

    def __init__(self, pool: StandingPool, memory_bytes: int, **how: float) -> None:
        self.connection = Connection(pool.url)
        self.connection.send(ask(memory_bytes, **how))  # type: ignore[arg-type]

    def hear(self) -> messages.FromHead:
        return self.connection.receive(DEADLINE_S)

    def until_waiting(self) -> admission_messages.Waiting:
        message = self.hear()
        assert isinstance(message, admission_messages.Waiting)
        return message

    def until_granted(self) -> messages.Lease:
        while not isinstance(message := self.hear(), messages.Lease):
            assert isinstance(message, admission_messages.Waiting), message
        return message

    def release(self) -> None:
        self.connection.send(messages.Release())
        while not isinstance(self.hear(), messages.Done):
            pass
        self.connection.close()


def test_a_request_waits_for_its_turn_and_says_why(pool: StandingPool) -> None:
    first = Client(pool, 60 * MiB)
    first.until_granted()
    second, shown = (client := Client(pool, 60 * MiB)), client.until_waiting()
    assert (shown.place, shown.why.never) == (1, False)
    assert [reason.code for reason in shown.why.reasons] == ["busy"]
    assert shown.why.reasons[0].numbers["memory_bytes"] == 60 * MiB
    assert shown.why.bound is not None
    third = Client(pool, 60 * MiB)
    behind = third.until_waiting()
    assert behind.place == 2
    assert [reason.code for reason in behind.why.reasons] == ["busy", "outbid"]
    assert shown.why.reasons[0].text in lease_wait.describe(shown, time.time())

    told = json.loads(pool.run("why", shown.request, "--json", "--pool", pool.name).out)
    assert set(told) == {"never", "reasons", "unblock", "estimate", "bound"}
    assert [set(reason) for reason in told["reasons"]] == [{"code", "text", "numbers"}]
    what_if = pool.run("why", shown.request, "--if", "memory=65MiB", "--json", "--pool", pool.name)
    assert what_if.code == 3
    assert json.loads(what_if.out)["never"] is True

    first.release()
    second.until_granted()
    second.connection.close()  # the program ends without giving it back
    third.until_granted()
    third.release()


def test_a_request_that_does_not_wait_is_refused_as_ever(pool: StandingPool) -> None:
    first = Client(pool, 60 * MiB)
    first.until_granted()
    with Connection(pool.url) as connection:
        with pytest.raises(shoal.LeaseError, match="1 device with 8 MiB free was asked for"):
            connection.ask(ask(8 * MiB, wait=False))
        with pytest.raises(shoal.LeaseError, match="SHOAL_WAIT=1"):
            connection.ask(ask(8 * MiB, wait=False))
    first.release()


def test_a_wait_has_an_end(pool: StandingPool) -> None:
    first = Client(pool, 60 * MiB)
    first.until_granted()
    second = Client(pool, 60 * MiB, wait_s=0.5)
    second.until_waiting()
    message = second.hear()
    assert isinstance(message, messages.Refusal)
    assert message.reason.startswith("no devices within 0.5 s. ")
    first.release()
    Client(pool, 60 * MiB).until_granted()  # nothing is left of the one that gave up


def test_what_the_pool_does_not_have_waits_for_a_node(pool: StandingPool) -> None:
    client = Client(pool, 65 * MiB)
    shown = client.until_waiting()
    assert shown.why.never
    assert [reason.code for reason in shown.why.reasons] == ["too-large"]
    assert shown.why.estimate is None
    assert "can never grant it" in lease_wait.describe(shown, time.time())
    result = pool.run("why", shown.request, "--pool", pool.name)
    assert result.code == 3, result
    assert "the largest has 64 MiB" in result.out


def test_a_client_that_ends_is_withdrawn(pool: StandingPool) -> None:
    first = Client(pool, 60 * MiB)
    first.until_granted()
    gone, polite, stays = Client(pool, 60 * MiB), Client(pool, 60 * MiB), Client(pool, 60 * MiB)
    for client in (gone, polite, stays):
        client.until_waiting()
    gone.connection.close()
    polite.connection.send(messages.Release())
    while not isinstance(message := polite.hear(), messages.Refusal):
        pass
    assert message.reason == "the request was withdrawn"
    first.release()
    stays.until_granted()


def test_why_of_what_is_not_known(pool: StandingPool) -> None:
    result = pool.run("why", "nobody", "--json", "--pool", pool.name)
    assert result.code == 1
    error = json.loads(result.out)["error"]
    assert set(error) == {"code", "text", "unblock"}
    assert "no request 'nobody'" in error["text"]


PROGRAM = """
import shoal, time
print("asks", flush=True)
try:
    with shoal.connect(memory="60MiB", {wait}) as lease:
        print("has", lease.granted[0].info.name, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_program_waits_and_hears_ctrl_c(pool: StandingPool) -> None:
    first = Client(pool, 60 * MiB)
    first.until_granted()
    environment = {"SHOAL_POOL": pool.url}
    waits = programs.start(PROGRAM.format(wait="wait=True"), **environment)
    other = programs.start(PROGRAM.format(wait=""), **environment, SHOAL_WAIT="1")
    wait_until(lambda: len(waiting_names(pool)) == 2, DEADLINE_S, "both wait")
    waits.send_signal(signal.SIGINT)
    out, _ = waits.communicate(timeout=DEADLINE_S)
    assert out.splitlines() == ["asks", "interrupted"]
    wait_until(lambda: len(waiting_names(pool)) == 1, DEADLINE_S, "it is withdrawn")
    first.release()
    out, _ = other.communicate(timeout=DEADLINE_S)
    assert out.splitlines()[1].startswith("has ")


def waiting_names(pool: StandingPool) -> list[str]:
    """The requests that wait, as the error for an unknown one lists them."""
    text = pool.run("why", "?", "--pool", pool.name).err
    return text.partition("these wait: ")[2].strip().split(", ") if "these wait" in text else []
