"""`kill -9` of head, agent, device servers and workers while clients work.

Promises: nobody's device is leased twice, no acknowledged lease is lost, each client is served or gets
a named error within 5 s, and everything is back within 3 s. The tests wait longer than that, because
the machine may be busy with other things; they print how long it took.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import shoal
from shoal.pool.wire import messages, tls
from tests.support import processes, programs
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

MiB = 2**20
DEVICES = ["cpu,memory=64MiB,threads=1,name=a", "cpu,memory=64MiB,threads=1,name=b"]
BACK_S = 20.0


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    with StandingPool(tmp_path_factory.mktemp("mortal"), *DEVICES, listen=True) as pool:
        yield pool


def works(device: str = "shoal") -> bool:
    return torch.ones(100, device=device).sum().item() == 100


def test_sessions_go_on_while_the_head_restarts(mortal: StandingPool) -> None:
    with shoal.connect(mortal.url, devices=2, memory="32MiB") as lease:
        x = torch.ones(100, device="shoal")
        for _ in range(3):
            head = mortal.head_pid
            os.kill(head, signal.SIGKILL)
            for _ in range(100):
                assert x.add_(1).sum().item() >= 200  # the head is on nobody's way
            mortal.until_whole(2, BACK_S)
            assert mortal.head_pid != head
        wait_until(
            lambda: all(s.use is not None for s in mortal.status().sessions), BACK_S,
            "the client is back at the head",
        )  # fmt: skip
        found = mortal.status()
        assert [(s.epoch, s.granted_bytes) for s in found.sessions] == [(lease.epoch, 32 * MiB)] * 2
        assert [d.free_bytes for d in found.devices] == [32 * MiB] * 2
        assert lease.end_reason is None
        with pytest.raises(shoal.LeaseError):  # nobody else gets what is held
            mortal.ask(messages.AskLease(1, 33 * MiB, []))
        assert works()
    wait_until(lambda: not mortal.status().sessions, 30, "the lease was given back")
    with shoal.connect(mortal.url) as later:
        assert later.epoch > lease.epoch


@pytest.mark.slow
def test_a_lease_whose_client_died_with_the_head_ends(mortal: StandingPool) -> None:
    program = programs.start(
        "import shoal; shoal.connect(); print('ready', flush=True); input()", SHOAL_POOL=mortal.url
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    head = mortal.head_pid
    os.kill(head, signal.SIGSTOP)  # it must not see the client end
    program.kill()
    program.communicate()
    os.kill(head, signal.SIGKILL)
    mortal.until_whole(2, BACK_S)
    wait_until(lambda: not mortal.status().sessions, BACK_S, "the orphaned lease has ended")


def test_an_agent_that_dies_takes_its_sessions_and_comes_back(mortal: StandingPool) -> None:
    with shoal.connect(mortal.url) as lease:
        x = torch.ones(3, device="shoal")
        pids = processes.descendants(mortal.agent_pid)
        os.kill(mortal.agent_pid, signal.SIGKILL)
        with pytest.raises(shoal.DeviceLostError):
            wait_until(lambda: x.sum().item() != 3, 30, "the session is lost")
        wait_until(lambda: not any(map(processes.alive, pids)), 8, "its processes are gone")
        mortal.until_whole(2, BACK_S)
        wait_until(lambda: lease.end_reason is not None, 30, "the reason is told")
        assert "the agent of node" in str(lease.end_reason)
    with shoal.connect(mortal.url):
        assert works()


def test_a_device_server_that_dies_is_started_again(mortal: StandingPool) -> None:
    with shoal.connect(mortal.url, devices=2, memory=MiB) as lease:
        y = torch.ones(3, device="shoal:2")
        os.kill(mortal.server_pids()[0], signal.SIGKILL)
        with pytest.raises(shoal.DeviceLostError):
            wait_until(lambda: not works("shoal:1"), 30, "the session is lost")
        assert y.sum().item() == 3  # the other device has not noticed
        wait_until(lambda: lease.end_reason is not None, 30, "the reason is told")
        assert "SIGKILL" in str(lease.end_reason)
        mortal.until_whole(2, BACK_S)
    with shoal.connect(mortal.url, devices=2):
        assert works()


def test_a_frozen_agent_is_noticed_within_five_seconds(mortal: StandingPool) -> None:
    with shoal.connect(mortal.url, memory=MiB) as lease:
        assert works()
        frozen = mortal.agent_pid
        os.kill(frozen, signal.SIGSTOP)
        try:
            wait_until(lambda: lease.end_reason is not None, 30, "the loss is told")
            assert "has not been heard of" in str(lease.end_reason)
            with pytest.raises(shoal.DeviceLostError):
                works()
        finally:
            os.kill(frozen, signal.SIGCONT)
        # It comes back with a session that nobody has leased any more: a late holder, thrown out.
        mortal.until_whole(2, BACK_S)
        worker = lease.worker_pids[0]
        wait_until(lambda: not processes.alive(worker), 30, "the late session's worker is gone")
    with shoal.connect(mortal.url):
        assert works()


# --- random moments --------------------------------

CLIENT = """
    import sys, time, torch, shoal
    from shoal.device import leases
    log = open(sys.argv[1], "w", buffering=1)
    def note(word):
        log.write(f"{time.monotonic()} {word}\\n")
    note("start")
    while True:
        try:
            note("asks")
            lease = shoal.connect(memory="20MiB", transport=sys.argv[2])
            note(f"lease {lease.epoch}")
            x = torch.zeros(100, device="shoal")
            for i in range(1, 5000):
                if x.add_(1).sum().item() != 100 * i:
                    note("wrong")
                if i % 20 == 0:
                    note("alive")
                    time.sleep(0.02)  # leaves the machine to those who recover
        except (shoal.DeviceLostError, shoal.LeaseError) as error:
            note(f"named {type(error).__name__}")
            time.sleep(0.05)
        except BaseException as error:
            note(f"unnamed {type(error).__name__} {error}")
            raise
        finally:
            if leases.current() is not None:
                leases.current().close()
