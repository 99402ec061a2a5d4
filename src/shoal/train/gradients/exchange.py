"""The exchange of gradients between replicas: each device owns, sums and returns a partition.

Built on plain torch copies between devices and in-place sums, so that a faster way between two
devices serves it without change. The owner takes a bucket of the others while the rest of its own
backward pass is still computed.

What returns to the others is the sum, and every group updates all weights; or, with a *divided
update*, each group updates the weights of its own partition, and those return. That halves the
optimizer's work and state in two groups, but a lost group takes its part of the state along.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from shoal.train.gradients.buckets import Bucket, Item, make_buckets
from shoal.train.group.devices import add_from, copy_later, record
from shoal.train.group.errors import TrainError
from shoal.train.group.replay import aside
from shoal.train.group.step_events import Board
from shoal.train.group.timeline import Stopwatch, Timeline

BUCKET_BYTES = 4 * 2**20
#: A parameter of this size is a bucket of its own: its gradient moves without being joined to others.
ALONE_BYTES = 2**18
#: The part of its own buckets by which an owner lets the others get behind before it waits for them.
#: Copies are in the devices' streams: without a lag the devices would march in step.
LAG = 0.25
SUMMED = "summed"  # the mark of a step whose sums are all on their way


@dataclass(slots=True)
class _BucketState:
    """One bucket in one step."""

    missing: list[set[int]]  # by group: places whose gradient is not ready
    flats: dict[int, torch.Tensor] = field(default_factory=dict)  # by contributing group
    parts: dict[int, torch.Tensor] = field(default_factory=dict)  # those that the owner takes
    total: torch.Tensor | None = None  # at the owner
    used: set[int] = field(default_factory=set)  # places that some group has a gradient for


@dataclass(slots=True)
class _GroupState:
    """One group in one step."""

    sent: int = 0  # buckets whose gradients are computed and joined
    flushed: bool = False  # all of them are
    #: What it will take when it is far enough: buckets its sender had sent, the bucket, the sender.
    held: deque[tuple[int, int, int]] = field(default_factory=deque)
    starts: list[torch.Event] = field(default_factory=list)  # where its backward pass ends
    lock: threading.Lock = field(default_factory=threading.Lock)  # of what it takes: one order


class Exchange:
    """Sums the gradients of equal parameters over the groups.

    Args:
        replicas: the parameters of each group, in the same order in all.
        divided: whether each group updates only the weights that it owns.
        speeds: of the groups; a slow one owns less.

    In a step: `begin()`, a backward pass in each group with `arm(group)` before its last
    micro-batch, `flush(group)` after it, `wait(group)`; then every group's `.grad` is the sum. With a
    divided update only the gradients that the group owns are there, and after the optimizers' steps
    `return_weights()` brings every group the weights of the others.
    """

    def __init__(
        self,
        replicas: Sequence[Sequence[nn.Parameter]],
        timeline: Timeline | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        divided: bool = False,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self._replicas = [[p for p in params if p.requires_grad] for params in replicas]
        self._groups = len(replicas)
        self.divided = divided and self._groups > 1
        # The backward pass makes the last layers' gradients first.
        order = list(reversed(range(len(self._replicas[0]))))
        items = [self._item(place) for place in order]
        made = make_buckets(items, self._groups, bucket_bytes, speeds, ALONE_BYTES)
        self.buckets = tuple(
            Bucket(b.owner, tuple(order[i] for i in b.items), b.size_bytes) for b in made
        )
        self._bucket_of = {place: i for i, b in enumerate(self.buckets) for place in b.items}
        self._owned = [
            [place for b in self.buckets if b.owner == group for place in b.items]
            for group in range(self._groups)
        ]
        self._lag = max(1, round(LAG * len(self.buckets)))
        self._devices = [sorted({p.device for p in ps}, key=str) for ps in self._replicas]
        several = self._groups > 1
        clock = timeline or Timeline()
        self._stopwatches = {
            d: Stopwatch(f"exchange to {d}", clock, d)
            for ds in self._devices
            for d in ds
            if several
        }
        self._hooks = [
            _when_accumulated(p, partial(self._on_grad, g, place))
            for g, params in enumerate(self._replicas)
            for place, p in enumerate(params)
            if several
        ]
        self._lock = threading.Lock()
        self._armed: set[tuple[int, torch.device]] = set()
        self._late: set[tuple[int, int]] = set()  # group and place
        self._states: list[_BucketState] = []
        self._unsummed = 0  # buckets of this step
        self._progress: list[_GroupState] = []
        self._contributing: frozenset[int] = frozenset()
        self._board = Board()
        self._step = 0

    def _item(self, place: int) -> Item:
        parameters = [params[place] for params in self._replicas]
        # A bucket lies on one device in each group, so that it is one copy.
        where = ",".join(str(p.device) for p in parameters)
        first = parameters[0]
        return Item(first.numel() * first.element_size(), f"{first.dtype} {where}")

    def owned(self, group: int) -> list[nn.Parameter]:
        """The parameters whose gradients the group sums."""
        return [self._replicas[group][place] for place in self._owned[group]]

    # --- a step ---

    def begin(self, board: Board, step: int, contributing: Sequence[int]) -> None:
        """A new step; groups that have no samples in it do not contribute but get the sum."""
        with self._lock:
            self._board, self._step = board, step
            self._contributing = frozenset(contributing)
            self._armed.clear()
            self._late.clear()
            self._states = [
                _BucketState([set(b.items) for _ in range(self._groups)]) for b in self.buckets
            ]
            self._unsummed = len(self.buckets)
            self._progress = [
                _GroupState(flushed=g not in self._contributing) for g in range(self._groups)
            ]
        if not self.buckets:  # every weight is frozen
            board.mark(SUMMED)

    def arm(self, group: int, device: torch.device, late: Sequence[torch.Tensor] = ()) -> None:
        """From now on gradients of this group on `device` are final when they are accumulated, but
        those of `late` when `accumulated` is told."""
        if late:
            identities = {id(parameter) for parameter in late}
            places = enumerate(self._replicas[group])
            self._late |= {(group, place) for place, p in places if id(p) in identities}
        self._armed.add((group, device))

    def accumulated(self, group: int, late: Sequence[torch.Tensor]) -> None:
        """The gradients of these parameters are final now."""
        if not self.several:
            return
        identities = {id(parameter) for parameter in late}
        for place, parameter in enumerate(self._replicas[group]):
            if id(parameter) in identities:
                self._late.discard((group, place))
                self._on_grad(group, place, parameter)

    @property
    def several(self) -> bool:
        """Whether there is anybody to exchange with."""
        return self._groups > 1

    def flush(self, group: int) -> None:
        """The group's backward pass is over: what has no gradient now gets none in this step."""
        if self._groups == 1 or group not in self._contributing:
            return
        progress = self._progress[group]
        progress.starts = [record(device) for device in self._devices[group]]
        for index, bucket in enumerate(self.buckets):
            with self._lock:
                missing = self._states[index].missing[group]
                ready = bool(missing)
                missing.clear()
            if ready:
                self._send(index, bucket, group)
        with self._lock:
            progress.flushed = True
        self._release(group)

    def wait(self, group: int, timeout_s: float) -> None:
        """Waits until the sums are on their way to the group, and makes them its gradients.

        Only the group's own thread touches `.grad`: a copy of a step that has failed, which may end
        long after it, cannot leave anything there for the next.
        """
        if self._groups == 1:
            return
        self._board.wait(SUMMED, f"the sums of gradients for group {group}", timeout_s)
        for state, bucket in zip(self._states, self.buckets, strict=True):
            parameters = [self._replicas[group][place] for place in bucket.items]
            if self.divided and bucket.owner != group:
                for parameter in parameters:
                    parameter.grad = None
                continue
            flat = self._returned(state, bucket, group)
            _assign(parameters, [place in state.used for place in bucket.items], flat)
        for device, start in zip(self._devices[group], self._progress[group].starts, strict=False):
            self._stopwatches[device].time("exchange", self._step, start, record(device))

    def _returned(self, state: _BucketState, bucket: Bucket, group: int) -> torch.Tensor:
        """The sum at a group, in the place of what the group gave."""
        assert state.total is not None
        if group == bucket.owner:
            return state.total
        with torch.no_grad():
            if group in state.flats:
                return state.flats[group].copy_(state.total, non_blocking=True)
            device = self._replicas[group][bucket.items[0]].device
            return state.total.to(device, non_blocking=True)

    def norms(self) -> list[torch.Tensor]:
        """The norm of all gradients, at each group, where a group has only those that it owns."""
        parts = [
            nn.utils.get_total_norm([p.grad for p in self.owned(g) if p.grad is not None])
            for g in range(self._groups)
        ]
        return [
            torch.linalg.vector_norm(
                torch.stack([part.to(devices[0], non_blocking=True) for part in parts])
            )
            for devices in self._devices
        ]

    @torch.no_grad()
    def return_weights(self) -> None:
        """After a divided update: every group gets the weights that the others have updated, each when
        it is used first."""
        for group in range(self._groups):
            for owner in range(self._groups):
                if owner != group:
                    for place in self._owned[owner]:
                        copy_later(self._replicas[group][place], self._replicas[owner][place])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for stopwatch in self._stopwatches.values():
            stopwatch.close()

    # --- gathering ---

    def _on_grad(self, group: int, place: int, parameter: torch.Tensor) -> None:
        if (group, parameter.device) not in self._armed or (group, place) in self._late:
            return
        index = self._bucket_of[place]
        with self._lock:
            missing = self._states[index].missing[group]
            if place not in missing:
                raise TrainError(
                    f"a gradient of shape {tuple(parameter.shape)} on {parameter.device} came twice in "
                    "a step: the sum would not be that of the batch. If a block that runs more than "
                    "once is checkpointed, use use_reentrant=False; if the model moves tensors to a "
                    "device that it names by its number, write x.device instead"
                )
            missing.discard(place)
            if missing:
                return
        with aside():  # a group that repeats this one's pass sends its own
            self._send(index, self.buckets[index], group)

    def _send(self, index: int, bucket: Bucket, group: int) -> None:
        """Joins the group's gradients; the owner takes them when it is far enough itself."""
        parameters = [self._replicas[group][place] for place in bucket.items]
        with torch.no_grad():
            flat = _flatten(parameters)
        state = self._states[index]
        with self._lock:
            state.flats[group] = flat
            state.used |= {
                place
                for place, p in zip(bucket.items, parameters, strict=True)
                if p.grad is not None
            }
            self._progress[group].sent += 1
            held = self._progress[group].sent, index, group
            self._progress[bucket.owner].held.append(held)
        self._release(group)
        if bucket.owner != group:
            self._release(bucket.owner)

    def _release(self, owner: int) -> None:
        """Lets an owner take what the others have at the point that it is past itself."""
        progress = self._progress[owner]
        with progress.lock:
            while True:
                with self._lock:
                    held = progress.held
                    if not held:
                        return
                    if not progress.flushed and held[0][0] + self._lag > progress.sent:
                        return
                    _, index, group = held.popleft()
                self._collect(self._states[index], self.buckets[index], group)

    @torch.no_grad()
    def _collect(self, state: _BucketState, bucket: Bucket, group: int) -> None:
        """At the owner: takes one group's part, and sums when it was the last."""
        state.parts[group] = state.flats[group]
        own = state.parts.get(bucket.owner)
        # Two are added where one of them lies, when both are there: their order does not matter.
        in_place = len(self._contributing) == 2 and bucket.owner in self._contributing
        if not in_place:
            owner = self._replicas[bucket.owner][bucket.items[0]].device
            state.parts[group] = state.parts[group].to(owner, non_blocking=True)
        if len(state.parts) < len(self._contributing):
            return
        if in_place and own is not None:
            other = next(part for g, part in state.parts.items() if g != bucket.owner)
            add_from(own, other)
            state.total = own
        else:
            state.total = _sum([state.parts[g] for g in sorted(state.parts)])
        state.parts.clear()
        if self.divided:
            state.flats.clear()
        with self._lock:
            self._unsummed -= 1
            last = self._unsummed == 0
        if last:
            self._board.mark(SUMMED)


def _when_accumulated(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _flatten(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The gradients as one flat tensor; a single one is taken as it lies."""
    if len(parameters) == 1:
        grad = parameters[0].grad
        if grad is not None and grad.is_contiguous():
            return grad.detach().view(-1)
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat: torch.Tensor = _flatten_dense_tensors(grads)  # type: ignore[no-untyped-call]
    return flat


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of the groups, whoever owns it: the same bits in every layout."""
    if len(parts) == 1:
        return parts[0]
    total = torch.add(parts[0], parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


def _assign(parameters: Sequence[nn.Parameter], used: Sequence[bool], flat: torch.Tensor) -> None:
    """Makes each parameter's gradient a view of the sum; one that nobody used has none."""
    views = _unflatten_dense_tensors(flat, parameters)  # type: ignore[no-untyped-call]
    for parameter, view, is_used in zip(parameters, views, used, strict=True):
        parameter.grad = view if is_used else None
