"""Deadlines and limits stand in one table, and no code matches the text of an error."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import shoal

SOURCE = Path(shoal.__file__).parent
ROOMS = ("pool", "device")
LIMIT = re.compile(r"_?[A-Z][A-Z_]*(_S|_MS|_DAYS|_MAX|_BYTES)")
KEPT = {"_BYTES_MAX", "DATA_ID_BYTES", "SECRET_BYTES"}  # of a format, not of a process


def sources(*rooms: str) -> Iterator[tuple[Path, ast.Module]]:
    for room in rooms:
        for path in sorted((SOURCE / room).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def test_limits_py_has_every_limit() -> None:
    found = []
    for path, tree in sources(*ROOMS):
        for node in tree.body:
            if not isinstance(node, ast.Assign) or path.name == "limits.py":
                continue
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            numbers = [n for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
            if any(LIMIT.fullmatch(n) and n not in KEPT for n in names) and numbers:
                found.append(f"{path}:{node.lineno} {names}")
    assert not found


def test_no_code_looks_into_the_text_of_an_error() -> None:
    """`"…" in str(error)`, `str(error).startswith(…)`: use its type and attributes."""
    found = []
    for path, tree in sources(*ROOMS, "cli"):
        for node in ast.walk(tree):
            match node:
                case ast.Compare(
                    ops=[ast.In() | ast.NotIn()], comparators=[ast.Call(ast.Name("str"))]
                ):
                    found.append(f"{path}:{node.lineno}")
                case ast.Call(ast.Attribute(ast.Call(ast.Name("str"), [ast.Name(name)]), method)):
                    if name in ("error", "refused", "problem") and method != "rstrip":
                        found.append(f"{path}:{node.lineno}")
    assert not found
