"""The form of README.md, docs/ and the rooms' pages, and that what they name exists."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
#: One in each room: what lives there, and which file to read first.
ROOMS = [
    *(
        page
        for part in ("src", "csrc", "bench", "tests")
        for page in ROOT.glob(f"{part}/**/README.md")
    ),
    ROOT / "web" / "README.md",
]
#: Files that a page names are looked for below these, and beside the page.
BASES = [ROOT, ROOT / "src", ROOT / "src" / "shoal", ROOT / "csrc"]
COLUMNS_MAX, PARAGRAPH_LINES_MAX, README_LINES_MAX = 100, 8, 150
ENDINGS = r"(?:py|pyi|cpp|h|md|json|toml|csv|svg|txt|sh)"
#: Files that Shoal or a program of its user writes.
PRODUCED = {"state.json", "profiles.json"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(rf"`([\w.*/-]*[\w*-]\.{ENDINGS})`")
ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")

every_page = pytest.mark.parametrize(
    "page", [*PAGES, *sorted(ROOMS)], ids=lambda page: str(page.relative_to(ROOT))
)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line outside of code blocks."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def paragraphs(text: str) -> Iterator[tuple[int, int]]:
    """Yield first line and length of every paragraph. An item of a list is one; a table is none."""
    first = length = previous = 0
    for number, line in [*prose(text), (0, "")]:
        stops = not line.strip() or line.lstrip().startswith(("|", "#", "<!--"))
        if length and (stops or ITEM.match(line) or number != previous + 1):
            yield first, length
            length = 0
        if not stops:
            first = first if length else number
            length += 1
        previous = number


def anchors(text: str) -> set[str]:
    """Return the anchors of the page's headings, as code hosts make them."""
    headings = [line.lstrip("#") for _, line in prose(text) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def tracked() -> set[str]:
    """Return the names of all files of the project, without their folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {Path(line).name for line in listed.splitlines() if (ROOT / line).exists()}


@every_page
def test_lines_are_short(page: Path) -> None:
    """At most 100 columns. Tables may be wider, and so may a line that a link makes too long."""
    long = [
        number
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if not line.lstrip().startswith("|") and len(LINK.sub("]", line)) > COLUMNS_MAX
    ]
    assert not long, f"{page.name}: lines {long}"


@every_page
def test_paragraphs_are_short(page: Path) -> None:
    found = list(paragraphs(page.read_text()))
    assert not [first for first, length in found if length > PARAGRAPH_LINES_MAX]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


def test_readme_repeats_the_conformance_page() -> None:
    (count,) = re.findall(r"(\d+ of \d+) operators", (ROOT / "README.md").read_text())
    assert f"| operators | {count} (" in (ROOT / "docs" / "conformance.md").read_text()


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for _, line in prose(page.read_text()):
        for link in LINK.findall(line):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), link


@every_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    if page.parent.name == "upstream" and page.name != "README.md":
        return  # other projects' files
    names = tracked()
    for number, line in prose(page.read_text()):
        for named in NAMED.findall(line):
            where = f"{page.name}:{number}: {named}"
            if "/" not in named:
                assert any(Path(n).match(named) for n in names) or named in PRODUCED, where
            elif not named.startswith("/"):
                assert any(any(base.glob(named)) for base in [*BASES, *page.parents[:2]]), where


def test_the_rules_can_fail() -> None:
    text = "\n".join(
        ["- a", "  b", "- c", "", *["long"] * 9, "| t |", "", "```", *["x"] * 9, "```"]
    )
    assert list(paragraphs(text)) == [(1, 2), (3, 1), (5, 9)]
    assert NAMED.findall("`csrc/wire/address.h`, `a.py` and `x.cpu()`") == [
        "csrc/wire/address.h",
        "a.py",
    ]
    assert anchors("# Why is my task waiting?\n```\n# no heading\n```") == {
        "why-is-my-task-waiting"
    }
