"""A training step over all groups: the part of `fit` that a hand-written loop uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal

import rich
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from shoal.errors import DeviceLostError
from shoal.train.data import batches, node_data
from shoal.train.gradients.exchange import BUCKET_BYTES, Exchange
from shoal.train.gradients.scaling import LossScale
from shoal.train.group import devices
from shoal.train.group.errors import GroupError, GroupLostError, NotFiniteError
from shoal.train.group.groups import WorkerGroup, WorkerGroups
from shoal.train.group.step_events import Board
from shoal.train.group.timeline import Timeline
from shoal.train.model.build import Builder
from shoal.train.model.replicas import (
    Objective,
    Part,
    Replica,
    StepContext,
    beside,
    copy_replica,
    hyperparameters,
    place,
)
from shoal.train.step.batch_division import Division, Prepared
from shoal.train.step.training_step import GroupWork
from shoal.train.step.recovery import OnLost, Recovery

STEP_TIMEOUT_S = 600.0
Autocast = torch.dtype | None


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did."""

    number: int
    samples: int
    shares: tuple[int, ...]  # samples of each group
    loss: float  # mean over the samples; NaN where nan="ignore" left it unread
    skipped: bool = False  # the loss was not finite and nan="skip", or float16 overflowed


class Trainer:
    """Trains a model over worker groups; the loop, the data and the optimizer are yours.

    The model and the optimizer are used as they are: they are moved to the first group's devices,
    the other groups get copies. `close()`, or leaving the `with` block, brings the model back.

    Args:
        model: on any device, with its parameters in `optimizer`.
        loss: `loss(output, target)`, the mean over the samples; None if the model returns its own.
        optimizer: any torch optimizer whose `step()` needs no closure.
        groups: from `worker_groups`, or what its first argument takes.
        micro_batches: pieces that a group computes one after another: gradient accumulation on one
            device, the pipeline's pieces on several (default there: 2 * stages - 1, 4 for each stage
            with "1f1b" and "gpipe", fewer where they would be too small to compute well).
        schedule: "zero-bubble", "zero-bubble-lean", "1f1b" or "gpipe".
        clip_norm: the largest norm of all gradients together.
        autocast: `torch.bfloat16` or `torch.float16` for mixed precision; the latter with a loss scale
            that follows the gradients (steps whose gradients overflow are skipped).
        weigh: what a part of a batch counts in the mean, by default its samples. For losses that
            are means over something else: `weigh=lambda batch: batch["attention_mask"].sum()`.
        nan: "raise" before the weights change, "skip" the step, or "ignore" (the loss is not read).
        on_lost: what is kept for the case that a group is lost. "stop" raises, and whatever that
            group held is gone; "save" raises, and `drop(error.group)` then leaves the last whole
            step in the model and the optimizer; "continue" does the step again with the others.
        divide_update: whether each group updates only the weights whose gradients it sums, and
            keeps only their optimizer state: less work and less memory. Default: where
            `on_lost="stop"` and the optimizer is one of torch's.
        balance: whether groups get as many samples as makes them finish together.
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
        self.steps = 0
        self.timeline = Timeline()
        self._objective = Objective(loss, autocast)
        self._scale = LossScale() if autocast is torch.float16 else None
        self._builder = Builder(micro_batches, schedule, tell)
        self._nan = nan
        self._on_lost = on_lost
        self._divide_update = _may_divide(optimizer, on_lost, divide_update)
        limits = tuple(batch_limits) if batch_limits is not None else None
        micros = self._builder.micro_batches_for
        self._division = Division(weigh or batches.size, balance, limits, micros)
        self._bucket_bytes = bucket_bytes
        self._timeout_s = step_timeout_s
        self._homes = {n: t.device for n, t in [*model.named_parameters(), *model.named_buffers()]}
        self._replicas: list[Replica] = []  # one list for the trainer's life: recovery has it, too
        self._recovery = Recovery(
            self._replicas, on_lost, step_timeout_s, self._disconnect, self._connect_without
        )
        self._exchange: Exchange | None = None
        self._work = GroupWork(
            self._replicas, step_timeout_s, clip_norm, reads_loss=nan != "ignore",
            waits_for_sums=on_lost != "stop", scales=self._scale is not None,
        )  # fmt: skip
        self._board = Board()
        self._forget: Callable[[], None] = _nothing
        self._unhook: Callable[[], None] = _nothing

    # --- a step ---

    def step(self, batch: Any) -> Step:
        """Trains on one batch. When this returns the loss is known and the rest is on its way: the
        devices work on while the next batch is prepared (`synchronize()` waits for them)."""
        self._division.learn(self.steps, self._replicas)  # before it is divided
        ready = batch if isinstance(batch, Prepared) else self.prepare(batch)
        self.build(ready.batch)
        while True:
            try:
                return self._attempt(ready)
            except GroupLostError as error:
                self._recovery.go_on_without(error)
            except GroupError as error:
                # After the commit there is no second time: some groups have updated their weights.
                if error.step != self.steps or not self._division.in_more_pieces(error, ready):
                    raise

    def prepare(self, batch: Any) -> Prepared:
        """Divides a batch and sends its parts to the groups' devices, ahead of its step. May run in
        a thread of its own: `shoal.train.Feed(loader, trainer.prepare)`."""
        batch = batches.as_tensors(batch)
        ready = Prepared(batch, batches.size(batch))
        replicas = list(self._replicas)
        if replicas:  # before the first step there is nothing to send to
            self._division.share_out(ready, replicas)
            firsts = [replica.used_members[0].device for replica in replicas]
            node_data.ask([[part.batch for part in parts] for parts in ready.parts], firsts)
            for device, parts in zip(firsts, ready.parts, strict=True):
                parts[:] = [Part(batches.ahead_to_device(p.batch, device), p.weight) for p in parts]
        return ready

    def build(self, batch: Any) -> None:
        """Puts the model on the groups' devices; the first step does this. A batch is needed to see
        where the model can be cut."""
        if self._replicas:
            return
        self._replicas[:] = self._builder.build(
            self.model, self.optimizer, self.groups, self._objective, self.timeline, batch
        )
        if self._divide_update:
            hook = self.optimizer.register_state_dict_pre_hook(lambda _: self._gather_state())
            self._unhook = hook.remove
        has_norm = any(isinstance(m, _BatchNorm) for m in self.model.modules())
        speeds = [self._builder.speed(r.group) * r.stages for r in self._replicas]
        self._division.begin(speeds, least=2 if has_norm else 0)
        self._connect()
        self._forget = self.groups.on_trouble(self._on_trouble, lambda: self.steps)

    def _connect(self) -> None:
        self._exchange = Exchange(
            [replica.parameters for replica in self._replicas],
            self.timeline,
            self._bucket_bytes,
            self._divide_update,
            [self._builder.speed(replica.group) for replica in self._replicas],
        )

    def _attempt(self, ready: Prepared) -> Step:
        self.timeline.collect()
        if ready.groups != tuple(replica.group.index for replica in self._replicas):
            self._division.share_out(ready, self._replicas)
        counts, parts = ready.counts, ready.parts
        number = self.steps
        board = self._board = Board()
        for replica in self._replicas:
            if replica.group.lost is not None:
                raise replica.group.error(DeviceLostError(replica.group.lost), number)
        assert self._exchange is not None
        self._exchange.begin(board, number, [i for i, n in enumerate(counts) if n > 0])
        settings = hyperparameters(self._replicas[0].optimizer)
        scale = self._scale.value if self._scale is not None else 1.0
        contexts = [
            StepContext(number, slot, board, self._exchange, self._timeout_s, scale)
            for slot in range(len(self._replicas))
        ]
        futures = self._work.start(parts, contexts, settings)
        try:
            for slot, replica in enumerate(self._replicas):
                what = f"{replica.group} in step {number}"
                board.wait(("ready", slot), what, self._timeout_s)
        except BaseException as error:
            board.fail(-1, error)
            failure = self._recovery.failure(board, futures, number)
            raise failure from failure.__cause__
        loss = self._loss(futures, board, number)
        overflowed = any(board.values("overflow").values())
        skipped = overflowed or (not math.isfinite(loss) and self._nan == "skip")
        if skipped:
            board.mark("skip")
        if not board.commit():
            raise self._recovery.failure(board, futures, number)
        if self._scale is not None:
            self._scale.learn(overflowed)
        self.steps += 1
        self._division.committed(number, ready, self._replicas)
        self._recovery.finish(futures, number)
        return Step(number, ready.samples, counts, loss, skipped)

    def _loss(self, futures: Sequence[Future[Any]], board: Board, number: int) -> float:
        """The batch's loss. Not finite: raises before any weight has changed."""
        if self._nan == "ignore":
            return math.nan
        values = board.values("loss")
        loss = math.fsum(values[slot] for slot in sorted(values))
        if math.isfinite(loss) or self._nan == "skip":
            return loss
        slot = next((s for s, v in sorted(values.items()) if not math.isfinite(v)), 0)
        group = self._replicas[slot].group
        error = NotFiniteError(
            f"the loss is {values[slot]} in group {group.index} "
            f"({', '.join(map(str, group.members))}), step {number}. The weights are those before "
            'this step. Look at the batch and the learning rate, or pass nan="skip"'
        )
        board.fail(group.index, error)
        self._recovery.settle(futures)
        self._recovery.clear_gradients()
        raise error

    # --- what goes wrong ---

    def _on_trouble(self, group: WorkerGroup, why: str) -> None:
        self._board.fail(group.index, DeviceLostError(why))

    @property
    def lost(self) -> list[GroupLostError]:
        """The losses so far."""
        return self._recovery.lost

    def drop(self, index: int) -> bool:
        """Gives a group up. The model and optimizer then hold what the others hold; False if there
        are no others, or with `on_lost="stop"`."""
        return self._recovery.drop(index)

    def _disconnect(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def _connect_without(self, slot: int) -> None:
        self._division.drop(slot)
        self._connect()

    # --- beside the steps ---

    def evaluate(self, batch: Any) -> float:
        """The loss of a batch without training; the groups share it. The model is in eval mode."""
        batch = batches.as_tensors(batch)
        self.build(batch)
        ready = Prepared(batch, batches.size(batch))
        while True:
            self._division.share_out_by_speed(ready, self._replicas)
            try:
                return self._evaluate(ready.parts)
            except GroupError as error:
                if not self._division.in_more_pieces(error, ready):
                    raise

    def _evaluate(self, parts: Sequence[Sequence[Part]]) -> float:
        def work(replica: Replica, pieces: Sequence[Part], _: WorkerGroup) -> float:
            modes = [m.training for m in replica.model.modules()]
            replica.model.eval()
            try:
                return math.fsum(replica.evaluate(p.batch).item() * p.weight for p in pieces)
            finally:
                for module, mode in zip(replica.model.modules(), modes, strict=True):
                    module.training = mode

        futures = [
            (r.group, r.group.call(partial(work, r, pieces)))
            for r, pieces in zip(self._replicas, parts, strict=True)
            if pieces
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
        """Waits until every group has done everything so far; raises what went wrong."""
        for replica in self._replicas:
            for member in replica.used_members:
                try:
                    devices.synchronize(member.device)
                except Exception as error:
                    raise replica.group.error(error, self.steps) from error

    def spread(self) -> None:
        """Gives all groups the weights and optimizer state of the first, after they were loaded."""
        for replica in self._replicas[1:]:
            copy_replica(self._replicas[0], replica)

    def _gather_state(self) -> None:
        """Brings the optimizer state that other groups keep to the user's own optimizer."""
        if self._exchange is None or not self._exchange.divided or not self._replicas:
            return
        first = self._replicas[0]
        for slot, replica in enumerate(self._replicas[1:], start=1):
            ours = dict(zip(replica.parameters, first.parameters, strict=True))
            for theirs in self._exchange.owned(slot):
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
        """Ends the training: the model goes back to where it was before."""
        self._forget()
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
        if self._exchange is not None:
            self._exchange.close()
        for replica in replicas:
            replica.close()
        if failure is not None and not self.lost:
            raise failure

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except DeviceLostError:
            if error is None:
                raise


def _may_divide(optimizer: Optimizer, on_lost: str, asked: bool | None) -> bool:
    """Whether groups may update parts of the model: each weight by itself, and none to be rescued."""
    if asked and on_lost != "stop":
        raise ValueError(
            f'divide_update=True keeps each part of the optimizer state once; on_lost="{on_lost}" '
            "needs it in every group"
        )
    apart = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
        optimizer, torch.optim.LBFGS
    )
    return on_lost == "stop" and (apart if asked is None else asked)


def _nothing() -> None:
    """Before there are groups to listen to."""
