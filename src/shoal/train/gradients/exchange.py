"""The exchange of gradients between replicas: each device owns, sums and returns a partition.

Built on plain torch copies between devices and in-place sums, so that a faster path between two devices
serves it without change. The owner takes a bucket of the others while it still computes the rest of its
own backward pass.

The owner returns the sum, and every group updates all weights. In a *sharded optimizer step* (as in
ZeRO) each group updates the weights of its own partition, and the owner returns those. That halves the
optimizer's work and state in two groups, but a lost group takes its shard of the state along.
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
from shoal.train.group.replay import not_captured
from shoal.train.group.step_events import Event, StepEvents
from shoal.train.group.timeline import Stopwatch, Timeline

BUCKET_BYTES = 4 * 2**20
#: A parameter of this size is a bucket of its own: its gradient moves without being joined to others.
ALONE_BYTES = 2**18
#: The fraction of its buckets by which an owner lets the others get behind before it waits for them.
#: Copies are in the devices' streams: without a lag the devices would run in lockstep.
LAG = 0.25


@dataclass(slots=True)
class _BucketState:
    """One bucket in one step."""

    missing: list[set[int]]  # by group: indices of parameters whose gradient is not ready
    flats: dict[int, torch.Tensor] = field(default_factory=dict)  # by contributing group
    taken: dict[int, torch.Tensor] = field(default_factory=dict)  # those that the owner has taken
    total: torch.Tensor | None = None  # at the owner
    used: set[int] = field(default_factory=set)  # indices that some group has a gradient for


@dataclass(frozen=True, slots=True)
class _Offer:
    """A group's gradients of a bucket that its owner has not taken yet."""

    sent: int  # buckets that the sender had sent
    bucket: int
    group: int  # the sender


@dataclass(slots=True)
class _GroupState:
    """One group in one step."""

    sent: int = 0  # buckets whose gradients are computed and joined
    flushed: bool = False  # all of them are
    offers: deque[_Offer] = field(default_factory=deque)  # to take when it is far enough itself
    starts: list[torch.Event] = field(default_factory=list)  # where its backward pass ends
    lock: threading.Lock = field(default_factory=threading.Lock)  # of what it takes: one order


@dataclass(slots=True)
class _StepState:
    """All groups in one step."""

    number: int
    events: StepEvents
    contributing: frozenset[int]  # groups with samples
    buckets: list[_BucketState]
    groups: list[_GroupState]
    unsummed: int  # buckets
    armed: set[tuple[int, torch.device]] = field(default_factory=set)
    late: set[tuple[int, int]] = field(default_factory=set)  # group, index of a parameter


