"""Host to device and back, against a memcpy of the same size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.figures import Figure, speed
from bench.measure import Burst, Plan, compare, loop, nothing

GROUP = "transfers"
TARGET = 0.8
KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
QUICK_SIZES = (64 * KIB, MIB, 16 * MIB)
WORKING_SET = 64 * MIB  # buffers are used in turn, so that none of the sides works from the cache


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


@dataclass
class Buffers:
    """As many of each kind as fill the working set."""

    pageable: list[torch.Tensor]
    other: list[torch.Tensor]
    pinned: list[torch.Tensor]
    device: list[torch.Tensor]

    @staticmethod
    def of(size: int) -> Buffers:
        count = max(2, min(128, WORKING_SET // size))
        elements = size // 4
        pageable = [torch.full((elements,), float(i)) for i in range(count)]
        return Buffers(
            pageable=pageable,
            other=[t.clone() for t in pageable],
            pinned=[t.pin_memory() for t in pageable],
            device=[t.to("shoal") for t in pageable],
        )


def copies(
    to: list[torch.Tensor], source: list[torch.Tensor], non_blocking: bool, wait: Callable[[], None]
) -> Burst:
    """Copies buffer after buffer, then waits."""
    at = 0

    def body() -> None:
        nonlocal at
        at = (at + 1) % len(to)
        to[at].copy_(source[at], non_blocking=non_blocking)

    return loop(body, wait)


def measure(
    plan: Plan, sizes: tuple[int, ...], tell: Callable[[str], None]
) -> tuple[list[Figure], dict[str, bool]]:
    figures, checks = [], {}
    wait = torch.shoal.synchronize
    for size in sizes:
        name = size_name(size)
        tell(f"{name} buffers")
        buffers = Buffers.of(size)
        wait()
        memcpy = copies(buffers.other, buffers.pageable, False, nothing)
        directions = {
            "to the device, pageable": copies(buffers.device, buffers.pageable, False, wait),
            "to the device, pinned": copies(buffers.device, buffers.pinned, True, wait),
            "to the host, pageable": copies(buffers.other, buffers.device, False, wait),
            "to the host, pinned": copies(buffers.pinned, buffers.device, True, wait),
        }
        for direction, burst in directions.items():
            tell(f"{name} {direction}")
            before = torch.shoal.traffic()
            pair = compare(memcpy, burst, plan, least=2, most=512, warm=len(buffers.device))
            after = torch.shoal.traffic()
            moved = sum(after[k] - before[k] for k in ("bytes_in", "bytes_out"))
            copied = after["bytes_copied_by_client"] - before["bytes_copied_by_client"]
            note = f"client copied {copied / moved:.2f} of the bytes; memcpy"
            rate = size / pair.base.median / 2**30
            figures.append(
                speed(
                    GROUP,
                    f"{name} {direction}",
                    pair,
                    "memcpy / shoal time",
                    TARGET,
                    f"{note} {rate:.1f} GiB/s",
                )
            )
            if "pinned" in direction:
                checks[f"{name} {direction}: no byte copied by the client"] = copied == 0
        del buffers, memcpy, directions
        torch.shoal.empty_cache()
    return figures, checks
