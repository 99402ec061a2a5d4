"""Python environments for `--requirements`: one for each list of packages, kept for the next task.

It runs as the first part of a task's program, so that its output is in the task's log, and a cancelled
task stops it. Then it becomes the program.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import PoolError
from shoal.pool.base import paths

_WHEELS_ONLY = "--wheels-only"
_READY = "shoal-ready"  # a file in an environment that is whole


#: A package, with extras, versions and a marker: no option, address or path.
_VERSION = r"\s*(?:===?|~=|!=|<=?|>=?)\s*[A-Za-z0-9.*+!_-]+\s*"
_PLAIN = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(?:\[[A-Za-z0-9._, -]*\])?"
    rf"(?:{_VERSION}(?:,{_VERSION})*)?(?:\s*;[ A-Za-z0-9._<>=!'\"()-]*)?"
)


def cache(name: str = "environments") -> Path:
    """Return the folder of this user's environments."""
    return paths.state_directory(name)


def place(cache: Path, text: str) -> Path:
    """Return where the environment with these packages is, or will be."""
    identity = f"{sys.version}\n{sys.prefix}\n{text}"
    return cache / hashlib.sha256(identity.encode()).hexdigest()[:24]


class NotPlain(PoolError):
    """A list of packages of another user's task that has more than packages."""


def check_plain(text: str) -> str:
    """Return a list of packages. pip would carry out options, and read files and addresses."""
    for number, line in enumerate(text.splitlines(), 1):
        wanted = line.partition("#")[0].strip()
        if wanted and not _PLAIN.fullmatch(wanted):
            raise NotPlain(
                f"line {number} of --requirements is not a package with a version. On another's "
                "machine there are no options, addresses or paths"
            )
    return text


def command(
    requirements: Path, cache: Path, program: list[str], *, wheels_only: bool = False
) -> list[str]:
    """Return the command that makes the environment and then becomes the program.

    Args:
        wheels_only: install without running code of the packages.
    """
    words = [sys.executable, "-m", __name__, *([_WHEELS_ONLY] if wheels_only else [])]
    return [*words, str(requirements), str(cache), *program]


def prepare(requirements: Path, cache: Path, options: Sequence[str] = ()) -> Path:
    """Return the environment with these packages, on top of the runner's. Make it if it is new."""
    made = place(cache, requirements.read_text())
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(cache / f"{made.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another task may be making the same
        if not (made / _READY).exists():
            shutil.rmtree(made, ignore_errors=True)
            print(
                "shoal: making a Python environment for --requirements", file=sys.stderr, flush=True
            )
            _make(made, requirements, options)
            (made / _READY).touch()
        os.utime(made / _READY)
    return made


def _make(made: Path, requirements: Path, options: Sequence[str]) -> None:
    """Make an environment that also sees the packages of this one, and install."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = made / "lib" / version / "site-packages"
    seen = [p for p in sys.path if p.endswith("site-packages")]
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in seen)
    (packages / "shoal-runner.pth").write_text(lines)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(made)]
    subprocess.run([*pip, "install", *options, "-r", str(requirements)], check=True)


def main() -> None:
    """`python -m shoal.pool.runner.environments [--wheels-only] REQUIREMENTS CACHE PROGRAM…`."""
    words = sys.argv[1:]
    options = ["--only-binary", ":all:"] if words[0] == _WHEELS_ONLY else []
    words = words[1:] if options else words
    requirements, cache, program = Path(words[0]), Path(words[1]), words[2:]
    try:
        made = prepare(requirements, cache, options)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"shoal: the environment for --requirements could not be made: {error}")
    path = f"{made / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ.update(PATH=path, VIRTUAL_ENV=str(made))
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"shoal: {program[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
