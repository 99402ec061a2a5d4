"""Suspend a session in place and resume it, against a memcpy of the same bytes.

    python -m bench.suspend [--gib 1] [--rounds 5]

The ratio is time ÷ memcpy's time in the same round; lower is better. The time is that of a program
that orders it and waits until the pool says that it is done. memcpy has one thread and both its
buffers are warm.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import shoal
from shoal.pool.client.head_connection import Connection
from shoal.pool.wire import messages
from shoal.pool.wire.profile_messages import SessionProfile

GIB = 1 << 30
BLOCK_BYTES = 64 << 20
TARGET = 1.5


class Owner:
    """Orders suspension over one connection to the head."""

    def __init__(self, lease: shoal.Lease) -> None:
        self._head = Connection(lease.url)
        device = lease.granted[0]
        self._part = (device.info.number, device.session)
        status = self._head.ask(messages.AskStatus(), 10)
        assert isinstance(status, messages.PoolStatus)
        self._lease = next(s.lease for s in status.sessions if s.session == device.session)

    def seconds_until(self, state: str, suspend: bool) -> float:
        start = time.perf_counter()
        self._head.ask(messages.OrderLease(self._lease, suspend), 10)
        while True:
            profile = self._head.ask(messages.AskSessionProfile(self._part), 10)
            assert isinstance(profile, SessionProfile)
            if profile.state == state:
                return time.perf_counter() - start
            if profile.state == "refused":
                raise SystemExit(f"the session cannot be suspended: {profile.reason}")
            time.sleep(0.001)


def memcpy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    start = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--gib", type=float, default=1.0)
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    size = int(given.gib * GIB)
    torch.set_num_threads(1)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    spec = f"cpu,memory={2 * size},host={2 * size},disk=0,threads=1"
    with shoal.up([spec]) as pool, shoal.connect(pool.url) as lease:
        held = [torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device="shoal") for _ in
                range(size // BLOCK_BYTES)]  # fmt: skip
        held[-1][0].item()
        owner = Owner(lease)
        out, back = [], []
        for number in range(given.rounds + 1):
            for tensor in held:
                tensor += 1
            held[-1][0].item()
            copy_s = memcpy_s(source, target)
            suspended_s = owner.seconds_until("suspended", suspend=True)
            resumed_s = owner.seconds_until("running", suspend=False)
            if number > 0:  # the first round touches pages
                out.append(suspended_s / copy_s)
                back.append(resumed_s / copy_s)
        assert all(tensor.min().item() == tensor.max().item() for tensor in held)
    for name, ratios in (("suspend", out), ("resume", back)):
        print(
            f"{name:8} {statistics.median(ratios):.2f} × memcpy of {given.gib:g} GiB "
            f"(from {min(ratios):.2f} to {max(ratios):.2f}; target {TARGET})"
        )


if __name__ == "__main__":
    main()
