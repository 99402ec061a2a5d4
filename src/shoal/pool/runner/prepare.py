"""What a program needs before it starts: its folder, its environment, its command."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from shoal.errors import PoolError
from shoal.pool.base import snapshots
from shoal.pool.runner.attempt_folder import Order

#: Variables that the program takes from the shell of `submit`, and not from the runner.
INHERITED = (
    "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "LANG", "LANGUAGE",
    "LC_ALL", "LC_ADDRESS", "LC_COLLATE", "LC_CTYPE", "LC_IDENTIFICATION", "LC_MEASUREMENT",
    "LC_MESSAGES", "LC_MONETARY", "LC_NAME", "LC_NUMERIC", "LC_PAPER", "LC_TELEPHONE", "LC_TIME",
)  # fmt: skip
MARK = "SHOAL_RUNNER"  # in every program's environment: the folder of its runner's tasks
#: Shoal's own variables that a runner hands on: where this user's identity and state are.
_KEPT = ("SHOAL_IDENTITY", "SHOAL_STATE", "SHOAL_LOG", "SHOAL_LOG_LEVEL")


class CannotStart(Exception):
    """The program cannot be started. `code` is what a shell would exit with, if it is the program's."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


def environment(order: Order) -> dict[str, str]:
    """Return the program's environment: the runner's, with what was inherited and asked for."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in INHERITED and (not name.startswith("SHOAL_") or name in _KEPT)
    }
    return {
        "PYTHONUNBUFFERED": "1",  # so that its log has each line at once
        **own,
        **order.spec.inherited,
        **order.spec.environment,
        "SHOAL_POOL": order.pool_url,
        "SHOAL_TICKET": order.ticket,
        "SHOAL_TASK": order.task_id,
        "SHOAL_ATTEMPT": str(order.attempt),
        MARK: str(Path(order.folder).parents[1]),
    }


def folder(order: Order) -> Path:
    """Return the folder in which the program starts."""
    if order.spec.snapshot:
        work = Path(order.folder) / "work"
        try:
            work.mkdir(mode=0o700, exist_ok=True)
            root = Path(order.store) if order.sandbox is not None else None
            snapshots.restore(order.spec.snapshot, work, root)
        except PoolError as error:
            raise CannotStart(str(error)) from None
        return work
    found = Path(order.spec.folder)
    if not found.is_dir():
        raise CannotStart(f"the folder {found}, from which it was submitted, does not exist")
    return found


def check_program(command: list[str], where: Path, environment: dict[str, str]) -> None:
    """Raise CannotStart as a shell would, before anything is started."""
    program = command[0]
    if "/" in program:
        path = where / program
        if not path.exists():
            raise CannotStart(f"{program}: no such file in {where}", 127)
        if path.is_dir() or not os.access(path, os.X_OK):
            raise CannotStart(f"{program} cannot be executed", 126)
    elif shutil.which(program, path=environment.get("PATH", os.defpath)) is None:
        raise CannotStart(f"{program}: command not found in the PATH of `shoal submit`", 127)
