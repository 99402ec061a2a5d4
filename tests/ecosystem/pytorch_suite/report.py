"""The comparison for people: a table for docs/ecosystem.md, and a file with every figure."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.ecosystem.pytorch_suite.compare import TIMES, FileResult, Suspect
from tests.ecosystem.pytorch_suite.runs import Outcome
from tests.ecosystem.pytorch_suite.sources import RELEASE

BEGIN = "<!-- pytorch tests: begin (written by `python -m tests.ecosystem.pytorch_suite`) -->"
END = "<!-- pytorch tests: end -->"
HEAD = (
    "| PyTorch's test file | tests | pass without Shoal | of these pass with it | not steady "
    "| differences |",
    "|---|---:|---:|---:|---:|---:|",
)


def markdown(results: list[FileResult]) -> str:
    """The table alone: the page that includes it says what it means."""
    rows = {
        f"`{r.without.file}`": (
            len(r.without.collected),
            len(r.counted),
            len(r.with_shoal.passed()),
            len(r.unsteady),
            len(r.differences) + len(r.added),
        )
        for r in results
    }
    rows["all"] = tuple(sum(column) for column in zip(*rows.values(), strict=True))
    lines = [
        f"| {' | '.join([file, *(f'{count:,}' for count in counts)])} |"
        for file, counts in rows.items()
    ]
    return "\n".join([*HEAD, *lines]) + "\n"


def as_json(results: list[FileResult]) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "tests": RELEASE,
        "python": platform.python_version(),
        "files": {r.without.file: _file(r) for r in results},
    }


def _file(result: FileResult) -> dict[str, Any]:
    without, with_shoal = result.without, result.with_shoal
    return {
        "collected": len(without.collected),
        "outcomes_without": _counts(without.outcomes.values()),
        "pass_without": len(result.counted),
        "pass_with": len(with_shoal.passed()),
        "seconds": {"without": without.seconds, "with": with_shoal.seconds},
        "not_importable": without.broken,
        "differences": {s.test: _suspect(s) for s in result.differences},
        "not_steady": {s.test: _suspect(s) for s in result.unsteady},
        "only_with_shoal": result.added,
        "loaded_more_of_shoal": {test: with_shoal.outcomes[test].imported for test in result.woke},
    }


def _counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    found: dict[str, int] = {}
    for outcome in outcomes:
        found[outcome.result] = found.get(outcome.result, 0) + 1
    return dict(sorted(found.items()))


def _suspect(suspect: Suspect) -> dict[str, Any]:
    return {
        "first": suspect.why,
        "again": suspect.again,
        f"alone, passes of {TIMES} (without, with)": suspect.alone,
        f"after its class, passes of {TIMES} (without, with)": suspect.together,
    }


def write(results: list[FileResult], directory: Path) -> tuple[Path, Path]:
    directory.mkdir(parents=True, exist_ok=True)
    table, figures = directory / "pytorch-suite.md", directory / "pytorch-suite.json"
    table.write_text(markdown(results))
    figures.write_text(json.dumps(as_json(results), indent=1) + "\n")
    return table, figures


def write_into(page: Path, results: list[FileResult]) -> None:
    """Replace what stands between the page's two markers by the table."""
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(
            f"{page} lacks the lines {BEGIN} and {END}. Add both where the table goes."
        )
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    said = f"PyTorch {RELEASE}'s tests, run with torch {torch.__version__}."
    page.write_text(f"{head}{BEGIN}\n{said}\n\n{markdown(results)}{END}{tail}")
