"""What the program of a task asks about itself.

>>> shoal.task.should_yield()
False
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["should_yield"]

_asked = threading.Event()
_listens = False


def should_yield() -> bool:
    """Return whether Shoal has asked this program to end: others go first, or it was cancelled.

    Call it between steps, first in the main thread, and early: until then SIGTERM ends the program.
    Once it returns True, save your work and exit with code 75 within the task's grace. The pool then
    starts a task with `--yields` again when devices are free.

    >>> if shoal.task.should_yield():
    ...     save()
    ...     sys.exit(75)
    """
    if "SHOAL_TASK" in os.environ:
        _listen()
    return _asked.is_set()


def _listen() -> None:
    """Hear SIGTERM from now on. A handler that the program has set is called as well."""
    global _listens
    if _listens or threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)

    def hear(number: int, frame: FrameType | None) -> None:
        _asked.set()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, hear)
    _listens = True
