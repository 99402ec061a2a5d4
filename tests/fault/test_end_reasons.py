"""Why a session ended: the same in the client's error, in `lease.end_reason` and in the audit log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

import shoal
from shoal.pool.wire import messages
from shoal.pool.wire.end_reasons import Why
from tests.support import processes, programs
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

MiB = 2**20
TOLD_S = 30.0  # detection and the head's word: 5 s on a quiet machine
Transport = Literal["auto", "network"]


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    """A pool whose parts die here, one after another."""
    device = "cpu,memory=64MiB,threads=1"
    with StandingPool(tmp_path_factory.mktemp("pool"), device, device, listen=True) as pool:
        yield pool


@pytest.fixture(params=["auto", "network"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param  # type: ignore[no-any-return]


class Reached:
    """The pool, as a client that has joined it reaches it."""

    def __init__(self, pool: StandingPool, transport: Transport, identity: Path) -> None:
        self.pool = pool
        self.transport = transport
        self.identity = identity

    def connect(self, devices: int = 1, duration_s: float | None = None) -> shoal.Lease:
        return shoal.connect(
            self.pool.network_url,
            devices=devices,
            memory="8MiB",
            duration_s=duration_s,
            transport=self.transport,
        )

    def start(self, source: str) -> subprocess.Popen[str]:
        return programs.start(
            source,
            self.transport,
            SHOAL_POOL=self.pool.network_url,
            SHOAL_IDENTITY=str(self.identity),
        )

    def audit(self, lease: int) -> list[str]:
        """What the audit log says of a lease, after its grant."""
        log = self.pool.ask(messages.ReadAudit(200))
        assert isinstance(log, messages.AuditLog)
        mine = [e for e in log.entries if e.detail.startswith(f"lease {lease}:")]
        return [e.detail for e in mine if e.action in ("end", "lose")]

    def await_audit(self, lease: int, text: str) -> None:
        wait_until(
            lambda: bool(found := self.audit(lease)) and all(d.endswith(text) for d in found),
            TOLD_S,
            f"the audit log says {text!r}, not {self.audit(lease)}",
        )


@pytest.fixture
def reached(mortal: StandingPool, transport: Transport, monkeypatch: pytest.MonkeyPatch) -> Reached:
    mortal.until_whole(2)
    identity = mortal.join(f"c{time.monotonic_ns()}").path
    monkeypatch.setenv("SHOAL_IDENTITY", str(identity))
    return Reached(mortal, transport, identity)


def use_for(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        torch.ones(3, device="shoal").sum().item()


def lose() -> str:
    """Use the device until it is lost; return the reason in the error."""
    with pytest.raises(shoal.DeviceLostError) as raised:
        use_for(TOLD_S + 5)
    found = re.fullmatch(
        r"shoal device \S+ was lost: (.*)\. Call shoal\.connect\(\) for a new lease; "
        r"tensors of the old one are gone\.",
        str(raised.value),
    )
    assert found, str(raised.value)
    return found[1]


def check_reason(reached: Reached, lease: shoal.Lease, why: Why, text: str) -> None:
    """The device is about to be lost."""
    reason = lose()
    assert re.search(text, reason), reason
    assert lease.end_reason == reason
    assert lease.end is not None
    assert lease.end.why is why
    reached.await_audit(lease.number, reason)


@pytest.mark.parametrize(
    ("number", "why", "text"),
    [
        (signal.SIGKILL, Why.WORKER_KILLED, "the worker process was killed by SIGKILL"),
        (signal.SIGTERM, Why.WORKER_KILLED, "the worker process was killed by SIGTERM"),
        (signal.SIGSEGV, Why.WORKER_CRASHED, "the worker process crashed with SIGSEGV"),
    ],
)
def test_a_worker_that_dies(reached: Reached, number: int, why: Why, text: str) -> None:
    with reached.connect() as lease:
        torch.ones(3, device="shoal").sum().item()
        os.kill(lease.worker_pids[0], number)
        check_reason(reached, lease, why, f"^{text}$")


def test_a_device_server_that_is_killed(reached: Reached) -> None:
    with reached.connect() as lease:
        torch.ones(3, device="shoal").sum().item()
        os.kill(processes.server_of(lease.worker_pids[0]), signal.SIGKILL)
        check_reason(reached, lease, Why.SERVER_ENDED, "^device server cpu/[01] .*SIGKILL$")


def test_an_agent_that_is_killed(reached: Reached) -> None:
    with reached.connect() as lease:
        torch.ones(3, device="shoal").sum().item()
        os.kill(reached.pool.agent_pid, signal.SIGKILL)
        check_reason(reached, lease, Why.AGENT_ENDED, "^the agent of node .* ended")


def test_a_client_that_is_revoked(reached: Reached) -> None:
    with reached.connect() as lease:
        torch.ones(3, device="shoal").sum().item()
        name = reached.identity.stem
        reached.pool.ask(messages.RevokeClient(name))
        check_reason(reached, lease, Why.REVOKED, f"^{name} was revoked by the pool's owner$")


def test_a_lease_whose_time_is_over(reached: Reached) -> None:
    with reached.connect(duration_s=0.5) as lease:
        check_reason(reached, lease, Why.EXPIRED, "^the lease's time is over$")


def test_a_worker_that_hangs(mortal: StandingPool) -> None:
    """On this machine its heartbeat tells; over the network a silent worker is a silent network."""
    mortal.until_whole(2)
    reached = Reached(mortal, "auto", Path())
    with shoal.connect(mortal.url, memory="8MiB") as lease:
        torch.ones(3, device="shoal").sum().item()
        worker = lease.worker_pids[0]
        os.kill(worker, signal.SIGSTOP)
        check_reason(reached, lease, Why.WORKER_HUNG, "gave no sign of life for 4 s$")
        wait_until(lambda: not processes.alive(worker), 30, "the hung worker is ended")


# --- the client ends --------------------------------


HOLD = """
    import sys, torch, shoal
    lease = shoal.connect(memory="8MiB", devices=2, transport=sys.argv[1])
    torch.ones(3, device="shoal").sum().item()
    print(lease.number, *lease.worker_pids, flush=True)
    input()
