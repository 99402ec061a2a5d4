"""Where Shoal keeps its files: a pool's state, and a client's identity."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import shoal_autoload
from shoal.errors import PoolError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


def check_name(name: str, what: str = "a name") -> str:
    """`name`, if it is fit for files, sockets and certificates."""
    if not _NAME.fullmatch(name):
        raise PoolError(f"{name!r}: {what} is at most 32 letters, digits, '_', '.' or '-'")
    return name


def state_directory(pool: str) -> Path:
    """Return the state directory of this user's pool: $SHOAL_STATE, else under $XDG_STATE_HOME."""
    root = os.environ.get("SHOAL_STATE")
    if root is None:
        base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        root = os.path.join(base, "shoal")
    return Path(root) / check_name(pool, "a pool's name")


def identity_file() -> Path:
    """Return the file that `shoal join` writes: $SHOAL_IDENTITY, else under $XDG_CONFIG_HOME."""
    return Path(shoal_autoload.identity_file())


def make_directory(path: Path) -> None:
    """Make a pool's state directory, which only its user may enter."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        if not os.access(path, os.W_OK | os.X_OK):  # also a read-only file system
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise PoolError(
            f"the state directory {path} cannot be written: {error.strerror}. Choose another: "
            "export SHOAL_STATE=DIR"
        ) from None


def check_writable(path: Path) -> None:
    """Raise PoolError if `path` cannot be written; makes the directory that it is in."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> PoolError:
    chosen_by = "SHOAL_IDENTITY=FILE" if path == identity_file() else "SHOAL_STATE=DIR"
    return PoolError(
        f"{path} cannot be written: {error.strerror}. Choose another place: export {chosen_by}"
    )


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, whole or not at all."""
    check_writable(path)
    try:
        _write_whole(path, text)
    except OSError as error:
        raise _unwritable(path, error) from None


def _write_whole(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def check_private(path: Path) -> None:
    """Raise PoolError for a secret that other users can read."""
    mode = path.stat().st_mode
    if mode & 0o077:
        raise PoolError(f"others can read {path}, which holds a key. Type: chmod 600 {path}")


def local_pool_id(pool: str) -> str:
    """Return the id of this user's pool of that name, in sockets and URLs."""
    return f"{os.getuid()}-{check_name(pool, 'a pool name')}"


def machine_id() -> str:
    """Return an id that differs between machines, and between boots of one."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def host_id() -> str:
    """Return an id of this machine that stays the same over its boots."""
    name = os.uname().nodename
    try:
        with open("/etc/machine-id") as file:
            return f"{file.read().strip()[:24]}.{name}"[:64]
    except OSError:
        return name[:64]


def socket_name(pool_id: str, part: str) -> str:
    """Return an abstract Unix address, which leaves no file behind. Both ends check the user."""
    return f"\0shoal/{pool_id}/{part}"
