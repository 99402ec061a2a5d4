"""The examples run as they are, with each of their layouts, show their progress, and learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT, environment

LAYOUTS = [
    '{"groups": 1, "devices": 1}',
    '{"groups": 2, "devices": 1}',
    '{"groups": 1, "devices": 2}',
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt_text", "cnn_images"])
def test_one_changed_line(name: str, layout: str, tmp_path: Path) -> None:
    """A copy elsewhere, without arguments: nothing is downloaded and nothing of the folder is used."""
    source = (ROOT / "examples" / "train" / f"{name}.py").read_text()
    changed, count = re.subn(r"(?m)^LAYOUT = \{.*?\}", f"LAYOUT = {layout}", source)
    assert count == 1
    (tmp_path / f"{name}.py").write_text(changed)
    done = subprocess.run(
        [sys.executable, f"{name}.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    match = re.search(r"loss ([\d.]+) → ([\d.]+) on", done.stdout)
    assert match, done.stdout + done.stderr
    assert float(match.group(2)) < 0.85 * float(match.group(1))
    assert re.search(r"epoch 0 step 2/\d+: loss .* samples/s .*left", done.stderr), done.stderr
    assert re.search(r"\d+ steps in 0:0", done.stderr), done.stderr
