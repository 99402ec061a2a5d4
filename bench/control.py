"""What a head costs with thousands of devices, without a network: nodes and clients are simulated.

python -m bench.control --devices 1000 4000
python -m bench.control --devices 1000 --beside ../other/.venv/bin/python --json control.json

The head is the real one, with its state in a file. Its channels are queues in the same process, so the
CPU time of its event loop has no TLS and no sockets in it, and the simulated peers' share is. Writing
the state is the work of another thread and not counted. A decision is admission, placement and booking:
a grant without its messages. `--beside` runs another checkout in turn. How late a beat is heard is
measured as the longest turn of the loop, in CPU time: so a machine that is busy does not count.
Exit code 1 if this build is over a limit: 0.2 ms for a decision, 20 ms for a status, 100 ms for a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import shoal
from shoal.pool.base import limits
from shoal.pool.base.clock import Clock
from shoal.pool.head.head import Head
from shoal.pool.head.placement import Request
from shoal.pool.head.store import Store
from shoal.pool.wire import admission_messages, frames, messages, node_messages
from shoal.tasks.requests import Ask
from shoal.tasks.room import Needs

GiB = 2**30
DEVICES_PER_NODE = 8
KINDS = ("a100", "h100", "l40s", "t4")
DECISION_MS_MAX, STATUS_MS_MAX, LATE_MS_MAX = 0.2, 20.0, 100.0
DEADLINE_S = 300.0


class Peer:
    """A channel whose other end is a queue."""

    is_local = True
    peer = None
    peer_pid = 0
    address = ""
    frame_bytes_max = 0

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: asyncio.Queue[Any] = asyncio.Queue()

    async def receive(self, kinds: object, timeout_s: float | None) -> Any:
        return await self.incoming.get()

    def send(self, message: Any) -> None:
        self.sent.put_nowait(message)

    def abort(self) -> None:
        pass

    hang_up = abort

    async def ask(self, message: Any) -> Any:
        """Send a message to the head and return its answer."""
        self.incoming.put_nowait(message)
        return await self.answer()

    async def answer(self) -> Any:
        """Return the next answer; what a waiting client is shown is none."""
        while True:
            message = await asyncio.wait_for(self.sent.get(), DEADLINE_S)
            if not isinstance(message, admission_messages.Waiting):
                return message


class Agent(Peer):
    """A node whose device servers take every grant at once."""

    def send(self, message: Any) -> None:
        if isinstance(message, node_messages.NodeGrant):
            grant = message.grant
            taken = node_messages.NodeGranted(message.index, grant.session, grant.epoch)
            self.incoming.put_nowait(taken)


def hello(node: int) -> node_messages.NodeHello:
    kind = KINDS[node % len(KINDS)]
    devices = [
        node_messages.NodeDevice(
            index, f"{kind}-{node}-{index}", "cuda", kind, 80 * GiB, 1.0, 1, "@bench", 7434 + index
        )
        for index in range(DEVICES_PER_NODE)
    ]  # fmt: skip
    return node_messages.NodeHello(
        f"node{node}", f"machine{node}", shoal.__version__, time.time(), False,
        [d.name for d in devices], devices, [],
    )  # fmt: skip


def memory_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this process has no VmRSS")


class Pool:
    """A head with simulated nodes and clients."""

    def __init__(self, folder: Path, devices: int) -> None:
        self.devices = devices
        # Deadlines run in CPU time: a machine that is busy with something else makes nobody late.
        clock = Clock(monotonic=lambda: 1000.0 + time.thread_time())
        limits.GRANT_S = DEADLINE_S
        self.head = Head("bench", Store(folder / "pool.db"), standing=True, clock=clock)
        self.serving: list[asyncio.Task[None]] = []
        self.clients: list[Peer] = []
        self.late_s = 0.0  # the longest turn: a beat that comes meanwhile waits so long

    def open(self, peer: Peer) -> None:
        serve: Callable[[Any], Awaitable[None]] = self.head.serve_local
        self.serving.append(asyncio.ensure_future(serve(peer)))

    def watch_turns(self, loop: asyncio.AbstractEventLoop) -> None:
        turn: Callable[[], None] = loop._run_once  # type: ignore[attr-defined]

        def timed() -> None:
            start = time.thread_time()
            turn()
            self.late_s = max(self.late_s, time.thread_time() - start)

        loop._run_once = timed  # type: ignore[attr-defined]

    async def start(self) -> None:
        self.watch_turns(asyncio.get_running_loop())
        self.serving.append(asyncio.ensure_future(self.head.watch()))
        for number in range(self.devices // DEVICES_PER_NODE):
            agent = Agent()
            agent.incoming.put_nowait(hello(number))
            self.open(agent)
        while len(self.head.table.devices) < self.devices:
            await asyncio.sleep(0.01)
        self.serving.append(asyncio.ensure_future(self._keep_alive()))

    async def _keep_alive(self) -> None:
        while True:
            now = self.head.clock.monotonic()
            for node in self.head.nodes.nodes.values():
                node.heard = now
            await asyncio.sleep(0.5)

    def client(self) -> Peer:
        peer = Peer()
        self.open(peer)
        self.clients.append(peer)
        return peer

    def lend(self, number: int, memory_bytes: int) -> int:
        """Give out a lease of one device, without messages and store. Return its number."""
        booked: list[int] = []

        def book(devices: tuple[int, ...]) -> dict[int, int]:
            request = Request(1, memory_bytes, client="bench", only=frozenset(devices))
            granted = self.head.table.grant(request)
            booked.append(granted.lease)
            return {share.device: share.memory_bytes for share in granted.shares}

        ask = Ask(f"bench-{number}-{memory_bytes}", "bench", Needs(1, memory_bytes))
        self.head.admitting.add(ask, book, lambda: None)
        self.head.admitting.holds_lease(ask.request, booked[0])
        return booked[0]

    def worst_late_ms(self) -> float:
        late, self.late_s = self.late_s, 0.0
        return round(1000 * late, 1)


async def cpu_ms(act: Callable[[], Awaitable[None]]) -> float:
    """Return the CPU time of the loop's thread while `act` runs."""
    start = time.thread_time()
    await act()
    return 1000 * (time.thread_time() - start)


