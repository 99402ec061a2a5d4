"""A pool that listens: TLS 1.3 and an identity on every port, joining, and who is refused."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch

import shoal
from shoal.errors import PoolError, ProtocolError
from shoal.pool.access import codes
from shoal.pool.base import limits
from shoal.pool.client import head_connection, joining
from shoal.pool.wire import frames, join_messages, messages, node_messages, session_messages, tls
from tests.support import commands, processes, programs, wire
from tests.support.standing import StandingPool, free_port
from tests.support.waiting import wait_until

MiB = 2**20


@pytest.fixture(scope="module")
def open_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    metrics = free_port()
    directory = tmp_path_factory.mktemp("open")
    options = ("--metrics", str(metrics))
    with StandingPool(
        directory, "cpu,memory=256MiB,threads=1", listen=True, options=options
    ) as pool:
        pool.metrics_port = metrics  # type: ignore[attr-defined]
        yield pool


@pytest.fixture
def ana(open_pool: StandingPool, monkeypatch: pytest.MonkeyPatch) -> tls.Identity:
    """A client that has joined; this process goes to the pool with her identity."""
    identity = open_pool.join(f"ana-{secrets.token_hex(3)}")
    monkeypatch.setenv("SHOAL_IDENTITY", str(identity.path))
    return identity


def idle(pool: StandingPool) -> None:
    wait_until(lambda: not pool.status().sessions, 30, "no session is left")


# --- joining --------------------------------


def test_a_client_joins_and_works(open_pool: StandingPool, tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity.pem"
    environment = {"SHOAL_IDENTITY": str(path)}
    joined = open_pool.run(*open_pool.told["join"].split()[1:], "--as", "new", **environment)
    assert joined.code == 0, joined.err
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size < 4096
    assert f"{open_pool.network_url}" in joined.out
    status = open_pool.run("status", "--json", **environment)
    assert json.loads(status.out)["pool"] == open_pool.name
    out = programs.succeed(
        "import torch; print(torch.ones(3, device='shoal').sum().item())", **environment
    )
    assert out == "3.0\n"
    doctor = open_pool.run("doctor", "--json", **environment)
    found = {f["what"]: f["state"] for f in json.loads(doctor.out)}
    assert doctor.code == 0, doctor.out
    assert found["identity"] == found["port"] == found["head"] == found["round trip"] == "good"
    again = open_pool.run(*open_pool.told["join"].split()[1:], SHOAL_IDENTITY=str(tmp_path / "b"))
    assert again.code == 1
    assert "was used before" in again.err
    assert not (tmp_path / "b").exists()
    idle(open_pool)


def test_wrong_and_expired_codes_and_roles(open_pool: StandingPool, tmp_path: Path) -> None:
    def refused(code: str, role: str = "client") -> str:
        with pytest.raises(PoolError) as raised:
            joining.join(f"{code}@127.0.0.1:{open_pool.port}", role, "x", tmp_path / "x.pem")
        assert not (tmp_path / "x.pem").exists()
        return str(raised.value)

    good = open_pool.make_code()
    parsed = codes.parse(good)
    wrong = codes.write(parsed.code_id, "0" * codes.SECRET, parsed.pin)
    assert "wrong, was used before, or has expired" in refused(wrong)
    assert "shoal join" in refused(good, role="node")
    short = open_pool.make_code(ttl_s=1.0)
    expires = time.time() + 1.0
    wait_until(lambda: time.time() > expires, 30, "the code's time is over")
    assert "has expired" in refused(short)
    other_pin = codes.write(parsed.code_id, parsed.secret, "0" * codes.PIN)
    assert "not the head that made this code" in refused(other_pin)
    identity = joining.join(  # the good one is still good: none of these used it up
        f"{good}@127.0.0.1:{open_pool.port}", "client", "late", tmp_path / "late.pem"
    )
    assert tls.Identity.load(identity.path) == identity


def test_names_are_given_once(open_pool: StandingPool, tmp_path: Path) -> None:
    names = [
        joining.join(
            f"{open_pool.make_code()}@127.0.0.1:{open_pool.port}", "client", wished, tmp_path / "n"
        ).name
        for wished in ("twin", "twin", "Twin", "owner", "../../etc", "")
    ]
    assert len(set(names)) == 6
    assert names[0] == "twin"
    assert all(n.replace("-", "").isalnum() for n in names)


STRANGER = tls.stranger_context()


def guess(pool: StandingPool, source: str, code_id: str, secret: str) -> str:
    """The answer to a join request that comes from `source`."""
    plain = socket.create_connection(("127.0.0.1", pool.port), 20, source_address=(source, 0))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else it waits for a delayed ACK
    with STRANGER.wrap_socket(plain) as connection:
        frames.send(connection, join_messages.Join(code_id, secret, "client", "x", "x"))
        answer, _ = frames.receive(connection, wire.ANY)
    assert isinstance(answer, messages.Refusal)
    return answer.reason


def test_many_wrong_codes_do_not_harm(open_pool: StandingPool, ana: tls.Identity) -> None:
    """Clients are served while strangers guess; an address that guesses too often is put off."""
    parsed = codes.parse(open_pool.make_code())
    evil = "127.0.0.66"
    for _ in range(limits.WRONG_CODES_PER_ADDRESS + 20):
        guess(open_pool, evil, parsed.code_id, secrets.token_hex(8))
        with head_connection.Connection(ana.url) as connection:
            assert isinstance(connection.ask(messages.AskStatus()), messages.PoolStatus)
    assert "wait a minute" in guess(open_pool, evil, parsed.code_id, parsed.secret)
    good = codes.write(parsed.code_id, parsed.secret, parsed.pin)  # others are not put off
    path = open_pool.directory / "still.pem"
    joining.join(f"{good}@127.0.0.1:{open_pool.port}", "client", "still", path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_wrong_codes(open_pool: StandingPool, ana: tls.Identity) -> None:
    """From 250 addresses, as fast as they go; members are served meanwhile, the head stays small.

    `GUESSES` sets another number.
    """
    guesses = int(os.environ.get("GUESSES", "100000"))
    parsed = codes.parse(open_pool.make_code(ttl_s=7200))
    head = open_pool.head_pid
    before = processes.resident_bytes(head)

    answered: list[int] = []
    served_s: list[float] = []
    start = time.monotonic()

    def flood(begin: int) -> None:
        for i in range(begin, guesses, 4):
            with suppress(OSError, ProtocolError):
                guess(open_pool, f"127.0.1.{i % 250 + 1}", parsed.code_id, secrets.token_hex(8))
                answered.append(i)

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(flood, i) for i in range(4)]
        while not all(d.done() for d in done):
            asked = time.monotonic()
            with head_connection.Connection(ana.url) as connection:
                assert isinstance(connection.ask(messages.AskStatus()), messages.PoolStatus)
            served_s.append(time.monotonic() - asked)
            time.sleep(1)
        for each in done:
            each.result()
    took_s = time.monotonic() - start
    assert open_pool.head_pid == head
    grown = processes.resident_bytes(head) - before
    print(
        f"{len(answered)} of {guesses} wrong codes answered in {took_s:.0f} s; a member's request took "
        f"{max(served_s) * 1e3:.0f} ms at most; the head grew by {grown / MiB:.1f} MiB"
    )
    assert grown < 64 * MiB
    assert len(answered) > guesses * 0.99
    invitation = (
        f"{codes.write(parsed.code_id, parsed.secret, parsed.pin)}@127.0.0.1:{open_pool.port}"
    )
    wait_until(lambda: not _blocked(open_pool), 60, "joining is possible again")
    path = open_pool.directory / "after.pem"
    assert joining.join(invitation, "client", "after", path).name == "after"


def _blocked(pool: StandingPool) -> bool:
    return "wait" in guess(pool, "127.0.0.1", "AAA", "x")


# --- strangers --------------------------------


def stranger(port: int, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=20)
    return (context or tls.stranger_context()).wrap_socket(plain)


def silence(connection: socket.socket) -> bool:
    """Whether the other side hangs up without a word of its own."""
    try:
        return connection.recv(1) == b""
    except ssl.SSLError:
        return True  # an alert: "certificate required", and nothing else
    except ConnectionResetError:
        return True


def device_port(pool: StandingPool) -> int:
    return pool.port + 1


REQUESTS: list[msgspec.Struct] = [
    messages.Describe(),
    messages.AskStatus(),
    messages.AskLease(1, MiB, []),
    messages.Resume(1, 1, "x"),
    messages.MakeCode("client", 60),
    messages.RevokeClient("ana"),
    messages.ReadAudit(10),
    node_messages.NodeHello("evil", "m", "0", 0.0, False, [], [], []),
    session_messages.Attach(session_messages.Versions("0", "0", 0), "x", 1, 1),
    messages.Beat(),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_no_port_answers_strangers(open_pool: StandingPool, request_: msgspec.Struct) -> None:
    for port in (open_pool.port, device_port(open_pool)):
        with stranger(port) as connection:
            with suppress(OSError):
                frames.send(connection, request_)
            assert silence(connection)


def test_no_port_speaks_without_tls_or_with_old_tls(open_pool: StandingPool) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    for port in (open_pool.port, device_port(open_pool)):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
            plain.sendall(frames.encode(messages.AskStatus()))
            reply = b""
            with suppress(ConnectionResetError):
                reply = plain.recv(100)
            assert len(reply) <= 7  # a TLS alert at most
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            stranger(port, old)


def test_a_certificate_of_another_pool_is_worth_nothing(
    open_pool: StandingPool, tmp_path: Path
) -> None:
    from shoal.pool.access.certificates import Authority

    foreign = Authority.open(tmp_path, "foreign").own_identity(tmp_path, "client", "ana", 0.0)
    context = tls.client_context(foreign)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for port in (open_pool.port, device_port(open_pool)):
        with stranger(port, context) as connection:
            with suppress(OSError):
                frames.send(connection, messages.AskStatus())
            assert silence(connection)


def test_a_head_that_is_another_is_not_spoken_to(
    open_pool: StandingPool, ana: tls.Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same address, other keys: what a client trusts is the authority that it joined."""
    from shoal.pool.access.certificates import Authority

    text = ana.path.read_text().replace(ana.authority, Authority.open(tmp_path, "other").pem)
    changed = tmp_path / "changed.pem"
    changed.write_text(text)
    changed.chmod(0o600)
    monkeypatch.setenv("SHOAL_IDENTITY", str(changed))
    with pytest.raises(shoal.LeaseError, match="not the one that this machine joined"):
        shoal.connect(open_pool.network_url)


