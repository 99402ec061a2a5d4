"""Pools for the contract of engines: started by `shoal up`, and seen by programs of their owner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from tests.support import programs
from tests.support.standing import StandingPool


class EnginePool(Protocol):
    """A running pool, and its engine as programs on the head's machine use it."""

    engine: str

    def python(self, source: str) -> programs.Outcome: ...

    def up_again(self) -> programs.Outcome: ...

    def close(self) -> None: ...


class OnLocal:
    engine = "local"

    def __init__(self, directory: Path) -> None:
        self._pool = StandingPool(directory, "cpu,memory=16MiB,threads=1")
        self.name = self._pool.name

    def python(self, source: str) -> programs.Outcome:
        return programs.run(source, self.name, SHOAL_STATE=str(self._pool.directory / "state"))

    def up_again(self) -> programs.Outcome:
        return self._pool.run("up", "--no-web", "--name", self.name, "--device", "cpu")

    def close(self) -> None:
        self._pool.stop()


def told(pool: EnginePool, source: str) -> Any:
    """Run a program with `engine` and `pool` bound, and return what it printed as JSON."""
    begin = "import sys, json, msgspec\nfrom shoal.pool.engines import engine as engines\n"
    begin += "pool = sys.argv[1]\nengine = engines.of(pool)\n"
    begin += "def tell(found): print(msgspec.json.encode(found).decode())\n"
    done = pool.python(begin + source)
    assert done.code == 0, done.out + done.err
    return json.loads(done.out)


def parts(pool: EnginePool) -> list[dict[str, Any]]:
    return list(told(pool, "tell(engine.list(pool))"))
