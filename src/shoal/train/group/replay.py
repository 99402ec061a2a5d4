"""Groups with alike parts of a batch: the program runs for one of them, and the others repeat it.

A model's Python code and autograd cost the program as much for every group as for the first, though
with parts of one size they do the same. So what the first group's device is told is written down and
told to the others' with their own weights and samples; what a step costs the program hardly grows with
the groups. A pass that depends on values (one is read, or decides a shape) cannot be repeated: that is
known before anything was told to another group, and the program then runs for each, as it does where
parts differ.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal import _core
from shoal.train.data import batches

_log = logging.getLogger("shoal.train")
REST_MAX = 256  # steps that are not tried after passes that could not be repeated


class CannotRepeat(Exception):
    """What was recorded cannot be told to another group; nothing was."""


@contextmanager
def aside() -> Iterator[None]:
    """What this thread does in the block belongs to its own device alone, and is not repeated."""
    _core.Recording.pause()
    try:
        yield
    finally:
        _core.Recording.resume()


@dataclass
class Recorded:
    """A pass of one group: what its device was told, and the tensors that are the group's own."""

    recording: _core.Recording
    batches: list[Any] = field(default_factory=list)  # on the device, piece by piece
    losses: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # and where they were made

    def passed(self, batch: Any, loss: torch.Tensor) -> None:
        """A forward pass is over."""
        self.batches.append(batch)
        self.losses.append((self.recording.mark(), loss.detach()))

    def repeat(
        self,
        device: torch.device,
        ours: Sequence[torch.Tensor],
        theirs: Sequence[torch.Tensor],
        samples: Sequence[Any],
        wanted: Sequence[torch.Tensor],
    ) -> _core.Repeat:
        """The pass on another device, with the tensors `theirs` for `ours` and another batch."""
        try:
            return _core.Repeat(
                self.recording,
                device.index,
                ours=[*ours, *_leaves(self.batches)],
                theirs=[*theirs, *_leaves(samples)],
                wanted=[*wanted, *(loss for _, loss in self.losses)],
            )
        except ValueError as error:
            raise CannotRepeat(str(error)) from None


def _leaves(parts: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for part in parts:
        batches.map_leaves(
            lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, part
        )
    return found


@contextmanager
def recorded(device: torch.device) -> Iterator[Recorded]:
    """Records what this thread tells `device` in the block."""
    recording = _core.Recording(device.index)
    try:
        yield Recorded(recording)
    finally:
        recording.stop()


class Alike:
    """Which groups can repeat another's pass. Passes that could not be repeated are tried again after
    a while, and ever more rarely: a model that reads values has its groups wait in turn for nothing.

    >>> alike = Alike()
    >>> alike.classes([("a",), ("b",), ("a",)])
    [[0, 2], [1]]
    """

    def __init__(self) -> None:
        self._rest = 0  # steps until the next try
        self._next_rest = 1
        self.failure = ""  # why the last pass could not be repeated

    def classes(self, kinds: Sequence[Any]) -> list[list[int]]:
        """Places of equal kinds together, in order; while it rests each by itself."""
        if self._rest > 0:
            self._rest -= 1
            return [[place] for place in range(len(kinds))]
        found: dict[Any, list[int]] = {}
        for place, kind in enumerate(kinds):
            found.setdefault(kind, []).append(place)
        return list(found.values())

    def succeeded(self) -> None:
        self._next_rest = 1

    def failed(self, why: str) -> None:
        if why != self.failure:
            _log.debug("shoal: the program runs for every group: %s", why)
        self.failure = why
        self._rest = self._next_rest
        self._next_rest = min(REST_MAX, 4 * self._next_rest)