# --- slow, oversized, malformed --------------------------------


def test_slow_and_silent_strangers_are_dropped(open_pool: StandingPool, ana: tls.Identity) -> None:
    deadline_s = limits.HANDSHAKE_S + limits.FRAME_S + 3
    no_handshake = [
        socket.create_connection(("127.0.0.1", p), timeout=deadline_s)
        for p in (open_pool.port, device_port(open_pool))
    ]
    no_request = stranger(open_pool.port)
    dripping = stranger(open_pool.port)
    dripping.sendall(struct.pack("<I", 100)[:2])
    with head_connection.Connection(ana.url) as connection:  # nobody else waits for them
        assert isinstance(connection.ask(messages.AskStatus()), messages.PoolStatus)
    for each in (*no_handshake, no_request, dripping):
        with each:
            each.settimeout(deadline_s)
            assert silence(each)  # or the socket's time-out fails the test


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", limits.ANONYMOUS_FRAME_BYTES_MAX + 1),
        struct.pack("<I", 2**32 - 1) + b"x" * 1000,
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<I", 5000) + b"\x91" * 5000,
        b"GET / HTTP/1.1\r\n\r\n",
        frames.encode(join_messages.Join("AAA", "x", "client", "x", "x" * 4000)),
    ],
)
def test_malformed_requests_end_their_connection(open_pool: StandingPool, data: bytes) -> None:
    with stranger(open_pool.port) as connection:
        with suppress(OSError):
            connection.sendall(data)
        with suppress(ProtocolError):
            reply, _ = frames.receive(connection, wire.ANY)
            assert isinstance(reply, messages.Refusal)
    assert open_pool.status().devices


