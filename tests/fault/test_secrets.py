"""What a worker, a data reader and the process that forks them know of the pool's secrets: nothing but
their own session's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization

import shoal
from shoal.pool.base import process
from shoal.pool.client import head_connection
from shoal.pool.wire import frames, messages, session_messages, tls
from tests.support import memory_scan, processes, wire
from tests.support.data_client import DataClient
from tests.support.standing import StandingPool

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="reads other processes' memory: root")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    served = tmp_path_factory.mktemp("served")
    np.save(served / "x.npy", np.arange(6))
    with StandingPool(
        tmp_path_factory.mktemp("pool"), "cpu,memory=256MiB,threads=1", listen=True,
        options=("--data", str(served)),
    ) as made:  # fmt: skip
        yield made


def forms_of_key(name: str, pem: str) -> dict[str, bytes]:
    """A private key as its file has it, and as OpenSSL keeps it: its number, in either order."""
    key = serialization.load_pem_private_key(pem.encode(), password=None)
    number: int = key.private_numbers().private_value  # type: ignore[union-attr]
    body = pem.strip().splitlines()[1]
    return {
        f"{name}, as text": body[48:].encode(),  # where the number begins: all keys begin alike
        f"{name}, big-endian": number.to_bytes(32, "big"),
        f"{name}, little-endian": number.to_bytes(32, "little"),
    }


@dataclass
class Sessions:
    """Three sessions of two clients on one device, and what each must keep from the others."""

    secrets: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by whose they are
    workers: dict[str, int] = field(default_factory=dict)
    heads: list[head_connection.Connection] = field(default_factory=list)

    def add(self, name: str, raw: DataClient) -> None:
        self.workers[name] = raw.worker_pid
        self.heads.append(raw.head)
        welcome, lease = raw.attached.welcome, raw.lease
        self.secrets[name] = {
            f"{name}'s session secret": welcome.secret,
            f"{name}'s data id": welcome.data_id,
            f"{name}'s token": lease.devices[0].token.encode(),
            f"{name}'s lease secret": lease.secret.encode(),
            **forms_of_key(f"{name}'s own key", raw.identity.key),
        }

    def stay(self) -> None:
        """Say that the clients are still there, as a lease's keep-alive does."""
        for head in self.heads:
            head.send(messages.Beat())

    def all_but(self, name: str) -> dict[str, bytes]:
        return {
            k: v for owner, some in self.secrets.items() if owner != name for k, v in some.items()
        }


@pytest.fixture(scope="module")
def sessions(pool: StandingPool) -> Iterator[Sessions]:
    made = Sessions()
    state = pool.directory / "state"
    files = list(state.rglob("*.pem"))
    for path in files:
        pem = path.read_text()
        begin = pem.index("-----BEGIN PRIVATE KEY")
        end = pem.index("-----END PRIVATE KEY-----\n") + len("-----END PRIVATE KEY-----\n")
        made.secrets[path.name] = forms_of_key(f"the key of {path.name}", pem[begin:end])
    assert {"authority.pem", "node.pem", "head.pem"} <= {p.name for p in files}
    with contextlib.ExitStack() as stack:
        for name in ("ana", "bob", "eve"):
            identity = pool.join(name)
            os.environ["SHOAL_IDENTITY"] = str(identity.path)
            raw = stack.enter_context(DataClient(identity))
            for connection in raw.both():  # without them the worker would give the client up
                stack.enter_context(connection)
            made.add(name, raw)
        yield made
    del os.environ["SHOAL_IDENTITY"]


def test_the_scan_finds_what_is_there(pool: StandingPool, sessions: Sessions) -> None:
    """Without this, the tests below could not fail."""
    ana = sessions.secrets["ana"]
    own = memory_scan.found_in(sessions.workers["ana"], ana)
    assert "ana's session secret" in own
    server = memory_scan.found_in(pool.server_pids()[0], {**ana, **sessions.secrets["node.pem"]})
    assert {"ana's session secret", "the key of node.pem, as text"} <= server
    assert any("node.pem" in name and "endian" in name for name in server)


