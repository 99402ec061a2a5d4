"""Whether anything leaks: `python -m bench.leaks --minutes 10`. Exit code 1 if something does.

Three parts, each with the descriptors, threads and private memory of the program and of every process
of its pool:

- leases: one program leases a device 2,000 times: from a pool of its own, from a standing pool, and
  from a standing pool over the network.
- files: a program with 1,100 other open files keeps its lease. select() counts to 1024.
- churn: 10,000 live tensors, of which all are replaced again and again for some minutes.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import torch
from tests.support import holdings, processes
from tests.support.holdings import Holdings
from tests.support.standing import StandingPool

import shoal
from shoal import _core

DEVICE = "cpu,memory=256MiB,threads=1"
PARTS = ("leases", "files", "churn")
WAYS = ("embedded", "standing", "network")
MIB = 2**20
# What allocators may keep beyond what they had after the first tenth. A leak of 5 KiB for each of 1,800
# leases is over it.
MEMORY_BYTES_MAX = 8 * MIB
# A worker touches its device's pages ahead of their use, in steps of 8 MiB: two of them.
ARENA_BYTES_MAX = 16 * MIB
OTHER_FILES = 1100
SETTLED_S = 30.0  # until the processes of a session must have ended
KEEP_S = 15.0  # a head takes a silent client's lease back after 10 s
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """A pool, and how a program reaches it."""

    way: str
    url: str
    root: Callable[[], int]  # the process of which all others of the pool descend

    @property
    def transport(self) -> Literal["auto", "network"]:
        return "network" if self.way == "network" else "auto"

    def lasting(self) -> list[int]:
        """Return the pool's processes, but not those of its sessions."""
        workers = set(self.workers())
        return [p for p in self._all() if p not in workers]

    def workers(self) -> list[int]:
        """Return the processes of the pool's sessions."""
        # A forked child has the command line of its device server.
        alike = {p for p in self._all() if "shoal.pool.node.device_server" in processes.command(p)}
        servers = [p for p in alike if processes.parent(p) not in alike]
        return [worker for server in servers for worker in processes.forked(server)]

    def _all(self) -> list[int]:
        return [self.root(), *processes.descendants(self.root())]


@dataclass(frozen=True)
class Look:
    """What the program and its pool hold at one moment."""

    client: Holdings
    pool: Holdings
    shared_files: int

    @classmethod
    def now(cls, place: Place) -> Look:
        return cls(
            holdings.of(os.getpid()),
            holdings.of_all(place.lasting()),
            len(_shared_files()),
        )

    def counts(self) -> tuple[int, ...]:
        client, pool = self.client, self.pool
        return (client.descriptors, client.threads, pool.descriptors, pool.threads)

    def growth_since(self, before: Look) -> list[str]:
        parts = (("client", self.client, before.client), ("pool", self.pool, before.pool))
        found = [
            f"{name}: {text}"
            for name, now, then in parts
            for text in now.growth_since(then, MEMORY_BYTES_MAX)
        ]
        if self.shared_files > before.shared_files:
            found.append(f"/dev/shm: {self.shared_files - before.shared_files} file(s) more")
        return found

    def __str__(self) -> str:
        return f"client {self.client}; pool {self.pool}; {self.shared_files} in /dev/shm"


@contextlib.contextmanager
def place(way: str) -> Iterator[Place]:
    """A pool with one device, reached in one of the three ways."""
    if way == "embedded":
        with shoal.up([DEVICE]) as pool:
            yield Place(way, pool.url, lambda: processes.head_pid(pool.url))
        return
    with tempfile.TemporaryDirectory() as directory:
        with StandingPool(Path(directory), DEVICE, listen=way == "network") as standing:
            if way == "network":
                os.environ["SHOAL_IDENTITY"] = str(standing.join("leaks").path)
            url = standing.network_url if way == "network" else standing.url
            yield Place(way, url, lambda: standing.process.pid)


def _shared_files() -> list[str]:
    """Return what this program or Shoal has in /dev/shm: other programs come and go there too."""
    ours = ("shoal", str(os.getpid()))
    return [name for name in os.listdir("/dev/shm") if any(word in name for word in ours)]


