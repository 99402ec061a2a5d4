"""A Ray cluster on network namespaces, with a pool on it, and a desk outside that has no Ray."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import needs, processes, programs
from tests.support.cluster import Machine
from tests.support.namespaces import Host
from tests.support.standing import shoal_command
from tests.support.waiting import wait_until

PORT = 6379


def require_ray() -> None:
    """Skips the test with the reason where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        needs.absent("Ray is not installed here; run: pip install 'ray[default]'")


class RayHosts:
    """Raylets on all hosts but the last, with one token. Only processes of its own are ever ended:
    `ray stop` would end every Ray on the machine, in whatever namespace."""

    def __init__(self, hosts: list[Host], directory: Path, token: bool = True) -> None:
        *self.hosts, desk = hosts
        self._auth = {}
        if token:
            self._auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._scratch = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets need a short path
        self.nodes: dict[int, subprocess.Popen[str]] = {}
        self.machines = []
        for number, host in enumerate(self.hosts):
            (directory / f"ray{number}").mkdir()
            machine = Machine(host, directory / f"ray{number}")
            machine.environment |= {**self._auth, "RAY_USAGE_STATS_ENABLED": "0"}
            machine.environment["PYTHONUNBUFFERED"] = "1"
            self.machines.append(machine)
        (directory / "desk").mkdir()
        self.desk = Machine(desk, directory / "desk")
        self.head = self.machines[0]
        self.address = f"{self.hosts[0].address}:{PORT}"

    def start(self, *numbers: int) -> None:
        """Start Ray on hosts, side by side but for the first. Return when they have."""
        for number in numbers:
            where = ["--address", self.address]
            if number == 0:
                where = ["--head", "--port", str(PORT), "--include-dashboard=false"]
            ray = str(Path(sys.executable).with_name("ray"))
            self.nodes[number] = self.machines[number].start(
                ray, "start", "--block", *where, "--node-ip-address", self.hosts[number].address,
                "--temp-dir", f"{self._scratch}/{number}", "--num-cpus", "4", "--num-gpus", "0",
                "--object-store-memory", "80000000", "--disable-usage-stats",
            )  # fmt: skip
            if number == 0:
                self._until_started(0)
        for number in numbers:
            if number:
                self._until_started(number)

    def _until_started(self, number: int) -> None:
        process = self.nodes[number]
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if "--block" in line:  # the last thing that it prints
                return
        raise AssertionError(seen + process.communicate()[1])

    def raylet(self, number: int) -> int:
        found = [
            pid
            for pid in processes.descendants(self.nodes[number].pid)
            if processes.command(pid)[0].endswith("raylet/raylet")
        ]
        assert len(found) == 1, found
        return found[0]

    def stop(self, number: int) -> None:
        """End Ray on a host, and all that it has started."""
        process = self.nodes.pop(number)
        pids = [process.pid, *processes.descendants(process.pid)]
        for pid in pids:
            if processes.alive(pid):
                os.kill(pid, signal.SIGTERM if pid == process.pid else signal.SIGKILL)
        process.communicate(timeout=60)
        wait_until(lambda: not any(map(processes.alive, pids)), 30, "Ray has ended")

    def close(self) -> None:
        for number in sorted(self.nodes, reverse=True):
            self.stop(number)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def pids(self) -> list[int]:
        """All processes on these hosts."""
        found = []
        for host in self.hosts:
            listed = subprocess.run(
                ["ip", "netns", "pids", host.name], capture_output=True, text=True
            )
            found += [int(word) for word in listed.stdout.split()]
        return found

    def of_shoal(self) -> list[list[str]]:
        """The commands of Shoal's processes on these hosts, and of Ray's actors that keep them."""
        commands = [processes.command(pid) for pid in self.pids() if processes.alive(pid)]
        return [c for c in commands if any("shoal.pool" in w or "Actor" in w for w in c)]


class OnRay:
    """A pool on those hosts, as the contract of engines uses it."""

    engine = "ray"

    def __init__(self, ray: RayHosts, *options: str) -> None:
        self.ray = ray
        self.name = "on-ray"
        self._options = (
            "--name", self.name, "--engine", "ray", "--address", ray.address, "--no-profile",
            "--device", "cpu,memory=32MiB,threads=1", *options,
        )  # fmt: skip
        self.told = ray.head.shoal("up", "--json", *self._options)

    def python(self, source: str) -> programs.Outcome:
        return self.ray.head.run(sys.executable, "-c", source, self.name)

    def up_again(self) -> programs.Outcome:
        return self.ray.head.run(*shoal_command("up", *self._options))

    def close(self) -> None:
        self.ray.head.run(*shoal_command("down", "--name", self.name))
