"""`python -m tests.ecosystem.pytorch_suite`: runs both ways, compares, writes the table."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch

from tests.ecosystem.pytorch_suite import compare, report, sources
from tests.ecosystem.pytorch_suite.runs import LOGS, Run, Runner

FILES = (
    "test_torch",
    "test_autograd",
    "test_nn",
    "test_dataloader",
    "distributed/test_c10d_common",
    "distributed/test_c10d_gloo",
    "distributed/test_c10d_pypg",
    "distributed/test_c10d_spawn_gloo",
    "distributed/test_store",
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def record(file: str, way: str) -> Path:
    """Where the outcomes of one file are kept, one way."""
    return LOGS / torch.__version__ / f"{file.replace('/', '-')}-{way}.json"


def baseline(runner: Runner, file: str, *, multiprocess: bool, fresh: bool) -> Run:
    """The run without Shoal. It does not depend on Shoal's code, so a kept one serves."""
    kept = record(file, "without-ranks" if multiprocess else "without")
    if kept.exists() and not fresh:
        return Run.load(kept)
    run = runner.run(file, shoal=False)
    run.save(kept)
    return run


def one_file(runner: Runner, without: Run) -> compare.FileResult:
    counted = without.passed()
    with_shoal = runner.run(without.file, shoal=True, wanted=counted)
    with_shoal.save(record(without.file, "with"))  # for whoever looks into a difference
    result = compare.FileResult(without, with_shoal, compare.suspects(without, with_shoal))
    say(f"  with Shoal: {len(with_shoal.passed())} pass, {with_shoal.seconds:.0f} s")
    for suspect in result.suspects:
        compare.run_again(runner, result, suspect)
        verdict = "DIFFERS" if suspect.differs else "not steady"
        say(f"  {verdict} {suspect.test}: {suspect.again or suspect.why}")
    if result.added:
        say(f"  DIFFERS: {len(result.added)} tests exist only with Shoal, first {result.added[0]}")
    for test in result.woke:
        say(f"  loaded more of Shoal: {test}")
    return result


@click.command()
@click.option("--fetch", is_flag=True, help="Download the tests first, with apt.")
@click.option("--file", "files", multiple=True, help="Run this test file only, e.g. test_nn.")
@click.option("--fresh", is_flag=True, help="Repeat the run without Shoal; else a kept one serves.")
@click.option("--baseline", "only_baseline", is_flag=True, help="Run without Shoal only.")
@click.option("--multiprocess", is_flag=True, help="Run c10d's tests with several ranks, too.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=LOGS,
    help="Directory of the table and the figures.  [default: build/pytorch-suite]",
)
@click.option(
    "--page",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Write the table into this page, too, between its markers.",
)
def main(
    fetch: bool,
    files: tuple[str, ...],
    fresh: bool,
    only_baseline: bool,
    multiprocess: bool,
    out: Path,
    page: Path | None,
) -> None:
    """Run PyTorch's own CPU tests without Shoal and with it, and list what differs."""
    if page is not None and (files or multiprocess):
        raise click.UsageError("--page takes a whole run: leave out --file and --multiprocess")
    try:
        if fetch:
            sources.fetch()
        tests = sources.find()
    except sources.SourcesMissing as missing:
        raise click.ClickException(str(missing)) from missing
    runner = Runner(tests, multiprocess=multiprocess)
    results = []
    for file in files or FILES:
        say(file)
        without = baseline(runner, file, multiprocess=multiprocess, fresh=fresh)
        counted = len(without.passed())
        say(f"  without Shoal: {counted} of {len(without.collected)} pass, {without.seconds:.0f} s")
        if without.broken:
            say(f"  not importable: {without.broken}")
        if not only_baseline:
            results.append(one_file(runner, without))
    if only_baseline:
        return
    table, figures = report.write(results, out)
    print(table.read_text())
    print(f"written: {table}, {figures}")
    if page is not None:
        try:
            report.write_into(page, results)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
    differences = sum(len(result.differences) + len(result.added) for result in results)
    counted = sum(len(result.counted) for result in results)
    if not counted:
        raise click.ClickException("no test passed without Shoal, so nothing was compared")
    sys.exit(differences > 0)


if __name__ == "__main__":
    main()
