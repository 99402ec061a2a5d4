"""`python -m tests.ecosystem.report RESULTS`: write the table of docs/ecosystem.md from a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "ecosystem.md"
BEGIN, END = "<!-- written by make test-ecosystem -->", "<!-- end of what it writes -->"


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of a run, one row per call."""
    lines = ["| Library | Call | How it gets `shoal` | Precision | Compared to the CPU |"]
    lines += ["|---|---|---|---|---|"]
    for one in results:
        library = f"{one['library']} {one['version']}"
        cells = [library, f"`{one['call']}`", one["how"], one["dtype"] or "–", one["equal"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rewrite(page: str, results: list[dict[str, Any]]) -> str:
    """Return the page with the table between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} lacks the markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}"


def main(results: str) -> None:
    found = json.loads(Path(results).read_text())
    PAGE.write_text(rewrite(PAGE.read_text(), found))
    print(f"{PAGE.name}: {len(found)} calls of {len({one['library'] for one in found})} libraries")


if __name__ == "__main__":
    main(*sys.argv[1:])
