"""What ends with the program: after the exit handlers that the program registered since `import torch`.

Such a handler may still read its tensors, as it may those of other accelerators.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable

_endings: list[Callable[[], None]] = []


def register(ending: Callable[[], None]) -> None:
    """Call `ending` at the program's end, before those that were registered earlier."""
    _endings.append(ending)


def unregister(ending: Callable[[], None]) -> None:
    """Do not call it any more."""
    with contextlib.suppress(ValueError):
        _endings.remove(ending)


def _run() -> None:
    with contextlib.ExitStack() as stack:
        for ending in _endings:
            stack.callback(ending)


atexit.register(_run)
