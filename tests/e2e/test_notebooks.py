"""The notebooks in examples/ run from top to bottom, and show what Jupyter would show.

A kernel is not needed for that: each cell is compiled as Jupyter does it, and the value of its last
line is shown as HTML or text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import programs
from tests.support.programs import ROOT

NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))

RUN = """
import ast, json, sys
names = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] != "code":
        continue
    body = ast.parse("".join(cell["source"])).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    where = f"cell {cell['id']}"
    exec(compile(ast.Module(body, []), where, "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), where, "eval"), names)
        html = getattr(value, "_repr_html_", None)
        if value is not None:
            print(f"{cell['id']}:", html() if html else repr(value))
"""


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return found


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_stored_without_results(notebook: Path) -> None:
    stored = json.loads(notebook.read_text())
    assert stored["nbformat"] == 4
    code = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    assert len({cell["id"] for cell in cells(notebook)}) == len(cells(notebook))
    assert code
    assert not [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"]]


@pytest.mark.timeout(300)
def test_the_first_steps_run() -> None:
    shown = programs.succeed(RUN, str(ROOT / "examples" / "first_steps.ipynb"), timeout=280)
    assert "pool: <" in shown  # the lease, as HTML
    assert "cpu/1" in shown  # the picture of the memory
    assert "free: 0" in shown
    assert "IndexError" not in shown
    assert "raised by aten::" in shown
