"""What has changed between two looks at a pool's parts, and the loop that looks. The first is pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from shoal.pool.base import limits
from shoal.pool.engines.engine import Event, NodeCame, NodeWent, PartEnded, PartStarted, Placed


def between(before: Iterable[Placed], after: Iterable[Placed]) -> list[Event]:
    """Return what happened: ends first, so a part that was started again has both.

    >>> old = Placed("head", "a", 1, 10.0)
    >>> between([old], [Placed("head", "a", 2, 11.0)])[0] == PartEnded(old)
    True
    """
    old, new = ({_run(p): p for p in parts if p.pid} for parts in (before, after))
    nodes_before, nodes_after = ({p.node for p in parts.values()} for parts in (old, new))
    return [
        *(PartEnded(p) for run, p in old.items() if run not in new),
        *(NodeWent(node) for node in sorted(nodes_before - nodes_after)),
        *(NodeCame(node) for node in sorted(nodes_after - nodes_before)),
        *(PartStarted(p) for run, p in new.items() if run not in old),
    ]


def _run(placed: Placed) -> tuple[str, str, int, float]:
    return placed.part, placed.node, placed.pid, placed.since


def watch(
    look: Callable[[], list[Placed]], wait: Callable[[float], None] = time.sleep
) -> Iterator[Event]:
    """Yield what changes between looks, beginning with what is there, until nothing is."""
    before: list[Placed] = []
    while True:
        after = look()
        yield from between(before, after)
        if not after:
            return
        before = after
        wait(limits.ENGINE_LOOK_S)
