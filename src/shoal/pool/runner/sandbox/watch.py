"""What a sandbox uses of files, memory and processes, looked at twice a second: there is no cgroup."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.pool.base import limits
from shoal.pool.runner import process_tree
from shoal.pool.runner.sandbox.bubblewrap import memory_bytes
from shoal.units import show_bytes


class Watch:
    """Args:
    pid: the processes below it are the sandbox's.
    folders: in which it writes.
    on_over: called once, in the watch's thread, with what was too much.
    """

    def __init__(self, pid: int, folders: list[Path], on_over: Callable[[str], None]) -> None:
        self._pid = pid
        self._folders = folders
        self._on_over = on_over

    def start(self) -> None:
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            begin = time.monotonic()
            found = too_many(self._pid) or too_large(self._folders)
            if found is not None:
                self._on_over(found)
                return
            # A tree with many files takes long to count: at most a tenth of the time goes into that.
            time.sleep(max(limits.SANDBOX_LOOK_S, 9 * (time.monotonic() - begin)))


def too_many(pid: int) -> str | None:
    """Return what the processes below `pid` have too much of, if anything."""
    pids = process_tree.descendants(pid)
    if len(pids) > limits.SANDBOX_PROCESSES_MAX:
        return f"it has more than {limits.SANDBOX_PROCESSES_MAX} processes"
    if sum(map(_resident_bytes, pids)) > memory_bytes():  # pages that several have count for each
        used = sum(map(_part_bytes, pids))
        if used > memory_bytes():
            return f"it uses more than {show_bytes(memory_bytes())} of memory"
    return None


def _resident_bytes(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _part_bytes(pid: int) -> int:
    """Return a process's memory, with its part of what it shares with others."""
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def too_large(folders: list[Path]) -> str | None:
    """Return what is too much in the folders that a sandbox writes to, if anything."""
    total_bytes = files = 0
    seen: set[tuple[int, int]] = set()
    for folder in folders:
        try:
            for path, names, others, directory in os.fwalk(folder, onerror=_unless_gone):
                if path.count(os.sep) - str(folder).count(os.sep) > limits.SANDBOX_DEPTH_MAX:
                    return f"it has folders nested more than {limits.SANDBOX_DEPTH_MAX} deep"
                for name in (*names, *others):
                    files += 1
                    if files > limits.SANDBOX_FILES_MAX:
                        return f"it has more than {limits.SANDBOX_FILES_MAX} files"
                    with suppress(OSError):
                        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
                        linked = stat.S_ISREG(found.st_mode) and found.st_nlink > 1
                        if linked and (found.st_dev, found.st_ino) in seen:
                            continue
                        if linked:
                            seen.add((found.st_dev, found.st_ino))
                        total_bytes += found.st_blocks * 512
        except PermissionError:
            return "it has a folder that its runner cannot read"
        except OSError as error:
            return f"its folders cannot be read: {os.strerror(error.errno or 0)}"
    if total_bytes > limits.SANDBOX_FOLDER_BYTES:
        return f"its files are over {show_bytes(limits.SANDBOX_FOLDER_BYTES)}"
    return None
