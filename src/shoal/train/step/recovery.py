"""Recovery from a failed step or a lost group: find the group at fault, stop the others, and go on
without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Literal

from shoal.errors import DeviceLostError
from shoal.train.group import devices
from shoal.train.group.errors import GroupError, GroupLostError, TrainError, device_at_fault
from shoal.train.group.groups import WorkerGroup
from shoal.train.group.step_events import StepEvents
from shoal.train.model.replicas import Replica, take_over

QUIESCE_LOST_S = 0.2  # for survivors to stop, before the error of a lost group is raised
LOST_KNOWN_S = 0.3  # until a process that has closed its connection has ended
POLL_CLOSELY_S = 0.02
POLL_S = 0.1  # between checks for a lost group during a wait
OnLost = Literal["stop", "save", "continue"]


class Recovery:
    """Keeps a trainer's replicas consistent when a step fails or a group is lost.

    Args:
        replicas: the trainer's own list. A group that is given up leaves it.
        on_lost: as for `Trainer`.
        timeout_s: the longest wait for a group to stop, or to issue its update.
        disconnect: ends the exchange among the replicas without waiting for it.
        connect_without: starts an exchange among the remaining ones; gets the lost one's slot.
    """

    def __init__(
        self,
        replicas: list[Replica],
        on_lost: OnLost,
        timeout_s: float,
        disconnect: Callable[[], None],
        connect_without: Callable[[int], None],
    ) -> None:
        self.lost: list[GroupLostError] = []
        self._replicas = replicas
        self._on_lost = on_lost
        self._timeout_s = timeout_s
        self._disconnect = disconnect
        self._connect_without = connect_without

    # --- a step that failed ---

    def failure(
        self, events: StepEvents, futures: Sequence[Future[Any]], number: int
    ) -> BaseException:
        """Wait until the groups of a failed step have stopped. Return the error of the group at
        fault."""
        assert events.failure is not None
        cause, index = events.failure.error, events.failure.group
        if index is None:  # the trainer's thread was interrupted, or waited too long
            self.quiesce(futures)
            return cause
        culprit = self._culprit(index, cause)
        alive = [
            f
            for replica, f in zip(self._replicas, futures, strict=True)
            if replica.group is not culprit
        ]
        error = culprit.error(cause, number)
        lost = isinstance(error, GroupLostError)
        if lost and self._on_lost == "stop":
            # Survivors may wait for the lost device for seconds. No step follows, so the error does
            # not wait for them; `Trainer.close()` does.
            if wait(alive, QUIESCE_LOST_S).not_done:
                return error
        else:
            self.quiesce(alive)
        if not lost:
            for replica in self._replicas:
                _drain(replica)
        self.clear_gradients(without=culprit if lost else None)
        return error

    def quiesce(self, futures: Sequence[Future[Any]]) -> None:
        """Wait until the groups of an aborted step have stopped."""
        for future in futures:
            try:
                future.exception(self._timeout_s)
            except TimeoutError:
                raise TrainError(f"a group did not stop within {self._timeout_s:g} s") from None

    def clear_gradients(self, without: WorkerGroup | None = None) -> None:
        for replica in self._replicas:
            if replica.group is not without:
                replica.optimizer.zero_grad(set_to_none=True)

    def _culprit(self, index: int, cause: BaseException) -> WorkerGroup:
        """Return the group at fault. A group also raises the error of another group's device when it
        uses a value that the device should have computed."""
        groups = [replica.group for replica in self._replicas]
        failed = next((g for g in groups if g.index == index), groups[0])
        named = holders(device_at_fault(cause), groups)
        if not isinstance(cause, DeviceLostError):
            return named[0] if named else failed
        if failed.lost is not None:
            return failed
        gone = named
        until = time.monotonic() + LOST_KNOWN_S
        while not gone and time.monotonic() < until:  # a process takes a moment to end
            gone = [g for g in groups if g.lost is not None or g.silent or g.has_ended()]
            time.sleep(0 if gone else POLL_CLOSELY_S)
        if not gone:  # asking a device that waits for the lost one takes seconds
            gone = [g for g in groups if any(devices.is_lost(d) for d in g.devices)]
        if not gone:
            return failed
        gone[0].lost = gone[0].lost or cause
        return gone[0]

    # --- a step that counts ---

    def finish(self, futures: Sequence[Future[Any]], number: int) -> None:
        """Wait until all groups have issued their updates: after that, the learning rate may change.
        The others need nothing more of a group that is lost now."""
        for replica, future in list(zip(self._replicas, futures, strict=True)):
            try:
                self._wait_update(replica, future)
            except DeviceLostError as error:
                lost = self._culprit(replica.group.index, error).error(error, number)
                assert isinstance(lost, GroupLostError)
                self.go_on_without(lost)
            except GroupError:
                raise
            except Exception as error:
                raise replica.group.error(error, number) from error

    def _wait_update(self, replica: Replica, future: Future[Any]) -> None:
        until = time.monotonic() + self._timeout_s
        while not future.done():
            gone = [r.group.lost for r in self._replicas if r.group.lost is not None]
            if gone and (replica.group.lost is not None or self._on_lost == "stop"):
                raise DeviceLostError(
                    str(gone[0]), gone[0].device
                )  # known before the device's own timeout
            if time.monotonic() > until:
                raise TrainError(f"waited {self._timeout_s:g} s for the update of {replica.group}")
            wait([future], POLL_S)
        future.result()

    # --- without a group ---

    def go_on_without(self, error: GroupLostError) -> None:
        """Give a lost group up. Raise the error if `on_lost` or the lack of other groups forbids it."""
        if error not in self.lost:  # an error of `finish` gets here twice
            self.lost.append(error)
        if self._on_lost != "continue" or len(self._replicas) == 1:
            raise error
        group = next(r.group for r in self._replicas if r.group.index == error.group)
        for member in group.members:
            # Its tensors are freed at any later time, and must not be copied to survivors then.
            devices.mark_lost(member.device, "the training went on without it")
        self._drop(error.group)

    def drop(self, index: int) -> bool:
        """Implement `Trainer.drop`."""
        if (
            self._on_lost == "stop"
            or len(self._replicas) < 2
            or all(r.group.index != index for r in self._replicas)
        ):
            return False
        self._drop(index)
        return True

    def _drop(self, index: int) -> None:
        """Go on without a group. If it held the user's own model, a survivor takes that over."""
        slot = next(i for i, r in enumerate(self._replicas) if r.group.index == index)
        lost = self._replicas.pop(slot)
        self._disconnect()  # threads of the exchange may still wait for the lost device
        lost.close()
        for replica in self._replicas:
            _drain(replica)
        if slot == 0:
            self._replicas[0] = take_over(lost, self._replicas[0])
        self._connect_without(slot)


def holders(name: str | None, groups: Sequence[WorkerGroup]) -> list[WorkerGroup]:
    """Return the group with a device of this name; none if several groups have one."""
    found = [g for g in groups if any(m.name == name for m in g.members)]
    return found if len(found) == 1 else []


def _drain(replica: Replica) -> None:
    """Wait for a group's work and drop its errors: they follow from the error that is raised already,
    and the next step must not raise them."""
    for member in replica.used_members:
        with suppress(Exception):
            devices.synchronize(member.device)
