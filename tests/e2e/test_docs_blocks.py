"""Every code block of README.md, CONTRIBUTING.md and docs/ says what it is, and runs if it can.

| mark | meaning |
|---|---|
| ```python | a whole program: runs as it is printed, in an empty directory |
| ```python fragment | cannot run alone: parses |
| ```sh run | commands that run as printed, beside the examples |
| ```console, ```text | commands and pictures to read |
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.programs import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKS = {"python", "python fragment", "sh run", "console", "text"}
_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Return line, mark and text of every block."""
    text = page.read_text()
    return [
        (text.count("\n", 0, m.start()) + 1, m[2].strip(), textwrap.dedent(m[3]))
        for m in _BLOCK.finditer(text)
    ]


ALL = [(page, *block) for page in PAGES for block in blocks(page)]


def params(wanted: str) -> list[object]:
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}:{line}")
        for page, line, mark, text in ALL
        if mark == wanted
    ]


def run(directory: Path, *command: str) -> None:
    """Run a command as a reader would, with the environment's own programs first."""
    environment = commands.environment(directory)
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        command,
        cwd=directory,
        env={**environment, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", params("python"))
def test_a_program_runs_as_it_is_printed(tmp_path: Path, text: str) -> None:
    (tmp_path / "block.py").write_text(text)
    run(tmp_path, sys.executable, "block.py")


@pytest.mark.parametrize("text", params("sh run"))
def test_commands_run_as_they_are_printed(tmp_path: Path, text: str) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run(tmp_path, "bash", "-euc", text)


@pytest.mark.parametrize("text", params("python fragment"))
def test_a_fragment_is_valid_python(text: str) -> None:
    ast.parse(text)


def test_every_block_has_a_known_mark() -> None:
    unknown = [(page.name, line, mark) for page, line, mark, _ in ALL if mark not in MARKS]
    assert not unknown
    assert len(params("python")) >= 12
    assert len(params("sh run")) >= 2
    fences = sum(len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(ALL)
