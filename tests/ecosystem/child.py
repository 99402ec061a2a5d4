"""The process that runs programs for tests.ecosystem.programs. It imports torch, nothing of Shoal."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
import types
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

#: What Python code of this process started and connected to, by the interpreter's audit events.
started: list[str] = []
connections: list[str] = []
_pid = os.getpid()
SETTLED_S = 0.3


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        started.append(" ".join(str(word) for word in arguments[1]))
    elif event in ("os.fork", "os.forkpty"):
        started.append("fork")
    elif event == "os.posix_spawn":
        started.append(str(arguments[1]))
    elif event == "os.system":
        started.append(str(arguments[0]))
    elif event == "socket.connect":
        connections.append(repr(arguments[1]))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _settle(threads: int, files: int) -> None:
    """Wait for threads that are about to end, until none has ended for a while."""
    gc.collect()
    last, since = (_threads(), _files()), time.monotonic()
    while last != (threads, files) and time.monotonic() - since < SETTLED_S:
        time.sleep(0.005)
        now = (_threads(), _files())
        if now != last:
            last, since = now, time.monotonic()


def _modules() -> set[str]:
    return {name for name in sys.modules if name == "shoal" or name.startswith("shoal.")}


def _children(pid: int) -> list[str]:
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it may end at this moment
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                found += [b" ".join(words).decode().strip(), *_children(int(child))]
    return found


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _execute(path: str) -> tuple[Any, dict[str, str] | None]:
    """Run one file as the main module. Return its variable `answer`, and the exception if any."""
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    try:
        exec(compile(Path(path).read_text(), path, "exec"), main.__dict__)
    except BaseException as error:
        if os.getpid() == _pid and not isinstance(error, SystemExit):
            traceback.print_exc()
        return None, {"type": _name(type(error)), "text": str(error)}
    return main.__dict__.get("answer"), None


def _section(path: str) -> dict[str, Any]:
    threads, files, modules = _threads(), _files(), _modules()
    before = (len(started), len(connections))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        answer, error = _execute(path)
    if os.getpid() != _pid:  # a forked child that went on to the end of the program
        os._exit(1 if error else 0)
    _settle(threads, files)
    return {
        "answer": answer,
        "error": error,
        "warnings": list(dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in seen)),
        "threads": _threads() - threads,
        "files": _files() - files,
        "started": started[before[0] :],
        "children": _children(os.getpid()),
        "connections": connections[before[1] :],
        "modules": sorted(_modules() - modules),
    }


def main(plan: str, report: str) -> None:
    import torch  # noqa: F401

    sys.argv = sys.argv[:1]
    alone = _threads()
    sys.addaudithook(_watch)
    files: list[tuple[str, str]] = json.loads(Path(plan).read_text())
    sections = {name: _section(path) for name, path in files}
    found = {"sections": sections, "alone": alone}
    scratch = f"{report}.part"
    Path(scratch).write_text(json.dumps(found, default=repr))
    os.replace(scratch, report)


if __name__ == "__main__":
    main(*sys.argv[1:])