async def grants(pool: Pool, count: int, devices: int = 1) -> float:
    """Return the CPU of a grant and its end, one after the other."""
    peers = [pool.client() for _ in range(count)]
    for peer in peers:
        await peer.ask(messages.Beat())  # it is connected

    async def act() -> None:
        for peer in peers:
            answer = await peer.ask(messages.AskLease(devices, GiB, [], program="bench"))
            assert isinstance(answer, messages.Lease), answer

    each = await cpu_ms(act) / count
    for peer in peers:
        await peer.ask(messages.Release())
    return each


async def decisions(pool: Pool, count: int) -> float:
    """Return the CPU of admission and lease table for a grant, without tasks, messages and store."""
    leases: list[int] = []

    async def act() -> None:
        for number in range(count):
            leases.append(pool.lend(number, GiB))

    each = await cpu_ms(act) / count
    for lease in leases:
        pool.head.table.release(lease)
    pool.head.admitting.changed()
    return each


async def status(pool: Pool) -> tuple[float, int]:
    """Return the CPU of a status after changes, and its bytes."""
    found = []
    for _ in range(5):
        await grants(pool, 5)
        start = time.thread_time()
        made = pool.head.status()
        if inspect.isawaitable(made):
            made = await made
        encoded = frames.encode(made)
        found.append(1000 * (time.thread_time() - start))
    return sorted(found)[2], len(encoded)


async def refusal(pool: Pool) -> float:
    peer = pool.client()

    async def act() -> None:
        for _ in range(10):
            answer = await peer.ask(messages.AskLease(1, 81 * GiB, [], program="bench"))
            assert not isinstance(answer, messages.Lease)

    return await cpu_ms(act) / 10


