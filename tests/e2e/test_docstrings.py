"""Every public name shows an example in its docstring, and the example runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shoal
import shoal.memory
import shoal.train
from shoal.device import module
from tests.e2e import docstring_examples
from tests.support import commands
from tests.support.programs import ROOT

MODULES = {"shoal": shoal, "shoal.train": shoal.train, "shoal.memory": shoal.memory}
NAMES = {
    f"{label}.{name}": getattr(public, name)
    for label, public in {**MODULES, "torch.shoal": module}.items()
    for name in public.__all__
}


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_shows_an_example(name: str) -> None:
    text = NAMES[name].__doc__ or ""
    assert text.partition("\n")[0].strip(), "says what it is"
    assert ">>> " in text


@pytest.mark.timeout(600)
def test_the_examples_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "e2e" / "docstring_examples.py"],
        cwd=tmp_path, env=commands.environment(tmp_path), capture_output=True, text=True, timeout=590,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    left_out = set(NAMES) - set(done.stdout.split())
    assert left_out == docstring_examples.ELSEWHERE | {"shoal.memory"}
