"""Errors of training. Those of a group carry its index, its devices and the step."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import DeviceLostError, PeerLostError, ShoalError


class TrainError(ShoalError):
    """Root of the errors of `shoal.train`.

    >>> try:
    ...     trainer.step(batch)
    ... except shoal.train.TrainError as error:
    ...     print(error)
    """


class GroupError(TrainError):
    """A group failed. `__cause__` is the error that its thread raised.

    >>> try:
    ...     trainer.step(batch)
    ... except shoal.train.GroupError as error:
    ...     print(error.group, error.devices, error.step)

    `device` is the name of the device at fault, `operator` and `line` say where it failed; None where
    the cause does not tell.
    """

    device: str | None = None
    operator: str | None = None
    line: str | None = None

    def __init__(self, group: int, devices: Sequence[str], step: int | None, why: str) -> None:
        self.group = group
        self.devices = tuple(devices)
        self.step = step
        self.why = why
        when = f", step {step}" if step is not None else ""
        super().__init__(f"group {group} ({', '.join(self.devices)}){when}: {why}")


class GroupLostError(GroupError, DeviceLostError):
    """A device of a group is gone or does not answer. `device` is its name, where that is known.

    >>> try:
    ...     trainer.step(batch)
    ... except shoal.train.GroupLostError as error:
    ...     print(error.group, error.device)
    """


class NotFiniteError(TrainError):
    """The loss is NaN or infinite. The weights are those before this step.

    >>> try:
    ...     trainer.step(batch)
    ... except shoal.train.NotFiniteError:
    ...     print("skipped")
    """


class BatchError(TrainError, ValueError):
    """A batch cannot be divided into samples; the text shows its contents.

    >>> try:
    ...     trainer.step("not a batch")
    ... except shoal.train.BatchError as error:
    ...     print(error)
    """


class CannotCut(TrainError):
    """The model cannot be cut into so many stages; the text says where it could be cut.

    >>> try:
    ...     trainer = shoal.train.Trainer(model, loss, optimizer, groups)
    ... except shoal.train.CannotCut as error:
    ...     print(error)
    """


class CheckpointError(TrainError):
    """A checkpoint cannot be written or read; the text says which file and why.

    >>> try:
    ...     saved = shoal.train.latest("runs/gpt")
    ... except shoal.train.CheckpointError as error:
    ...     print(error)
    """


class DataError(TrainError):
    """Training data cannot be read; the text says which file and why.

    >>> try:
    ...     loader = shoal.train.load("nothing.npy")
    ... except shoal.train.DataError as error:
    ...     print(error)
    """


def device_at_fault(error: BaseException) -> str | None:
    """Return the name of the device that an error comes from; None if the error does not say."""
    name = error.peer if isinstance(error, PeerLostError) else getattr(error, "device", None)
    return name if isinstance(name, str) else None
