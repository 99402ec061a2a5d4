"""Hosts as network namespaces, joined by veth pairs through a bridge: separate machines on one."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess

import pytest

from tests.support import needs

_CLONE_NEWNET = 0x40000000


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def require_namespaces() -> None:
    """Skips the test with the reason where the machine does not allow namespaces."""
    needs.command("ip")
    name = f"shoal-probe-{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
        _ip("link", "add", f"v{name[-6:]}", "type", "veth", "peer", f"w{name[-6:]}", "netns", name)
        _ip("link", "del", f"v{name[-6:]}")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Host:
    """One namespace: its name for `ip netns exec`, and its address."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def command(self, *words: str) -> list[str]:
        """`words`, to be run on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def limit(self, rate: str) -> None:
        """What leaves the host leaves it no faster than `rate`, as `tc` writes it: "1gbit"."""
        words = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate]
        words += ["burst", "4mb", "latency", "50ms"]
        done = subprocess.run(self.command(*words), capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"tc: {done.stderr.strip()}")

    def enter(self) -> None:
        """Moves the calling thread to this host: for a child before it runs a program."""
        fd = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(fd)


class Hosts:
    """`with Hosts(3) as hosts`: namespaces 10.77.x.1, .2, … that reach each other and nobody else."""

    def __init__(self, count: int) -> None:
        self._tag = secrets.token_hex(3)
        self._switch = f"shoal-{self._tag}-sw"
        net = f"10.77.{secrets.randbelow(250)}"
        self.hosts = [Host(f"shoal-{self._tag}-{i}", f"{net}.{i + 1}") for i in range(count)]

    def __enter__(self) -> list[Host]:
        require_namespaces()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self.hosts

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for i, host in enumerate(self.hosts):
            _ip("netns", "add", host.name)
            _ip("-n", self._switch, "link", "add", f"p{i}", "type", "veth",
                "peer", "eth0", "netns", host.name)  # fmt: skip
            _ip("-n", self._switch, "link", "set", f"p{i}", "master", "br0", "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")

    def cut(self, host: Host) -> None:
        """Pulls the host's cable."""
        _ip("-n", self._switch, "link", "set", f"p{self.hosts.index(host)}", "down")

    def mend(self, host: Host) -> None:
        _ip("-n", self._switch, "link", "set", f"p{self.hosts.index(host)}", "up")

    def _remove(self) -> None:
        for name in (*(h.name for h in self.hosts), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def __exit__(self, *_: object) -> None:
        self._remove()
