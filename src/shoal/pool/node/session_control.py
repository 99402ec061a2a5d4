"""A device server's hold on its sessions: how much memory each has now, and whether it runs.

Each session has a block of shared memory (csrc/transport/session_block.h). The server writes limits
and orders there and reads what the worker counted; two events ring when there is something new.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.pool.base import limits
from shoal.pool.node import session_profile
from shoal.pool.node.memory_division import SessionMemory, divide
from shoal.pool.node.session_profile import CallUse
from shoal.pool.node.spec import Spill
from shoal.pool.wire import node_messages, profile_messages
from shoal.pool.wire.acceptor import SelectorLoop, Timer

if TYPE_CHECKING:
    from shoal import _core

_RUN, _SUSPEND = 0, 1


@dataclass(eq=False)
class SessionControl:
    """One session's block, and what the server wants of it."""

    grant: node_messages.Grant
    block: _core.SessionBlock
    orders_fd: int  # an event for the worker
    reports_fd: int  # an event of the worker
    limit_bytes: int = 0
    suspended: bool = False  # its memory is not booked
    wants_run: bool = True  # what the head ordered last
    refused: str = ""  # why the server itself does not suspend it
    has_reader: Callable[[], bool] = lambda: False
    waiting_since: float | None = None
    sent: profile_messages.SessionProfile | None = None
    sent_at: float = 0.0

    @property
    def state(self) -> str:
        number = self.block.state
        return session_profile.STATES[number] if number < len(session_profile.STATES) else "running"

    def memory(self, now: float) -> SessionMemory:
        # A worker never uses more than it was given, whatever it says.
        used_bytes = min(self.block.used_bytes, max(self.limit_bytes, self.block.limit_bytes))
        wanted_bytes = session_profile.bounded(self.block.wanted_bytes)
        if wanted_bytes == 0:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = now
        return SessionMemory(
            self.grant.session,
            0 if self.suspended else self.grant.memory_bytes,
            0 if self.suspended else self.grant.most_bytes,
            self.limit_bytes,
            used_bytes,
            session_profile.bounded(self.block.away_bytes),
            wanted_bytes,
            0.0 if self.waiting_since is None else now - self.waiting_since,
        )

    def set_limit(self, limit_bytes: int, ceiling_bytes: int) -> None:
        changed = limit_bytes < self.limit_bytes
        self.limit_bytes = limit_bytes
        self.block.limit_bytes = limit_bytes
        self.block.ceiling_bytes = ceiling_bytes
        if changed:
            self.ring()

    def order(self, order: int) -> None:
        self.block.order = order
        self.ring()

    def ring(self) -> None:
        with suppress(OSError):  # a full counter rings too
            os.eventfd_write(self.orders_fd, 1)

    def close(self) -> None:
        # The worker refers to this too: a cycle would keep the block until the garbage collector comes.
        self.has_reader = lambda: False
        os.close(self.orders_fd)
        os.close(self.reports_fd)


