"""Every error that Shoal raises by itself. Operators raise what local torch raises."""

from __future__ import annotations


class ShoalError(RuntimeError):
    """Root of Shoal's own errors. The text says what happened, why, and what to type next."""


class DeviceLostError(ShoalError):
    """A device of the lease is gone, and the tensors on it with it.

    >>> try:
    ...     loss.backward()
    ... except shoal.DeviceLostError:
    ...     lease = shoal.connect()      # a new lease in the same program
    """


class PeerLostError(DeviceLostError):
    """This value was to come from another device of the lease, and that one is gone.

    The device that raises it is well, and so are all other tensors on it.
    """


class ShareError(ShoalError):
    """Memory was shared, opened or used in a way that is not possible; the text says why."""


class ShareRevokedError(ShareError):
    """A tensor from `shoal.open` was used after its owner ended or took it back.

    The program and its other tensors are well.

    >>> try:
    ...     y = x + table            # table = shoal.open(handle)
    ... except shoal.ShareRevokedError:
    ...     table = shoal.open(ask_for_a_new_handle())
    """


class ProtocolError(ShoalError):
    """Bytes came that are no message, or a message that does not belong there."""


class LeaseError(ShoalError):
    """The pool did not grant a lease, or a device server did not accept it; the text says why."""


class PoolError(ShoalError):
    """A pool was asked for something that it does not do, or cannot be reached; the text says why."""


class DeviceSpecError(ShoalError, ValueError):
    """A device was declared in a way that Shoal does not understand."""


class PoolStartError(PoolError):
    """A pool, or one of its device servers, did not start."""


def describe(error: BaseException) -> str:
    """One line for an error of any kind: what it says, or its name where that says little.

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
