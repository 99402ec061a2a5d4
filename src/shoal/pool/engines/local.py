"""The engine `local`: the processes of a pool are children of the program that starts it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from shoal.pool.base import paths
from shoal.pool.base.addresses import own_name
from shoal.pool.engines import changes
from shoal.pool.engines.engine import Event, Placed, Plan, Shape
from shoal.pool.local import agent_process, head_process, supervisor


class LocalEngine:
    def __init__(self, address: str = "") -> None:
        self._watcher: supervisor.Supervisor | None = None

    def watcher(self, plan: Plan) -> supervisor.Supervisor:
        """Return what starts the pool's processes and keeps them running, until a signal."""
        head = msgspec.json.encode(plan.head).decode()
        agent = msgspec.json.encode(plan.agent).decode()
        return supervisor.Supervisor(
            [
                supervisor.Supervised("head", head_process.__name__, head),
                supervisor.Supervised("agent", agent_process.__name__, agent),
                *plan.beside,
            ],
            record=paths.state_directory(plan.pool),
        )

    def start(self, plan: Plan) -> None:
        """Start the pool's processes. They end with this program, and are not restarted without
        `watcher(plan).run()`, which `shoal up` does."""
        self._watcher = self.watcher(plan)
        self._watcher.start()

    def stop(self, pool: str) -> bool:
        return supervisor.stop(paths.state_directory(pool))

    def list(self, pool: str) -> list[Placed]:
        node = own_name()
        return [
            Placed(run.name, node, run.pid, run.since, run.restarts)
            for run in supervisor.recorded(paths.state_directory(pool))
        ]

    def watch(self, pool: str) -> Iterator[Event]:
        return changes.watch(lambda: self.list(pool))

    def want(self, pool: str, shapes: Sequence[Shape], until: float) -> str:
        return ""  # a machine does not grow