@dataclass
class Sessions:
    """All sessions of a device server: its ledger of memory."""

    memory_bytes: int  # of the device
    spill: Spill
    spill_is_declared: bool
    pages: bool  # the device's memory can leave it
    loop: SelectorLoop
    send: Callable[[profile_messages.SessionProfile], None]
    context_bytes: int = 0  # that each worker takes of the device before its first tensor
    controls: dict[int, SessionControl] = field(default_factory=dict)  # by session
    _beat: Timer | None = None
    _look: Timer | None = None

    def open(self, grant: node_messages.Grant) -> SessionControl:
        """Make a session's block, before its worker is forked."""
        from shoal import _core

        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        control = SessionControl(
            grant, _core.SessionBlock(), os.eventfd(0, flags), os.eventfd(0, flags)
        )
        self.controls[grant.session] = control
        self.share_out()
        self.loop.add_reader(control.reports_fd, self._rung, control)
        if self._beat is None:
            self._beat = self.loop.call_later(limits.SESSION_BEAT_S, self._beats)
        return control

    def close(self, control: SessionControl) -> None:
        """Forget a session whose worker has ended, after its last profile."""
        self._report(control, float("inf"))
        if self.controls.get(control.grant.session) is control:
            del self.controls[control.grant.session]
        self.loop.remove_reader(control.reports_fd)
        control.close()
        self.share_out()

    def booked_bytes(self) -> int:
        return sum(
            min(c.block.used_bytes, c.grant.most_bytes) if c.suspended else c.grant.memory_bytes
            for c in self.controls.values()
        ) + self.context_bytes * len(self.controls)

    # --- the beat ----------------------------------------------------------------------------------

    def _beats(self) -> None:
        self._beat = None
        self.look()
        if self.controls:
            self._beat = self.loop.call_later(limits.SESSION_BEAT_S, self._beats)

    def _rung(self, control: SessionControl) -> None:
        """A worker has something to report. It may ring as often as it likes: it is read rarely."""
        with suppress(OSError):
            os.eventfd_read(control.reports_fd)
        if self._look is None:
            self._look = self.loop.call_later(limits.SESSION_LOOK_S, self._look_now)

    def _look_now(self) -> None:
        self._look = None
        self.look()

    def look(self) -> None:
        """Read what the workers report, divide the memory anew, and report to the agent."""
        for control in self.controls.values():
            if control.wants_run:
                continue
            if control.state == "suspended":
                control.suspended = True
            elif control.state == "refused":
                control.refused, control.wants_run = self._reason(control), True
        self._resume()
        self.share_out()
        now = time.monotonic()
        for control in self.controls.values():
            self._report(control, now)

    def share_out(self) -> None:
        now = time.monotonic()
        memories = [c.memory(now) for c in self.controls.values()]
        left_bytes = self.memory_bytes - self.context_bytes * len(memories)
        division = divide(left_bytes, memories, limits.MEMORY_WAIT_S)
        for session, limit_bytes in division.limits_bytes.items():
            self.controls[session].set_limit(limit_bytes, division.ceilings_bytes[session])
        self._share_out_swap()

    def _share_out_swap(self) -> None:
        """Divide the host memory for evicted segments. A fixed lease has its share of it."""
        running = [c for c in self.controls.values() if not c.suspended and c.wants_run]
        fixed = [c for c in running if c.grant.limit_bytes == 0]
        elastic = [c for c in running if c.grant.limit_bytes > 0]
        left_bytes = self.spill.host_bytes
        for control in fixed:
            share_bytes = self.swap_share_bytes(control.grant)
            control.block.swap_limit_bytes = share_bytes
            left_bytes -= share_bytes
        used = {c.grant.session: min(c.block.swap_bytes, self.spill.host_bytes) for c in elastic}
        left_bytes = max(0, left_bytes - sum(used.values()))
        for control in elastic:
            share_bytes = used[control.grant.session] + left_bytes // len(elastic)
            control.block.swap_limit_bytes = share_bytes

    def swap_share_bytes(self, grant: node_messages.Grant) -> int:
        return int(self.spill.host_bytes * min(1.0, grant.most_bytes / self.memory_bytes))

    # --- suspend and resume ------------------------------------------------------------------------

    def obey(self, order: node_messages.OrderSession) -> None:
        control = self.controls.get(order.session)
        if control is None or control.grant.epoch != order.epoch:
            return
        control.wants_run, control.refused = not order.suspend, ""
        if order.suspend:
            self._suspend(control)
        self.look()

    def _suspend(self, control: SessionControl) -> None:
        if control.block.order == _SUSPEND:
            return
        if not self.pages:
            control.refused = "accelerator"
        elif control.has_reader():
            control.refused = "reader"
        elif control.block.used_bytes > self._host_room_bytes():
            control.refused = "host-full"
        if control.refused:
            return
        control.order(_SUSPEND)

    def _host_room_bytes(self) -> int:
        """Host memory that suspended sessions may take yet."""
        taken_bytes = sum(
            min(c.block.swap_bytes, c.grant.most_bytes)
            for c in self.controls.values()
            if not c.wants_run
        )
        room_bytes = self.spill.host_bytes - taken_bytes
        if not self.spill_is_declared:
            room_bytes = max(room_bytes, available_bytes() // 2)
        return room_bytes

    def _resume(self) -> None:
        """Let sessions go on for whose memory there is room again."""
        for control in self.controls.values():
            if not control.wants_run or control.block.order != _SUSPEND:
                continue
            if control.suspended:
                used_bytes = min(control.block.used_bytes, control.grant.most_bytes)
                others_bytes = self.booked_bytes() - used_bytes
                if others_bytes + control.grant.memory_bytes > self.memory_bytes:
                    continue
                control.suspended = False
                self.share_out()
            control.order(_RUN)

    # --- profiles ----------------------------------------------------------------------------------

    def _report(self, control: SessionControl, now: float) -> None:
        state, why = control.state, control.refused
        if control.refused:
            state = "refused"
        before = control.sent
        changed = before is None or (before.state, before.reason) != (state, why)
        if not changed and now - control.sent_at < limits.SESSION_PROFILE_S:
            return
        profile = self.profile(control, state, why)
        if profile == before:
            return
        control.sent, control.sent_at = profile, now
        self.send(profile)

    @staticmethod
    def _reason(control: SessionControl) -> str:
        refusals, number = session_profile.REFUSALS, control.block.reason
        return refusals[number] if 0 < number < len(refusals) else "accelerator"

    def profile(
        self, control: SessionControl, state: str, why: str
    ) -> profile_messages.SessionProfile:
        block, bounded = control.block, session_profile.bounded
        uses = [CallUse(*row) for row in block.uses()]
        steps = session_profile.steps(uses)
        return profile_messages.SessionProfile(
            session=control.grant.session,
            epoch=control.grant.epoch,
            state=state,
            reason=why,
            task_type=session_profile.type_of(uses, steps),
            steps=bounded(steps),
            calls=bounded(sum(use.calls for use in uses)),
            busy_ns=bounded(sum(use.ns for use in uses)),
            used_bytes=bounded(block.used_bytes),
            away_bytes=bounded(block.away_bytes),
            host_bytes=bounded(block.swap_bytes),
            disk_bytes=bounded(block.disk_bytes),
            peak_bytes=bounded(block.peak_bytes),
            limit_bytes=control.limit_bytes,
            operators=session_profile.operators(uses),
        )


def available_bytes() -> int:
    """Return the host memory that programs can still take, as the system estimates it."""
    with suppress(OSError, ValueError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
