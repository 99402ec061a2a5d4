"""A pool on this machine that a program starts, and that ends with the program."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence

import msgspec

import shoal_autoload
from shoal import views
from shoal.errors import LeaseError, PoolStartError
from shoal.pool.base import at_exit, log, process
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.client.head_connection import ask
from shoal.pool.node import machine
from shoal.pool.node.spec import DeviceSpec, parse_device
from shoal.pool.wire import messages
from shoal.units import show_bytes

_log = logging.getLogger("shoal")


class Pool:
    """A running pool. Leave its `with` block, or call `close()`, to end it.

    >>> with shoal.up(devices=["cpu", "cpu,memory=1GiB,speed=0.5"]) as pool:
    ...     lease = shoal.connect(pool.url, devices=2)
    """

    def __init__(self, specs: Sequence[DeviceSpec]) -> None:
        self._id = secrets.token_hex(8)
        self._owner_pid = os.getpid()
        encoded = msgspec.json.encode(list(specs)).decode()
        module = "shoal.pool.local.embedded"
        command = [sys.executable, "-m", module, self._id, str(os.getpid()), encoded]
        self._head = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._head.stdout is not None
        report = self._head.stdout.readline()
        if report != process.READY:
            reason = process.failure_in(report) or process.exit_reason(self._head.wait())
            raise PoolStartError(f"the program's pool did not start: {reason}")
        at_exit.register(self.close)

    @property
    def url(self) -> str:
        """The URL that another program of this user passes to `shoal.connect` or $SHOAL_POOL."""
        return LOCAL_PREFIX + self._id

    def _repr_html_(self) -> str:
        """What a notebook shows: the devices and their memory."""
        rows = [
            [d.name, d.kind, show_bytes(d.memory_bytes), show_bytes(d.free_bytes), d.sessions]
            for d in (self.devices if self.running else [])
        ]
        return views.table(
            f"pool {self.url}", ["device", "kind", "memory", "free", "sessions"], rows
        )

    @property
    def running(self) -> bool:
        return self._head.poll() is None

    @property
    def devices(self) -> list[messages.DeviceInfo]:
        """The pool's devices and how much of each is free."""
        return describe(self.url)

    def close(self) -> None:
        """End the pool, its device servers and every session on them."""
        if os.getpid() != self._owner_pid or not self.running:
            return
        self._head.kill()  # its children die with it
        self._head.wait()
        at_exit.unregister(self.close)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "running" if self.running else "ended"
        return f"<shoal.Pool {self.url} {state}>"


def up(devices: Sequence[str] | None = None) -> Pool:
    """Start a pool on this machine that ends with this program.

    Args:
        devices: the declaration of each device, e.g. `["cuda:0", "cpu,memory=1GiB,speed=0.5"]`. By
            default the machine's accelerators or, where there are none, one CPU device with all cores.

    >>> with shoal.up(devices=["cpu"]) as pool:
    ...     print(pool.url)
    """
    declared = list(devices) if devices is not None else default_devices()
    if not declared:
        raise PoolStartError('a pool needs at least one device: shoal.up(devices=["cpu"])')
    specs = [parse_device(text, number) for number, text in enumerate(declared)]
    log.check_settings()
    for warning in machine.check(specs) if devices is not None else ():
        _log.warning("shoal: %s", warning)
    return Pool(specs)


def default_devices() -> list[str]:
    """Return the machine's accelerators, or one CPU device. Starts no driver in this process."""
    try:
        # A driver that the user names is there, wherever the device files are.
        named = bool(os.environ.get("SHOAL_CUDA_DRIVER"))
        kind = "cuda" if named else shoal_autoload.other_accelerator()
    except ImportError:  # torch is missing: the device server says so
        return ["cpu"]
    count = machine.ask_torch([kind])[kind].count if kind else 0
    return [f"{kind}:{i}" for i in range(count)] or ["cpu"]


def describe(url: str) -> list[messages.DeviceInfo]:
    """Return the devices of a pool."""
    connection, answer = ask(url, messages.Describe())
    connection.close()
    if not isinstance(answer, messages.PoolInfo):
        raise LeaseError(f"the pool answered {type(answer).__name__}")
    return answer.devices
