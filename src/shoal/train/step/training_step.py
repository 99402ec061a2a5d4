"""The groups' work in a step, in their threads: compute, exchange and, after the commit, update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from shoal.errors import DeviceLostError
from shoal.train.gradients.scaling import unscale
from shoal.train.group import devices
from shoal.train.group.groups import WorkerGroup
from shoal.train.group.issue_lock import Turns
from shoal.train.group.replay import Alike, CannotRepeat, Recorded, recorded
from shoal.train.group.step_events import COMMIT, Board
from shoal.train.model.replicas import Part, Replica, StepContext, adopt_hyperparameters


class GroupWork:
    """Has the groups work on a step.

    Args:
        replicas: the trainer's own list. A group that is given up leaves it.
        timeout_s: of every wait.
        clip_norm: the largest norm of all gradients together.
        reads_loss: whether a step's loss is read at all.
        waits_for_sums: whether the sums must have come before the commit, not only be on their way.
        scales: whether gradients are scaled, and are checked for what that made overflow.
    """

    def __init__(
        self,
        replicas: list[Replica],
        timeout_s: float,
        clip_norm: float | None,
        *,
        reads_loss: bool,
        waits_for_sums: bool,
        scales: bool,
    ) -> None:
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._clip_norm = clip_norm
        self._reads_loss = reads_loss
        self._waits_for_sums = waits_for_sums
        self._scales = scales
        self._turns = Turns()
        self.alike = Alike()

    def start(
        self,
        parts: Sequence[Sequence[Part]],
        contexts: Sequence[StepContext],
        settings: Sequence[dict[str, Any]],
    ) -> list[Future[None]]:
        """Has the groups' threads work; of groups with alike parts the first one's does it for all.
        Returns whom to wait for, by group."""
        futures: dict[int, Future[None]] = {}
        kinds = [
            # Without parts, or with stages, a group is like no other.
            tuple(p.weight for p in group) if group and replica.stages == 1 else slot
            for slot, (group, replica) in enumerate(zip(parts, self._replicas, strict=True))
        ]
        for slots in self.alike.classes(kinds):
            work = partial(self._work, slots, parts, contexts, settings)
            future = self._replicas[slots[0]].group.call(work)
            futures |= dict.fromkeys(slots, future)
        return [futures[slot] for slot in sorted(futures)]

    def _work(
        self,
        slots: Sequence[int],
        parts: Sequence[Sequence[Part]],
        contexts: Sequence[StepContext],
        settings: Sequence[dict[str, Any]],
        _: WorkerGroup,
    ) -> None:
        """A step of some groups, in the thread of the first: compute, exchange, and after the commit,
        update."""
        board, exchange = contexts[slots[0]].board, contexts[slots[0]].exchange
        with self._turns.turn():
            losses = self._compute(slots, parts, contexts)
        if self._reads_loss:  # the longest wait: all others have issued their work after it
            for slot in slots:
                with self._blamed(board, slot):
                    # Another group's device may be lost: this thread must not wait for it then.
                    read = (
                        (loss.value() if slot == slots[0] else loss.value_unless(board.check), w)
                        for loss, w in losses[slot]
                    )
                    board.put("loss", slot, math.fsum(value * w for value, w in read))
        for slot in slots:
            with self._blamed(board, slot):
                exchange.wait(slot, self._timeout_s)
                self._check(contexts[slot], own=slot == slots[0])
                board.mark(("ready", slot))
        if exchange.divided and slots[0] > 0:
            return  # the first group's thread issues the whole update
        with self._blamed(board, slots[0]):
            board.wait(COMMIT, "the other groups", self._timeout_s)
            updated = range(len(self._replicas)) if exchange.divided else slots
            if not board.is_marked("skip"):
                self._update(updated, contexts[slots[0]], settings)
            for slot in updated:
                self._replicas[slot].optimizer.zero_grad(set_to_none=True)
                self._replicas[slot].finish(contexts[slot].step)

    @contextmanager
    def _blamed(self, board: Board, slot: int) -> Iterator[None]:
        """What fails in the block is the group's failure."""
        try:
            yield
        except BaseException as error:
            board.fail(self._replicas[slot].group.index, error)
            raise

    def _compute(
        self,
        slots: Sequence[int],
        parts: Sequence[Sequence[Part]],
        contexts: Sequence[StepContext],
    ) -> dict[int, list[tuple[devices.Reading, float]]]:
        """The forward and backward passes of groups with alike parts: the program runs for the first,
        and the others repeat what its device was told, if that is possible."""
        leader = self._replicas[slots[0]]
        losses = {}
        with self._blamed(contexts[slots[0]].board, slots[0]):
            with recorded(leader.group.device) if len(slots) > 1 else nullcontext() as taken:
                if parts[slots[0]]:
                    context = contexts[slots[0]]
                    losses[slots[0]] = leader.forward_backward(parts[slots[0]], context, taken)
            contexts[slots[0]].exchange.flush(slots[0])
        for slot in slots[1:]:
            with self._blamed(contexts[slot].board, slot):
                assert taken is not None
                losses[slot] = self._repeat(slot, leader, taken, parts[slot], contexts[slot])
                contexts[slot].exchange.flush(slot)
        devices.set_current(leader.group.device)
        return {slot: losses.get(slot, []) for slot in slots}

    def _repeat(
        self,
        slot: int,
        leader: Replica,
        taken: Recorded,
        parts: Sequence[Part],
        context: StepContext,
    ) -> list[tuple[devices.Reading, float]]:
        replica = self._replicas[slot]
        try:
            losses = replica.repeat(leader, taken, parts, context)
        except CannotRepeat as error:
            self.alike.failed(str(error))
            devices.set_current(replica.group.device)
            return replica.forward_backward(parts, context)
        self.alike.succeeded()
        return losses

    def _check(self, context: StepContext, own: bool) -> None:
        """The sums have come to a group, as far as must be known before the commit."""
        replica, exchange = self._replicas[context.slot], context.exchange
        if self._waits_for_sums:
            # The others' gradients have really come: after the commit there is no way back.
            for member in replica.used_members:
                if own:
                    devices.synchronize(member.device)
                else:
                    devices.synchronize_unless(member.device, context.board.check)
        if self._scales:
            summed = exchange.owned(context.slot) if exchange.divided else replica.parameters
            context.board.put("overflow", context.slot, unscale(summed, context.scale))

    def _update(
        self, slots: Sequence[int], context: StepContext, settings: Sequence[dict[str, Any]]
    ) -> None:
        """The update of one group, or a divided one, which is that of all groups."""
        exchange = context.exchange
        divided = exchange.divided
        norms = exchange.norms() if divided and self._clip_norm is not None else []
        # Of a divided update nobody else issues anything meanwhile.
        with nullcontext() if divided else self._turns.turn():
            for slot in slots:
                if divided and slot > 0 and not exchange.owned(slot):
                    continue
                replica = self._replicas[slot]
                devices.set_current(replica.group.device)
                try:
                    if slot > 0:
                        adopt_hyperparameters(replica.optimizer, settings)
                    if self._clip_norm is not None and divided:
                        owned = exchange.owned(slot)
                        nn.utils.clip_grads_with_norm_(owned, self._clip_norm, norms[slot])
                    elif self._clip_norm is not None:
                        nn.utils.clip_grad_norm_(replica.parameters, self._clip_norm)
                    replica.optimizer.step()
                except DeviceLostError:
                    raise
                except Exception as error:
                    raise replica.group.error(error, context.step) from error
            devices.set_current(self._replicas[context.slot].group.device)
            if divided:
                exchange.return_weights()
