"""Snapshots of folders: files by hash, in a folder of this user on this machine.

A snapshot is a list of paths with the hashes of their contents; its own hash names it. A file that
several snapshots have is stored once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.errors import PoolError
from shoal.pool.base import limits, paths
from shoal.units import show_bytes

IGNORE_FILES = (".gitignore", ".shoalignore")
_NEVER = (".git", "__pycache__")
_HASH = re.compile("[0-9a-f]{64}")


class File(msgspec.Struct, frozen=True):
    path: Annotated[str, Meta(max_length=4096)]
    hash: Annotated[str, Meta(max_length=64)]
    size_bytes: int
    executable: bool = False
    link: str | None = None  # a symbolic link to this


def store() -> Path:
    """Return the folder of this user's snapshots."""
    return paths.state_directory("files")


def take(folder: Path, names: Iterator[str]) -> str:
    """Store the named files of a folder. Return the snapshot's name."""
    root = store()
    paths.make_directory(root)
    forget_old(root)
    files: list[File] = []
    for name in names:
        files.append(_take_file(root, folder, name))
        if len(files) > limits.SNAPSHOT_FILES_MAX:
            raise PoolError(
                f"{folder} has more than {limits.SNAPSHOT_FILES_MAX} files. Leave some out: list them "
                "in .shoalignore, as in .gitignore"
            )
    total_bytes = sum(file.size_bytes for file in files)
    if total_bytes > limits.SNAPSHOT_BYTES_MAX:
        largest = sorted(files, key=lambda f: -f.size_bytes)[:10]
        listed = ", ".join(f"{f.path} ({show_bytes(f.size_bytes)})" for f in largest)
        raise PoolError(
            f"{folder} has {show_bytes(total_bytes)} of files; a snapshot has at most "
            f"{show_bytes(limits.SNAPSHOT_BYTES_MAX)}. Leave some out in .shoalignore; the largest are "
            f"{listed}"
        )
    encoded = msgspec.json.encode(sorted(files, key=lambda f: f.path))
    return _put(root, encoded)


def _take_file(root: Path, folder: Path, name: str) -> File:
    path = folder / name
    if path.is_symlink():
        return File(name, "", 0, link=os.readlink(path))
    data = path.read_bytes()
    return File(name, _put(root, data), len(data), bool(path.stat().st_mode & 0o100))


def _put(root: Path, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    path = root / name[:2] / name
    if path.exists():
        os.utime(path)  # it is in use
        return name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    scratch = path.with_name(f".{name}.{os.getpid()}")
    try:
        scratch.write_bytes(data)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return name


class Unfit(PoolError):
    """A snapshot's list is not one that Shoal has made."""


def file_of(root: Path, name: str) -> Path:
    """Return where the file with this hash is. Anybody may have written the hash."""
    if not _HASH.fullmatch(name):
        raise Unfit(f"{name!r} is not the hash of a file")
    return root / name[:2] / name


def read_list(data: bytes) -> list[File]:
    """Return the files of a snapshot. Anybody may have written its list, so each name is checked."""
    try:
        files = msgspec.json.decode(data, type=list[File])
    except msgspec.MsgspecError as error:
        raise Unfit(f"the snapshot's list cannot be read: {error}") from None
    if len(files) > limits.SNAPSHOT_FILES_MAX:
        raise Unfit(f"the snapshot has more than {limits.SNAPSHOT_FILES_MAX} files")
    if sum(file.size_bytes for file in files) > limits.SNAPSHOT_BYTES_MAX:
        raise Unfit(f"the snapshot is over {show_bytes(limits.SNAPSHOT_BYTES_MAX)}")
    for file in files:
        parts = file.path.split("/")
        if "\0" in file.path or any(part in ("", ".", "..") for part in parts):
            raise Unfit(f"the snapshot has a file outside of its folder: {file.path!r}")
        if file.size_bytes < 0 or (file.link is None and not _HASH.fullmatch(file.hash)):
            raise Unfit(f"the snapshot's list is wrong about {file.path!r}")
        if file.link is not None and (not file.link or "\0" in file.link):
            raise Unfit(f"the snapshot has a link to nothing: {file.path!r}")
    return files


def restore(name: str, target: Path, root: Path | None = None) -> None:
    """Write the files of a snapshot below `target`, which is empty or has a part of them."""
    root = root or store()
    try:
        files = read_list(file_of(root, name).read_bytes())
        # Links last: nothing is written through them.
        for file in sorted(files, key=lambda f: f.link is not None):
            path = target / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            if file.link is not None:
                path.symlink_to(file.link)
            else:
                _write_new(path, file_of(root, file.hash), executable=file.executable)
    except FileNotFoundError as error:
        raise PoolError(
            f"the snapshot is not on this machine any more ({error.filename}). Submit the task again"
        ) from None
    except OSError as error:
        raise PoolError(f"the snapshot cannot be written: {error}") from None


def _write_new(path: Path, source: Path, *, executable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    mode = 0o755 if executable else 0o644
    with open(source, "rb") as data, os.fdopen(os.open(path, flags, mode), "wb") as file:
        shutil.copyfileobj(data, file)


def forget_old(root: Path) -> None:
    """Remove files that no snapshot has used for as long as ended tasks are kept."""
    oldest = time.time() - limits.TASKS_KEPT_DAYS * 86400
    for path in root.glob("??/*"):
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def skipped(name: str) -> bool:
    return name in _NEVER