"""


class Busy:
    """A client that works, loses its lease, asks for another, and writes down what happens."""

    def __init__(self, pool: StandingPool, log: Path, member: tls.Identity | None) -> None:
        """Over the network with the identity of `member`; without one, by shared memory."""
        self.log = log
        where = {"SHOAL_POOL": pool.url}
        if member is not None:
            where = {"SHOAL_POOL": pool.network_url, "SHOAL_IDENTITY": str(member.path)}
        transport = "auto" if member is None else "network"
        self.program = programs.start(CLIENT, str(log), transport, **where)

    def lines(self) -> list[list[str]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [line.split(maxsplit=2) for line in text.splitlines() if len(line.split()) > 1]

    def served(self) -> int:
        """How often it got on with its work so far."""
        return sum(line[1] == "alive" for line in self.lines())

    def longest_s(self, *, asking: bool) -> float:
        """The longest time between two words: while it asked for a lease, or while it had one."""
        pairs = itertools.pairwise(line for line in self.lines())
        gaps = [float(b[0]) - float(a[0]) for a, b in pairs if (a[1] == "asks") == asking]
        return max(gaps, default=0.0)

    def epochs(self) -> list[str]:
        return [line[2] for line in self.lines() if line[1] == "lease"]

    def stop(self) -> None:
        self.program.kill()
        self.program.communicate()


def choose_victims(pool: StandingPool, dice: random.Random) -> list[int]:
    kind = dice.choice(["head", "head", "agent", "server", "worker", "worker", "head and agent"])
    if kind in ("server", "worker"):
        wait_until(lambda: bool(pool.server_pids()), BACK_S, "the agent has started a server")
        servers = pool.server_pids()
        workers = [w for s in servers for w in processes.forked(s)]
        return [dice.choice(servers if kind == "server" or not workers else workers)]
    return [pool.head_pid] * ("head" in kind) + [pool.agent_pid] * ("agent" in kind)


def check_ledger(pool: StandingPool) -> None:
    """No device is leased twice: not in the head's table, not among its servers' workers."""
    found = pool.status()
    for device in found.devices:
        granted = sum(s.granted_bytes for s in found.sessions if s.device == device.number)
        assert granted <= device.memory_bytes
    parts = [s.part for s in found.sessions]
    assert len(parts) == len(set(parts))
    assert len({s.session for s in found.sessions}) == len({s.lease for s in found.sessions})
    for server in pool.server_pids():
        assert len([w for w in processes.forked(server) if processes.alive(w)]) * 20 <= 64


@dataclass(frozen=True)
class Storm:
    """What a storm showed."""

    leases: int
    back_s: list[float]  # of each round: until head, agent and devices were all there again
    answer_s: float  # the longest that a client with a lease waited for a result or a named error
    asking_s: float  # the longest that a client waited for a lease, or its refusal

    def __str__(self) -> str:
        back = sorted(self.back_s)
        median, most, worst = statistics.median(back), back[len(back) * 9 // 10], back[-1]
        return (
            f"{len(back)} rounds, {self.leases} leases; whole again after {median:.2f} s (median), "
            f"{most:.2f} s (9 of 10), {worst:.2f} s (worst); a client with a lease waited at most "
            f"{self.answer_s:.2f} s, one that asked for one {self.asking_s:.2f} s"
        )


def storm(pool: StandingPool, directory: Path, rounds: int, seed: int) -> Storm:
    """Kills at random while two clients work over the network and one by shared memory."""
    dice = random.Random(seed)
    pool.until_whole(2, BACK_S)
    member = pool.join(f"storm-{seed}")
    kinds = [member, member, None]
    clients = [Busy(pool, directory / f"client-{i}", kind) for i, kind in enumerate(kinds)]
    back_s = []
    try:
        for client in clients:
            wait_until(lambda c=client: c.served() > 0, 60, "each client works")  # type: ignore[misc]
        for number in range(rounds):
            before = [client.served() for client in clients]
            for pid in choose_victims(pool, dice):
                os.kill(pid, signal.SIGKILL)
            back_s.append(pool.until_whole(2, BACK_S))
            for client, was in zip(clients, before, strict=True):
                wait_until(
                    lambda c=client, w=was: c.served() > w,  # type: ignore[misc]
                    BACK_S,
                    f"each client goes on after round {number} of seed {seed}",
                )
            check_ledger(pool)
    finally:
        for client in clients:
            client.stop()
    for client in clients:
        words = {line[1] for line in client.lines()}
        assert words <= {"start", "asks", "lease", "alive", "named"}, client.lines()[-20:]
    epochs = [epoch for client in clients for epoch in client.epochs()]
    assert len(epochs) == len(set(epochs)), "two clients were told that they have the same lease"
    wait_until(lambda: not pool.status().sessions, BACK_S, "all leases have ended")
    answer_s, asking_s = (max(c.longest_s(asking=a) for c in clients) for a in (False, True))
    return Storm(len(epochs), back_s, answer_s, asking_s)


def test_random_kills(mortal: StandingPool, tmp_path: Path) -> None:
    print(storm(mortal, tmp_path, rounds=2, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_random_kills(mortal: StandingPool, tmp_path: Path) -> None:
    """`ROUNDS` sets another number."""
    rounds = int(os.environ.get("ROUNDS", "100"))
    seed = random.SystemRandom().randrange(10**6)
    found = storm(mortal, tmp_path, rounds, seed)
    print(f"seed {seed}: {found}")
    assert found.answer_s < 5 + BACK_S  # it is printed; a busy machine cannot be held to 5 s
