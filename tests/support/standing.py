"""Standing pools for tests: `shoal up` as a process of its own, with its state in a directory."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.base.paths import local_pool_id
from shoal.pool.client import head_connection
from shoal.pool.wire import messages, tls
from tests.support import processes, programs
from tests.support.waiting import wait_until


def free_port() -> int:
    """A port that is free right now, with some after it that probably are."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def shoal_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli.main", *arguments]


class StandingPool:
    """A pool by `shoal up`, used from this process over its Unix socket or by those who join it."""

    def __init__(
        self,
        directory: Path,
        *devices: str,
        listen: bool = False,
        options: tuple[str, ...] = (),
        profile: bool = False,
        tasks: bool = False,
        web: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._variables = dict(variables or {})  # of the pool's processes
        self.directory = directory
        self.name = f"t{secrets.token_hex(4)}"
        self.port = free_port() if listen else 0
        self.url = LOCAL_PREFIX + local_pool_id(self.name)
        self.network_url = f"shoal://127.0.0.1:{self.port}"
        self._arguments = ["up", "--json", "--name", self.name, *options]
        if not profile:  # nothing else should run beside what is tested
            self._arguments.append("--no-profile")
        if not web:
            self._arguments.append("--no-web")
        if not tasks:
            self._arguments.append("--no-tasks")
        for device in devices or ("cpu,memory=64MiB,threads=1",):
            self._arguments += ["--device", device]
        if listen:
            self._arguments += ["--listen", f"127.0.0.1:{self.port}"]
        self.start()

    def environment(self, **extra: str) -> dict[str, str]:
        return programs.environment(SHOAL_STATE=str(self.directory / "state"), **extra)

    def start(self) -> None:
        self.process = subprocess.Popen(
            shoal_command(*self._arguments),
            env=self.environment(**self._variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate()[1])
        self.told = json.loads(line)
        if "error" in self.told:
            raise AssertionError(self.told["error"])

    # --- use -----------------------------

    def run(self, *arguments: str, **extra: str) -> programs.Outcome:
        """A `shoal` command of this pool's owner."""
        done = subprocess.run(
            shoal_command(*arguments),
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            timeout=110,  # of a loaded machine
        )
        return programs.Outcome(done.returncode, done.stdout, done.stderr)

    def ask(self, request: msgspec.Struct) -> msgspec.Struct:
        with head_connection.Connection(self.url, 10) as connection:
            return connection.ask(request, 10)

    def status(self) -> messages.PoolStatus:
        found = self.ask(messages.AskStatus())
        assert isinstance(found, messages.PoolStatus)
        return found

    def make_code(self, role: str = "client", ttl_s: float = 600, **quota: int) -> str:
        code = self.ask(messages.MakeCode(role, ttl_s, **quota))
        assert isinstance(code, messages.Code)
        return code.code

    def join(self, name: str, **quota: int) -> tls.Identity:
        """A client that has joined over TLS, with its identity in a file of its own."""
        from shoal.pool.client import joining

        invitation = f"{self.make_code(**quota)}@127.0.0.1:{self.port}"
        return joining.join(invitation, "client", name, self.directory / f"{name}.pem")

    # --- processes -----------------------

    @property
    def head_pid(self) -> int:
        return self.status().pid

    @property
    def agent_pid(self) -> int:
        """Waits for it: one that has just died is started again."""
        found: list[int] = []

        def running() -> bool:
            found[:] = [
                p
                for p in processes.children(self.process.pid)
                if "shoal.pool.local.agent_process" in processes.command(p) and processes.alive(p)
            ]
            return len(found) == 1

        wait_until(running, 30, "the pool has an agent")
        return found[0]

    def server_pids(self) -> list[int]:
        return [
            p
            for p in processes.children(self.agent_pid)
            if "shoal.pool.node.device_server" in processes.command(p) and processes.alive(p)
        ]

    def pids(self) -> list[int]:
        return [self.process.pid, *processes.descendants(self.process.pid)]

    def until_whole(self, devices: int, seconds: float = 30) -> float:
        """Waits until the head answers and all devices are there; returns how long that took."""

        def whole() -> bool:
            try:
                found = self.status()
            except head_connection.LeaseError:
                return False
            up = [n for n in found.nodes if n.state == "up" and not n.failures]
            return sum(n.devices for n in up) == devices

        return wait_until(whole, seconds, "the pool is whole again")

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        self.process.communicate(timeout=20)

    def __enter__(self) -> StandingPool:
        return self

    def __exit__(self, *_: object) -> None:
        pids = self.pids()
        self.stop()
        wait_until(lambda: not any(map(processes.alive, pids)), 30, "nothing of the pool is left")
