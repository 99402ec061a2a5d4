"""The examples run with each of their layouts and learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs import ROOT, start

LAYOUTS = [
    '{"groups": 1, "devices": 1}',
    '{"groups": 2, "devices": 1}',
    '{"groups": 1, "devices": 2}',
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt_text", "cnn_images"])
def test_one_changed_line(name: str, layout: str, tmp_path: Path) -> None:
    import os
    import sys

    source = (ROOT / "examples" / "train" / f"{name}.py").read_text()
    changed, count = re.subn(r"(?m)^LAYOUT = \{.*?\}", f"LAYOUT = {layout}", source)
    assert count == 1
    arguments = [str(ROOT / "docs" / "architecture.md")] if name == "gpt_text" else []
    changed = changed.replace("Path(__file__)", "Path('.')")
    program = start(changed, *arguments, PYTHONPATH=os.pathsep.join(sys.path))
    out, err = program.communicate(timeout=110)
    match = re.search(r"loss ([\d.]+) → ([\d.]+)", out)
    assert match, out + err
    assert float(match.group(2)) < 0.85 * float(match.group(1))
