"""A training step, from top to bottom.

| Phase | Thread | Function |
|---|---|---|
| Divide the batch, send its micro-batches to the devices | any, ahead of the step | `prepare` |
| Start the groups | the trainer's | `_start_groups` |
| Forward and backward pass, or the replay of another group's | the groups' | `_forward_backward` |
| Read the losses | the groups' | `_read_losses` |
| Sum the gradients over the groups, and report ready | the groups' | `_finish_exchange` |
| Commit: decide that the step counts | the trainer's | `_decide` |
| Update the weights, and return those of a sharded step | the groups' | `_update` |
| Wait until every update is issued | the trainer's | `Recovery.finish` |

group/step_events.py has the events that the threads wait for. Before the commit an error undoes the
step; after it, the error belongs to the next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn

from shoal.errors import DeviceLostError
from shoal.train.data import batches, node_data
from shoal.train.gradients.exchange import Exchange
from shoal.train.gradients.scaling import LossScale, unscale
from shoal.train.group import devices
from shoal.train.group.errors import GroupError, GroupLostError, NotFiniteError
from shoal.train.group.groups import WorkerGroup
from shoal.train.group.issue_lock import IssueLock
from shoal.train.group.replay import CannotReplay, CapturedPass, ReplayPolicy, capture
from shoal.train.group.step_events import Decision, Event, StepEvents
from shoal.train.model.replicas import (
    MicroBatch,
    Replica,
    StepContext,
    adopt_hyperparameters,
    hyperparameters,
)
from shoal.train.step.prepared_batches import BatchPreparer, Prepared
from shoal.train.step.recovery import Recovery

#: Losses of one group's micro-batches, with their weights.
Losses = list[tuple[devices.Reading, float]]


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did.

    >>> step = trainer.step(batch)
    >>> print(step.number, step.samples, step.loss)
    """

    number: int
    samples: int
    shares: tuple[int, ...]  # samples of each group
    loss: float  # mean over the samples; NaN where nan="ignore" left it unread
    skipped: bool = False  # the loss was not finite and nan="skip", or float16 overflowed


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Arguments of `Trainer` that its steps use."""

    timeout_s: float  # of every wait
    clip_norm: float | None
    nan: Literal["raise", "skip", "ignore"]
    awaits_sums: bool  # before the commit: a lost group must not take its gradients along


class TrainingSteps:
    """Runs the steps of a trainer.

    Args:
        replicas: the trainer's own list. A group that is given up leaves it.
        scale: of the loss, where gradients may overflow.
    """

    def __init__(
        self,
        replicas: list[Replica],
        preparer: BatchPreparer,
        recovery: Recovery,
        scale: LossScale | None,
        options: StepOptions,
    ) -> None:
        self.done = 0  # steps so far: the number of the next one
        self.exchange: Exchange | None = None
        self.events = StepEvents(0)  # of the present step
        self.replay = ReplayPolicy()
        self._replicas = replicas
        self._preparer = preparer
        self._recovery = recovery
        self._scale = scale
        self._options = options
        self._issue_lock = IssueLock()

    # --- prepare and divide, ahead of the step ---

    def prepare(self, batch: Any) -> Prepared:
        """Divide a batch and send its micro-batches to the groups' devices."""
        batch = batches.as_tensors(batch)
        ready = Prepared(batch, batches.size(batch))
        replicas = list(self._replicas)
        if replicas:  # before the first step there is nothing to send to
            self._preparer.divide(ready, replicas)
            firsts = [replica.used_members[0].device for replica in replicas]
            node_data.ask([[m.batch for m in group] for group in ready.micro_batches], firsts)
            for device, group in zip(firsts, ready.micro_batches, strict=True):
                group[:] = [
                    MicroBatch(batches.ahead_to_device(m.batch, device), m.weight) for m in group
                ]
        return ready

    # --- the trainer's thread ---

    def run(self, ready: Prepared) -> Step:
        """Train on one batch. Repeat the step without a lost group, or in more micro-batches."""
        while True:
            try:
                return self._attempt(ready)
            except GroupLostError as error:
                self._recovery.go_on_without(error)
            except GroupError as error:
                # After the commit nothing is repeated: some groups have updated their weights.
                if error.step != self.done or not self._preparer.cut_finer(error, ready):
                    raise

    def _attempt(self, ready: Prepared) -> Step:
        number = self.done
        if ready.groups != tuple(replica.group.index for replica in self._replicas):
            self._preparer.divide(ready, self._replicas)
        futures = self._start_groups(ready)
        self._await_groups(futures)
        loss = self._loss(futures)
        overflowed = any(result.overflowed for result in self.events.results)
        skipped = overflowed or (not math.isfinite(loss) and self._options.nan == "skip")
        if not self.events.commit(Decision.SKIP if skipped else Decision.UPDATE):
            raise self._recovery.failure(self.events, futures, number)
        if self._scale is not None:
            self._scale.learn(overflowed)
        self.done += 1
        self._preparer.committed(number, ready, self._replicas)
        self._recovery.finish(futures, number)
        return Step(number, ready.samples, ready.counts, loss, skipped)

    def _start_groups(self, ready: Prepared) -> list[Future[None]]:
        """Start the groups' threads and return their futures. The first group's thread works for all
        groups with the same micro-batches; its future then stands for each of them."""
        exchange, events = self.exchange, StepEvents(len(self._replicas))
        assert exchange is not None
        self.events = events
        for replica in self._replicas:
            if replica.group.lost is not None:
                raise replica.group.error(replica.group.lost, self.done)
        exchange.begin(events, self.done, [i for i, n in enumerate(ready.counts) if n > 0])
        scale = self._scale.value if self._scale is not None else 1.0
        contexts = [
            StepContext(self.done, slot, micro_batches, events, exchange, scale)
            for slot, micro_batches in enumerate(ready.micro_batches)
        ]
        kinds = [
            # A group without samples, or with stages, is like no other.
            tuple(m.weight for m in c.micro_batches)
            if c.micro_batches and r.stages == 1
            else c.slot
            for c, r in zip(contexts, self._replicas, strict=True)
        ]
        settings = hyperparameters(self._replicas[0].optimizer)
        futures: dict[int, Future[None]] = {}
        for slots in self.replay.classes(kinds):
            work = partial(self._group_step, [contexts[slot] for slot in slots], contexts, settings)
            futures |= dict.fromkeys(slots, self._replicas[slots[0]].group.call(work))
        return [futures[slot] for slot in sorted(futures)]

    def _await_groups(self, futures: Sequence[Future[None]]) -> None:
        """Wait until every group is ready for the commit."""
        try:
            for slot, replica in enumerate(self._replicas):
                what = f"{replica.group} in step {self.done}"
                self.events.wait(Event.READY, what, self._options.timeout_s, slot)
        except BaseException as error:
            self.events.fail(None, error)
            failure = self._recovery.failure(self.events, futures, self.done)
            raise failure from failure.__cause__

    def _loss(self, futures: Sequence[Future[None]]) -> float:
        """Return the batch's loss. Raise if it is not finite, before any weight has changed."""
        if self._options.nan == "ignore":
            return math.nan
        values = [result.loss or 0.0 for result in self.events.results]
        loss = math.fsum(values)
        if math.isfinite(loss) or self._options.nan == "skip":
            return loss
        slot = next((s for s, value in enumerate(values) if not math.isfinite(value)), 0)
        group = self._replicas[slot].group
        error = NotFiniteError(
            f"the loss is {values[slot]} in group {group.index} "
            f"({', '.join(map(str, group.members))}), step {self.done}. The weights are those before "
            'this step. Check the batch and the learning rate, or pass nan="skip"'
        )
        self.events.fail(group.index, error)
        self._recovery.quiesce(futures)
        self._recovery.clear_gradients()
        raise error

    # --- the groups' threads ---

    def _group_step(
        self,
        own: Sequence[StepContext],
        every: Sequence[StepContext],
        settings: Sequence[dict[str, Any]],
        _: WorkerGroup,
    ) -> None:
        """Do the step of the groups `own`, in the thread of the first; `every` has all groups."""
        events, exchange = own[0].events, own[0].exchange
        with self._issue_lock.held():
            losses = self._forward_backward(own)
        if self._options.nan != "ignore":
            self._read_losses(own, losses)
        self._finish_exchange(own)
        if exchange.sharded and own[0].slot > 0:
            return  # the first group's thread issues the whole update
        with self._blamed(own[0]):
            decision = events.wait_decision(self._options.timeout_s)
            updated = every if exchange.sharded else own
            if decision is Decision.UPDATE:
                self._update(updated, settings)
            for context in updated:
                self._replicas[context.slot].optimizer.zero_grad(set_to_none=True)
                self._replicas[context.slot].finish(context.step)

    @contextmanager
    def _blamed(self, context: StepContext) -> Iterator[None]:
        """Report an error in the block as the group's."""
        try:
            yield
        except BaseException as error:
            context.events.fail(self._replicas[context.slot].group.index, error)
            raise

    def _forward_backward(self, own: Sequence[StepContext]) -> list[Losses]:
        """Run the model for the first group. Replay its pass for the others, where that is possible."""
        first = own[0]
        leader = self._replicas[first.slot]
        losses: list[Losses] = []
        with self._blamed(first):
            with capture(leader.group.device) if len(own) > 1 else nullcontext() as captured:
                losses.append(
                    leader.forward_backward(first, captured) if first.micro_batches else []
                )
            first.exchange.flush(first.slot)
        for context in own[1:]:
            with self._blamed(context):
                assert captured is not None
                losses.append(self._replay(leader, captured, context))
                context.exchange.flush(context.slot)
        devices.set_current(leader.group.device)
        return losses

    def _replay(self, leader: Replica, captured: CapturedPass, context: StepContext) -> Losses:
        replica = self._replicas[context.slot]
        try:
            losses = replica.replay(leader, captured, context)
        except CannotReplay as error:
            self.replay.failed(str(error))
            devices.set_current(replica.group.device)
            return replica.forward_backward(context)
        self.replay.succeeded()
        return losses

    def _read_losses(self, own: Sequence[StepContext], losses: Sequence[Losses]) -> None:
        """Wait for the losses. This is the longest wait: all other work is issued before it."""
        for context, readings in zip(own, losses, strict=True):
            with self._blamed(context):
                # Another group's device may be lost: this thread must not wait for it then.
                read = (
                    (r.value() if context is own[0] else r.value_unless(context.events.check), w)
                    for r, w in readings
                )
                loss = math.fsum(value * weight for value, weight in read)
                context.events.results[context.slot].loss = loss

    def _finish_exchange(self, own: Sequence[StepContext]) -> None:
        """Wait for the sums of gradients, as far as the commit needs them, and report ready."""
        for context in own:
            replica, exchange, events = (
                self._replicas[context.slot], context.exchange, context.events,
            )  # fmt: skip
            with self._blamed(context):
                exchange.wait(context.slot, self._options.timeout_s)
                for member in replica.used_members if self._options.awaits_sums else ():
                    if context is own[0]:
                        devices.synchronize(member.device)
                    else:
                        devices.synchronize_unless(member.device, events.check)
                if self._scale is not None:
                    sums = exchange.owned(context.slot) if exchange.sharded else replica.parameters
                    overflowed = unscale(sums, context.scale) > 0
                    events.results[context.slot].overflowed = overflowed
                events.set(Event.READY, context.slot)

    def _update(self, updated: Sequence[StepContext], settings: Sequence[dict[str, Any]]) -> None:
        """Run the optimizers. In a sharded step each group updates the weights whose gradients it
        sums, and the other groups then get those weights."""
        exchange, clip_norm = updated[0].exchange, self._options.clip_norm
        sharded = exchange.sharded
        norms = exchange.norms() if sharded and clip_norm is not None else []
        # No other thread issues anything during a sharded update.
        with nullcontext() if sharded else self._issue_lock.held():
            for context in updated:
                replica, slot = self._replicas[context.slot], context.slot
                if sharded and slot > 0 and not exchange.owned(slot):
                    continue
                devices.set_current(replica.group.device)
                try:
                    if slot > 0:
                        adopt_hyperparameters(replica.optimizer, settings)
                    if clip_norm is not None and sharded:
                        nn.utils.clip_grads_with_norm_(exchange.owned(slot), clip_norm, norms[slot])
                    elif clip_norm is not None:
                        nn.utils.clip_grad_norm_(replica.parameters, clip_norm)
                    replica.optimizer.step()
                except DeviceLostError:
                    raise
                except Exception as error:
                    raise replica.group.error(error, context.step) from error
            devices.set_current(self._replicas[updated[0].slot].group.device)
            if sharded:
                exchange.return_weights()
