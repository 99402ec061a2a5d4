"""`python -m tests.ecosystem.case FILE:FUNCTION MODE`: run one case in this process, report in JSON.

MODE is "chosen" (the library chooses), "told" (the program says CPU) or "both".
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any


def _processes() -> list[str]:
    """Return the command lines of this process's children."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found.append(b" ".join(words).decode().strip())
    return found


def main(name: str, mode: str) -> None:
    file, _, function = name.partition(":")
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = getattr(importlib.import_module(f"tests.ecosystem.cases.{file}"), function)
        if mode in ("chosen", "both"):
            found["chosen"] = run(cpu=False)
        if mode in ("told", "both"):
            found["told"] = run(cpu=True)
    found["warnings"] = [str(w.message) for w in seen if "shoal" in str(w.message)]
    found["processes"] = _processes()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
