"""What is wrong with the pool right now, as a list of checks."""

from __future__ import annotations

import msgspec

import shoal
from shoal.pool.wire.messages import PoolStatus

CLOCK_S = 2.0
DISK_BYTES = 256 * 2**20


class Check(msgspec.Struct, frozen=True):
    name: str
    ok: bool
    text: str
    help: str = ""


class Checks(msgspec.Struct, frozen=True):
    checks: list[Check]


def examine(status: PoolStatus, readers: int) -> Checks:
    """Return all checks; what fails says what to type."""
    state = status.state
    down = [f"{n.name} is {n.state}" for n in status.nodes if n.state != "up"]
    failures = [f"{n.name}: {failure}" for n in status.nodes for failure in n.failures]
    clocks = [
        f"{n.name}: {n.clock_ahead_s:+.1f} s"
        for n in status.nodes
        if abs(n.clock_ahead_s) > CLOCK_S
    ]
    room = state.free_bytes
    checks = [
        _check("nodes", down, f"{len(status.nodes)} up", "shoal status"),
        _check("devices", failures, f"{len(status.devices)} offered", "shoal doctor"),
        _check("clocks", clocks, "they agree", "chronyc tracking"),
        _check("state", [state.error] if state.error else [], "written to the disk", "df"),
        _check("disk", ["almost full"] if room is not None and room < DISK_BYTES else [],
               "has room", "df"),
        _check("version", [] if status.shoal == shoal.__version__ else [f"the head has {status.shoal}"],
               f"shoal {status.shoal}", "shoal down && shoal up"),
        Check("dashboard", True, f"{readers} browser(s) follow the pool"),
    ]  # fmt: skip
    return Checks(checks)


def _check(name: str, wrong: list[str], good: str, help_text: str) -> Check:
    return Check(name, not wrong, "; ".join(wrong) or good, help_text if wrong else "")
