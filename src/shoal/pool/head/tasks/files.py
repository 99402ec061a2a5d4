"""The files of tasks that run on other machines than their owner's: by hash, apart for each owner."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from shoal.errors import PoolError
from shoal.pool.base import limits, paths, snapshots
from shoal.pool.wire.task_messages import FileChunk
from shoal.units import show_bytes


class FilesRefused(PoolError):
    """The head does not take a file; the text says why."""


class _Arriving:
    """A file of which a part has come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest = hashlib.sha256()
        self.size_bytes = 0


class SubmittedFiles:
    """Args:
    root: their folder; None: this head keeps none.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._arriving: dict[tuple[str, str], _Arriving] = {}
        self._used_bytes: dict[str, int] = {}
        self._whole: dict[tuple[str, str], float] = {}  # owner, snapshot -> when that was seen

    def _folder(self, owner: str) -> Path:
        if self._root is None:
            raise FilesRefused("this pool keeps no files of tasks: it has no other machines")
        return self._root / hashlib.sha256(owner.encode()).hexdigest()[:16]

    def missing(self, owner: str, hashes: list[str]) -> list[str]:
        """Return which of these are not here. Those that are here are kept from now on."""
        folder, found = self._folder(owner), []
        for name in hashes:
            try:
                os.utime(snapshots.file_of(folder, name))
            except FileNotFoundError:
                found.append(name)
        return found

    def put(self, owner: str, chunk: FileChunk) -> None:
        """Keep a part of a file. Raise FilesRefused if it cannot be kept."""
        folder, key = self._folder(owner), (owner, chunk.hash)
        snapshots.file_of(folder, chunk.hash)
        if chunk.offset == 0:
            paths.make_directory(folder)
            while len(self._arriving) >= limits.FILES_PER_MESSAGE_MAX:
                self._forget(next(iter(self._arriving)))
            self._arriving[key] = _Arriving(folder / f".{chunk.hash}")
            self._arriving[key].path.write_bytes(b"")
        arriving = self._arriving.get(key)
        if arriving is None or arriving.size_bytes != chunk.offset:
            raise FilesRefused("a part of a file did not follow the last one; submit again")
        used = self._used(owner) + len(chunk.data)
        if used > limits.FILES_OF_OWNER_BYTES:
            self._forget(key)
            raise FilesRefused(
                f"the head keeps at most {show_bytes(limits.FILES_OF_OWNER_BYTES)} of files for "
                f"{owner}. Those that no task has used for {limits.TASKS_KEPT_DAYS} days make room"
            )
        try:
            with open(arriving.path, "ab") as file:
                file.write(chunk.data)
        except OSError as error:
            self._forget(key)
            raise FilesRefused(f"the head cannot keep the file: {error.strerror}") from None
        self._used_bytes[owner] = used
        arriving.digest.update(chunk.data)
        arriving.size_bytes += len(chunk.data)
        if chunk.last:
            self._finish(folder, key, arriving)

    def _finish(self, folder: Path, key: tuple[str, str], arriving: _Arriving) -> None:
        if arriving.digest.hexdigest() != key[1]:
            self._forget(key)
            raise FilesRefused("a file has other bytes than its hash says")
        path = snapshots.file_of(folder, key[1])
        path.parent.mkdir(mode=0o700, exist_ok=True)
        arriving.path.replace(path)
        del self._arriving[key]

    def _forget(self, key: tuple[str, str]) -> None:
        arriving = self._arriving.pop(key)
        self._used_bytes[key[0]] = self._used(key[0]) - arriving.size_bytes
        arriving.path.unlink(missing_ok=True)

    def _used(self, owner: str) -> int:
        if owner not in self._used_bytes:
            sizes = 0
            for path in self._folder(owner).glob("??/*"):
                with suppress(FileNotFoundError):
                    sizes += path.stat().st_size
            self._used_bytes[owner] = sizes
        return self._used_bytes[owner]

    def has(self, owner: str, snapshot: str) -> bool:
        """Return whether every file of a snapshot is here."""
        if self._root is None:
            return False
        seen = self._whole.get((owner, snapshot))
        if seen is not None and time.monotonic() - seen < limits.TASKS_REMOVE_S:
            return True
        try:
            path = snapshots.file_of(self._folder(owner), snapshot)
            if path.stat().st_size > limits.FILE_LIST_BYTES_MAX:
                return False
            listed = snapshots.read_list(path.read_bytes())
        except (OSError, PoolError):
            return False
        names = sorted({file.hash for file in listed if file.link is None})
        if self.missing(owner, names):
            return False
        self._whole[owner, snapshot] = time.monotonic()
        return True

    def read(self, owner: str, name: str, offset: int) -> tuple[bytes, bool]:
        """Return bytes of a file, and whether they are its last."""
        path = snapshots.file_of(self._folder(owner), name)
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(limits.FILE_CHUNK_BYTES)
            return data, file.tell() >= os.fstat(file.fileno()).st_size

    def remove_old(self) -> None:
        """Remove what no submission has used for as long as ended tasks are kept."""
        self._whole.clear()
        if self._root is None:
            return
        for folder in self._root.glob("*"):
            snapshots.forget_old(folder)
        self._used_bytes.clear()
