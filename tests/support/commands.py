"""`shoal` commands as a user types them, on a machine of their own: an empty home and no pool."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support import programs
from tests.support.standing import shoal_command


def environment(home: Path, **extra: str) -> dict[str, str]:
    """Of a user who has neither a pool nor an identity."""
    return programs.environment(
        **{
            "HOME": str(home),
            "SHOAL_STATE": str(home / "state"),
            "SHOAL_IDENTITY": str(home / "identity.pem"),
            **extra,
        }
    )


def run(home: Path, *arguments: str, timeout: float = 60, **extra: str) -> programs.Outcome:
    """A `shoal` command that must end by itself."""
    done = subprocess.run(
        shoal_command(*arguments),
        env=environment(home, **extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return programs.Outcome(done.returncode, done.stdout, done.stderr)


def refused(home: Path, *arguments: str, timeout: float = 60, **extra: str) -> str:
    """The one message of a command that a mistake keeps from working."""
    done = run(home, *arguments, timeout=timeout, **extra)
    assert done.code == 1, (done.code, done.out, done.err)
    assert "Traceback" not in done.err
    said = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert len(said) == 1, done.err
    return said[0].removeprefix("Error: ")
