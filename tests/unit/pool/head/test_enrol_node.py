"""Nodes that an engine starts: their names stay, and only their newest certificate is good."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shoal.errors import ProtocolError
from shoal.pool.access import certificates, codes
from shoal.pool.access.certificates import Authority
from shoal.pool.head.enrolment import Enrolment
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.store import Store
from shoal.pool.wire import join_messages, messages, roles
from shoal.pool.wire.tls import Peer


def peer_of(pem: str) -> Peer:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(pem.encode())
    names = {a.rfc4514_attribute_name: str(a.value) for a in certificate.subject}
    return Peer(names["CN"], names["OU"], f"{certificate.serial_number:X}")


class Desk:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "pool.db"
        self.authority = Authority.open(directory, "p")
        self.open()

    def open(self) -> None:
        self.store = Store(self.path)
        self.enrolment = Enrolment(self.store, LeaseTable(), self.authority, "0" * 20, "p")

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def enrol(self, name: str) -> Peer:
        request = certificates.request_pem(certificates.new_key())
        done = asyncio.run(self.enrolment.enrol_node(messages.EnrolNode(name, request)))
        assert done.authority == self.authority.pem
        peer = peer_of(done.certificate)
        assert peer.name == done.name
        return peer


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_known_node_comes_back_with_a_new_certificate(desk: Desk) -> None:
    first = desk.enrol("host-a")
    number = desk.store.device_number("host-a", "cpu/0")
    second = desk.enrol("host-a")
    for _ in range(2):  # as well after a restart of the head
        desk.enrolment.check(second)
        with pytest.raises(ProtocolError, match="not known here"):
            desk.enrolment.check(first)
        assert desk.store.device_number("host-a", "cpu/0") == number
        desk.reopen()
    joined = [e for e in desk.store.read_audit(9) if e[2] == "join"]
    assert len(joined) == 2


def test_a_revoked_node_does_not_come_back(desk: Desk) -> None:
    desk.enrol("host-a")
    desk.enrolment.revoke("host-a", roles.pool_owner())
    with pytest.raises(ProtocolError, match="revoked"):
        desk.enrol("host-a")


def test_a_node_takes_no_name_of_another(desk: Desk) -> None:
    code = asyncio.run(
        desk.enrolment.make_code(messages.MakeCode("user", 60.0), roles.pool_owner())
    )
    parsed = codes.parse(code.code)
    request = certificates.request_pem(certificates.new_key())
    asyncio.run(
        desk.enrolment.join(
            join_messages.Join(parsed.code_id, parsed.secret, "user", "ana", request), "10.0.0.1"
        )
    )
    desk.store.device_number("vm", "cpu/0")  # of the head's own agent
    for name in ("ana", "vm", "owner", "head"):
        first = desk.enrol(name)
        assert first.name == f"{name}-node"
        assert desk.enrol(name).name == first.name, "the same whenever it comes back"
    desk.store.device_number("far", "cpu/0")
    desk.store.device_number("far-node", "cpu/0")
    with pytest.raises(ProtocolError, match="Choose another name"):
        desk.enrol("far")


@pytest.mark.parametrize("name", ["", "A", "a b", "a" * 25, "-a", "../x"])
def test_names_are_fit_for_certificates(desk: Desk, name: str) -> None:
    with pytest.raises(ProtocolError, match="is not the name of a node"):
        desk.enrol(name)


@pytest.mark.parametrize("request_pem", ["", "nonsense", "-----BEGIN CERTIFICATE REQUEST-----"])
def test_malformed_requests_are_refused(desk: Desk, request_pem: str) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        asyncio.run(desk.enrolment.enrol_node(messages.EnrolNode("host-a", request_pem)))
    assert not desk.enrolment.knows("host-a")