class Exchange:
    """Sums the gradients of equal parameters over the groups.

    Args:
        replicas: the parameters of each group, in the same order in all.
        sharded: whether each group updates only the weights that it owns.
        speeds: of the groups; a slow one owns less.

    In a step: `begin()`, a backward pass in each group with `arm(group)` before its last
    micro-batch, `flush(group)` after it, `wait(group)`; then every group's `.grad` is the sum. In a
    sharded step a group has only the gradients that it owns, and after the optimizers' steps
    `return_weights()` gives every group the weights of the others.
    """

    def __init__(
        self,
        replicas: Sequence[Sequence[nn.Parameter]],
        timeline: Timeline | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        sharded: bool = False,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self._replicas = [[p for p in params if p.requires_grad] for params in replicas]
        self._groups = len(replicas)
        self.sharded = sharded and self._groups > 1
        # The backward pass makes the last layers' gradients first.
        order = list(reversed(range(len(self._replicas[0]))))
        items = [self._item(index) for index in order]
        made = make_buckets(items, self._groups, bucket_bytes, speeds, ALONE_BYTES)
        self.buckets = tuple(
            Bucket(b.owner, tuple(order[i] for i in b.items), b.size_bytes) for b in made
        )
        self._bucket_of = {index: i for i, b in enumerate(self.buckets) for index in b.items}
        self._owned = [
            [index for b in self.buckets if b.owner == group for index in b.items]
            for group in range(self._groups)
        ]
        self._lag = max(1, round(LAG * len(self.buckets)))
        self._devices = [sorted({p.device for p in ps}, key=str) for ps in self._replicas]
        clock = timeline or Timeline()
        self._stopwatches = {
            d: Stopwatch(f"exchange to {d}", clock, d)
            for ds in self._devices
            for d in ds
            if self.several
        }
        self._hooks = [
            _when_accumulated(p, partial(self._on_grad, g, index))
            for g, params in enumerate(self._replicas)
            for index, p in enumerate(params)
            if self.several
        ]
        self._lock = threading.Lock()
        self._now = _StepState(0, StepEvents(0), frozenset(), [], [], 0)

    def _item(self, index: int) -> Item:
        parameters = [params[index] for params in self._replicas]
        # A bucket lies on one device in each group, so that it is one copy.
        where = ",".join(str(p.device) for p in parameters)
        first = parameters[0]
        return Item(first.numel() * first.element_size(), f"{first.dtype} {where}")

    def owned(self, group: int) -> list[nn.Parameter]:
        """Return the parameters whose gradients the group sums."""
        return [self._replicas[group][index] for index in self._owned[group]]

    # --- a step ---

    def begin(self, events: StepEvents, step: int, contributing: Sequence[int]) -> None:
        """Begin a step. Groups without samples do not contribute but get the sum."""
        giving = frozenset(contributing)
        with self._lock:
            self._now = _StepState(
                step,
                events,
                giving,
                [_BucketState([set(b.items) for _ in range(self._groups)]) for b in self.buckets],
                [_GroupState(flushed=g not in giving) for g in range(self._groups)],
                unsummed=len(self.buckets),
            )
        if not self.buckets:  # every weight is frozen
            events.set(Event.SUMMED)

    def arm(self, group: int, device: torch.device, late: Sequence[torch.Tensor] = ()) -> None:
        """Take gradients of this group on `device` as final when autograd accumulates them; those of
        `late` when `accumulated` is called."""
        if late:
            identities = {id(parameter) for parameter in late}
            indices = enumerate(self._replicas[group])
            self._now.late |= {(group, index) for index, p in indices if id(p) in identities}
        self._now.armed.add((group, device))

    def accumulated(self, group: int, late: Sequence[torch.Tensor]) -> None:
        """Take the gradients of these parameters as final."""
        if not self.several:
            return
        identities = {id(parameter) for parameter in late}
        for index, parameter in enumerate(self._replicas[group]):
            if id(parameter) in identities:
                self._now.late.discard((group, index))
                self._on_grad(group, index, parameter)

    @property
    def several(self) -> bool:
        """Whether there are groups to exchange with."""
        return self._groups > 1

    def flush(self, group: int) -> None:
        """End the group's backward pass: a parameter without a gradient gets none in this step."""
        now = self._now
        if not self.several or group not in now.contributing:
            return
        progress = now.groups[group]
        progress.starts = [record(device) for device in self._devices[group]]
        for number in range(len(self.buckets)):
            with self._lock:
                missing = now.buckets[number].missing[group]
                ready = bool(missing)
                missing.clear()
            if ready:
                self._send(now, number, group)
        with self._lock:
            progress.flushed = True
        self._release(now, group)

    def wait(self, group: int, timeout_s: float) -> None:
        """Wait until the sums are on their way to the group, and make them its gradients.

        Only the group's own thread touches `.grad`: a copy of a failed step, which may end long after
        it, cannot leave anything there for the next.
        """
        if not self.several:
            return
        now = self._now
        now.events.wait(Event.SUMMED, f"the sums of gradients for group {group}", timeout_s)
        for state, bucket in zip(now.buckets, self.buckets, strict=True):
            parameters = [self._replicas[group][index] for index in bucket.items]
            if self.sharded and bucket.owner != group:
                for parameter in parameters:
                    parameter.grad = None
                continue
            flat = self._returned(state, bucket, group)
            _assign(parameters, [index in state.used for index in bucket.items], flat)
        for device, start in zip(self._devices[group], now.groups[group].starts, strict=False):
            self._stopwatches[device].time("exchange", now.number, start, record(device))

    def _returned(self, state: _BucketState, bucket: Bucket, group: int) -> torch.Tensor:
        """Copy the sum to a group, over the gradients that the group gave."""
        assert state.total is not None
        if group == bucket.owner:
            return state.total
        with torch.no_grad():
            if group in state.flats:
                return state.flats[group].copy_(state.total, non_blocking=True)
            device = self._replicas[group][bucket.items[0]].device
            return state.total.to(device, non_blocking=True)

    def norms(self) -> list[torch.Tensor]:
        """Compute the norm of all gradients, on each group, where each has only those that it owns."""
        norms = [
            nn.utils.get_total_norm([p.grad for p in self.owned(g) if p.grad is not None])
            for g in range(self._groups)
        ]
        return [
            torch.linalg.vector_norm(
                torch.stack([norm.to(devices[0], non_blocking=True) for norm in norms])
            )
            for devices in self._devices
        ]

    @torch.no_grad()
    def return_weights(self) -> None:
        """Give every group the weights that the others have updated in a sharded step. The device
        copies each weight when it first uses it."""
        for group in range(self._groups):
            for owner in range(self._groups):
                if owner != group:
                    for index in self._owned[owner]:
                        copy_later(self._replicas[group][index], self._replicas[owner][index])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for stopwatch in self._stopwatches.values():
            stopwatch.close()

    # --- gathering ---

    def _on_grad(self, group: int, index: int, parameter: torch.Tensor) -> None:
        now = self._now
        if (group, parameter.device) not in now.armed or (group, index) in now.late:
            return
        number = self._bucket_of[index]
        with self._lock:
            missing = now.buckets[number].missing[group]
            if index not in missing:
                raise TrainError(
                    f"a gradient of shape {tuple(parameter.shape)} on {parameter.device} came twice in "
                    "a step: the sum would not be that of the batch. If a block that runs more than "
                    "once is checkpointed, use use_reentrant=False. If the model moves tensors to a "
                    "device that it names by its number, write x.device instead"
                )
            missing.discard(index)
            if missing:
                return
        with not_captured():  # a group that replays this pass sends its own
            self._send(now, number, group)

    def _send(self, now: _StepState, number: int, group: int) -> None:
        """Join the group's gradients of a bucket and offer them to the owner."""
        bucket = self.buckets[number]
        parameters = [self._replicas[group][index] for index in bucket.items]
        with torch.no_grad():
            flat = _flatten(parameters)
        state = now.buckets[number]
        with self._lock:
            state.flats[group] = flat
            state.used |= {
                index
                for index, p in zip(bucket.items, parameters, strict=True)
                if p.grad is not None
            }
            now.groups[group].sent += 1
            offer = _Offer(now.groups[group].sent, number, group)
            now.groups[bucket.owner].offers.append(offer)
        self._release(now, group)
        if bucket.owner != group:
            self._release(now, bucket.owner)

    def _release(self, now: _StepState, owner: int) -> None:
        """Let an owner take the others' gradients up to the point that it has passed itself."""
        progress = now.groups[owner]
        with progress.lock:
            while True:
                with self._lock:
                    offers = progress.offers
                    if not offers:
                        return
                    if not progress.flushed and offers[0].sent + self._lag > progress.sent:
                        return
                    offer = offers.popleft()
                self._collect(now, offer.bucket, offer.group)

    @torch.no_grad()
    def _collect(self, now: _StepState, number: int, group: int) -> None:
        """Take one group's gradients at the owner, and sum after the last group's."""
        bucket = self.buckets[number]
        state = now.buckets[number]
        state.taken[group] = state.flats[group]
        own = state.taken.get(bucket.owner)
        # Two are added where one of them lies, when both are there: their order does not matter.
        in_place = len(now.contributing) == 2 and bucket.owner in now.contributing
        if not in_place:
            owner = self._replicas[bucket.owner][bucket.items[0]].device
            state.taken[group] = state.taken[group].to(owner, non_blocking=True)
        if len(state.taken) < len(now.contributing):
            return
        if in_place and own is not None:
            other = next(flat for g, flat in state.taken.items() if g != bucket.owner)
            add_from(own, other)
            state.total = own
        else:
            state.total = _sum([state.taken[g] for g in sorted(state.taken)])
        state.taken.clear()
        if self.sharded:
            state.flats.clear()
        with self._lock:
            now.unsummed -= 1
            last = now.unsummed == 0
        if last:
            now.events.set(Event.SUMMED)


def _when_accumulated(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _flatten(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Join gradients in one flat tensor; take a single one as it is."""
    if len(parameters) == 1:
        grad = parameters[0].grad
        if grad is not None and grad.is_contiguous():
            return grad.detach().view(-1)
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat: torch.Tensor = _flatten_dense_tensors(grads)  # type: ignore[no-untyped-call]
    return flat


def _sum(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum in the order of the groups, so that every layout gives the same bits."""
    if len(flats) == 1:
        return flats[0]
    total = torch.add(flats[0], flats[1])
    for flat in flats[2:]:
        total.add_(flat)
    return total


def _assign(parameters: Sequence[nn.Parameter], used: Sequence[bool], flat: torch.Tensor) -> None:
    """Make each parameter's gradient a view of the sum; an unused one gets none."""
    views = _unflatten_dense_tensors(flat, parameters)  # type: ignore[no-untyped-call]
    for parameter, view, is_used in zip(parameters, views, used, strict=True):
        parameter.grad = view if is_used else None
