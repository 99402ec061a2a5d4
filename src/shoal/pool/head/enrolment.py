"""The members of a pool: codes, joining, revoking. Only a head that listens has this."""

from __future__ import annotations

import ipaddress
import re
import secrets
import time
from dataclasses import replace

from shoal.errors import ProtocolError
from shoal.pool.access import codes
from shoal.pool.access.codes import Desk, IssuedCode, JoinRefused, Quota
from shoal.pool.access.identity import Authority
from shoal.pool.base import limits
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.store import Store, StoredClient
from shoal.pool.wire import join_messages, messages
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


class Enrolment:
    def __init__(
        self, store: Store, table: LeaseTable, authority: Authority, pin: str, pool: str
    ) -> None:
        self._store = store
        self._table = table
        self._authority = authority
        self._pin = pin
        self._pool = pool
        self.desk = Desk()
        self.refused = 0  # wrong codes so far
        self._clients = {c.name: c for c in store.clients()}
        for code in store.codes():
            if code.expires > time.time():
                self.desk.issue(code, time.time())
        for client in self._clients.values():
            table.quotas[client.name] = client.quota

    def make_code(self, request: messages.MakeCode) -> messages.Code:
        """Make a code for one client or node."""
        if request.role not in codes.ROLES:
            raise ProtocolError(
                f"a code is for a {' or a '.join(codes.ROLES)}, not {request.role!r}"
            )
        if not 1 <= request.ttl_s <= 7 * 86400:
            raise ProtocolError("a code is valid for 1 second to 7 days")
        now = time.time()
        code_id = self._new_id()
        secret = "".join(secrets.choice(codes.SYMBOLS) for _ in range(codes.SECRET))
        quota = Quota(request.devices_max, request.memory_bytes_max)
        code = IssuedCode(
            code_id, codes.hash_secret(secret), request.role, now + request.ttl_s, quota
        )
        self.desk.issue(code, now)
        self._store.add_code(code, now)
        return messages.Code(codes.write(code_id, secret, self._pin), code.expires)

    def _new_id(self) -> str:
        while True:
            made = "".join(secrets.choice(codes.SYMBOLS) for _ in range(codes.ID))
            if made not in self.desk.codes:
                return made

    def join(self, request: join_messages.Join, address: str) -> join_messages.Joined:
        """Return a certificate for a newcomer with a good code. Raise JoinRefused otherwise."""
        now = time.time()
        try:
            code = self.desk.accept(
                request.code_id, request.secret, request.role, source_of(address), now,
                time.monotonic(),
            )  # fmt: skip
        except JoinRefused:
            self.refused += 1
            raise
        name = self._free_name(request.name, code.role)
        issued = self._authority.sign_request(request.request, code.role, name)
        client = StoredClient(name, code.role, issued.serial, now, issued.expires, None, code.quota)
        self._store.add_client(client, code.code_id, now)
        self._clients[name] = client
        self._table.quotas[name] = code.quota
        return join_messages.Joined(name, self._pool, issued.pem, self._authority.pem)

    def _free_name(self, wished: str, role: str) -> str:
        base = re.sub(r"[^a-z0-9-]+", "-", wished.lower()).strip("-")[:24] or role
        nodes = {node for node, _ in self._store.devices().values()}
        taken = {*self._clients, *nodes, "owner", "head"}
        number = 1
        while (name := base if number == 1 else f"{base}-{number}") in taken:
            number += 1
        return name

    def check(self, peer: Peer) -> None:
        """Raise ProtocolError unless the certificate is known and not revoked."""
        client = self._clients.get(peer.name)
        if client is None or client.serial != peer.serial or client.role != peer.role:
            raise ProtocolError(f"the certificate of {peer.name} is not known here. Join again.")
        if client.revoked is not None:
            raise ProtocolError(
                f"{peer.name} was revoked by the pool's owner. Ask for a code and join again."
            )

    def revoke(self, name: str) -> None:
        """Refuse a client or node from now on. This head does not trust its certificate again, even if
        the disk is full; the store writes it as soon as it can."""
        client = self._clients.get(name)
        if client is None or client.revoked is not None:
            known = ", ".join(n for n, c in self._clients.items() if c.revoked is None) or "none"
            raise ProtocolError(
                f"there is no client or node {name!r} to revoke; there are: {known}"
            )
        now = time.time()
        self._clients[name] = replace(client, revoked=now)
        self._store.revoke_client(name, now)

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
