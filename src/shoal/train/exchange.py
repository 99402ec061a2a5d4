"""The exchange of gradients between replicas: each device owns, sums and returns a partition.

Built on plain torch copies between devices and in-place sums, so that a faster way between two
devices serves it without change. A bucket moves as soon as the backward pass has made its last
gradient, while the rest is still computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from shoal.train.board import Aborted, Board
from shoal.train.buckets import Bucket, Item, make_buckets
from shoal.train.devices import record, set_current
from shoal.train.timeline import Stopwatch, Timeline

BUCKET_BYTES = 4 * 2**20


class _Lane:
    """A thread that runs the copies towards one device, in order."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def close(self, wait: bool) -> None:
        self._queue.put(None)
        if wait:
            self._thread.join(5)

    def _run(self) -> None:
        set_current(self._device)
        with torch.no_grad():
            while (work := self._queue.get()) is not None:
                work()
                del work  # keep no tensor alive while waiting


@dataclass(slots=True)
class _BucketState:
    """One bucket in one step."""

    missing: list[set[int]]  # by group: places whose gradient is not ready
    flats: dict[int, torch.Tensor] = field(default_factory=dict)  # by contributing group
    ready: dict[int, torch.Event] = field(default_factory=dict)  # when they are computed
    parts: dict[int, torch.Tensor] = field(default_factory=dict)  # the same, at the owner
    sums: dict[int, torch.Tensor] = field(default_factory=dict)  # by group: what came back
    used: set[int] = field(default_factory=set)  # places that some group has a gradient for
    returned: int = 0


