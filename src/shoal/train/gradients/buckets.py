"""Gradient partitions: which group sums which gradients. Pure.

Groups exchange gradients in *buckets*, runs of parameters in the order in which the backward pass
makes them ready. Each bucket has one owner among the groups: the others send it theirs, and the owner
sums them and returns the sum. All buckets of an owner are its partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter as the exchange sees it."""

    size_bytes: int
    kind: str = "float32"  # only equal kinds (dtypes) share a bucket


@dataclass(frozen=True, slots=True)
class Bucket:
    owner: int
    items: tuple[int, ...]  # parameter indices
    size_bytes: int


def make_buckets(
    items: Sequence[Item],
    owners: int,
    bucket_bytes: int,
    weights: Sequence[float] | None = None,
    alone_bytes: int | None = None,
) -> tuple[Bucket, ...]:
    """Cut `items`, given in the order of readiness, into buckets and assign them to the owners.

    A parameter larger than `bucket_bytes`, or of at least `alone_bytes`, is a bucket of its own. A
    bucket goes to the owner with the least load so far, relative to its weight (its speed): no owner
    gets more than one bucket above its fair load.

    >>> [b.owner for b in make_buckets([Item(4), Item(4), Item(4), Item(4)], 2, 4)]
    [0, 1, 0, 1]
    """
    if owners < 1 or bucket_bytes < 1:
        raise ValueError(
            f"owners and bucket_bytes must be at least 1 (got {owners} and {bucket_bytes})"
        )
    speeds = list(weights) if weights is not None else [1.0] * owners
    if len(speeds) != owners or min(speeds) <= 0:
        raise ValueError(f"{owners} owners need {owners} weights above zero (got {speeds})")
    load = [0.0] * owners
    buckets = []
    for run in _runs(items, bucket_bytes, alone_bytes or bucket_bytes + 1):
        size = sum(items[i].size_bytes for i in run)
        owner = min(range(owners), key=lambda o: (load[o] + size / speeds[o], o))
        load[owner] += size / speeds[owner]
        buckets.append(Bucket(owner, tuple(run), size))
    return tuple(buckets)


def _runs(items: Sequence[Item], bucket_bytes: int, alone_bytes: int) -> list[list[int]]:
    """Return runs in order of readiness; each kind fills its own."""
    finished: list[list[int]] = []
    open_runs: dict[str, tuple[list[int], int]] = {}
    for index, item in enumerate(items):
        if item.size_bytes >= alone_bytes:
            finished.append([index])
            continue
        run, size = open_runs.get(item.kind, ([], 0))
        if run and size + item.size_bytes > bucket_bytes:
            finished.append(run)
            run, size = [], 0
        run.append(index)
        open_runs[item.kind] = run, size + item.size_bytes
    finished += [run for run, _ in open_runs.values()]
    # A bucket can start when its last gradient is ready.
    return sorted(finished, key=lambda run: run[-1])
