"""docs/tasks.md lists every code of a reason and every rule, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.tasks.reasons import Code
from shoal.tasks.rules import RULES

PAGE = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()


def listed(section: str) -> list[str]:
    """The first column of the first table of a section."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    table = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert table is not None
    return re.findall(r"^\| `([\w-]+)`", table.group(), re.M)


def test_the_page_lists_the_codes() -> None:
    assert listed("Why it waits") == list(Code)


def test_the_page_lists_the_rules() -> None:
    assert listed("Who goes first") == list(RULES)
