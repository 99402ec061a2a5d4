"""The direction of Python imports, and what must stay small: the command line, head and agent."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from tests.support import programs

HEAVY = "{'torch', 'numpy', 'highspy', 'rich'}"


@pytest.mark.parametrize(
    "load",
    [
        "from shoal.cli.main import main; main(['--help'], standalone_mode=False)",
        "from shoal.cli.main import main; main(['devices', '--help'], standalone_mode=False)",
        "from shoal.pool.local import agent_process, embedded, head_process",
    ],
)
def test_heavy_modules_are_not_imported(load: str) -> None:
    found = programs.succeed(
        f"import sys\n{load}\nprint('heavy', sorted({HEAVY} & set(sys.modules)))"
    )
    assert found.splitlines()[-1] == "heavy []"


#: Each room, and the rooms that it may import. A room may always import itself.
BELOW = {"errors", "units", "plots", "views", "_core", "_constants"}  # every room may import these
ROOMS = {
    "errors": set(),
    "units": {"errors"},
    "plots": {"units"},
    "views": set(),
    "task": set(),
    "memory": set(),
    "integrations": set(),
    "schedule": set(),
    "people": set(),
    "tasks": {"schedule"},
    "pool.base": set(),
    "pool.wire": {"pool.base", "schedule", "tasks", "people"},
    "pool.access": {"pool.base", "pool.wire"},
    "pool.client": {"pool.base", "pool.wire", "pool.access", "tasks"},
    "pool.head": {
        "pool.base", "pool.wire", "pool.access", "pool.planner", "schedule", "tasks", "people"
    },
    "pool.runner": {"pool.base", "pool.wire", "tasks"},
    "pool.node": {"pool.base", "pool.wire", "schedule"},
    "pool.planner": {"pool.base", "pool.wire", "schedule"},
    "pool.local": {
        "pool.base", "pool.wire", "pool.access", "pool.client", "pool.head", "pool.node",
        "pool.runner", "tasks",
    },
    "pool.engines": {
        "pool.base", "pool.wire", "pool.access", "pool.client", "pool.local", "pool.node"
    },
    "device": {
        "pool.base", "pool.wire", "pool.client", "pool.local", "pool.node", "integrations", "memory"
    },
    "train": {"device", "memory", "pool.base", "pool.wire", "pool.local", "schedule"},
    "web": {"pool.base", "pool.wire", "people", "tasks"},
    "cli": {
        "pool.base", "pool.wire", "pool.access", "pool.client", "pool.local", "pool.node",
        "pool.engines", "pool.planner", "schedule", "people", "tasks", "web",
    },
}  # fmt: skip
SOURCE = Path(shoal.__file__).parent


def room(module: str) -> str:
    """Return the room of a module: "pool.wire" of shoal.pool.wire.frames; "" of shoal itself."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] == ["pool"] else parts[:1])


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of Shoal that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == "shoal")


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), path


@pytest.mark.parametrize("name", ROOMS)
def test_imports_point_one_way(name: str) -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules()
        if room(module) == name
        for imported in imports(path)
        if room(imported) not in {"", "pool", name, *BELOW, *ROOMS[name]}
    ]
    assert not wrong


def test_every_room_has_a_direction() -> None:
    found = {room(module) for module, _ in modules()} - {"", "__main__", "pool"}
    assert found <= ROOMS.keys()


def test_no_two_rooms_import_each_other() -> None:
    done: set[str] = set()
    while len(done) < len(ROOMS):
        free = {name for name, below in ROOMS.items() if name not in done and below <= done}
        assert free, f"a cycle among {sorted(ROOMS.keys() - done)}"
        done |= free
