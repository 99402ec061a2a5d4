"""A task's log on disk: frames in files of at most 64 MiB, of which the last two are kept."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.pool.base import limits
from shoal.tasks import log_frames

_PREFIX = "log-"  # and the position of the file's first byte


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a log from `position`, which is later than asked for where the log was cut."""

    position: int
    data: bytes


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Return the files of a log by their first position."""
    found = []
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            digits = path.name.removeprefix(_PREFIX)
            if path.name.startswith(_PREFIX) and digits.isdecimal():
                found.append((int(digits), path))
    return sorted(found)


class LogWriter:
    """Appends frames. A full disk drops output and never stops the program: a frame says how much."""

    def __init__(self, folder: Path, file_bytes: int = limits.LOG_FILE_BYTES) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._position = 0
        self._fd = -1
        self._in_file_bytes = 0
        self._unwritten_bytes = 0
        self._next_file()

    def write(self, at: float, stream: int, data: bytes) -> None:
        for start in range(0, len(data), log_frames.FRAME_BYTES_MAX):
            self._frame(at, stream, data[start : start + log_frames.FRAME_BYTES_MAX])

    def end(self, at: float) -> None:
        self._frame(at, log_frames.END, b"")
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _frame(self, at: float, stream: int, data: bytes) -> None:
        if self._unwritten_bytes:
            note = f"[shoal: {self._unwritten_bytes} bytes of output are lost: the disk is full]\n"
            if not self._append(
                log_frames.encode(self._position, at, log_frames.ERR, note.encode())
            ):
                self._unwritten_bytes += len(data)
                return
            self._unwritten_bytes = 0
        if not self._append(log_frames.encode(self._position, at, stream, data)):
            self._unwritten_bytes += len(data)

    def _append(self, frame: bytes) -> bool:
        """Write a whole frame or nothing. Return False if the disk is full."""
        try:
            if self._fd < 0 or self._in_file_bytes + len(frame) > self._file_bytes:
                self._next_file()
            written = os.write(self._fd, frame)
            if written < len(frame):
                os.ftruncate(self._fd, self._in_file_bytes)
                return False
        except OSError:
            return False
        self._in_file_bytes += len(frame)
        self._position += len(frame)
        return True

    def _next_file(self) -> None:
        path = self._folder / f"{_PREFIX}{self._position:020d}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._in_file_bytes = fd, 0
        for _, old in _files(self._folder)[:-2]:
            old.unlink(missing_ok=True)


def read(folder: Path, position: int, bytes_max: int) -> Chunk:
    """Return what the log has from `position`; nothing if it has not grown that far."""
    files = _files(folder)
    if not files:
        return Chunk(position, b"")
    position = max(position, files[0][0])
    start, path = max((f for f in files if f[0] <= position), key=lambda f: f[0])
    try:
        with open(path, "rb") as file:
            file.seek(position - start)
            data = file.read(bytes_max)
    except FileNotFoundError:  # it was dropped at this moment
        return Chunk(position, b"")
    following = next((first for first, _ in files if first > start), None)
    if not data and following is not None and position < following:
        return Chunk(following, b"")  # a file that a full disk cut short
    return Chunk(position, data)
