"""Capture and replay between groups: the program runs for one group, and the others replay its pass.

A model's Python code and autograd cost the program as much for every group as for the first, although
micro-batches of one size make them do the same. So Shoal captures the operators that the first group's
thread issues and replays them on the other groups' devices, with their own weights and samples. A
step's cost to the program hardly grows with the number of groups.

A pass that depends on values cannot be replayed: it reads one, or a value decides a shape. The core
knows that before it sends anything to another group. The program then runs for each group, as it does
where the micro-batches differ.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shoal import _core

_log = logging.getLogger("shoal.train")
PAUSE_STEPS_MAX = 256  # without an attempt, after passes that could not be replayed


class CannotReplay(Exception):
    """A captured pass cannot be replayed. Nothing was sent."""


@contextmanager
def not_captured() -> Iterator[None]:
    """Issue work for this thread's own device alone: replays leave it out."""
    _core.Capture.pause()
    try:
        yield
    finally:
        _core.Capture.resume()


@dataclass
class CapturedPass:
    """A pass of one group: its operators, and the tensors that are the group's own."""

    operators: _core.Capture
    batches: list[Any] = field(default_factory=list)  # on the device, by micro-batch
    #: By micro-batch: the position in the capture after the forward pass, and its loss.
    losses: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def add_forward(self, batch: Any, loss: torch.Tensor) -> None:
        """Note that the forward pass of a micro-batch is over."""
        self.batches.append(batch)
        self.losses.append((self.operators.mark(), loss.detach()))

    def replay(
        self,
        device: torch.device,
        ours: Sequence[torch.Tensor],
        theirs: Sequence[torch.Tensor],
        samples: Sequence[Any],
        wanted: Sequence[torch.Tensor],
    ) -> _core.Replay:
        """Begin the pass on another device, with the tensors `theirs` for `ours` and other samples."""
        try:
            return _core.Replay(
                self.operators,
                device.index,
                ours=[*ours, *_leaves(self.batches)],
                theirs=[*theirs, *_leaves(samples)],
                wanted=[*wanted, *(loss for _, loss in self.losses)],
            )
        except ValueError as error:
            raise CannotReplay(str(error)) from None


def _leaves(samples: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(samples) if isinstance(leaf, torch.Tensor)]


@contextmanager
def capture(device: torch.device) -> Iterator[CapturedPass]:
    """Capture the operators that this thread issues on `device` in the block."""
    operators = _core.Capture(device.index)
    try:
        yield CapturedPass(operators)
    finally:
        operators.stop()


class ReplayPolicy:
    """Decides which groups replay another's pass.

    After a pass that could not be replayed it pauses, and for longer each time: groups that share a
    class wait for one another, which is a waste if the replay fails.

    >>> policy = ReplayPolicy()
    >>> policy.classes([("a",), ("b",), ("a",)])
    [[0, 2], [1]]
    """

    def __init__(self) -> None:
        self._pause = 0  # steps until the next attempt
        self._next_pause = 1
        self.failure = ""  # why the last pass could not be replayed

    def classes(self, kinds: Sequence[Any]) -> list[list[int]]:
        """Return the indices of equal kinds together, in order; in a pause, each by itself."""
        if self._pause > 0:
            self._pause -= 1
            return [[index] for index in range(len(kinds))]
        found: dict[Any, list[int]] = {}
        for index, kind in enumerate(kinds):
            found.setdefault(kind, []).append(index)
        return list(found.values())

    def succeeded(self) -> None:
        self._next_pause = 1

    def failed(self, why: str) -> None:
        if why != self.failure:
            _log.debug("shoal: the program runs for every group: %s", why)
        self.failure = why
        self._pause = self._next_pause
        self._next_pause = min(PAUSE_STEPS_MAX, 4 * self._next_pause)
