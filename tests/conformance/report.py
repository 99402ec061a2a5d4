"""Write docs/conformance.md, and the figures that the runner prints."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tests.conformance.suite import KINDS, Result

COLUMNS = 100


@dataclass(frozen=True)
class Rate:
    passed: int
    total: int

    def __str__(self) -> str:
        share = 100 * self.passed / self.total if self.total else 0.0
        return f"{self.passed} of {self.total} ({share:.2f} %)"


def subjects(results: list[Result], kind: str) -> Rate:
    """Count the operators (modules, optimizers) that pass every one of their checks."""
    whole: dict[str, bool] = defaultdict(lambda: True)
    for result in results:
        if result.check.kind == kind and not result.empty:
            whole[result.check.subject] &= result.passed
    return Rate(sum(whole.values()), len(whole))


def variants(results: list[Result], kind: str) -> dict[str, Rate]:
    """Return the pass rate by dtype, mode or implementation."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for result in results:
        if result.check.kind == kind and not result.empty:
            groups[result.check.variant].append(result.passed)
    return {name: Rate(sum(passed), len(passed)) for name, passed in groups.items()}


def markdown(results: list[Result], compared_with: str = "local CPU") -> str:
    """Return the page. It holds no date and no time, so it changes only when a result does."""
    checks = sum(not r.empty for r in results)
    samples = sum(r.samples for r in results)
    lines = [
        "# Conformance",
        "",
        *_paragraph(
            f"Torch's own databases of operators, modules and optimizers (torch {torch.__version__}) "
            f'run on `device="shoal"`, compared with {compared_with}: {checks:,} checks over '
            f"{samples:,} sample inputs. `make conformance` writes this page."
        ),
        "",
        *_paragraph(
            "The checks compare values with `torch.testing.assert_close` at its default tolerances. "
            "Both sides start from the same seed, so random operators must agree too. A subject "
            "passes if all its checks pass."
        ),
        "",
        "| | pass | checks |",
        "|---|---|---|",
    ]
    for kind in KINDS:
        by_variant = variants(results, kind)
        detail = ", ".join(
            f"{name} {rate.passed}/{rate.total}" for name, rate in by_variant.items()
        )
        lines.append(f"| {kind} | {subjects(results, kind)} | {detail} |")
    lines += ["", "## What fails, and why", ""]
    failed = _grouped(
        (r.check.subject, r.check.variant, r.reason or "") for r in results if r.failed
    )
    if failed:
        lines += ["| subject | checks | reason |", "|---|---|---|"]
    lines += [
        f"| {subject} | {', '.join(names)} | {reason.replace('|', chr(92) + '|')} |"
        for (subject, reason), names in failed.items()
    ] or ["Nothing."]
    empty = _grouped((r.check.subject, r.check.variant, "") for r in results if r.empty)
    if empty:
        lines += ["", "## What could not be compared", ""]
        lines += _paragraph(
            f"Local torch accepts no sample of these {sum(map(len, empty.values()))} checks, or has "
            "no derivative there. They are in no figure above."
        )
        lines += ["", "| subject | checks |", "|---|---|"]
        lines += [f"| {subject} | {', '.join(names)} |" for (subject, _), names in empty.items()]
    return "\n".join(lines) + "\n"


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, break_on_hyphens=False)


def _grouped(found: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], list[str]]:
    """Return the variants of each subject that share a reason."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for subject, variant, reason in found:
        groups[subject, reason].append(variant)
    return groups


def as_json(results: list[Result]) -> dict[str, object]:
    return {
        "torch": str(torch.__version__),
        "passed_wholly": {
            kind: {"passed": rate.passed, "total": rate.total}
            for kind in KINDS
            if (rate := subjects(results, kind)).total
        },
        "failures": {r.check.name: r.reason for r in results if r.failed},
        "not_compared": [r.check.name for r in results if r.empty],
    }