def test_a_crowd_of_strangers_does_not_keep_members_out(
    open_pool: StandingPool, ana: tls.Identity
) -> None:
    """From one address they are few at a time; members from elsewhere still get in."""
    crowd = [
        socket.create_connection(("127.0.0.1", open_pool.port), timeout=20)
        for _ in range(limits.STRANGERS_PER_ADDRESS_MAX + 30)
    ]
    try:
        plain = socket.socket()
        plain.bind(("127.0.0.2", 0))
        plain.settimeout(20)
        plain.connect(("127.0.0.1", open_pool.port))
        with tls.client_context(ana).wrap_socket(plain, server_hostname="head.shoal") as member:
            frames.send(member, messages.AskStatus())
            answer, _ = frames.receive(member, wire.ANY)
            assert isinstance(answer, messages.PoolStatus)
    finally:
        for each in crowd:
            each.close()


# --- members --------------------------------


def test_a_client_may_not_govern(open_pool: StandingPool, ana: tls.Identity) -> None:
    owners = f"{ana.name} may not send .*: that needs the role admin"
    for request, refusal in (
        (messages.MakeCode("client", 60), owners),
        (messages.RevokeClient(ana.name), owners),
        (messages.ListClients(), owners),
        (messages.ReadAudit(5), owners),
        (
            node_messages.NodeHello(ana.name, "m", "0", 0.0, False, [], [], []),
            "does not send NodeHello",
        ),
        (node_messages.Grant("token", 1, MiB), "malformed: Invalid value 'Grant'"),
    ):
        with head_connection.Connection(ana.url) as connection:
            with pytest.raises(shoal.LeaseError, match=refusal):
                connection.ask(request)


