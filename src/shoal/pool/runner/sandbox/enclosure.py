"""Another's program in its sandbox: what it is started with, and what runs beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shoal.errors import PoolError
from shoal.pool.base import door, process
from shoal.pool.base.addresses import NETWORK_PREFIX, split_address
from shoal.pool.runner import environments, prepare
from shoal.pool.runner.attempt_folder import AttemptFolder, Order
from shoal.pool.runner.sandbox import bubblewrap
from shoal.pool.runner.sandbox.bubblewrap import Places
from shoal.pool.runner.sandbox.door import Door
from shoal.pool.runner.sandbox.watch import Watch
from shoal.pool.wire import tls

#: Environments of other people's tasks: no program of this user runs in one.
CACHE = "environments-of-others"


class Enclosure:
    """Nothing that the owner wrote reaches a process outside of it, but names of packages for pip.

    Args:
        on_over: called in another thread with what the program used too much of.
    """

    def __init__(self, order: Order, folder: AttemptFolder, on_over: Callable[[str], None]) -> None:
        self._order = order
        self._folder = folder
        self._on_over = on_over
        self.cwd = "/"  # never the work folder: Python imports from where it starts
        self.environment = {**os.environ, prepare.MARK: str(Path(order.folder).parents[1])}
        folder.temporary.mkdir(mode=0o700, exist_ok=True)
        self._door = Door(folder.path, addresses(order))
        try:
            self.command, self.fds = self._prepare()
        except (OSError, PoolError) as error:
            raise prepare.CannotStart(str(error)) from None

    def _prepare(self) -> tuple[list[str], list[int]]:
        order, folder = self._order, self._folder
        spec, shown = order.spec, order.sandbox
        assert shown is not None
        cache, made = environments.cache(CACHE), None
        if spec.requirements:
            environments.check_plain(spec.requirements)
            made = environments.place(cache, spec.requirements)
        identity = tls.Identity(
            Path(bubblewrap.IDENTITY), shown.name, "task", order.pool_url, shown.key,
            shown.certificate, shown.authority,
        )  # fmt: skip
        command, fds = bubblewrap.command(
            Places(folder.work, folder.temporary, self._door.path, made), identity.text,
            inside(order, made), spec.program,
        )  # fmt: skip
        if made is not None:
            listed = folder.path / "requirements.txt"
            listed.write_text(spec.requirements)
            command = environments.command(listed, cache, command, wheels_only=True)
        return command, fds

    def before_program(self) -> None:
        """Called in the child, before it becomes the program."""
        process.die_with_parent_thread()
        bubblewrap.set_limits()

    def started(self) -> None:
        """The program was forked: begin to serve and to watch it."""
        self.close()
        self._door.start()
        Watch(os.getpid(), [self._folder.work, self._folder.temporary], self._on_over).start()

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def inside(order: Order, made: Path | None) -> dict[str, str]:
    """Return the environment of the program: nothing of the runner's."""
    language = {n: v for n, v in order.spec.inherited.items() if n.startswith(("LANG", "LC_"))}
    found = {
        "PYTHONUNBUFFERED": "1",  # so that its log has each line at once
        "USER": "task",
        "HOME": bubblewrap.HOME,
        "TMPDIR": bubblewrap.TEMPORARY,
        "PATH": bubblewrap.search_path(made),
        **language,
        **({"VIRTUAL_ENV": str(made)} if made is not None else {}),
        **order.spec.environment,
    }
    return found | {
        "SHOAL_POOL": order.pool_url,
        "SHOAL_TICKET": order.ticket,
        "SHOAL_TASK": order.task_id,
        "SHOAL_ATTEMPT": str(order.attempt),
        "SHOAL_IDENTITY": bubblewrap.IDENTITY,
        door.VARIABLE: bubblewrap.DOOR,
    }


def addresses(order: Order) -> list[tuple[str, int]]:
    """Return what the program reaches: the head, and the servers of its devices."""
    assert order.sandbox is not None
    head = split_address(order.pool_url.removeprefix(NETWORK_PREFIX))
    return [head, *((host or head[0], port) for host, port in order.sandbox.devices)]
