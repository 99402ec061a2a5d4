"""The members of a pool: codes, joining, revoking. Only a head that listens has this."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

from shoal.errors import ProtocolError
from shoal.pool.access import codes
from shoal.pool.access.certificates import Authority, key_pem, new_key
from shoal.pool.access.codes import CodeRegistry, IssuedCode, JoinRefused, Quota
from shoal.pool.base import limits
from shoal.pool.base.clock import Clock, Randomness
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.store import Store, StoredClient, StoreError
from shoal.pool.wire import join_messages, messages, roles
from shoal.pool.wire.roles import Principal, Role
from shoal.pool.wire.tls import Peer


def source_of(address: str) -> str:
    """Return the source that attempts count for: an IPv4 address, or an IPv6 host's /64."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped or ipaddress.ip_network((int(parsed), 64), strict=False))
    return str(parsed)


def _node_name(wished: str) -> str:
    """Return a name as it may stand in a certificate; empty: nothing is left of it."""
    return re.sub(r"[^a-z0-9-]+", "-", wished.lower()).strip("-")[:24]


class Enrolment:
    def __init__(
        self,
        store: Store,
        table: LeaseTable,
        authority: Authority,
        pin: str,
        pool: str,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        self._clock = clock or Clock()
        self._random = randomness or Randomness()
        self._store = store
        self._table = table
        self._authority = authority
        self._pin = pin
        self._pool = pool
        self.registry = CodeRegistry()
        self.refused = 0  # wrong codes so far
        self.on_joined: Callable[[str, str], Awaitable[None]] | None = None  # code, name
        self._clients = {c.name: c for c in store.clients()}
        for code in store.codes():
            if code.expires > self._clock.now():
                self.registry.issue(code, self._clock.now())
        for client in self._clients.values():
            table.quotas[client.name] = client.quota

    async def make_code(self, request: messages.MakeCode, actor: Principal) -> messages.Code:
        """Make a code for one client or node. Only the owner makes codes for admins."""
        try:
            role = roles.of_code(request.role)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if role is Role.ADMIN:
            actor.require(Role.OWNER, "make a code for an admin")
        if not 1 <= request.ttl_s <= 7 * 86400:
            raise ProtocolError("a code is valid for 1 second to 7 days")
        now = self._clock.now()
        code_id = self._new_id()
        secret = self._random.text(codes.SYMBOLS, codes.SECRET)
        quota = Quota(request.devices_max, request.memory_bytes_max)
        code = IssuedCode(code_id, codes.hash_secret(secret), role, now + request.ttl_s, quota)
        try:
            self.registry.issue(code, now)
        except JoinRefused as error:
            raise ProtocolError(str(error)) from None
        try:
            await self._store.flushed(self._store.add_code(code, actor.name, now))
        except StoreError:
            self.registry.codes.pop(code_id, None)
            raise
        return messages.Code(codes.write(code_id, secret, self._pin), code.expires)

    def _new_id(self) -> str:
        while True:
            made = self._random.text(codes.SYMBOLS, codes.ID)
            if made not in self.registry.codes:
                return made

    async def join(self, request: join_messages.Join, address: str) -> join_messages.Joined:
        """Return a certificate for a newcomer with a good code. Raise JoinRefused otherwise."""
        now = self._clock.now()
        try:
            code = self.registry.accept(
                request.code_id, request.secret, request.role, source_of(address), now,
                self._clock.monotonic(),
            )  # fmt: skip
        except JoinRefused:
            self.refused += 1
            raise
        name = self._free_name(request.name, code.role)
        issued = self._authority.sign_request(request.request, code.role, name)
        client = StoredClient(name, code.role, issued.serial, now, issued.expires, None, code.quota)
        self._clients[name] = client  # from here on the name is taken
        text = codes.write(code.code_id, request.secret, self._pin)
        try:
            await self._store.flushed(self._store.add_client(client, code.code_id, now, text))
        except StoreError:
            del self._clients[name]
            self.registry.codes[code.code_id] = code  # it is still good
            raise
        self._table.quotas[name] = code.quota
        if self.on_joined is not None:
            await self.on_joined(text, name)
        return join_messages.Joined(name, self._pool, issued.pem, self._authority.pem, code.role)

    async def enrol_node(self, request: messages.EnrolNode) -> messages.NodeEnrolled:
        """Return a certificate for a node that an engine has started.

        A node that was enrolled before keeps its name, and so the numbers of its devices. Only its
        newest certificate is good: a node that was cut off and replaced cannot come back.
        """
        now, name = self._clock.now(), self._name_of_node(request.name)
        known = self._clients.get(name)
        if known is not None and known.revoked is not None:
            raise ProtocolError(
                f"{name} was revoked by the pool's owner. Give the node another name"
            )
        issued = self._authority.sign_request(request.request, Role.NODE, name)
        client = StoredClient(name, Role.NODE, issued.serial, now, issued.expires, None, Quota())
        self._clients[name] = client
        try:
            await self._store.flushed(self._store.enrol_node(client, now))
        except StoreError:
            if known is None:
                del self._clients[name]
            else:
                self._clients[name] = known
            raise
        return messages.NodeEnrolled(name, issued.pem, self._authority.pem)

    def _name_of_node(self, wished: str) -> str:
        """Return the name of an engine's node: the same each time. Somebody on that machine may have
        joined under its name before."""
        if not wished or _node_name(wished) != wished:
            raise ProtocolError(
                f"{wished!r} is not the name of a node. It has at most 24 letters a-z, digits or '-'"
            )
        taken = self._taken()
        for name in (wished, f"{wished}-node"):
            known = self._clients.get(name)
            if name not in taken or (known is not None and known.role == Role.NODE):
                return name
        raise ProtocolError(f"{wished} is the name of somebody else. Choose another name")

    def _free_name(self, wished: str, role: str) -> str:
        base = _node_name(wished) or role
        taken = self._taken()
        number = 1
        while (name := base if number == 1 else f"{base}-{number}") in taken:
            number += 1
        return name

    def _taken(self) -> set[str]:
        nodes = {node for node, _ in self._store.devices().values()}
        return {*self._clients, *nodes, "owner", "head", "tasks"}

    def knows(self, name: str) -> bool:
        """Return whether somebody has, or had, this name."""
        return name in self._clients

    def role_of(self, name: str) -> Role | None:
        """Return the role of a client of the pool; None for a node, a stranger or a revoked one."""
        client = self._clients.get(name)
        if client is None or client.revoked is not None or client.expires <= self._clock.now():
            return None
        return roles.of_certificate(client.role) if roles.is_client(client.role) else None

    def identity_of_task(self, name: str) -> tuple[str, str, str]:
        """Return key, certificate and authority for the program of an attempt."""
        key = new_key()
        issued = self._authority.sign(
            key.public_key(), Role.TASK, name, limits.TASK_CERTIFICATE_DAYS
        )
        return key_pem(key), issued.pem, self._authority.pem

    def check(self, peer: Peer) -> None:
        """Raise ProtocolError unless the certificate is known and not revoked."""
        client = self._clients.get(peer.name)
        known = client is not None and client.serial == peer.serial
        if client is None or not known or client.role != roles.of_certificate(peer.role):
            raise ProtocolError(
                f"the certificate of {peer.name} is not known here. Join again: shoal join CODE@HOST"
            )
        if client.revoked is not None:
            raise ProtocolError(
                f"{peer.name} was revoked by the pool's owner. Ask for a code and join again."
            )

    def revoke(self, name: str, actor: Principal) -> None:
        """Refuse a client or node from now on. This head does not trust its certificate again, even if
        the disk is full; the store writes it as soon as it can."""
        client = self._clients.get(name)
        if client is None or client.revoked is not None:
            known = ", ".join(n for n, c in self._clients.items() if c.revoked is None) or "none"
            raise ProtocolError(
                f"there is no client or node {name!r} to revoke; there are: {known}"
            )
        if client.role == Role.ADMIN:
            actor.require(Role.OWNER, "revoke an admin")
        now = self._clock.now()
        self._clients[name] = replace(client, revoked=now)
        self._store.revoke_client(name, actor.name, now)

    def list(self) -> messages.ClientList:
        return messages.ClientList(
            [
                messages.ClientInfo(
                    c.name, c.role, c.joined, c.expires, c.revoked, c.quota.devices,
                    c.quota.memory_bytes, len(self._table.held_by(c.name)),
                )
                for c in list(self._clients.values())[-limits.CLIENTS_SHOWN_MAX :]
            ]
        )  # fmt: skip
