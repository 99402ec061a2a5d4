"""Text from outside, checked: what traces and tables of any format have in common.

Numbers are bounded so that no later sum, quotient or simulated clock can overflow or stand still.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from shoal.schedule.model.entities import GANG_DEVICES_MAX, InputError

FILE_BYTES_MAX = 512 * 2**20
#: About 30 years: arrivals, deadlines, and a task's own length.
TIME_MAX_S = 1e9
TIME_MIN_S = 1e-3
STEPS_MIN, STEPS_MAX = 1e-3, 1e15
SPEED_MIN, SPEED_MAX = 1e-9, 1e12  # steps/s
WEIGHT_MIN, WEIGHT_MAX = 1e-6, 1e6
SHOWN_CHARS_MAX = 60

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def read_text(path: Path) -> str:
    """Read a file, with `\\n` as its only line end and without a byte order mark."""
    file = str(path)
    try:
        with path.open("rb") as source:
            raw = source.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InputError(file, 1, "file", f"cannot be read: {error.strerror}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise InputError(file, 1, "file", f"is longer than {FILE_BYTES_MAX} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problem = f"is not UTF-8 text: byte 0x{raw[error.start]:02x}; is it the right file?"
        raise InputError(file, line, "text", problem) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    found = _CONTROL.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        problem = f"has the control character {found[0]!r}; is it the right file?"
        raise InputError(file, line, "text", problem)
    return text


def shown(text: str) -> str:
    """A value as an error quotes it.

    >>> shown("many")
    "'many'"
    """
    short = text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
    return repr(short)


class Place:
    """The position of a value: errors about it name the file, the line and the field."""

    def __init__(self, file: str, line: int, field: str) -> None:
        self.file, self.line, self.field = file, line, field

    def error(self, problem: str) -> InputError:
        return InputError(self.file, self.line, self.field, problem)

    def number(self, text: str, least: float, most: float) -> float:
        """A number within bounds."""
        text = text.strip()
        if text.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            raise self.error(f"{shown(text)} is not finite")
        if not _NUMBER.fullmatch(text):
            raise self.error(f"{shown(text)} is not a number" if text else "is empty")
        return self.bounded(float(text), shown(text), least, most)

    def bounded(self, number: float, quoted: str, least: float, most: float) -> float:
        if not math.isfinite(number) or not least <= number <= most:
            raise self.error(f"{quoted} must be a number from {least:g} to {most:g}")
        return number

    def devices(self, text: str) -> int:
        """The size of a gang."""
        number = self.number(text, 1, GANG_DEVICES_MAX)
        if number != int(number):
            raise self.error(f"{shown(text)} is not a whole number of devices")
        return int(number)

    def speed(self, number: float, quoted: str) -> float:
        """Steps per second; 0 says: cannot run there."""
        return number if number == 0 else self.bounded(number, quoted, SPEED_MIN, SPEED_MAX)
