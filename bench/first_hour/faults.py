"""Shoal when a device or a worker fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import torch

import shoal
from bench.first_hour.finding import Finding

MiB = 2**20
_NEIGHBOUR = """
import sys, torch, shoal
with shoal.connect(sys.argv[1], memory="25%"):
    x = torch.ones(1000, device="shoal")
    print(x.sum().item(), flush=True)
    sys.stdin.readline()
    print((x + x).sum().item(), flush=True)
"""


class Neighbour:
    """Another program with a session on the same device."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NEIGHBOUR, url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.started = self._process.stdout.readline().strip() == "1000.0"

    def goes_on(self) -> bool:
        """Let it compute again, and end."""
        out, _ = self._process.communicate("\n", timeout=60)
        return out.strip() == "2000.0" and self._process.returncode == 0


def sessions(quick: bool) -> Iterator[Finding]:
    """Run two sessions side by side."""
    with shoal.up(devices=["cuda:0"]) as pool, shoal.connect(pool.url, memory="25%"):
        neighbour = Neighbour(pool.url)
        mine = torch.ones(10, device="shoal").sum().item() == 10
        yield Finding("two programs share the device", neighbour.started and mine)
        yield Finding("… and both go on", neighbour.goes_on())


def shortage(quick: bool) -> Iterator[Finding]:
    """Ask for more memory than the lease has, at once and in parts."""
    memory, block = ("256MiB", 8 * MiB) if quick else ("4GiB", 128 * MiB)  # elements of 4 bytes
    with (
        shoal.up(devices=[f"cuda:0,memory={memory}"]) as pool,
        shoal.connect(pool.url) as lease,
    ):
        x = torch.ones(16, device="shoal")
        try:
            torch.ones(16 * block, device="shoal").sum().item()
            text = ""
        except torch.OutOfMemoryError as error:
            text = str(error).splitlines()[0]
        yield Finding("too large a tensor is OutOfMemoryError", bool(text), note=text)
        yield Finding("… and the session goes on", lease.active and x.sum().item() == 16)
        try:
            blocks = [torch.ones(block, device="shoal") for _ in range(12)]
            total = sum(block.sum().item() for block in blocks)
            yield Finding("1.5 times the memory", total == 12 * block)
        except torch.OutOfMemoryError as error:
            yield Finding("1.5 times the memory", None, note=str(error).splitlines()[0])


def device_assert(quick: bool) -> Iterator[Finding]:
    """Let a kernel find an index out of range."""
    with shoal.up(devices=["cuda:0"]) as pool:
        lease = shoal.connect(pool.url, memory="25%")
        neighbour = Neighbour(pool.url)
        text = ""
        try:
            torch.zeros(4, device="shoal")[torch.tensor([9], device="shoal")].cpu()
        except shoal.DeviceLostError as error:
            text = str(error)
        yield Finding("a device assert is DeviceLostError", "the device failed" in text, note=text)
        yield Finding("… the other session goes on", neighbour.goes_on())
        lease.close()
        with shoal.connect(pool.url):
            again = torch.ones(3, device="shoal").sum().item() == 3
        yield Finding("… and a new one starts", again)


def killed(quick: bool) -> Iterator[Finding]:
    """Kill a worker in a copy."""
    with shoal.up(devices=["cuda:0"]) as pool:
        lease = shoal.connect(pool.url, memory="25%")
        neighbour = Neighbour(pool.url)
        block = torch.ones((4 if quick else 64) * 2**20).pin_memory()
        there = [block.to("shoal", non_blocking=True) for _ in range(4)]
        os.kill(lease.worker_pids[0], signal.SIGKILL)
        text = ""
        try:
            there[-1].cpu()
        except shoal.DeviceLostError as error:
            text = str(error)
        yield Finding("a worker killed in a copy is DeviceLostError", bool(text), note=text)
        yield Finding("… the other session goes on", neighbour.goes_on())
        lease.close()
        with shoal.connect(pool.url):
            again = torch.ones(3, device="shoal").sum().item() == 3
        yield Finding("… and a new one starts", again)
