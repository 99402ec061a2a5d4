"""A Griffe extension: the examples in docstrings become blocks of code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from pages import fenced


class Examples(griffe.Extension):
    """Fence the examples of every object."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Griffe calls this for every object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
