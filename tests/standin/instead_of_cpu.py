"""Lets the tests' CPU devices be the stand-in's: `cpu,memory=64MiB` is declared, `cuda:0` starts.

Shoal's own code does not know of it. What reads a declaration is replaced when it is imported, in the
tests' process and in every Python process that they start.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

#: Set where the replacement is wanted.
VARIABLE = "STANDIN_INSTEAD_OF_CPU"
_MODULE = "shoal.pool.node.spec"


class _WhenImported(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            _replace(module)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def _replace(module: Any) -> None:
    parse = module.parse_device
    devices = int(os.environ.get("STANDIN_DEVICES", "1"))

    def parse_device(text: str, number: int = 0) -> Any:
        import msgspec

        found = parse(text, number)
        if found.device != "cpu":
            return found
        # Threads and speed are a CPU device's own.
        return msgspec.structs.replace(
            found, device=f"cuda:{number % devices}", threads=None, speed=1.0
        )

    module.parse_device = parse_device


def install() -> None:
    """Replace it in this process. Call this before `import shoal`."""
    if _MODULE in sys.modules:
        raise ImportError("shoal is imported already")
    sys.meta_path.insert(0, _WhenImported())
