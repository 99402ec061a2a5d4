"""Roles: what the holder of a certificate may do, and who sent a message.

| role | may |
|---|---|
| guest | what anybody may: see events, and enrol for one by the code on its screen |
| task | what a task's program needs: lease the devices that were planned for it |
| user | look at the pool, lease devices, and everything with tasks of its own |
| submitter | also have its programs run on nodes that offer it |
| admin | also govern: members, codes for users, everybody's tasks, the audit log |
| owner | everything: whoever reaches the head's Unix socket, and nobody over the network |

A node has no role but its own: it offers devices and asks for nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shoal.errors import ProtocolError


class Role(enum.StrEnum):
    GUEST = "guest"
    TASK = "task"
    USER = "user"
    SUBMITTER = "submitter"
    ADMIN = "admin"
    OWNER = "owner"
    NODE = "node"


_RISING = (Role.GUEST, Role.USER, Role.SUBMITTER, Role.ADMIN, Role.OWNER)
#: What a code can give. The owner is whoever started the pool.
OF_CODES = (Role.USER, Role.SUBMITTER, Role.ADMIN, Role.NODE)
OWNER = "owner"  # the name of the client over a Unix socket: the pool's user, or root


def of_certificate(unit: str) -> Role | None:
    """Return the role that a certificate names; None for one that is no member's.

    >>> of_certificate("client")  # certificates from before there were roles
    <Role.USER: 'user'>
    """
    if unit == "client":
        return Role.USER
    return Role(unit) if unit in (*OF_CODES, Role.TASK) else None


def is_client(unit: str) -> bool:
    """Return whether a certificate is for programs, not for a node or the head."""
    return of_certificate(unit) not in (None, Role.NODE)


def of_code(name: str) -> Role:
    """Return the role that a code shall give. Raise ValueError for one that no code gives."""
    found = of_certificate(name)
    if found is None or found is Role.TASK:
        raise ValueError(f"a code is for a {', '.join(OF_CODES)}, not for {name!r}")
    return found


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sent a message, as the connection proves it.

    `name` is in the certificate, or "owner". `owner` is whose quota, tasks and shares count: the same,
    except for a task, which belongs to the member who submitted it.
    """

    name: str
    owner: str
    roles: frozenset[Role]
    event: str = ""  # of a guest with a browser: the only event that it takes part in

    def may(self, role: Role) -> bool:
        return role in self.roles

    @property
    def highest(self) -> Role:
        """Return the highest role, or that of a node."""
        own = Role.TASK if Role.TASK in self.roles else Role.NODE
        return next((r for r in reversed(_RISING) if r in self.roles), own)

    def require(self, role: Role, what: str) -> None:
        """Raise ProtocolError unless the sender has this role or a higher one.

        >>> member("ana", Role.USER).require(Role.ADMIN, "list members")
        Traceback (most recent call last):
        shoal.errors.ProtocolError: ana may not list members: that needs the role admin…
        """
        if self.may(role):
            return
        if role is Role.OWNER:
            help_text = "only the pool's owner may, on the head's machine"
        else:
            help_text = (
                f"that needs the role {role}. The pool's owner gives it with a new code: "
                f"shoal code --role {role}"
            )
        raise ProtocolError(f"{self.name} may not {what}: {help_text}")


def member(name: str, role: Role, owner: str = "") -> Principal:
    """Return the principal of a certificate.

    >>> member("ana", Role.ADMIN).may(Role.SUBMITTER)
    True
    """
    lower = _RISING[: _RISING.index(role) + 1] if role in _RISING else (role,)
    if Role.USER in lower:
        lower = (Role.TASK, *lower)
    return Principal(name, owner or name, frozenset(lower))


def guest(name: str, event: str) -> Principal:
    """Return the principal of a stranger (no name), or of a guest of an event."""
    return Principal(name, name, frozenset({Role.GUEST}), event)


def pool_owner() -> Principal:
    return member(OWNER, Role.OWNER)