class Exchange:
    """Sums the gradients of equal parameters over the groups.

    Args:
        replicas: the parameters of each group, in the same order in all.

    In a step: `begin()`, a backward pass in each group with `arm(group)` before its last
    micro-batch, `flush(group)` after it, `wait(group)`; then every group's `.grad` is the sum.
    """

    def __init__(
        self,
        replicas: Sequence[Sequence[nn.Parameter]],
        timeline: Timeline | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._replicas = [[p for p in params if p.requires_grad] for params in replicas]
        self._groups = len(replicas)
        # The backward pass makes the last layers' gradients first.
        order = list(reversed(range(len(self._replicas[0]))))
        items = [self._item(place) for place in order]
        made = make_buckets(items, self._groups, bucket_bytes)
        self.buckets = tuple(
            Bucket(b.owner, tuple(order[i] for i in b.items), b.size_bytes) for b in made
        )
        self._bucket_of = {place: i for i, b in enumerate(self.buckets) for place in b.items}
        devices = {p.device for params in self._replicas for p in params}
        ordered = sorted(devices, key=str)
        self._gather = {d: _Lane(d, f"shoal-gather-{d}") for d in ordered}
        self._return = {d: _Lane(d, f"shoal-return-{d}") for d in ordered}
        clock = timeline or Timeline()
        self._stopwatches = {d: Stopwatch(f"exchange to {d}", clock) for d in ordered}
        self._hooks = [
            _when_accumulated(p, partial(self._on_grad, g, place))
            for g, params in enumerate(self._replicas)
            for place, p in enumerate(params)
            if self._groups > 1
        ]
        self._lock = threading.Lock()
        self._armed: set[tuple[int, torch.device]] = set()
        self._states: list[_BucketState] = []
        self._contributing: frozenset[int] = frozenset()
        self._board = Board()
        self._step = 0

    def _item(self, place: int) -> Item:
        parameters = [params[place] for params in self._replicas]
        # A bucket lies on one device in each group, so that it is one copy.
        where = ",".join(str(p.device) for p in parameters)
        first = parameters[0]
        return Item(first.numel() * first.element_size(), f"{first.dtype} {where}")

    def begin(self, board: Board, step: int, contributing: Sequence[int]) -> None:
        """A new step; groups that have no samples in it do not contribute but get the sum."""
        with self._lock:
            self._board, self._step = board, step
            self._contributing = frozenset(contributing)
            self._armed.clear()
            self._states = [
                _BucketState([set(b.items) for _ in range(self._groups)]) for b in self.buckets
            ]

    def arm(self, group: int, device: torch.device) -> None:
        """From now on gradients of this group on `device` are final when they are accumulated."""
        self._armed.add((group, device))

    def flush(self, group: int) -> None:
        """The group's backward pass is over: what has no gradient now gets none in this step."""
        if self._groups == 1 or group not in self._contributing:
            return
        for index, bucket in enumerate(self.buckets):
            with self._lock:
                state = self._states[index]
                missing = state.missing[group]
                ready = bool(missing)
                missing.clear()
            if ready:
                self._send(index, bucket, group)

    def wait(self, group: int, timeout_s: float) -> None:
        """Waits until the sums are on their way to the group, and makes them its gradients.

        Only the group's own thread touches `.grad`: a copy of a step that has failed, which may end
        long after it, cannot leave anything there for the next.
        """
        if self._groups == 1:
            return
        for index, bucket in enumerate(self.buckets):
            self._board.wait(
                ("sum", index, group), f"gradients for group {group} (bucket {index})", timeout_s
            )
            with self._lock:
                state = self._states[index]
                flat = state.sums.pop(group)
            parameters = [self._replicas[group][place] for place in bucket.items]
            _assign(parameters, [place in state.used for place in bucket.items], flat)

    def close(self, wait: bool = True) -> None:
        """Ends the threads; without `wait` they may outlive this, until their device is given up."""
        for hook in self._hooks:
            hook.remove()
        for lane in [*self._gather.values(), *self._return.values()]:
            lane.close(wait)
        for stopwatch in self._stopwatches.values():
            stopwatch.close(wait)

    def _on_grad(self, group: int, place: int, parameter: torch.Tensor) -> None:
        if (group, parameter.device) not in self._armed:
            return
        index = self._bucket_of[place]
        with self._lock:
            missing = self._states[index].missing[group]
            missing.discard(place)
            if missing:
                return
        self._send(index, self.buckets[index], group)

    def _send(self, index: int, bucket: Bucket, group: int) -> None:
        """Joins the group's gradients and hands them to the owner's thread."""
        parameters = [self._replicas[group][place] for place in bucket.items]
        with torch.no_grad():
            flat = _flatten(parameters)
        ready = record(flat.device)
        with self._lock:
            state = self._states[index]
            state.flats[group], state.ready[group] = flat, ready
            state.used |= {
                place
                for place, p in zip(bucket.items, parameters, strict=True)
                if p.grad is not None
            }
        owner = self._replicas[bucket.owner][bucket.items[0]].device
        work = partial(self._collect, self._board, state, index, bucket, group, owner)
        self._gather[owner].put(partial(self._guarded, self._board, group, work))

    def _collect(
        self,
        board: Board,
        state: _BucketState,
        index: int,
        bucket: Bucket,
        group: int,
        owner: torch.device,
    ) -> None:
        """At the owner: takes one group's part, and sums when it was the last."""
        state.parts[group] = state.flats[group].to(owner, non_blocking=True)
        if len(state.parts) == len(self._contributing):
            total = _sum(
                [state.parts[g] for g in sorted(state.parts)], state.parts.get(bucket.owner)
            )
            summed = record(owner)
            for target in range(self._groups):
                device = self._replicas[target][bucket.items[0]].device
                work = partial(self._give_back, board, state, index, bucket, target, total, summed)
                self._return[device].put(partial(self._guarded, board, target, work))
            state.parts.clear()
        if group != bucket.owner:
            self._time(owner, state.ready[group])

    def _give_back(
        self,
        board: Board,
        state: _BucketState,
        index: int,
        bucket: Bucket,
        group: int,
        total: torch.Tensor,
        summed: torch.Event,
    ) -> None:
        """Brings the sum to one group, in the place of what the group gave."""
        device = self._replicas[group][bucket.items[0]].device
        if group == bucket.owner:
            flat = total
        elif group in state.flats:
            flat = state.flats[group].copy_(total, non_blocking=True)
        else:
            flat = total.to(device, non_blocking=True)
        with self._lock:
            state.sums[group] = flat
            state.returned += 1
            if state.returned == self._groups:
                state.flats.clear()
        if group != bucket.owner:
            self._time(device, summed)
        board.mark(("sum", index, group))

    def _guarded(self, board: Board, group: int, work: Callable[[], None]) -> None:
        """Runs a copy; what goes wrong ends the step, not the thread."""
        if board.failure is not None:
            return
        try:
            work()
        except Aborted:
            pass
        except BaseException as error:
            board.fail(group, error)

    def _time(self, device: torch.device, start: torch.Event) -> None:
        """From when the values were there at the other device until they are here."""
        self._stopwatches[device].time("exchange", self._step, start, record(device))


def _when_accumulated(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _flatten(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The gradients as one flat tensor; a single one is taken as it lies."""
    if len(parameters) == 1:
        grad = parameters[0].grad
        if grad is not None and grad.is_contiguous():
            return grad.detach().view(-1)
    parts: list[Any] = [
        (p.grad.detach() if p.grad is not None else torch.zeros_like(p)).reshape(-1)
        for p in parameters
    ]
    return torch.cat(parts)


def _sum(parts: Sequence[torch.Tensor], own: torch.Tensor | None) -> torch.Tensor:
    """The sum in the order of the groups, whoever owns it: the same bits in every layout.

    Two parts are added in the owner's place: their order does not change the sum.
    """
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2 and own is not None:
        other = parts[1] if own is parts[0] else parts[0]
        return own.add_(other)
    total = torch.add(parts[0], parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


def _assign(parameters: Sequence[nn.Parameter], used: Sequence[bool], flat: torch.Tensor) -> None:
    """Makes each parameter's gradient a view of the sum; one that nobody used has none."""
    start = 0
    for parameter, is_used in zip(parameters, used, strict=True):
        stop = start + parameter.numel()
        parameter.grad = flat[start:stop].view(parameter.shape) if is_used else None
        start = stop
