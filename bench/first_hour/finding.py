"""A figure or an outcome, and what it should be."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """What a check found. `value` is None where the check does not apply here."""

    name: str
    value: float | str | bool | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """Return "ok", "odd" (outside its range), "FAILED" or "-" (does not apply).

        >>> Finding("copy", 3.0, "GB/s", low=5).verdict
        'odd'
        """
        if self.value is None:
            return "-"
        if isinstance(self.value, bool):
            return "ok" if self.value else "FAILED"
        if isinstance(self.value, str):
            return "ok"
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return "ok" if low <= self.value <= high else "odd"

    @property
    def expected(self) -> str:
        """Return the range in words."""
        if isinstance(self.value, bool):
            return "yes"
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        if self.low is not None:
            return f"at least {self.low:g}"
        return f"at most {self.high:g}" if self.high is not None else ""

    @property
    def shown(self) -> str:
        """Return the value with its unit."""
        if self.value is None:
            return "-"
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        text = f"{self.value:.3g}" if isinstance(self.value, float) else str(self.value)
        return f"{text} {self.unit}".strip()

    def report(self) -> dict[str, Any]:
        """Return it for the file."""
        return {**asdict(self), "verdict": self.verdict}