@pytest.mark.parametrize("name", ["ana", "bob", "eve"])
def test_a_worker_has_no_secret_but_its_sessions_own(sessions: Sessions, name: str) -> None:
    sessions.stay()
    pid = sessions.workers[name]
    assert memory_scan.found_in(pid, sessions.all_but(name)) == set()
    own = memory_scan.found_in(pid, sessions.secrets[name])
    assert own <= {f"{name}'s session secret", f"{name}'s data id"}
    assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()


def test_the_process_that_forks_has_no_secret_at_all(sessions: Sessions) -> None:
    sessions.stay()
    forker = processes.parent(sessions.workers["ana"])
    assert forker == processes.parent(sessions.workers["bob"])
    assert memory_scan.found_in(forker, sessions.all_but("")) == set()


def test_a_data_reader_has_no_secret(pool: StandingPool, sessions: Sessions) -> None:
    sessions.stay()
    identity = pool.join("dan")
    os.environ["SHOAL_IDENTITY"] = str(identity.path)
    with DataClient(identity) as raw:
        mine = Sessions()
        mine.add("dan", raw)
        up, down = raw.both()
        connection, _ = raw.attached.open_reader(raw.lease.lease, raw.lease.epoch)
        with connection, up, down:
            forker = processes.parent(raw.worker_pid)
            others = {raw.worker_pid, *sessions.workers.values()}
            readers = [p for p in processes.children(forker) if p not in others]
            assert len(readers) == 1
            wanted = {**sessions.all_but(""), **mine.secrets["dan"]}
            assert memory_scan.found_in(readers[0], wanted) == set()


def test_hidden_memory_is_not_the_users_to_read() -> None:
    """The kernel gives the files of such a process to root, whoever runs it."""

    def owner_of_memory(hide: bool) -> int:
        read_fd, write_fd = os.pipe()
        child = os.fork()
        if child == 0:
            os.setresuid(65534, 65534, 65534)
            libc = ctypes.CDLL(None)
            libc.prctl(4, 1, 0, 0, 0)  # a change of user hides it, too: undo that
            if hide:
                process.hide_memory()
            os.write(write_fd, b"!")
            signal.pause()
        os.read(read_fd, 1)
        owner = os.stat(f"/proc/{child}/mem").st_uid
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return owner

    assert owner_of_memory(hide=False) == 65534
    assert owner_of_memory(hide=True) == 0


def test_the_wrong_client_does_not_get_past_the_worker(
    pool: StandingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device server has let ana in; on the way to the worker, bob takes her connection over."""
    ana, bob = pool.join("ana2"), pool.join("bob2")
    monkeypatch.setenv("SHOAL_IDENTITY", str(ana.path))
    head, lease = head_connection.ask(ana.url, messages.AskLease(1, 16 << 20, []))
    assert isinstance(lease, messages.Lease)
    device = lease.devices[0]
    assert device.network is not None
    try:
        door = head_connection.open_tls(
            "127.0.0.1", device.network.port, ana, device.network.server_name, 20
        )
        door.settimeout(20)
        versions = session_messages.our_versions()
        frames.send(door, session_messages.Attach(versions, device.token, lease.lease, lease.epoch))
        handover, _ = frames.receive(door, wire.ANY)
        assert isinstance(handover, session_messages.Handover)
        name = shoal._core.SESSION_SERVER_NAME
        taken = tls.connect_again(door, bob, handover.certificate, name)
        with taken:
            answer, _ = frames.receive(taken, wire.ANY)
        assert isinstance(answer, messages.Refusal)
        assert "belongs to another client" in answer.reason
    finally:
        head.ask(messages.Release(), 10)
        head.close()


def test_a_stranger_at_the_workers_place_is_refused(
    pool: StandingPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate that the device server did not vouch for: another session's."""
    identity = pool.join("ann3")
    monkeypatch.setenv("SHOAL_IDENTITY", str(identity.path))
    with DataClient(identity) as raw, DataClient(identity) as other:
        del other
        _, certificate = shoal._core.make_session_identity()
        context = tls.client_context(identity)
        wrong = tls._context("PROTOCOL_TLS_CLIENT")
        wrong.load_cert_chain(identity.path)
        wrong.load_verify_locations(cadata=certificate)
        for refused in (context, wrong):
            with (
                socket.socket() as _unused,
                pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"),
            ):
                refused.wrap_socket(raw.dial(), server_hostname=shoal._core.SESSION_SERVER_NAME)
