"""Tasks on machines of others: who may, with which files, and what their programs show to get in."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shoal.errors import PoolError, ProtocolError, describe
from shoal.pool.base import limits
from shoal.pool.head.tasks.files import SubmittedFiles
from shoal.pool.head.tasks.rows import Entry
from shoal.pool.wire import roles, runner_messages
from shoal.pool.wire.roles import Principal, Role
from shoal.tasks.states import ACTIVE

if TYPE_CHECKING:
    from shoal.pool.wire.tls import Peer

_NAME = re.compile(r"task\.([0-9]{1,18})\.([0-9]{1,9})")  # members have no dot in their names


class Members(Protocol):
    """What a head that listens knows of its members."""

    def role_of(self, name: str) -> Role | None: ...
    def identity_of_task(self, name: str) -> tuple[str, str, str]: ...


class Elsewhere:
    """Args:
    members: None: this head does not listen, so there are no other machines.
    endpoint: host and port of a device's server, if it has one.
    """

    def __init__(
        self,
        files: SubmittedFiles,
        members: Members | None,
        endpoint: Callable[[int], tuple[str, int] | None],
    ) -> None:
        self.files = files
        self._members = members
        self._endpoint = endpoint

    def may(self, owner: str) -> bool:
        """Return whether an owner's programs may run on nodes that offer that."""
        if self._members is None:
            return False
        role = Role.OWNER if owner == roles.OWNER else self._members.role_of(owner)
        return role is not None and Role.SUBMITTER in roles.member(owner, role).roles

    def can(self, entry: Entry) -> bool:
        """Return whether a task can run on another machine: its files are here, its owner may."""
        return entry.travels and self.may(entry.owner)

    def make_pass(self, entry: Entry) -> runner_messages.Pass | None:
        """Return what an attempt's program shows; None if a device of it is not on the network."""
        if self._members is None:
            return None
        endpoints = [self._endpoint(device) for device in sorted(entry.shares)]
        devices = [one for one in endpoints if one is not None]
        if len(devices) < len(endpoints):
            return None
        name = f"task.{entry.number}.{entry.task.attempt}"
        key, certificate, authority = self._members.identity_of_task(name)
        return runner_messages.Pass(name, key, certificate, authority, devices)

    def principal(self, peer: Peer, find: Callable[[int], Entry | None]) -> Principal:
        """Return who a task's program is. Raise ProtocolError once its attempt has ended."""
        found = _NAME.fullmatch(peer.name)
        entry = find(int(found[1])) if found is not None else None
        if (
            found is None
            or entry is None
            or entry.task.state not in ACTIVE
            or entry.task.attempt != int(found[2])
            or not self.may(entry.owner)
        ):
            raise ProtocolError(f"the attempt of {peer.name} has ended")
        return roles.member(peer.name, Role.TASK, entry.owner)

    def submitted(
        self, entry: Entry | None, runner: str, ask: runner_messages.ReadSubmitted
    ) -> runner_messages.Submitted:
        """Answer a runner that asks for a file of a task that it is to start."""
        if entry is None or entry.task.runner != runner or entry.task.state not in ACTIVE:
            problem = "the task is not this runner's any more"
            return runner_messages.Submitted(ask.number, problem=problem)
        try:
            data, last = self.files.read(entry.owner, ask.hash, ask.offset)
        except (OSError, PoolError) as error:
            problem = f"the head cannot read a file of the task: {describe(error)}"
            return runner_messages.Submitted(ask.number, problem=problem[: limits.TEXT_CHARS_MAX])
        return runner_messages.Submitted(ask.number, data, last)
