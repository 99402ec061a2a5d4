"""The processes of a node, for `shoal status --json`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from typing import Protocol

from shoal.pool.base import limits, process
from shoal.pool.wire.messages import ProcessInfo


class Server(Protocol):
    """What an agent knows of a device server."""

    process: subprocess.Popen[bytes]
    ended: bool


def processes(node: str, servers: Iterable[Server]) -> list[ProcessInfo]:
    """Return the agent, which calls this, its device servers, and what these have forked."""
    found = [ProcessInfo("agent", os.getpid(), node)]
    for pid in (server.process.pid for server in servers if not server.ended):
        found.append(ProcessInfo("server", pid, node))
        found += [ProcessInfo("worker", worker, node) for worker in process.children(pid)]
    return found[: limits.SESSIONS_MAX]
