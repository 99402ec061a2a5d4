"""Every error that Shoal raises by itself.

An operator that fails on a device raises the type that local torch raises. The exception then has the
attributes `device` (its name), `operator` and `line` ("train.py:12 in step"); None where unknown.
"""

from __future__ import annotations


class ShoalError(RuntimeError):
    """Root of Shoal's own errors. The text says what happened, why, and what to type next.

    >>> try:
    ...     shoal.connect("shoal+local://0-nobody")
    ... except shoal.ShoalError as error:
    ...     print(error)
    """


class DeviceLostError(ShoalError):
    """A device of the lease is gone, and the tensors on it with it.

    `device` is its name; `operator` and `line` say what the program did, where that is known.

    >>> try:
    ...     loss.backward()
    ... except shoal.DeviceLostError as error:
    ...     print(error.device)
    ...     lease = shoal.connect()      # a new lease in the same program
    """

    operator: str | None = None
    line: str | None = None

    def __init__(self, text: str = "", device: str | None = None) -> None:
        # The core can pass one string only: the text, a separator and the name of the device.
        text, _, name = text.partition("\x1f")
        super().__init__(text)
        self.device = device or name or None


class PeerLostError(DeviceLostError):
    """A value should come from another device of the lease, and that device is gone.

    `peer` is the name of the lost device. `device`, which raises the error, and all other tensors on it
    are intact.

    >>> try:
    ...     total = (left + right).sum().item()
    ... except shoal.PeerLostError as error:
    ...     print(error.peer, "is gone;", error.device, "goes on")
    """

    peer: str | None = None


class ShareError(ShoalError):
    """Memory cannot be shared, opened or used in this way; the text says why.

    >>> try:
    ...     shoal.share(torch.ones(3))
    ... except shoal.ShareError as error:
    ...     print(error)
    """


class ShareRevokedError(ShareError):
    """A tensor from `shoal.open` was used after its owner ended or revoked it.

    The program and its other tensors are intact.

    >>> try:
    ...     y = x + table            # table = shoal.open(handle)
    ... except shoal.ShareRevokedError:
    ...     table = shoal.open(ask_for_a_new_handle())
    """


class ProtocolError(ShoalError):
    """The received bytes are not a message, or the message is not allowed here."""


class LeaseError(ShoalError):
    """The pool cannot be reached or grants no lease, or a device server refuses it; the text says why.

    >>> try:
    ...     shoal.connect(devices=1000)
    ... except shoal.LeaseError as error:
    ...     print(error)
    """


class PoolError(ShoalError):
    """The pool refused a request or did not start; the text says why.

    >>> try:
    ...     pool = shoal.up(devices=["cpu"])
    ... except shoal.PoolError as error:
    ...     print(error)
    """


class DeviceSpecError(ShoalError, ValueError):
    """The declaration of a device is not valid.

    >>> try:
    ...     shoal.up(devices=["cpu,memory=-1GiB"])
    ... except shoal.DeviceSpecError as error:
    ...     print(error)
    """


class PoolStartError(PoolError):
    """A pool, or one of its device servers, did not start.

    >>> try:
    ...     pool = shoal.up(devices=["cpu"])
    ... except shoal.PoolStartError as error:
    ...     print(error)
    """


def describe(error: BaseException) -> str:
    """Describe an error of any kind in one line: its text, or its type where the text says little.

    >>> describe(PermissionError(13, "Permission denied", "/usr/x"))
    '/usr/x: Permission denied'
    """
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if error.filename else ""
        return named + error.strerror
    if isinstance(error, ShoalError):
        return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
