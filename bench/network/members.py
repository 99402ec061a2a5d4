"""What a head's members cost it over real TLS: beats of simulated agents and clients, and a restart.

python -m bench.network.members --agents 125 --clients 500 --seconds 600

Agents offer devices that do not exist and take every grant; clients hold a lease of one device and
compute nothing. All run in one process behind one address. The head is the real one, below `shoal up`.
In the end it is killed, and the figures say how long the last one took to be back and who lost a lease.
Exit code 1 if a beat was answered after more than 4 s (a node or head counts as lost), or a lease is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.support.standing import StandingPool

import shoal
from shoal.errors import ProtocolError
from shoal.pool.access import certificates
from shoal.pool.base import limits
from shoal.pool.client.head_connection import Connection
from shoal.pool.wire import messages, node_messages, tls
from shoal.pool.wire.channel import Channel, connect_to_head

GiB = 2**30
DEVICES_PER_NODE = 8


class Member:
    """Connects again whenever its connection ends, as agents and clients do."""

    def __init__(self, url: str, identity: tls.Identity) -> None:
        self.url, self.context = url, tls.client_context(identity)
        self.connected = asyncio.Event()
        self.worst_beat_s = 0.0
        self.attempts = 0
        self._sent = 0.0

    async def run(self) -> None:
        while True:
            self.attempts += 1
            try:
                channel = await connect_to_head(self.url, self.context)
            except (OSError, TimeoutError, ProtocolError):
                await asyncio.sleep(limits.RETRY_S)
                continue
            beats: asyncio.Task[None] | None = None
            try:
                await self.begin(channel)
                self.connected.set()
                beats = asyncio.ensure_future(self.beat(channel))
                while True:
                    self.hear(channel, await self.next(channel))
            except (ProtocolError, OSError):
                self._sent = 0.0
                self.connected.clear()
            finally:
                if beats is not None:
                    beats.cancel()
                channel.abort()
            await asyncio.sleep(limits.RETRY_S)

    async def beat(self, channel: Channel) -> None:
        while True:
            self._sent = time.monotonic()
            channel.send(messages.Beat())
            await asyncio.sleep(limits.BEAT_S)

    def hear(self, channel: Channel, message: object) -> None:
        if isinstance(message, messages.Beat) and self._sent:
            self.worst_beat_s = max(self.worst_beat_s, time.monotonic() - self._sent)

    async def begin(self, channel: Channel) -> None:
        raise NotImplementedError

    async def next(self, channel: Channel) -> object:
        raise NotImplementedError


class Agent(Member):
    def __init__(self, url: str, identity: tls.Identity) -> None:
        super().__init__(url, identity)
        self.name = identity.name
        self.held: dict[tuple[int, int], node_messages.Grant] = {}

    async def begin(self, channel: Channel) -> None:
        devices = [
            node_messages.NodeDevice(
                i, f"gpu/{i}", "cuda", "a100", 80 * GiB, 1.0, 1, "@bench", 7434 + i
            )
            for i in range(DEVICES_PER_NODE)
        ]  # fmt: skip
        held = [
            node_messages.HeldSession(i, s, g.lease, g.epoch) for (i, s), g in self.held.items()
        ]
        channel.send(
            node_messages.NodeHello(
                self.name, f"machine-{self.name}", shoal.__version__, time.time(), False,
                [d.name for d in devices], devices, held,
            )
        )  # fmt: skip

    async def next(self, channel: Channel) -> object:
        return await channel.receive(node_messages.FROM_HEAD, limits.SILENCE_S)

    def hear(self, channel: Channel, message: object) -> None:
        super().hear(channel, message)
        if isinstance(message, node_messages.NodeGrant):
            grant = message.grant
            self.held[message.index, grant.session] = grant
            channel.send(node_messages.NodeGranted(message.index, grant.session, grant.epoch))
        elif isinstance(message, node_messages.NodeRevoke):
            self.held.pop((message.index, message.session), None)


class Client(Member):
    lease: messages.Lease | None = None
    lost = ""

    async def begin(self, channel: Channel) -> None:
        if self.lease is None:
            channel.send(messages.AskLease(1, GiB, [], program="bench"))
        else:
            channel.send(messages.Resume(self.lease.lease, self.lease.epoch, self.lease.secret))
        answer = await self.next(channel)
        if isinstance(answer, messages.Lease):
            self.lease = answer
        elif not isinstance(answer, messages.Resumed) or answer.ended:
            self.lost = self.lost or str(answer)

    async def next(self, channel: Channel) -> object:
        return await channel.receive(messages.FROM_HEAD, limits.SILENCE_S)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def enrol(pool: StandingPool, folder: Path, count: int) -> list[tls.Identity]:
    """Return identities of nodes, as an engine gets them."""
    found = []
    with Connection(pool.url, limits.COMMAND_ANSWER_S) as owner:
        for number in range(count):
            key = certificates.new_key()
            asked = messages.EnrolNode(f"node-{number}", certificates.request_pem(key))
            answer = owner.ask(asked, limits.COMMAND_ANSWER_S)
            assert isinstance(answer, messages.NodeEnrolled), answer
            found.append(
                tls.Identity(
                    folder / f"{number}.pem", answer.name, "node", pool.network_url,
                    certificates.key_pem(key), answer.certificate, answer.authority,
                )
            )  # fmt: skip
            found[-1].save()
    return found


async def measure(
    pool: StandingPool, options: argparse.Namespace, folder: Path
) -> dict[str, object]:
    agents = [Agent(pool.network_url, i) for i in enrol(pool, folder, options.agents)]
    ana = pool.join("ana")
    clients = [Client(pool.network_url, ana) for _ in range(options.clients)]
    tasks = [asyncio.ensure_future(agent.run()) for agent in agents]
    await asyncio.gather(*(agent.connected.wait() for agent in agents))
    begin = time.monotonic()
    for client in clients:
        tasks.append(asyncio.ensure_future(client.run()))
        await asyncio.sleep(0.005)
    await asyncio.gather(*(client.connected.wait() for client in clients))
    found: dict[str, object] = {"agents": len(agents), "clients": len(clients)}
    found["asked_s"] = round(time.monotonic() - begin, 1)
    members: list[Member] = [*agents, *clients]
    for member in members:
        member.worst_beat_s, member.attempts = 0.0, 0
    head = await asyncio.to_thread(lambda: pool.head_pid)
    begin, cpu = time.monotonic(), cpu_s(head)
    await asyncio.sleep(options.seconds)
    found["seconds"] = round(time.monotonic() - begin, 1)
    found["head_cpu_share"] = round((cpu_s(head) - cpu) / (time.monotonic() - begin), 3)
    found["head_mib"] = round(_resident_mib(head), 1)
    found["worst_beat_s"] = round(max(m.worst_beat_s for m in members), 3)
    found["connections_lost"] = sum(m.attempts for m in members)
    for member in members:
        member.attempts = 0
        member.connected.clear()
    begin = time.monotonic()
    os.kill(head, signal.SIGKILL)
    await asyncio.gather(*(member.connected.wait() for member in members))
    found["all_back_s"] = round(time.monotonic() - begin, 1)
    found["attempts"] = sum(m.attempts for m in members)
    await asyncio.sleep(limits.RESUME_S)
    found["leases_lost"] = sum(bool(c.lost) for c in clients)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


def _resident_mib(pid: int) -> float:
    return (
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=125)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with StandingPool(Path(folder), "cpu,memory=16MiB,threads=1", listen=True) as pool:
            found = asyncio.run(measure(pool, options, Path(folder)))
    print(json.dumps(found), flush=True)
    late = float(str(found["worst_beat_s"])) > limits.SILENCE_S
    return 1 if late or found["leases_lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
