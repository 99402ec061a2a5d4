"""`Trainer`: what a hand-written training loop uses. training_step.py has the step itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, Literal

import rich
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from shoal.errors import DeviceLostError
from shoal.train.data import batches
from shoal.train.gradients.exchange import BUCKET_BYTES, Exchange
from shoal.train.gradients.scaling import LossScale
from shoal.train.group import devices
from shoal.train.group.errors import GroupError, GroupLostError
from shoal.train.group.groups import WorkerGroup, WorkerGroups
from shoal.train.group.timeline import Timeline
from shoal.train.model.build import Builder
from shoal.train.model.replicas import MicroBatch, Objective, Replica, beside, copy_replica, place
from shoal.train.step.prepared_batches import BatchPreparer, Prepared
from shoal.train.step.recovery import OnLost, Recovery
from shoal.train.step.training_step import Step, StepOptions, TrainingSteps

STEP_TIMEOUT_S = 600.0
Autocast = torch.dtype | None


class Trainer:
    """Trains a model over worker groups; the loop, the data and the optimizer are yours.

    The trainer moves the model and the optimizer state to the first group's devices and copies them to
    the other groups. `close()`, or leaving the `with` block, moves the model back.

    Args:
        model: on any device, with its parameters in `optimizer`.
        loss: `loss(output, target)`, the mean over the samples; None if the model returns its own.
        optimizer: any torch optimizer whose `step()` needs no closure.
        groups: from `worker_groups`.
        micro_batches: of each group, computed one after another: gradient accumulation on one device,
            the pipeline's micro-batches on several (default there: 2 * stages - 1; 4 for each stage
            with "1f1b" and "gpipe"; fewer where they would be too small to compute well).
        schedule: "zero-bubble", "zero-bubble-lean", "1f1b" or "gpipe".
        clip_norm: the largest norm of all gradients together.
        autocast: `torch.bfloat16` or `torch.float16` for mixed precision. float16 scales the loss;
            the scale follows the gradients, and a step whose gradients overflow is skipped.
        weigh: the weight of a micro-batch in the mean, by default its samples. For losses that are
            means over something else: `weigh=lambda batch: batch["attention_mask"].sum()`.
        nan: "raise" before the weights change, "skip" the step, or "ignore" (the loss is not read).
        on_lost: what to keep in case a group is lost. "stop" raises, and the tensors of that group
            are gone. "save" raises, and `drop(error.group)` then leaves the last whole step in the
            model and the optimizer. "continue" repeats the step with the other groups.
        divide_update: whether to shard the optimizer step: each group updates only the weights whose
            gradients it sums, and keeps only their optimizer state. That is less work and less
            memory. Default: where `on_lost="stop"` and the optimizer is one of torch's.
        balance: whether to split batches so that all groups finish together.
        batch_limits: the most samples that each group can hold, if memory limits them.

    >>> with shoal.train.worker_groups(2) as groups:
    ...     with shoal.train.Trainer(model, F.cross_entropy, optimizer, groups) as trainer:
    ...         for batch in loader:
    ...             print(trainer.step(batch).loss)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: batches.Loss | None,
        optimizer: Optimizer,
        groups: WorkerGroups,
        *,
        micro_batches: int | None = None,
        schedule: str = "zero-bubble",
        clip_norm: float | None = None,
        autocast: Autocast = None,
        weigh: Callable[[Any], Any] | None = None,
        nan: Literal["raise", "skip", "ignore"] = "raise",
        on_lost: OnLost = "stop",
        divide_update: bool | None = None,
        balance: bool = True,
        batch_limits: Sequence[int | None] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        step_timeout_s: float = STEP_TIMEOUT_S,
        tell: Callable[[Any], None] = rich.print,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.groups = groups
        self.timeline = Timeline()
        self._objective = Objective(loss, autocast)
        self._builder = Builder(micro_batches, schedule, tell)
        self._shards_optimizer = _may_shard(optimizer, on_lost, divide_update)
        limits = tuple(batch_limits) if batch_limits is not None else None
        micros = self._builder.micro_batches_for
        self._preparer = BatchPreparer(weigh or batches.size, balance, limits, micros)
        self._bucket_bytes = bucket_bytes
        self._timeout_s = step_timeout_s
        self._homes = {n: t.device for n, t in [*model.named_parameters(), *model.named_buffers()]}
        self._replicas: list[Replica] = []  # one list for the trainer's life: its helpers hold it
        self._recovery = Recovery(
            self._replicas, on_lost, step_timeout_s, self._disconnect, self._connect_without
        )
        scale = LossScale() if autocast is torch.float16 else None
        options = StepOptions(step_timeout_s, clip_norm, nan, awaits_sums=on_lost != "stop")
        self._steps = TrainingSteps(self._replicas, self._preparer, self._recovery, scale, options)
        self._stop_listening: Callable[[], None] = _nothing
        self._unhook: Callable[[], None] = _nothing

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._steps.done

    @steps.setter
    def steps(self, done: int) -> None:
        self._steps.done = done

    def step(self, batch: Any) -> Step:
        """Train on one batch.

        When this returns, the loss is known and the rest is queued: the devices compute while the
        program prepares the next batch. `synchronize()` waits for them.
        """
        self.timeline.collect()
        self._preparer.learn(self.steps, self._replicas)  # before the batch is divided
        ready = batch if isinstance(batch, Prepared) else self.prepare(batch)
        self.build(ready.batch)
        return self._steps.run(ready)

    def prepare(self, batch: Any) -> Prepared:
        """Divide a batch and send its micro-batches to the groups' devices, ahead of its step.

        May run in a thread of its own: `shoal.train.Feed(loader, trainer.prepare)`.
        """
        return self._steps.prepare(batch)

    def build(self, batch: Any) -> None:
        """Put the model on the groups' devices; the first step does this. The batch shows where the
        model can be cut."""
        if self._replicas:
            return
        self._replicas[:] = self._builder.build(
            self.model, self.optimizer, self.groups, self._objective, self.timeline, batch,
            self.steps,
        )  # fmt: skip
        if self._shards_optimizer:
            hook = self.optimizer.register_state_dict_pre_hook(lambda _: self._gather_state())
            self._unhook = hook.remove
        has_norm = any(isinstance(m, _BatchNorm) for m in self.model.modules())
        speeds = [self._builder.speed(r.group) * r.stages for r in self._replicas]
        self._preparer.begin(speeds, least=2 if has_norm else 0)
        self._connect()
        self._stop_listening = self.groups.on_trouble(self._on_trouble, lambda: self.steps)

    def _connect(self) -> None:
        self._steps.exchange = Exchange(
            [replica.parameters for replica in self._replicas],
            self.timeline,
            self._bucket_bytes,
            self._shards_optimizer,
            [self._builder.speed(replica.group) for replica in self._replicas],
        )

    # --- lost groups ---

    def _on_trouble(self, group: WorkerGroup, error: DeviceLostError) -> None:
        self._steps.events.fail(group.index, error)

    @property
    def lost(self) -> list[GroupLostError]:
        """The groups that were lost so far."""
        return self._recovery.lost

    def drop(self, index: int) -> bool:
        """Give a group up. The model and optimizer then hold what the others hold. Return False if
        there are no others, or with `on_lost="stop"`."""
        return self._recovery.drop(index)

    def _disconnect(self) -> None:
        if self._steps.exchange is not None:
            self._steps.exchange.close()

    def _connect_without(self, slot: int) -> None:
        self._preparer.drop(slot)
        self._connect()

    # --- beside the steps ---

    def evaluate(self, batch: Any) -> float:
        """Return the loss of a batch without training. Every group computes a sub-batch, with the
        model in eval mode."""
        batch = batches.as_tensors(batch)
        self.build(batch)
        ready = Prepared(batch, batches.size(batch))
        while True:
            self._preparer.divide_by_speed(ready, self._replicas)
            try:
                return self._evaluate(ready.micro_batches)
            except GroupError as error:
                if not self._preparer.cut_finer(error, ready):
                    raise

    def _evaluate(self, by_group: Sequence[Sequence[MicroBatch]]) -> float:
        def work(replica: Replica, micro_batches: Sequence[MicroBatch], _: WorkerGroup) -> float:
            modes = [m.training for m in replica.model.modules()]
            replica.model.eval()
            try:
                return math.fsum(replica.evaluate(m.batch).item() * m.weight for m in micro_batches)
            finally:
                for module, mode in zip(replica.model.modules(), modes, strict=True):
                    module.training = mode

        futures = [
            (replica.group, replica.group.call(partial(work, replica, micro_batches)))
            for replica, micro_batches in zip(self._replicas, by_group, strict=True)
            if micro_batches
        ]
        wait([future for _, future in futures], self._timeout_s)
        total = 0.0
        for group, future in futures:
            try:
                total += future.result(0)
            except Exception as error:
                raise group.error(error, self.steps) from error
        return total

    def synchronize(self) -> None:
        """Wait until every group has done everything so far; raise the first error."""
        for replica in self._replicas:
            for member in replica.used_members:
                try:
                    devices.synchronize(member.device)
                except Exception as error:
                    raise replica.group.error(error, self.steps) from error

    def spread(self) -> None:
        """Give all groups the weights and optimizer state of the first, after they were loaded."""
        for replica in self._replicas[1:]:
            copy_replica(self._replicas[0], replica)

    def _gather_state(self) -> None:
        """Copy the optimizer state that other groups keep to the user's own optimizer."""
        exchange = self._steps.exchange
        if exchange is None or not exchange.sharded or not self._replicas:
            return
        first = self._replicas[0]
        for slot, replica in enumerate(self._replicas[1:], start=1):
            ours = dict(zip(replica.parameters, first.parameters, strict=True))
            for theirs in exchange.owned(slot):
                if theirs in replica.optimizer.state:
                    state = replica.optimizer.state[theirs]
                    own = ours[theirs]
                    first.optimizer.state[own] = {
                        k: beside(v, theirs, own) for k, v in state.items()
                    }

    @property
    def layout(self) -> list[list[str]]:
        """The names of the devices of each group, in the order of its stages."""
        return [[m.name for m in replica.used_members] for replica in self._replicas]

    def close(self) -> None:
        """End the training. The model goes back to the device that it came from."""
        self._stop_listening()
        self._unhook()
        failure: BaseException | None = None
        try:
            self._gather_state()
        except DeviceLostError as error:
            failure = error
        replicas = list(self._replicas)
        self._replicas.clear()
        if not replicas:
            return
        try:
            place(self.model, self.optimizer, lambda name: self._homes[name])
        except DeviceLostError as error:
            failure = error
        if self._steps.exchange is not None:
            self._steps.exchange.close()
        for replica in replicas:
            replica.close()
        if failure is not None and not self.lost:
            raise failure

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except DeviceLostError:
            if error is None:
                raise


def _may_shard(optimizer: Optimizer, on_lost: str, asked: bool | None) -> bool:
    """Return whether each group may update a shard of the weights: the optimizer treats each weight by
    itself, and no group's state must survive its loss."""
    if asked and on_lost != "stop":
        raise ValueError(
            f"divide_update=True keeps each shard of the optimizer state in one group, but "
            f'on_lost="{on_lost}" needs all of it in every group. Pass divide_update=False'
        )
    elementwise = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
        optimizer, torch.optim.LBFGS
    )
    return on_lost == "stop" and (elementwise if asked is None else asked)


def _nothing() -> None:
    """Stand in for a callback until there are groups."""
