"""`python -m tests.conformance`: runs everything, prints the pass rate, writes the page."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread on each side, same sums

# Before Shoal: DEVICE=standin:late python -m tests.conformance runs it on the stand-in.
from tests.standin.plugin import STANDIN

# isort: split
import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.conformance import report, suite

LEAST_OPERATORS = 0.99  # of them that must pass wholly; the page lists the others, with reasons
PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"


def run_all(checks: list[suite.Check], console: Console) -> list[suite.Result]:
    columns = (
        TextColumn("{task.description:40.40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    results: list[suite.Result] = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=len(checks), failed=0)
        for check in checks:
            progress.update(task, description=f"{check.subject} {check.variant}")
            results.append(suite.run(check))
            if results[-1].failed:
                console.print(f"[red]FAIL[/] {check.name}: ", end="")
                console.print(results[-1].reason, markup=False, highlight=False)
            failed = sum(r.failed for r in results)
            progress.update(task, advance=1, failed=failed)
        progress.update(task, description="done")
    return results


@click.command()
@click.option("--only", default="", help="Run the checks whose name holds this text.")
@click.option(
    "--dtype", default="", help="Run the checks of this dtype or variant: bfloat16, gradient."
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write results here too."
)
@click.option(
    "--page", type=click.Path(path_type=Path), default=None, help=f"Default: {PAGE.name}."
)
def main(only: str, dtype: str, json_path: Path | None, page: Path | None) -> None:
    """Runs torch's own operator, module and optimizer databases on the shoal device."""
    console = Console(stderr=True)
    checks = [c for c in suite.all_checks() if only in c.name and dtype in ("", c.variant)]
    if not checks:
        raise click.ClickException("no check has such a name")
    results = run_all(checks, console)
    for kind in suite.KINDS:
        rate = report.subjects(results, kind)
        if rate.total:
            print(f"{kind}: {rate} pass wholly")
    if json_path is not None:
        json_path.write_text(json.dumps(report.as_json(results), indent=1) + "\n")
    if page is None and not only and not dtype and STANDIN is None:
        page = PAGE  # a part must not replace the page of the whole
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(report.markdown(results))
        print(f"written: {page}")
    if STANDIN is not None:
        print(f"standin: {STANDIN.counts()}")
    operators = report.subjects(results, "operators")
    sys.exit(operators.total > 0 and operators.passed < LEAST_OPERATORS * operators.total)


if __name__ == "__main__":
    main()
