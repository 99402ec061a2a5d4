"""What a sandbox is made of, as arguments of `bwrap`.

The program sees the system's programs and libraries and the runner's Python, all read-only, and its own
work folder, temporary folder and door. It has namespaces of its own for users, processes, networks,
System V memory and host names.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from shoal.pool.base import limits
from shoal.pool.runner.sandbox import seccomp

PACKAGE = "bubblewrap"
WORK, TEMPORARY, HOME = "/task", "/tmp", "/tmp/home"
DOOR, IDENTITY = "/run/shoal/door", "/run/shoal/identity.pem"
_USER = 1000
_ROOTS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
#: Of /etc: what programs need to start, and nothing that says who uses this machine.
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone")
_FILES = {
    "/etc/passwd": f"task:x:{_USER}:{_USER}:task:{HOME}:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "/etc/group": f"task:x:{_USER}:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost task\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


@dataclass(frozen=True)
class Places:
    """The folders and files on this machine that a sandbox gets."""

    work: Path
    temporary: Path
    door: Path
    environment: Path | None = None  # of --requirements, read-only


def problem() -> str | None:
    """Return why this machine cannot run other people's programs, or None if it can."""
    if shutil.which("bwrap") is None:
        return f"bwrap is missing. Type: apt install {PACKAGE}"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return f"Shoal has no filter of system calls for {os.uname().machine}"
    read_fd = os.memfd_create("arguments")
    filter_fd = os.memfd_create("filter")
    try:
        os.write(filter_fd, seccomp.program())
        os.lseek(filter_fd, 0, os.SEEK_SET)
        words = [*_namespaces(), *_system(), *_python(), "--seccomp", str(filter_fd)]
        _fill(read_fd, words)
        done = subprocess.run(
            ["bwrap", "--args", str(read_fd), "--", sys.executable, "-c", ""],
            capture_output=True, text=True, timeout=limits.SANDBOX_TRY_S, stdin=subprocess.DEVNULL,
            pass_fds=[read_fd, filter_fd], env={"PATH": os.defpath},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"bwrap cannot be run: {error}"
    finally:
        os.close(read_fd)
        os.close(filter_fd)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason"]
        return f"bwrap does not work here: {said[-1]}"
    return None


def command(
    places: Places, identity: str, environment: Mapping[str, str], program: list[str]
) -> tuple[list[str], list[int]]:
    """Return the command that runs a program in a sandbox, and descriptors that it inherits.

    Arguments with secrets go through a descriptor: others can read the command line.
    """
    fds: list[int] = []

    def memory(data: bytes) -> str:
        fds.append(os.memfd_create("sandbox"))
        _write(fds[-1], data)
        return str(fds[-1])

    words = [*_namespaces(), *_system()]
    words += ["--bind", str(places.temporary), TEMPORARY, "--dir", HOME, *_python()]
    if places.environment is not None:
        words += ["--ro-bind", str(places.environment), str(places.environment)]
    words += ["--bind", str(places.work), WORK, "--perms", "0700", "--dir", "/run/shoal"]
    words += ["--bind", str(places.door), DOOR]
    words += ["--perms", "0600", "--file", memory(identity.encode()), IDENTITY]
    for path, text in _FILES.items():
        words += ["--perms", "0444", "--file", memory(text.encode()), path]
    words += ["--remount-ro", "/", "--chdir", WORK, "--clearenv"]
    for name, value in environment.items():
        words += ["--setenv", name, value]
    words += ["--seccomp", memory(seccomp.program())]
    fds.append(os.memfd_create("arguments"))
    _fill(fds[-1], words)
    # The shell says what is not found, and exits as shells do.
    start = ["/bin/sh", "-c", 'exec "$@"', "task", *program]
    return ["bwrap", "--args", str(fds[-1]), "--", *start], fds


def _namespaces() -> list[str]:
    return [
        "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
        "--unshare-cgroup-try", "--disable-userns", "--uid", str(_USER), "--gid", str(_USER),
        "--hostname", "task", "--cap-drop", "ALL", "--die-with-parent", "--new-session",
    ]  # fmt: skip


def _system() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for name in _ROOTS:
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    for name in _ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    shared = str(limits.SANDBOX_SHARED_BYTES)
    words += ["--proc", "/proc", *_kernel()]
    words += ["--dev", "/dev", "--size", shared, "--tmpfs", "/dev/shm"]
    return [*words, "--remount-ro", "/dev"]


#: Of /proc: what nobody in a sandbox needs to read.
_HIDDEN = ("kcore", "keys", "key-users", "kmsg", "sysrq-trigger", "timer_list", "slabinfo")


def _kernel() -> list[str]:
    """Make the kernel's settings read-only. A node of root's would own them, without any capability."""
    words = []
    for entry in sorted(os.listdir("/proc")):
        path = f"/proc/{entry}"
        if entry in _HIDDEN:
            words += ["--ro-bind", "/dev/null", path]
        elif entry.isdecimal() or os.path.islink(path):
            continue
        elif os.path.isdir(path) or os.stat(path).st_mode & 0o222:
            words += ["--ro-bind", path, path]
    return words


def _python() -> list[str]:
    words = []
    for path in python_folders():
        words += ["--ro-bind", path, path]
    return words


@cache
def python_folders() -> tuple[str, ...]:
    """Return the folders of this Python and of Shoal that are not a part of the system."""
    found = [sys.base_prefix, sys.prefix]
    for module in ("shoal", "shoal_autoload"):
        spec = find_spec(module)
        found += list(spec.submodule_search_locations or ()) if spec is not None else []
    core = find_spec("shoal._core")
    if core is not None and core.origin is not None:
        found.append(os.path.dirname(core.origin))
    kept: list[str] = []
    for path in map(os.path.abspath, found):
        above = ["/usr", *kept]
        if path != "/" and not any(path == a or path.startswith(a + "/") for a in above):
            kept.append(path)
    return tuple(kept)


def search_path(environment: Path | None) -> str:
    """Return the PATH of a program in a sandbox."""
    folders = [os.path.join(sys.prefix, "bin"), "/usr/local/bin", "/usr/bin", "/bin"]
    return os.pathsep.join([str(environment / "bin"), *folders] if environment else folders)


def set_limits() -> None:
    """Bound what a process takes. Called in the child, before it becomes the program."""
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits.SANDBOX_FOLDER_BYTES,
        resource.RLIMIT_NOFILE: limits.SANDBOX_DESCRIPTORS,
        resource.RLIMIT_NPROC: limits.SANDBOX_PROCESSES_MAX,
        resource.RLIMIT_DATA: memory_bytes(),
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, value in wanted.items():
        _, most = resource.getrlimit(which)
        bound = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(which, (bound, bound))


@cache
def memory_bytes() -> int:
    """Return how much memory the processes of one sandbox may use together."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(total * limits.SANDBOX_MEMORY_FRACTION)


def _fill(fd: int, words: list[str]) -> None:
    _write(fd, b"".join(word.encode() + b"\0" for word in words))


def _write(fd: int, data: bytes) -> None:
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