async def waiting(pool: Pool, count: int) -> dict[str, float]:
    """Requests of ten shapes wait for devices that are all taken. Then some leases end."""
    holders: list[Peer] = []
    free = {n for n in pool.head.table.devices if pool.head.table.free_bytes(n) > 0}
    for _ in free:
        peer = pool.client()
        answer = await peer.ask(messages.AskLease(1, None, [], program="bench"))
        assert isinstance(answer, messages.Lease), answer
        holders.append(peer)
    before_bytes = memory_bytes()
    pool.worst_late_ms()
    peers = [pool.client() for _ in range(count)]

    async def ask() -> None:
        for place, peer in enumerate(peers):
            kind = KINDS[place % 4] if place % 10 < 8 else None
            size = (40 + place % 10) * GiB
            peer.incoming.put_nowait(
                messages.AskLease(1, size, [], kind=kind, program="bench", wait=True)
            )
        for peer in peers:  # each is told why it waits
            await asyncio.wait_for(peer.sent.get(), DEADLINE_S)

    ask_ms = await cpu_ms(ask) / count
    each_bytes = (memory_bytes() - before_bytes) / count
    ask_late_ms = pool.worst_late_ms()
    turns = min(100, len(holders))

    async def take_turns() -> None:
        before = pool.head.granting.counts["leases_granted"]
        for number, peer in enumerate(holders[:turns]):
            await peer.ask(messages.Release())
            async with asyncio.timeout(DEADLINE_S):
                while pool.head.granting.counts["leases_granted"] <= before + number:
                    await asyncio.sleep(0.002)

    turn_ms = await cpu_ms(take_turns) / turns
    return {
        "waiting": count,
        "request_ms": round(ask_ms, 3),
        "request_bytes": round(each_bytes),
        "asking_late_ms": ask_late_ms,
        "turn_ms": round(turn_ms, 3),
        "turn_late_ms": pool.worst_late_ms(),
    }


async def measure(devices: int, waiting_count: int, folder: Path) -> dict[str, float]:
    pool = Pool(folder, devices)
    began, start_bytes = time.monotonic(), memory_bytes()
    await pool.start()
    hello_s = time.monotonic() - began
    found: dict[str, float] = {"devices": devices, "leases": 2 * devices}
    found["hello_ms_per_node"] = round(1000 * hello_s * DEVICES_PER_NODE / devices, 2)
    for number in range(2 * devices):
        pool.lend(number, 8 * GiB)
    await asyncio.sleep(0.01)  # that was one turn
    found["memory_mib"] = round((memory_bytes() - start_bytes) / 2**20, 1)
    pool.worst_late_ms()
    found["decision_ms"] = round(await decisions(pool, 100), 4)
    found["grant_ms"] = round(await grants(pool, 200), 4)
    found["grant_of_4_ms"] = round(await grants(pool, 50, 4), 4)
    found["grant_late_ms"] = pool.worst_late_ms()
    status_ms, status_bytes = await status(pool)
    found["status_ms"], found["status_bytes"] = round(status_ms, 2), status_bytes
    found["refusal_ms"] = round(await refusal(pool), 2)
    found["status_late_ms"] = pool.worst_late_ms()
    if waiting_count:
        found |= await waiting(pool, waiting_count)
    for task in pool.serving:
        task.cancel()
    await asyncio.gather(*pool.serving, return_exceptions=True)
    return found


def run_one(devices: int, waiting_count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(measure(devices, waiting_count, Path(folder)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--beside", help="python of another checkout")
    parser.add_argument("--beside-waiting", type=int, default=0, help="requests that wait there")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run_one(options.one, options.waiting)))
        return 0
    rows: list[dict[str, Any]] = []
    pythons = [("this", sys.executable, options.waiting)]
    if options.beside:
        pythons.insert(0, ("beside", options.beside, options.beside_waiting))
    for devices in options.devices:
        for name, python, count in pythons:
            command = [
                python,
                "-m",
                "bench.control",
                "--one",
                str(devices),
                "--waiting",
                str(count),
            ]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append({"build": name, **json.loads(output)})
            print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    mine = [row for row in rows if row["build"] == "this"]
    late = ("grant_late_ms", "status_late_ms", "asking_late_ms", "turn_late_ms")
    over = any(
        row["decision_ms"] > DECISION_MS_MAX
        or row["status_ms"] > STATUS_MS_MAX
        or max(row.get(name, 0.0) for name in late) > LATE_MS_MAX
        for row in mine
    )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
