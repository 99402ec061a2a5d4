"""Shared memory under attack and accident: killed owners, other owners, and descriptors that lie."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import torch

import shoal
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.base.paths import socket_name
from shoal.pool.client import head_connection
from shoal.pool.node.shares import share_server
from shoal.pool.wire import frames, messages, node_messages, share_messages
from tests.support import processes, wire
from tests.support.partner import Partner, PartnerError
from tests.support.raw_client import Ended, Error, Kind, RawClient, message
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

MiB = 2**20
MAGIC = 0x65726168736873
SHARE, OPEN, UNSHARE = 30, 31, 32
READ, EXCLUSIVE = 0, 1


@pytest.fixture(scope="module")
def pool() -> Iterator[shoal.Pool]:
    with shoal.up(["cpu,memory=512MiB,threads=1"]) as made:
        assert made.devices
        yield made


@pytest.fixture(autouse=True)
def _nobody_notices(pool: shoal.Pool) -> Iterator[None]:
    """Afterwards the same processes are there, and two programs share as before."""
    before = processes.pool_pids(pool.url)[:2]
    yield
    while RawShare.made:
        RawShare.made.pop().close()
    with shoal.connect(pool.url, memory="64MiB"):
        handle = shoal.share(torch.ones(3, device="shoal"))
        assert shoal.open(handle).sum().item() == 3
    assert processes.pool_pids(pool.url)[:2] == before


def visit(pool: shoal.Pool) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect(socket_name(pool.url.removeprefix(LOCAL_PREFIX), "shares"))
    return connection


def answer(connection: socket.socket) -> msgspec.Struct | None:
    """What comes back before the other side closes."""
    try:
        reply, fds = frames.receive(connection, wire.ANY, fds_max=3)
    except shoal.ShoalError:
        return None
    for fd in fds:
        os.close(fd)
    return reply


# --- accidents --------------------------------


def test_an_owner_that_is_killed(pool: shoal.Pool) -> None:
    with Partner(SHOAL_POOL=pool.url) as owner, shoal.connect(pool.url, memory="64MiB"):
        owner('lease = shoal.connect(memory="64MiB")')
        theirs = shoal.open(owner('str(shoal.share(torch.arange(1e6, device="shoal")))'))
        held = shoal.open(
            owner(
                't = torch.zeros(9, device="shoal"); h = shoal.share(t, mode="exclusive")\n'
                "shoal.release(h)"
            )
            or owner("str(h)")
        )
        kept = theirs.clone()
        with shoal.acquire(held):
            held.add_(1)
            owner.kill()

            def revoked() -> bool:
                try:
                    (theirs + held.sum()).sum().item()
                except shoal.ShareRevokedError:
                    return True
                return False

            took_s = wait_until(revoked, 8, "what was its owner's is taken back")
        print(f"revoked {took_s * 1000:.0f} ms after the kill")
        with pytest.raises(shoal.ShareRevokedError, match="taken back"):
            held.cpu()
        with pytest.raises(shoal.ShareRevokedError):
            theirs.cpu()
        assert kept.sum().item() == kept.cpu().sum().item()  # the rest of the program is well
        assert shoal.shares() == []


def test_nothing_is_left_when_everything_is_killed(tmp_path: Path) -> None:
    before = processes.shared_memory_files()
    with StandingPool(tmp_path, "cpu,memory=128MiB,threads=1") as standing:
        with Partner(SHOAL_POOL=standing.url) as owner, Partner(SHOAL_POOL=standing.url) as reader:
            for partner in (owner, reader):
                partner('lease = shoal.connect(memory="32MiB")')
            handle = owner('str(shoal.share(torch.ones(100000, device="shoal")))')
            reader(f"t = shoal.open({handle!r})")
            assert reader("t.sum().item()") == 100000
            pids = [*standing.pids(), owner.pid, reader.pid]
            memories = {
                os.stat(f"/proc/{pid}/fd/{fd}").st_ino
                for pid in pids
                for fd in os.listdir(f"/proc/{pid}/fd")
                if "shoal-share" in os.readlink(f"/proc/{pid}/fd/{fd}")
            }
            assert memories
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(processes.alive, pids)), 30, "all of them are gone")
    assert processes.shared_memory_files() == before


def test_a_node_that_is_killed(tmp_path: Path) -> None:
    with StandingPool(tmp_path, "cpu,memory=128MiB,threads=1") as standing:
        with shoal.connect(standing.url, memory="32MiB"):
            ours = torch.ones(5, device="shoal")
            handle = shoal.share(ours)
            os.kill(standing.agent_pid, signal.SIGKILL)
            with pytest.raises(shoal.ShoalError):  # the device is lost with its node
                wait_until(lambda: ours.sum().item() != 5, 30, "the device is lost")
        standing.until_whole(1)
        with shoal.connect(standing.url, memory="32MiB"):
            with pytest.raises(shoal.ShareError, match="no such shared memory"):
                shoal.open(handle)
            assert shoal.open(shoal.share(torch.ones(5, device="shoal"))).sum().item() == 5


# --- other owners --------------------------------


def test_a_handle_is_useless_to_another_client(tmp_path: Path) -> None:
    with StandingPool(tmp_path, "cpu,memory=128MiB,threads=1", listen=True) as standing:
        ana, bob = standing.join("ana"), standing.join("bob")

        def program(identity: Path) -> Partner:
            return Partner(SHOAL_IDENTITY=str(identity), SHOAL_POOL=standing.network_url)

        with program(ana.path) as owner, program(ana.path) as friend, program(bob.path) as thief:
            for each in (owner, friend, thief):
                each('lease = shoal.connect(memory="16MiB")')
            handle = owner('str(shoal.share(torch.ones(10, device="shoal")))')
            assert friend(f"shoal.open({handle!r}).sum().item()") == 10
            with pytest.raises(PartnerError, match="no such shared memory"):
                thief(f"shoal.open({handle!r})")
            assert thief("shoal.shares()") == []
            assert len(friend("shoal.shares()")) == 1
            standing.ask(messages.RevokeClient(ana.name))
            with pytest.raises(PartnerError, match="DeviceLostError"):
                friend("torch.ones(3, device='shoal').sum().item()")  # both of her programs are out
            assert thief("torch.ones(3, device='shoal').sum().item()") == 3


# --- lies to the node --------------------------------


def grant(pool: shoal.Pool) -> tuple[object, str]:
    head, lease = head_connection.ask(pool.url, messages.AskLease(1, 16 * MiB, []))
    assert isinstance(lease, messages.Lease)
    return head, lease.devices[0].token


LAYOUT = share_messages.ShareLayout("float32", [4], [1], 0)


def test_the_share_server_believes_nothing(pool: shoal.Pool) -> None:
    head, token = grant(pool)
    good = share_messages.ShareCreate(token, 16, "read", LAYOUT)
    unsealed = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    short = share_server.make_memory(4096)
    device = os.open("/dev/zero", os.O_RDWR)
    large = share_messages.ShareCreate(token, 2**50, "read", LAYOUT)
    cases: list[tuple[msgspec.Struct, list[int]]] = [
        (good, []),
        (good, [unsealed]),
        (good, [device]),
        (share_messages.ShareCreate(token, 5000, "read", LAYOUT), [short]),
        (share_messages.ShareCreate(token, 0, "read", LAYOUT), [short]),
        (large, [short]),
        (share_messages.ShareCreate("wrong token", 16, "read", LAYOUT), [short]),
        (share_messages.ShareOpen(token, "none", "none"), []),
        (share_messages.ShareOpen("wrong token", "none", "none"), []),
        (share_messages.ShareAcquire("none", "none"), []),
        (share_messages.ShareRelease("none", ""), []),
        (share_messages.ShareEnd("", ""), []),
        (share_messages.ShareList("wrong token"), []),
        (messages.AskStatus(), []),
        (node_messages.Grant("token", 1, 2**40), []),
    ]
    for request, fds in cases:
        with visit(pool) as connection:
            frames.send(connection, request, fds)
            assert isinstance(answer(connection), messages.Refusal), request
    for fd in (unsealed, short, device):
        os.close(fd)
    dice = random.Random(7)
    for data in (b"\0" * 100, struct.pack("<I", 2**31), dice.randbytes(5000), b""):
        with visit(pool) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            reply = answer(connection)
            assert reply is None or isinstance(reply, messages.Refusal)
    head.close()  # type: ignore[attr-defined]


def test_a_program_that_is_gone_before_its_answer_leaves_no_share(pool: shoal.Pool) -> None:
    head, token = grant(pool)
    memory = share_server.make_memory(16)
    for _ in range(20):
        with visit(pool) as connection:
            frames.send(
                connection, share_messages.ShareCreate(token, 16, "exclusive", LAYOUT), [memory]
            )

    def listed() -> int:
        with visit(pool) as connection:
            frames.send(connection, share_messages.ShareList(token))
            reply = answer(connection)
            assert isinstance(reply, share_messages.ShareListing)
            return len(reply.shares)

    wait_until(lambda: listed() == 0, 30, "their lines are closed, so they are gone")
    os.close(memory)
    head.close()  # type: ignore[attr-defined]


def test_only_the_node_writes_to_a_control_page() -> None:
    page = share_server.ControlPage()
    import mmap

    seen = memoryview(mmap.mmap(page.fd, 4096, prot=mmap.PROT_READ)).cast("Q")
    page.publish(7)
    page.revoke()
    assert seen[:2].tolist() == [1, 7]
    with pytest.raises(PermissionError):
        mmap.mmap(page.fd, 4096)
    with pytest.raises(PermissionError):
        os.write(page.fd, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(page.fd, 0)
    again = os.open(f"/proc/self/fd/{page.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, 4096)
    os.close(again)
    page.close()


# --- lies to a worker --------------------------------


class RawShare:
    """The three descriptors of a shared memory, made by hand. They are closed after the test."""

    made: ClassVar[list[RawShare]] = []

    def __init__(self, size: int = 4096, *, sealed: bool = True) -> None:
        self.made.append(self)
        self.page = share_server.ControlPage()
        self.memory = share_server.make_memory(size)
        if not sealed:
            os.close(self.memory)
            self.memory = os.memfd_create("loose")
            os.ftruncate(self.memory, size)
        self.line, self.worker_line = socket.socketpair()

    def fds(self) -> list[int]:
        return [self.memory, self.page.fd, self.worker_line.fileno()]

    def close(self) -> None:
        self.page.close()
        os.close(self.memory)
        self.line.close()
        self.worker_line.close()


def pass_on(client: RawClient, number: int, fds: list[int], magic: int = MAGIC) -> None:
    socket.send_fds(client.socket, [struct.pack("<QQ", magic, number)], fds)


def test_a_worker_checks_what_is_passed_to_it(pool: shoal.Pool) -> None:
    with RawClient(pool.url) as client:
        at = client.address(1)
        client.send(message(Kind.ALLOCATE, at, 4096))
        good, small, loose = RawShare(), RawShare(), RawShare(sealed=False)
        swapped = RawShare()
        cases: list[tuple[list[int], list[int] | None]] = [
            (message(SHARE, at, 4096, 99, READ, 1), None),  # nothing came under that number
            (message(SHARE, at, 4096, 1, 7, 1), None),  # no such mode
            (message(SHARE, at, 4096, 1, READ, 0), None),  # nobody
            (message(SHARE, at, 4096, 1), None),
            (message(SHARE, at, 4096, 1, READ, 1, 5), None),
            (message(SHARE, at + 64, 64, 2, READ, 1), swapped.fds()),  # a part of a segment
            (message(SHARE, client.address(2), 4096, 2, READ, 1), None),  # no segment
            (message(SHARE, at, 4096, 3, READ, 1), loose.fds()),
            (message(OPEN, client.address(3), 8192, 4, EXCLUSIVE, 2), small.fds()),
            (message(OPEN, client.address(4), 2**62, 5, EXCLUSIVE, 2), small.fds()),
            (message(OPEN, client.address(5), 4096, 6, READ, 2), small.fds()),  # writable still
            (message(OPEN, client.address(6), 0, 7, EXCLUSIVE, 2), None),
            (message(OPEN, 5, 4096, 8, EXCLUSIVE, 2), small.fds()),
            (message(OPEN, client.address(7), 4096, 9, EXCLUSIVE, 2),
             [swapped.page.fd, swapped.memory, swapped.worker_line.fileno()]),
            (message(UNSHARE, at), None),
            (message(UNSHARE, 7), None),
        ]  # fmt: skip
        for words, fds in cases:
            if fds is not None:
                pass_on(client, words[3], fds)
            error, _ = client.outcome(words)
            assert error in (Error.PROTOCOL, Error.OUT_OF_MEMORY, Error.RUNTIME), words
        pass_on(client, 20, good.fds())
        assert client.outcome(message(SHARE, at, 4096, 20, EXCLUSIVE, 1))[0] == Error.NONE
        assert client.outcome(message(Kind.WRITE, at, 8, 4))[0] == 12  # it does not hold it
        good.page.publish(1)
        assert client.outcome(message(Kind.WRITE, at, 8, 5))[0] == Error.NONE
        assert os.pread(good.memory, 8, 0) == struct.pack("<Q", 5)
        good.page.publish(2)
        error, text = client.outcome(message(Kind.WRITE, at, 8, 6))
        assert error == 12, text
        assert os.pread(good.memory, 8, 0) == struct.pack("<Q", 5)


@pytest.mark.parametrize(
    "name", ["no descriptors", "two", "four", "bytes", "magic", "twice", "many"]
)
def test_a_socket_that_says_nonsense_ends_its_own_session(pool: shoal.Pool, name: str) -> None:
    share = RawShare()
    with RawClient(pool.url) as client:
        assert client.outcome(message(Kind.SYNC))[0] == Error.NONE
        match name:
            case "no descriptors":
                client.socket.sendall(struct.pack("<QQ", MAGIC, 1))
            case "two":
                pass_on(client, 1, share.fds()[:2])
            case "four":
                pass_on(client, 1, [*share.fds(), share.memory])
            case "bytes":
                client.socket.sendall(b"hello")
            case "magic":
                pass_on(client, 1, share.fds(), magic=1)
            case "twice":
                pass_on(client, 1, share.fds())
                pass_on(client, 1, share.fds())
            case "many":
                for number in range(100):
                    try:
                        pass_on(client, number, share.fds())
                    except OSError:
                        break
        wait_until(client.ended, 30, "the worker ends the session")
        with pytest.raises(Ended):
            client.request(message(Kind.SYNC))
