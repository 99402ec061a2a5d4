"""Requests that wait: how many a head takes and grants, what they cost, and whether beats are late.

python -m bench.waiting --waiting 1000

Starts a pool on this machine. Prints one line for each figure, and exits with 1 if a request is lost
or waits without a reason, or a heartbeat is later than --late-ms.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.support.standing import StandingPool

from shoal.pool.client.head_connection import Connection
from shoal.pool.wire import admission_messages, messages

MiB = 2**20
DEADLINE_S = 300.0


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmRSS")


class Beats(threading.Thread):
    """Asks the head for its beat a hundred times a second, and notes how late each answer is."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.late_s: list[float] = []
        self.ended = threading.Event()
        self._url = url

    def run(self) -> None:
        with Connection(self._url) as connection:
            while not self.ended.wait(0.01):
                start = time.monotonic()
                connection.send(messages.Beat())
                connection.receive(DEADLINE_S)
                self.late_s.append(time.monotonic() - start)


class Waiting:
    """Clients that wait for the whole of one device."""

    def __init__(self, url: str, count: int) -> None:
        self.connections = [Connection(url) for _ in range(count)]
        self.reasons = 0

    def ask(self) -> float:
        """Ask for all. Return the seconds until each has been told why it waits."""
        start = time.monotonic()
        for connection in self.connections:
            connection.send(messages.AskLease(1, 60 * MiB, [], program="bench", wait=True))
        for connection in self.connections:
            message = connection.receive(DEADLINE_S)
            if isinstance(message, admission_messages.Waiting) and message.why.reasons:
                self.reasons += 1
        return time.monotonic() - start

    def take_turns(self, count: int) -> tuple[int, float]:
        """Let `count` of them have the device, one after the other. Return how many did."""
        start, granted = time.monotonic(), 0
        for connection in self.connections[:count]:
            while isinstance(message := connection.receive(DEADLINE_S), admission_messages.Waiting):
                pass
            granted += isinstance(message, messages.Lease)
            connection.send(messages.Release())
        return granted, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, default=1000, help="requests that wait")
    parser.add_argument("--grants", type=int, default=200, help="of them, those that are granted")
    parser.add_argument("--rule", default="first-come")
    parser.add_argument("--late-ms", type=float, default=100.0, help="a beat may be this late")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rule = ("--rule", options.rule)
        with StandingPool(Path(folder), "cpu,memory=64MiB,threads=1", options=rule) as pool:
            status = pool.status()
            holder = Connection(pool.url)
            holder.ask(messages.AskLease(1, 60 * MiB, []))
            before_bytes = memory_bytes(status.pid)
            waiting = Waiting(pool.url, options.waiting)
            connected_bytes = memory_bytes(status.pid)
            beats = Beats(pool.url)
            beats.start()
            ask_s = waiting.ask()
            each_bytes = (memory_bytes(status.pid) - connected_bytes) / options.waiting
            holder.close()
            granted, turns_s = waiting.take_turns(options.grants)
            beats.ended.set()
            beats.join()
    late_ms = sorted(1000 * s for s in beats.late_s)
    figures = {
        "waiting": options.waiting,
        "told_why": waiting.reasons,
        "requests_per_s": round(options.waiting / ask_s, 1),
        "granted": granted,
        "grants_per_s": round(granted / turns_s, 1),
        "connection_bytes": round((connected_bytes - before_bytes) / options.waiting),
        "request_bytes": round(each_bytes),
        "beat_p50_ms": round(late_ms[len(late_ms) // 2], 2),
        "beat_max_ms": round(late_ms[-1], 2),
    }
    print(json.dumps(figures))
    whole = waiting.reasons == options.waiting and granted == options.grants
    return 0 if whole and late_ms[-1] <= options.late_ms else 1


if __name__ == "__main__":
    sys.exit(main())
