"""What a client asks a runner for: parts of logs, and results of tasks."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from shoal.pool.base import limits
from shoal.pool.runner import attempt_folder, log_file
from shoal.pool.runner.attempt_folder import AttemptFolder
from shoal.pool.wire import messages, runner_messages, task_messages
from shoal.pool.wire.task_messages import FileInfo, FileList, FilePart, LogPart
from shoal.tasks.patterns import matches, may_hold


def answer(
    root: Path, ask: runner_messages.AskRunner
) -> LogPart | FileList | FilePart | messages.Refusal:
    """Answer one request about a task of this runner."""
    attempt = ask.attempt
    match ask.request:
        case task_messages.ReadLog() as request:
            return _log(AttemptFolder(root, ask.task, attempt), request)
        case task_messages.AskFiles() as request:
            return _files(_work(root, ask), request.patterns or ask.keep, request.first)
        case task_messages.ReadFile() as request:
            return _file(_work(root, ask), request)


def _log(folder: AttemptFolder, request: task_messages.ReadLog) -> LogPart | messages.Refusal:
    if not folder.path.exists():
        return messages.refusal("the runner no longer has the log of this attempt")
    over = folder.end() is not None  # before the read: what is read then has its last byte
    chunk = log_file.read(folder.path, request.position, request.bytes_max)
    return LogPart(folder.attempt, chunk.position, chunk.data, over and not chunk.data)


def _work(root: Path, ask: runner_messages.AskRunner) -> Path:
    if ask.folder:
        return Path(ask.folder)
    attempt = attempt_folder.last_attempt(root, ask.task) or 0
    return AttemptFolder(root, ask.task, attempt).work


def _files(folder: Path, patterns: list[str], first: int) -> FileList | messages.Refusal:
    """Return the files below a task's folder that match a pattern; `**` is any number of folders."""
    found: list[FileInfo] = []
    for directory, names, files, directory_fd in os.fwalk(folder):  # follows no link
        below = [os.path.relpath(os.path.join(directory, n), folder) for n in sorted(names)]
        names[:] = [
            os.path.basename(path)
            for path in below
            if os.path.basename(path) != ".git" and any(may_hold(path, p) for p in patterns)
        ]
        for name in sorted(files):
            path = os.path.relpath(os.path.join(directory, name), folder)
            if not any(matches(path, p) for p in patterns):
                continue
            with suppress(OSError):
                status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    executable = bool(status.st_mode & 0o100)
                    found.append(FileInfo(path, status.st_size, executable))
    page = found[first : first + limits.FETCH_FILES_MAX // 4]  # with long names it fits a frame
    following = first + len(page)
    return FileList(page, following if following < len(found) else None)


def _file(folder: Path, request: task_messages.ReadFile) -> FilePart | messages.Refusal:
    """Return bytes of one result, which must be below the folder, and no link.

    The program may put a link in a file's place at any moment.
    """
    try:
        with open(_open_below(folder, request.path), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise IsADirectoryError
            file.seek(request.offset)
            return FilePart(file.read(request.bytes_max))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
        return messages.refusal(f"{request.path} is not a file of this task")
    except OSError as error:
        if error.errno == errno.ELOOP:
            return messages.refusal(f"{request.path} is not a file of this task, but a link")
        return messages.refusal(f"{request.path} cannot be read: {error.strerror}")


def _open_below(folder: Path, path: str) -> int:
    """Open a file below a folder. No part of the path below it may be a link."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise FileNotFoundError
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(part, flags, dir_fd=at)
            os.close(at)
            at = below
        # A pipe in its place would wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(parts[-1], flags, dir_fd=at)
    finally:
        os.close(at)
