"""Gradient partitions: who sums which gradients. Pure.

Gradients are exchanged in *buckets*, runs of parameters in the order in which the backward pass
makes them ready. Each bucket has one owner among the replicas' devices: the others send it theirs,
the owner sums and returns the sum. All buckets of an owner are its partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter, as far as the exchange is concerned."""

    size_bytes: int
    kind: str = "float32"  # only equal kinds (dtypes) share a bucket


@dataclass(frozen=True, slots=True)
class Bucket:
    owner: int
    items: tuple[int, ...]  # places in the list of parameters
    size_bytes: int


def make_buckets(
    items: Sequence[Item],
    owners: int,
    bucket_bytes: int,
    weights: Sequence[float] | None = None,
    alone_bytes: int | None = None,
) -> tuple[Bucket, ...]:
    """Cuts `items`, given in the order of readiness, into buckets and deals them to the owners.

    A parameter larger than `bucket_bytes`, or of at least `alone_bytes`, is a bucket of its own. A
    bucket goes to the owner that has the least so far, measured by its weight (its speed): no owner
    gets more than a bucket above its part.

    >>> [b.owner for b in make_buckets([Item(4), Item(4), Item(4), Item(4)], 2, 4)]
    [0, 1, 0, 1]
    """
    if owners < 1 or bucket_bytes < 1:
        raise ValueError(
            f"{owners} owners and buckets of {bucket_bytes} bytes: both are at least 1"
        )
    speeds = list(weights) if weights is not None else [1.0] * owners
    if len(speeds) != owners or min(speeds) <= 0:
        raise ValueError(f"{owners} owners need as many weights above zero, not {speeds}")
    load = [0.0] * owners
    buckets = []
    for places in _runs(items, bucket_bytes, alone_bytes or bucket_bytes + 1):
        size = sum(items[i].size_bytes for i in places)
        owner = min(range(owners), key=lambda o: (load[o] + size / speeds[o], o))
        load[owner] += size / speeds[owner]
        buckets.append(Bucket(owner, tuple(places), size))
    return tuple(buckets)


def _runs(items: Sequence[Item], bucket_bytes: int, alone_bytes: int) -> list[list[int]]:
    """Runs in order of readiness; each kind fills a run of its own."""
    finished: list[list[int]] = []
    open_runs: dict[str, tuple[list[int], int]] = {}
    for place, item in enumerate(items):
        if item.size_bytes >= alone_bytes:
            finished.append([place])
            continue
        run, size = open_runs.get(item.kind, ([], 0))
        if run and size + item.size_bytes > bucket_bytes:
            finished.append(run)
            run, size = [], 0
        run.append(place)
        open_runs[item.kind] = run, size + item.size_bytes
    finished += [run for run, _ in open_runs.values()]
    # A bucket can start when its last gradient is ready.
    return sorted(finished, key=lambda run: run[-1])