"""


def held(reached: Reached) -> tuple[subprocess.Popen[str], int, list[int]]:
    program = reached.start(HOLD)
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, program.communicate()[1]
    lease, *workers = map(int, line.split())
    return program, lease, workers


def test_a_client_that_is_killed(reached: Reached) -> None:
    program, lease, _ = held(reached)
    program.kill()
    program.communicate()
    reached.await_audit(lease, "the client's process ended without giving the lease back")


def test_a_lease_that_is_given_back(reached: Reached) -> None:
    program, lease, _ = held(reached)
    program.communicate("\n", timeout=60)
    reached.await_audit(lease, f"lease {lease}: given back")
    with reached.connect() as mine:
        torch.ones(3, device="shoal").sum().item()
    reached.await_audit(mine.number, f"lease {mine.number}: given back")
    assert mine.end_reason is None


def test_a_worker_that_crashed_as_its_program_ended_is_not_given_back(reached: Reached) -> None:
    with reached.connect() as lease:
        torch.ones(3, device="shoal").sum().item()
        worker = lease.worker_pids[0]
        # The device server is stopped, so the head hears of the program first.
        server = processes.server_of(worker)
        os.kill(server, signal.SIGSTOP)
        os.kill(worker, signal.SIGSEGV)
        wait_until(lambda: not processes.alive(worker), 30, "the worker has crashed")
    try:
        reached.await_audit(lease.number, "given back")
    finally:
        os.kill(server, signal.SIGCONT)
    reached.await_audit(lease.number, "the worker process crashed with SIGSEGV")


# --- an embedded pool --------------------------------


def test_an_embedded_pool_tells_the_reason() -> None:
    with shoal.up(["cpu,memory=64MiB,threads=1"]) as pool:
        for number, text in (
            (signal.SIGKILL, "the worker process was killed by SIGKILL"),
            (signal.SIGSEGV, "the worker process crashed with SIGSEGV"),
        ):
            with shoal.connect(pool.url) as lease:
                torch.ones(3, device="shoal").sum().item()
                os.kill(lease.worker_pids[0], number)
                assert lose() == text == lease.end_reason
        with shoal.connect(pool.url) as lease:
            torch.ones(3, device="shoal").sum().item()
            os.kill(processes.server_pids(pool.url)[0], signal.SIGKILL)
            assert "device server cpu/0 is not running: it was killed by SIGKILL" in lose()
    with shoal.up(["cpu,memory=64MiB,threads=1"]) as pool, shoal.connect(pool.url) as lease:
        torch.ones(3, device="shoal").sum().item()
        os.kill(processes.head_pid(pool.url), signal.SIGKILL)
        assert lose() == "the pool's head ended, and its devices with it" == lease.end_reason


def test_every_thread_gets_the_reason() -> None:
    out = programs.succeed(
        """
        import os, signal, threading, torch, shoal
        told = []
        def work():
            try:
                while True:
                    torch.ones(3, device="shoal").sum().item()
            except shoal.DeviceLostError as error:
                told.append("killed by SIGKILL" in str(error))
        with shoal.up(["cpu,memory=64MiB,threads=1"]) as pool, shoal.connect(pool.url) as lease:
            threads = [threading.Thread(target=work) for _ in range(4)]
            [t.start() for t in threads]
            os.kill(lease.worker_pids[0], signal.SIGKILL)
            [t.join() for t in threads]
        print(told)
        """
    )
    assert out == "[True, True, True, True]\n"


def test_autograd_gets_the_reason() -> None:
    """The error crosses a thread of autograd's own."""
    out = programs.succeed(
        """
        import os, signal, torch, shoal
        with shoal.up(["cpu,memory=64MiB,threads=1"]) as pool, shoal.connect(pool.url) as lease:
            w = torch.ones(64, 64, device="shoal", requires_grad=True)
            w.sum().item()
            os.kill(lease.worker_pids[0], signal.SIGKILL)
            try:
                while True:
                    (w @ w).relu().sum().backward()
                    w.grad.sum().item()
            except shoal.DeviceLostError as error:
                print("killed by SIGKILL" in str(error))
        """
    )
    assert out == "True\n"
