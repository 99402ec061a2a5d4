"""Errors of training. Each names the group, the devices and the step that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import DeviceLostError, ShoalError


class TrainError(ShoalError):
    """Root of the errors of `shoal.train`."""


class GroupError(TrainError):
    """A group failed. `__cause__` is what its thread raised.

    >>> try:
    ...     trainer.step(batch)
    ... except shoal.train.GroupError as error:
    ...     print(error.group, error.devices, error.step)
    """

    def __init__(self, group: int, devices: Sequence[str], step: int | None, why: str) -> None:
        self.group = group
        self.devices = tuple(devices)
        self.step = step
        self.why = why
        when = f", step {step}" if step is not None else ""
        super().__init__(f"group {group} ({', '.join(self.devices)}){when}: {why}")


class GroupLostError(GroupError, DeviceLostError):
    """A device of a group is gone or does not answer."""


class NotFiniteError(TrainError):
    """The loss became NaN or infinite. The weights are those before this step."""


class BatchError(TrainError, ValueError):
    """A batch cannot be divided into samples; the text says what it holds."""


class CannotCut(TrainError):
    """The model cannot be cut into so many stages; the text says where it could be cut."""


class CheckpointError(TrainError):
    """A checkpoint could not be written or read; the text says which file and why."""


class DataError(TrainError):
    """Training data cannot be read; the text says which file and why."""
