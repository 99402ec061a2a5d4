"""Processes from outside: who is alive, who descends from whom, what they left behind."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.pool.base.addresses import LOCAL_PREFIX

HEADS = {"shoal.pool.local.embedded", "shoal.pool.local.head_process"}


def alive(pid: int) -> bool:
    """Whether the process exists and still runs (a zombie has ended)."""
    return _state(pid) not in ("", "Z", "X")


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent(int(entry.name)) == pid:
            found.append(int(entry.name))
    return sorted(found)


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on; those nearest first."""
    found = children(pid)
    for child in list(found):
        found += descendants(child)
    return found


def head_pid(url: str) -> int:
    """The process of the pool's head, by the pool's name in its command line."""
    pool = url.removeprefix(LOCAL_PREFIX)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = command(int(entry.name))
            if HEADS & set(words) and pool in words and alive(int(entry.name)):
                return int(entry.name)
    raise AssertionError(f"the pool {url} has no head")


def pool_pids(url: str) -> list[int]:
    """Head, device servers and workers of a pool."""
    head = head_pid(url)
    return [head, *descendants(head)]


def server_pids(url: str) -> list[int]:
    """The pool's device servers, in the order of its devices."""
    return [p for p in children(head_pid(url)) if "shoal.pool.node.device_server" in command(p)]


def forked(server: int) -> list[int]:
    """Workers and data readers of a device server: children of its fork server."""
    return [child for forker in children(server) for child in children(forker)]


def server_of(worker: int) -> int:
    """The device server that a worker belongs to."""
    return parent(parent(worker))


def resident_bytes(pid: int) -> int:
    """Memory that a process has in use."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def shared_memory_files() -> set[str]:
    """Names in /dev/shm, without those of other programs that are alive right now."""
    names = set(os.listdir("/dev/shm"))
    return {n for n in names if not _belongs_to_the_living(n)}


def _belongs_to_the_living(name: str) -> bool:
    # torch calls its files torch_<pid>_<random>_<number>
    parts = name.split("_")
    return len(parts) > 1 and parts[0] == "torch" and parts[1].isdigit() and alive(int(parts[1]))


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat after the name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