def test_an_admin_governs_from_another_machine(open_pool: StandingPool, tmp_path: Path) -> None:
    """It may not make other admins, nor revoke them: that is for the owner."""
    admin = joining.join(
        f"{open_pool.make_code('admin')}@127.0.0.1:{open_pool.port}", "client", "boss",
        tmp_path / "boss.pem",
    )  # fmt: skip
    assert tls.Identity.load(admin.path).role == "admin"

    def typed(*arguments: str) -> programs.Outcome:
        return commands.run(tmp_path, *arguments, SHOAL_IDENTITY=str(admin.path))

    made = typed("code", "--role", "submitter", "--json")
    assert made.code == 0, made
    invitation = json.loads(made.out)["command"].split()[-1]
    assert joining.join(invitation, "client", "sub", tmp_path / "sub.pem").role == "submitter"
    listed = {(c["name"], c["role"]) for c in json.loads(typed("clients", "--json").out)}
    assert listed >= {("boss", "admin"), ("sub", "submitter")}
    text = typed("code", "--role", "admin").err
    assert "boss may not make a code for an admin: only the pool's owner may" in text
    assert "boss may not revoke an admin" in typed("revoke", "boss").err
    assert typed("revoke", "sub").code == 0


def test_shoal_pool_names_the_pool_that_is_governed(
    open_pool: StandingPool, tmp_path: Path
) -> None:
    done = commands.run(tmp_path, "clients", "--json", SHOAL_POOL=open_pool.url)
    assert done.code == 0, done