def use() -> None:
    x = torch.ones(1000, device="shoal")
    y = torch.randn(100_000).to("shoal")  # large enough for a lane
    assert float((x.sum() + y.cpu()[0] * 0).item()) == 1000


# --- leases --------------------------------


def leases(where: Place, count: int, tell: Tell) -> list[str]:
    """Lease and give back `count` times. Return what leaks.

    What grows after the first tenth may be a descriptor that is closed late, or a cache. So if
    something grew, as many leases follow once more: what leaks grows again.
    """
    warm = min(max(20, count // 10), count // 2)
    begin = time.monotonic()
    done = _lease(where, 0, warm, tell)
    before = settled(where)
    tell(f"{where.way}: {done} leases: {before}")
    grown: list[str] = []
    for more in (count - warm, count):
        done = _lease(where, done, more, tell)
        after = settled(where, since=before)
        tell(f"{where.way}: {done} leases in {time.monotonic() - begin:.0f} s: {after}")
        grown = after.growth_since(before)
        if not grown:
            break
        tell(f"{where.way}: {', '.join(grown)}; the client has {holdings.files(os.getpid())}")
        before = after
    return [f"{where.way}: {text}" for text in grown]


def _lease(where: Place, done: int, more: int, tell: Tell) -> int:
    """Lease `more` times, and say four times what is held. Return how often it was leased now."""
    for number in range(done + 1, done + more + 1):
        with shoal.connect(where.url, memory="32MiB", transport=where.transport):
            use()
        if number % max(1, more // 4) == 0 and number < done + more:
            tell(f"{where.way}: {number} leases: {Look.now(where)}")
    return done + more


def settled(where: Place, since: Look | None = None) -> Look:
    """Return a look after the last session has left, and nothing changes any more.

    Its processes and threads end a moment later, and on a busy machine the moment is long. So with
    `since` it waits until nothing has grown since then: what leaks never goes. The program lets go of a
    session's last blocks when it next allocates pinned memory.
    """
    look, deadline = Look.now(where), time.monotonic() + SETTLED_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
        torch.empty(8).pin_memory()
        now = Look.now(where)
        quiet = not where.workers() and now.counts() == look.counts()
        if quiet and not (since and now.growth_since(since)):
            return now
        look = now
    return look


# --- files --------------------------------


def files(where: Place, tell: Tell, keep_s: float = KEEP_S) -> list[str]:
    """Opens many files, then leases. Returns what went wrong."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OTHER_FILES + 200:
        return [f"only {hard} descriptors are allowed here: ulimit -Hn"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, OTHER_FILES + 200), hard))
    with contextlib.ExitStack() as opened:
        for _ in range(OTHER_FILES):
            opened.enter_context(open(os.devnull))
        lease = opened.enter_context(
            shoal.connect(where.url, memory="32MiB", transport=where.transport)
        )
        begin = time.monotonic()
        try:
            while time.monotonic() - begin < keep_s:
                use()
                time.sleep(0.1)
        except shoal.DeviceLostError as error:
            after_s = time.monotonic() - begin
            return [f"{where.way}: {OTHER_FILES} files: lost after {after_s:.1f} s: {error}"]
        tell(f"{where.way}: {OTHER_FILES} files: lease kept for {keep_s:g} s")
        keepers = [t for t in threading.enumerate() if t.name == "shoal-lease"]
        if where.way != "embedded" and not keepers:
            return [f"{where.way}: {OTHER_FILES} files: the thread that keeps the lease has ended"]
        return [f"{where.way}: {lease.end_reason}"] if lease.end_reason else []


# --- churn --------------------------------


@dataclass(frozen=True)
class Churned:
    """What program, pool and worker hold at one moment of the churn."""

    look: Look
    worker: Holdings
    arena_bytes: int  # of the worker's memory: touched pages of the device's own

    @classmethod
    def now(cls, where: Place, worker: int) -> Churned:
        arena_bytes = int(_core.worker_stats(0)["reserved_bytes"])
        return cls(Look.now(where), holdings.of(worker), arena_bytes)

    def growth_since(self, before: Churned) -> list[str]:
        arena_grown = self.arena_bytes - before.arena_bytes
        beside = MEMORY_BYTES_MAX + max(0, arena_grown)
        found = [f"worker: {t}" for t in self.worker.growth_since(before.worker, beside)]
        if arena_grown > ARENA_BYTES_MAX:
            found.append(f"worker: the device's pages grew by {arena_grown / MIB:.1f} MiB")
        return [*self.look.growth_since(before.look), *found]

    def __str__(self) -> str:
        return f"{self.look}; worker {self.worker}, {self.arena_bytes / MIB:.0f} MiB of it the device's"


def churn(where: Place, count: int, minutes: float, tell: Tell) -> list[str]:
    """Replace `count` live tensors over and over. Return what leaks.

    It goes on for `minutes`, and until each was replaced four times on average: on a loaded machine
    that takes longer. If something grew after the first tenth, it goes on for as long again.
    """
    with shoal.connect(where.url, memory="200MiB", transport=where.transport) as lease:
        churning = Churning(where, count, lease.worker_pids[0], tell)
        churning.go_on(minutes * 6, 2 * count)
        before = churning.look()
        grown: list[str] = []
        for seconds in (minutes * 54, minutes * 60):
            churning.go_on(seconds, 2 * count)
            after = churning.look()
            grown = after.growth_since(before)
            if not grown:
                break
            tell(f"churn: {', '.join(grown)}; the client has {holdings.files(os.getpid())}")
            before = after
        return grown


class Churning:
    """Tensors of different sizes, of which a random tenth is replaced at a time."""

    def __init__(self, where: Place, count: int, worker: int, tell: Tell) -> None:
        self._where, self._worker, self._tell = where, worker, tell
        self._dice = random.Random(1)
        self._live = [self._tensor() for _ in range(count)]
        self._replaced = 0
        self._begin = time.monotonic()

    def _tensor(self) -> torch.Tensor:
        return torch.full((self._dice.randrange(1, 2000),), 1.0, device="shoal")

    def go_on(self, seconds: float, replacements: int) -> None:
        """Replace tensors for at least so long, and at least so many. Say four times what is held."""
        begin, enough = time.monotonic(), self._replaced + replacements
        end, report = begin + seconds, begin + seconds / 4
        while (now := time.monotonic()) < end or self._replaced < enough:
            self._replace_a_tenth()
            if report <= now < end:
                report += seconds / 4
                self.look()

    def _replace_a_tenth(self) -> None:
        live, dice = self._live, self._dice
        for _ in range(len(live) // 10):
            index = dice.randrange(len(live))
            live[index] = live[index] + 1 if self._replaced % 2 else self._tensor()
            self._replaced += 1
        assert live[dice.randrange(len(live))].min().item() >= 1  # waits, as programs do

    def look(self) -> Churned:
        """Return what is held now, and say it."""
        now = Churned.now(self._where, self._worker)
        rate = self._replaced / (time.monotonic() - self._begin)
        self._tell(f"churn: {self._replaced} replaced, {rate:.0f}/s: {now}")
        return now


@click.command()
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="Part to run. Default: all.")
@click.option("--way", "ways", type=click.Choice(WAYS), multiple=True, help="Default: all.")
@click.option("--leases", "count", default=2000, show_default=True)
@click.option("--tensors", default=10_000, show_default=True)
@click.option("--minutes", default=10.0, show_default=True, help="Length of the churn.")
def main(
    only: tuple[str, ...], ways: tuple[str, ...], count: int, tensors: int, minutes: float
) -> None:
    """Check that descriptors, threads and memory stay flat."""
    found: list[str] = []
    begin = time.monotonic()

    def tell(text: str) -> None:
        click.echo(f"{time.monotonic() - begin:6.0f} s  {text}")

    for part in only or PARTS:
        for way in ways or (WAYS if part != "churn" else ("standing",)):
            with place(way) as where:
                if part == "leases":
                    found += leases(where, count, tell)
                elif part == "files":
                    found += files(where, tell)
                else:
                    found += churn(where, tensors, minutes, tell)
    for text in found:
        click.echo(f"LEAK  {text}", err=True)
    click.echo("nothing leaks" if not found else f"{len(found)} leak(s)")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
