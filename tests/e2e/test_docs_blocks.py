"""Every Python block of README.md and docs/ runs as it is printed, in an empty directory.

A block that cannot run by itself begins with "```python fragment" and must still parse.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.programs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^( *)```python([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Line, mark and text of every Python block."""
    text = page.read_text()
    return [
        (text.count("\n", 0, m.start()) + 1, m[2].strip(), textwrap.dedent(m[3]))
        for m in _BLOCK.finditer(text)
    ]


ALL = [(page, *block) for page in PAGES for block in blocks(page)]


def params(*, whole: bool) -> list[object]:
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}:{line}")
        for page, line, mark, text in ALL
        if (mark == "") == whole
    ]


@pytest.mark.parametrize("text", params(whole=True))
def test_a_block_runs_as_it_is_printed(tmp_path: Path, text: str) -> None:
    (tmp_path / "block.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "block.py"],
        cwd=tmp_path,
        env=commands.environment(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", params(whole=False))
def test_a_fragment_is_valid_python(text: str) -> None:
    ast.parse(text)


def test_marks_are_known() -> None:
    assert {mark for _, _, mark, _ in ALL} <= {"", "fragment"}
    assert len(ALL) >= 12
