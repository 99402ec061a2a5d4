"""Small operators: what it costs to issue one, and what a read costs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.figures import Figure, slowdown
from bench.measure import Plan, compare, loop, nothing

GROUP = "operators"
ISSUE_TARGET = 2.0
ISSUED = 1000  # in one burst: far fewer than the op ring holds, so the client never waits for room
SUSTAINED = 20_000
BIG_BYTES = 64 << 20

Body = Callable[[], object]


def bodies(device: str) -> dict[str, Body]:
    """Each operator as the user writes it. Their results are dropped at once."""
    a, b = torch.randn(16, device=device), torch.randn(16, device=device)
    matrix = torch.randn(16, 16, device=device)
    return {
        "add, 16 elements": lambda: a + b,
        "multiply by a Python number": lambda: a * 2.5,
        "add in place": lambda: a.add_(b),
        "matrix product, 16 × 16": lambda: matrix @ matrix,
        "a view": lambda: a.view(4, 4),
        "an empty tensor": lambda: torch.empty(16, device=device),
    }


def measure(plan: Plan, tell: Callable[[str], None]) -> list[Figure]:
    figures = []
    wait = torch.shoal.synchronize
    local, ours = bodies("cpu"), bodies("shoal")
    for name, body in ours.items():
        tell(f"issue {name}")
        pair = compare(
            loop(local[name], nothing),
            loop(body, wait, timed_finish=False),
            plan,
            count=ISSUED,
            warm=ISSUED,
        )
        note = "the client's time to issue it; local: the whole operator"
        figures.append(slowdown(GROUP, f"issue: {name}", pair, ISSUE_TARGET, note))
    name = "add, 16 elements"
    tell("sustained")
    pair = compare(
        loop(local[name], nothing), loop(ours[name], wait), plan, count=SUSTAINED, warm=ISSUED
    )
    note = f"{SUSTAINED} in a row and the wait for the last"
    figures.append(slowdown(GROUP, f"sustained: {name}", pair, None, note))
    return figures + reads(plan, tell)


def reads(plan: Plan, tell: Callable[[str], None]) -> list[Figure]:
    """`.item()` waits for the device: a round trip."""
    figures = []
    here, there = torch.randn(()), torch.randn((), device="shoal")
    big_here = torch.zeros(BIG_BYTES // 8, dtype=torch.float64)
    big_there = big_here.to("shoal")
    cases: list[tuple[str, Body, Body, str]] = [
        ("item()", here.item, there.item, "one round trip"),
        (
            "(a + 1).item()",
            lambda: (here + 1).item(),
            lambda: (there + 1).item(),
            "an operator and a round trip",
        ),
        (
            "item() of one element of 64 MiB",
            lambda: big_here[12345].item(),
            lambda: big_there[12345].item(),
            "",
        ),
    ]
    for name, local, ours, note in cases:
        tell(name)
        before = torch.shoal.traffic()["bytes_out"]
        ours()
        moved = torch.shoal.traffic()["bytes_out"] - before
        pair = compare(loop(local, nothing), loop(ours, nothing), plan, count=ISSUED, warm=100)
        words = f"{note}; {moved} bytes moved" if note else f"{moved} bytes moved"
        figures.append(slowdown(GROUP, name, pair, None, words))
    return figures
