"""What follows from a step that failed, or from a group that is lost: whose fault it was, how the
others let go of the step, and how the training goes on without that group."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Literal

from shoal.errors import DeviceLostError
from shoal.train.group import devices
from shoal.train.group.errors import GroupError, GroupLostError, TrainError
from shoal.train.group.groups import WorkerGroup
from shoal.train.group.step_events import Board
from shoal.train.model.replicas import Replica, take_over

SETTLE_LOST_S = 0.2  # that survivors get to let go of a step before a loss is raised
LOST_KNOWN_S = 0.3  # in which a process that has closed its connection is seen to have ended
LOOK_CLOSELY_S = 0.02
LOOK_EVERY_S = 0.1  # how often a wait looks whether the group is lost
#: As the core says which device it was.
_LOST = re.compile(r"device (\S+) (?:of this lease )?was lost")
_RAISED = re.compile(r"\[shoal\] raised by .*, on device (\S+)$", re.MULTILINE)
OnLost = Literal["stop", "save", "continue"]


class Recovery:
    """Keeps a trainer's replicas consistent when a step fails or a group is lost.

    Args:
        replicas: the trainer's own list. A group that is given up leaves it.
        on_lost: as for `Trainer`.
        timeout_s: the longest wait for a group to let go of a step, or to issue its update.
        disconnect: ends the exchange among the replicas without waiting for it.
        connect_without: starts an exchange among those that are left; gets the lost one's slot.
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

    def failure(self, board: Board, futures: Sequence[Future[Any]], number: int) -> BaseException:
        """The step failed: waits until the groups have let go, and says whose fault it was."""
        assert board.failure is not None
        cause = board.failure.error
        if board.failure.group < 0:  # the trainer's thread was interrupted, or waited too long
            self.settle(futures)
            return cause
        culprit = self._culprit(board.failure.group, cause)
        alive = [
            f
            for replica, f in zip(self._replicas, futures, strict=True)
            if replica.group is not culprit
        ]
        error = culprit.error(cause, number)
        lost = isinstance(error, GroupLostError)
        if lost and self._on_lost == "stop":
            # Survivors may wait for the lost device for seconds. There is no next step to keep
            # them for, so the error does not wait for them; `Trainer.close()` does.
            if wait(alive, SETTLE_LOST_S).not_done:
                return error
        else:
            self.settle(alive)
        if not lost:
            for replica in self._replicas:
                _drain(replica)
        self.clear_gradients(without=culprit if lost else None)
        return error

    def settle(self, futures: Sequence[Future[Any]]) -> None:
        """Waits until work that was told to stop has stopped."""
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
        """The group whose device is gone; a copy that failed may have been another's."""
        groups = [replica.group for replica in self._replicas]
        failed = next((g for g in groups if g.index == index), groups[0])
        if not isinstance(cause, DeviceLostError):  # maybe met by who uses what another computes
            return next(iter(named(str(cause), groups, _RAISED)), failed)
        if failed.lost is not None:
            return failed
        gone = named(str(cause), groups)
        until = time.monotonic() + LOST_KNOWN_S
        while not gone and time.monotonic() < until:  # a process takes a moment to be gone
            gone = [g for g in groups if g.lost is not None or g.silent or g.has_ended()]
            time.sleep(0 if gone else LOOK_CLOSELY_S)
        if not gone:  # asking a device that waits for the lost one takes seconds
            gone = [g for g in groups if any(devices.is_lost(d) for d in g.devices)]
        if not gone:
            return failed
        gone[0].lost = gone[0].lost or str(cause)
        return gone[0]

    # --- a step that counts ---

    def finish(self, futures: Sequence[Future[Any]], number: int) -> None:
        """Waits until all groups have issued their updates; from then on lr may change. A group that
        is lost now has missed nothing that the others need."""
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
                raise DeviceLostError(gone[0])  # known before the device itself gives up
            if time.monotonic() > until:
                raise TrainError(f"waited {self._timeout_s:g} s for the update of {replica.group}")
            wait([future], LOOK_EVERY_S)
        future.result()

    # --- without a group ---

    def go_on_without(self, error: GroupLostError) -> None:
        """Gives a lost group up, or raises where the training cannot go on or is not to."""
        if error not in self.lost:  # what `finish` raises comes by here again
            self.lost.append(error)
        if self._on_lost != "continue" or len(self._replicas) == 1:
            raise error
        self._drop(error.group)

    def drop(self, index: int) -> bool:
        """`Trainer.drop`."""
        if (
            self._on_lost == "stop"
            or len(self._replicas) < 2
            or all(r.group.index != index for r in self._replicas)
        ):
            return False
        self._drop(index)
        return True

    def _drop(self, index: int) -> None:
        """Goes on without a group. The user's own model moves in with a survivor if need be."""
        slot = next(i for i, r in enumerate(self._replicas) if r.group.index == index)
        lost = self._replicas.pop(slot)
        self._disconnect()  # threads of the exchange may still wait for the lost device
        lost.close()
        for replica in self._replicas:
            _drain(replica)
        if slot == 0:
            self._replicas[0] = take_over(lost, self._replicas[0])
        self._connect_without(slot)


def named(
    text: str, groups: Sequence[WorkerGroup], pattern: re.Pattern[str] = _LOST
) -> list[WorkerGroup]:
    """The group whose device an error speaks of; none where a name is two groups' or nobody's."""
    found = pattern.search(text)
    if found is None:
        return []
    holders = [g for g in groups if any(m.name == found[1] for m in g.members)]
    return holders if len(holders) == 1 else []


def _drain(replica: Replica) -> None:
    """Waits until a group has done what it was given, and lets go of what failed there: it followed
    from what is told already, and must not be told as the next step's."""
    for member in replica.used_members:
        with suppress(Exception):
            devices.synchronize(member.device)
