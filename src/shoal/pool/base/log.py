"""Log lines of a pool's processes: a time, a level and a component, as text or as JSON.

    2026-11-18T01:02:03.456Z WARNING agent[gpu-7]: the head has closed the connection

$SHOAL_LOG is "text" (default) or "json"; $SHOAL_LOG_LEVEL is "debug", "info", "warning" (default) or
"error". Code uses the standard logging module; only the processes of a pool call `set_up`. In a user's
program Shoal installs no handler: that program's own settings decide.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from types import TracebackType

from shoal.errors import PoolError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


def set_up(component: str) -> None:
    """Send every record of this process to stderr, also warnings and uncaught exceptions.

    A forked child calls it again with a name of its own.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(component) if chosen_format() == "json" else Lines(component))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(chosen_level().upper())
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def check_settings() -> None:
    """Raise PoolError if the environment asks for what does not exist, before a process does."""
    chosen_format()
    chosen_level()


def chosen_format() -> str:
    return _chosen("SHOAL_LOG", FORMATS, "text")


def chosen_level() -> str:
    return _chosen("SHOAL_LOG_LEVEL", LEVELS, "warning")


def _chosen(variable: str, values: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, "").lower() or default
    if value not in values:
        raise PoolError(f"{variable} is one of {', '.join(values)}, not {value!r}")
    return value


class Lines(logging.Formatter):
    """One line of text for each record. A traceback follows it, indented."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self.component = component

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {self.component}: {_text(record)}"
        if record.exc_info:
            line += "\n    " + self.formatException(record.exc_info).replace("\n", "\n    ")
        return line


class JsonLines(logging.Formatter):
    """One JSON object for each record."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self.component = component

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "component": self.component,
            "pid": record.process,
            "text": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{at}.{int(record.msecs):03}Z"


def _text(record: logging.LogRecord) -> str:
    """Return the message in one line: remote text cannot forge a line of its own."""
    text = record.getMessage()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logging.getLogger("shoal").critical("an unexpected error", exc_info=(kind, error, traceback))
