"""docs/conformance.md and the figures that the runner prints."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from tests.conformance.suite import KINDS, Result


@dataclass(frozen=True)
class Rate:
    passed: int
    total: int

    def __str__(self) -> str:
        share = 100 * self.passed / self.total if self.total else 0.0
        return f"{self.passed} of {self.total} ({share:.2f} %)"


def subjects(results: list[Result], kind: str) -> Rate:
    """How many operators (modules, optimizers) pass every one of their checks."""
    whole: dict[str, bool] = defaultdict(lambda: True)
    for result in results:
        if result.check.kind == kind and not result.empty:
            whole[result.check.subject] &= result.passed
    return Rate(sum(whole.values()), len(whole))


def variants(results: list[Result], kind: str) -> dict[str, Rate]:
    """Pass rate by dtype, mode or implementation."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for result in results:
        if result.check.kind == kind and not result.empty:
            groups[result.check.variant].append(result.passed)
    return {name: Rate(sum(passed), len(passed)) for name, passed in groups.items()}


def markdown(results: list[Result], compared_with: str = "local CPU") -> str:
    """The page. It holds no date and no time, so it changes only when a result does."""
    samples = sum(r.samples for r in results)
    lines = [
        "# Conformance",
        "",
        "torch's own databases of operators, modules and optimizers (torch "
        f'{torch.__version__}), run on `device="shoal"` and compared with {compared_with}: '
        f"{sum(not r.empty for r in results):,} checks over {samples:,} sample inputs. Written by "
        "`python -m tests.conformance` (`make conformance`).",
        "",
        "Values are compared with `torch.testing.assert_close` at its default tolerances; both "
        "sides start from the same seed, so random operators must agree too. A subject passes "
        "wholly if all its checks do.",
        "",
        "| | pass wholly | checks |",
        "|---|---|---|",
    ]
    for kind in KINDS:
        by_variant = variants(results, kind)
        detail = ", ".join(
            f"{name} {rate.passed}/{rate.total}" for name, rate in by_variant.items()
        )
        lines.append(f"| {kind} | {subjects(results, kind)} | {detail} |")
    failed = [r for r in results if r.failed]
    lines += ["", "## What fails, and why", ""]
    if not failed:
        lines.append("Nothing.")
    else:
        lines += ["| check | reason |", "|---|---|"]
        for result in failed:
            reason = (result.reason or "").replace("|", "\\|")
            lines.append(f"| {result.check.subject}, {result.check.variant} | {reason} |")
    empty = [f"{r.check.subject} ({r.check.variant})" for r in results if r.empty]
    if empty:
        lines += ["", "## What could not be compared", ""]
        lines += [
            f"Local torch accepts no sample of these {len(empty)} checks, or has no derivative "
            "there; they are in no figure above.",
            "",
            ", ".join(empty) + ".",
        ]
    return "\n".join(lines) + "\n"


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