def test_a_quota_comes_with_the_code(
    open_pool: StandingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    eve = open_pool.join("eve", devices_max=1, memory_bytes_max=32 * MiB)
    monkeypatch.setenv("SHOAL_IDENTITY", str(eve.path))
    with pytest.raises(shoal.LeaseError, match="eve may hold 32 MiB at once"):
        shoal.connect(memory="33MiB")
    with shoal.connect() as lease:
        assert lease.granted[0].info.memory_bytes == 32 * MiB
        assert torch.ones(3, device="shoal").sum().item() == 3
    listed = open_pool.run("clients", "--name", open_pool.name, "--json")
    (mine,) = [c for c in json.loads(listed.out) if c["name"] == "eve"]
    assert mine["memory_bytes_max"] == 32 * MiB
    idle(open_pool)


def test_one_tenants_lease_is_useless_to_another(
    open_pool: StandingPool, ana: tls.Identity
) -> None:
    bob = open_pool.join(f"bob-{secrets.token_hex(3)}")
    connection, lease = head_connection.ask(ana.url, messages.AskLease(1, MiB, []))
    assert isinstance(lease, messages.Lease)
    device = lease.devices[0]
    assert device.network is not None
    with connection:
        os.environ["SHOAL_IDENTITY"] = str(bob.path)
        with (
            head_connection.Connection(ana.url) as his,
            pytest.raises(shoal.LeaseError, match="has ended"),
        ):
            his.ask(messages.Resume(lease.lease, lease.epoch, lease.secret))
        attach = session_messages.Attach(
            session_messages.our_versions(), device.token, lease.lease, lease.epoch
        )
        assert "not known" in at_the_door(device.network, bob, attach)
        for wrong in (
            msgspec.structs.replace(attach, epoch=attach.epoch - 1),
            msgspec.structs.replace(attach, lease=attach.lease + 1),
            msgspec.structs.replace(attach, token="x"),
        ):
            assert "not known" in at_the_door(device.network, ana, wrong)
        other = session_messages.Versions("9.9", "1.0", 0)
        mismatch = msgspec.structs.replace(attach, versions=other)
        assert "versions differ" in at_the_door(device.network, ana, mismatch)
        # The rightful holder passes the door.
        assert at_the_door(device.network, ana, attach) == "welcome"
        assert "not known" in at_the_door(device.network, ana, attach)  # a token is good once
        connection.ask(messages.Release())
    idle(open_pool)


def at_the_door(
    endpoint: messages.NetworkEndpoint, identity: tls.Identity, attach: session_messages.Attach
) -> str:
    with head_connection.open_tls(
        "127.0.0.1", endpoint.port, identity, endpoint.server_name, 20
    ) as door:
        door.settimeout(20)
        frames.send(door, attach)
        answer, _ = frames.receive(door, wire.ANY)
        if isinstance(answer, session_messages.Handover):
            name = shoal._core.SESSION_SERVER_NAME
            with tls.connect_again(door, identity, answer.certificate, name) as taken:
                answer, _ = frames.receive(taken, wire.ANY)
    if isinstance(answer, session_messages.Welcome):
        return "welcome"
    assert isinstance(answer, messages.Refusal)
    return answer.reason


def test_a_device_server_proves_whose_it_is(open_pool: StandingPool, ana: tls.Identity) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        head_connection.open_tls("127.0.0.1", device_port(open_pool), ana, "other.node.shoal", 20)
    with pytest.raises(ssl.SSLCertVerificationError):  # a node is no head
        head_connection.open_tls("127.0.0.1", device_port(open_pool), ana, "head.shoal", 20)


def test_a_revoked_client_is_out_within_two_seconds(
    open_pool: StandingPool, ana: tls.Identity
) -> None:
    with shoal.connect(memory=MiB) as lease:
        x = torch.ones(3, device="shoal")
        assert x.sum().item() == 3
        worker = lease.worker_pids[0]
        done = open_pool.ask(messages.RevokeClient(ana.name))
        assert isinstance(done, messages.Done)
        wait_until(lambda: not processes.alive(worker), 8, "the revoked client's worker is gone")
        with pytest.raises(shoal.DeviceLostError):
            x.sum().item()
        wait_until(lambda: lease.end_reason is not None, 30, "the reason is told")
        assert "revoked" in str(lease.end_reason)
    for _ in range(2):
        with pytest.raises(shoal.LeaseError, match="was revoked by the pool's owner"):
            shoal.connect()
    again = open_pool.run("revoke", ana.name, "--name", open_pool.name)
    assert again.code == 1
    assert "to revoke; there are: " in again.err


def test_a_lease_outlives_a_broken_connection(open_pool: StandingPool, ana: tls.Identity) -> None:
    with shoal.connect(memory=MiB) as lease:
        x = torch.ones(3, device="shoal")
        connection = lease._keepalive._connection  # type: ignore[union-attr]
        assert connection is not None
        connection.socket.shutdown(socket.SHUT_RDWR)
        wait_until(
            lambda: lease._keepalive._connection not in (None, connection),  # type: ignore[union-attr]
            10, "the keeper has come back",
        )  # fmt: skip
        assert x.sum().item() == 3
        assert [s.epoch for s in open_pool.status().sessions] == [lease.epoch]
    idle(open_pool)


def test_a_client_that_vanishes_leaves_nothing(open_pool: StandingPool, ana: tls.Identity) -> None:
    program = programs.start(
        "import shoal; lease = shoal.connect(memory=1<<20); print('ready', flush=True); input()",
        SHOAL_IDENTITY=str(ana.path),
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    assert len(open_pool.status().sessions) == 1
    program.kill()
    program.communicate()
    wait_until(lambda: not open_pool.status().sessions, 30, "its lease has ended")


# --- metrics --------------------------------


def scrape(pool: StandingPool, request: bytes) -> bytes:
    address = ("127.0.0.1", pool.metrics_port)  # type: ignore[attr-defined]
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(request)
        reply = b""
        while data := connection.recv(65536):
            reply += data
    return reply


SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def test_metrics(open_pool: StandingPool) -> None:
    page = scrape(open_pool, SCRAPE)
    assert page.startswith(b"HTTP/1.1 200 OK")
    assert b'shoal_device_memory_bytes{device="cpu/0"' in page
    assert b"shoal_up 1" in page
    assert b"404" in scrape(open_pool, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for host in (b"Host: evil.example\r\n", b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        assert b"421" in scrape(open_pool, b"GET /metrics HTTP/1.1\r\n" + host + b"\r\n")
    assert b"200" not in scrape(open_pool, b"x" * 20_000 + b"\r\n\r\n")


def test_metrics_of_queue_tasks_and_latencies(open_pool: StandingPool) -> None:
    def value(name: str) -> float:
        found = re.search(
            rf"^shoal_{re.escape(name)} (\S+)$", scrape(open_pool, SCRAPE).decode(), re.M
        )
        assert found, name
        return float(found[1])

    assert value('tasks{state="waiting"}') == value("queue_requests") == 0
    granted, answered = value("queue_wait_seconds_count"), value("request_seconds_count")
    made = open_pool.run("submit", "--json", "--", "true", SHOAL_POOL=open_pool.url)  # no runner
    wait_until(lambda: value("queue_requests") == 1, 30, "the task waits")
    assert value('tasks{state="waiting"}') == 1
    assert value("tasks_submitted_total") == 1
    first = value("queue_oldest_seconds")
    wait_until(lambda: value("queue_oldest_seconds") > first, 30, "it has waited longer")
    open_pool.run("cancel", json.loads(made.out)["id"], SHOAL_POOL=open_pool.url)
    wait_until(lambda: value("queue_requests") == 0, 30, "nothing waits")
    wait_until(lambda: value("tasks_ended_total") == 1, 30, "it has ended")
    out = programs.succeed("import torch; torch.ones(3, device='shoal')", SHOAL_POOL=open_pool.url)
    assert not out
    assert value("queue_wait_seconds_count") == granted + 1
    assert value('queue_wait_seconds_bucket{le="+Inf"}') == granted + 1
    assert value("request_seconds_count") > answered
    assert value("request_seconds_sum") > 0


def test_metrics_beyond_this_machine_need_a_certificate(tmp_path: Path) -> None:
    pool = StandingPool.__new__(StandingPool)
    pool.directory = tmp_path
    done = pool.run("up", "--metrics", "0.0.0.0:9999", "--name", "t-metrics")
    assert done.code == 1
    assert "--listen" in done.err
